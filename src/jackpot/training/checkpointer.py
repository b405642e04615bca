"""The checkpointer decides when a running run writes a checkpoint, and what is in it."""

from collections.abc import Callable, Mapping
from typing import Any

from jackpot.core.errors import CheckpointError
from jackpot.core.roles import Role
from jackpot.training.components import RunComponents
from jackpot.training.run_folder.checkpoint import Checkpoints
from jackpot.training.run_folder.folder import RunFolder


class Checkpointer:
    """Writes the checkpoints of a run and prunes old ones.

    One is due every `checkpoint.every` iterations, at the last iteration, where the policy is better than ever before,
    and one iteration after a checkpoint that could not be written.

    Args:
        folder: opened; counts the failures.
        state: content of the checkpoint that the run continues from; None for a new run.
    """

    def __init__(self, components: RunComponents, folder: RunFolder, state: Mapping[str, Any] | None) -> None:
        self._components, self._folder = components, folder
        self._checkpoints = Checkpoints(folder.checkpoints, components.config.checkpoint.keep)
        self._saved = -1  # newest iteration with a checkpoint
        self._overdue = False  # True after a checkpoint that could not be written
        self._value: float | None = None  # accuracy or mean reward of the policy in this iteration, if it was evaluated
        self._best: dict[str, float] | None = None  # {"iteration", "accuracy"} of the best checkpoint
        if state is not None:
            self._saved = state["iteration"]
            self._best = self._checkpoints.restore_links(state["best"])
            for name, number in state["failed"].items():
                folder.failed[name] += number  # this start may have counted one
            with folder.dispensable(self._saved, "removal of old checkpoints"):
                self._checkpoints.remove_unfinished()

    def save_if_due(self, iteration: int, state: Callable[[], dict[str, Any]], value: float | None) -> None:
        """Write the checkpoint of an iteration if one is due. A failure is counted and shown, and the run goes on.

        Args:
            state: returns the state of the loop's other parts that a resumed run needs; called only where one is due.
            value: accuracy of the policy after this iteration, or its mean reward where the task has no verdict; None
                where it was not evaluated.
        """
        self._value = value
        config = self._components.config.checkpoint
        is_last = iteration == self._components.config.iterations
        due = is_last or self._is_best or self._overdue or iteration % config.every == 0
        first = 0 if self._components.config.guard.rollback else 1  # a policy may never be as good as at the start
        if due and iteration >= first:
            self._save(iteration, state())

    def save_last(self, iteration: int, state: Callable[[], dict[str, Any]]) -> None:
        """Write the checkpoint that a run ends with, unless it stands there already.

        Raises:
            CheckpointError: it cannot be written; names the iteration that the run would continue from.
        """
        if iteration > max(self._saved, 0) and (error := self._save(iteration, state())):
            what = (
                f"continues from iteration {self._saved}, the newest checkpoint"
                if self._saved >= 0
                else "begins again from iteration 0, as there is no checkpoint, and keeps what it finds in superseded/"
            )
            raise CheckpointError(f"{error}. Free space there and run the same command: it {what}") from error

    @property
    def _is_best(self) -> bool:
        return self._value is not None and (self._best is None or self._value > self._best["accuracy"])

    def _save(self, iteration: int, state: dict[str, Any]) -> CheckpointError | None:
        """Write a checkpoint and prune older ones; return the error where it cannot be written."""
        parts, is_best = self._components, self._is_best
        config = parts.config
        has: dict[Role, Any] = {"policy": config.policy, "rollout_model": config.rollout_model, "critic": config.critic}
        roles = [role for role, settings in has.items() if settings is not None]
        best = {"iteration": iteration, "accuracy": self._value} if is_best else self._best
        own = {"iteration": iteration, "best": best, "failed": self._folder.failed}
        own |= {"version": list(parts.learner.version), "settings": config.model_dump_json()}
        self._folder.flush(iteration)
        try:
            self._checkpoints.save(iteration, parts.learner, roles, parts.tokenizer, {**state, **own}, is_best)
        except CheckpointError as error:
            self._overdue = True
            self._folder.failure(iteration, "checkpoint/failed", {"event": "checkpoint_failed", "why": str(error)})
            return error
        self._overdue, self._saved, self._best = False, iteration, best
        with self._folder.dispensable(iteration, "removal of old checkpoints"):
            self._checkpoints.prune()
        return None
