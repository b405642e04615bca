"""The rollback guard takes a run whose policy has collapsed back to a checkpoint from before that.

It orders the return by one write to rollbacks.json, which holds how often a run went back and how small its steps are
since then, and the trainer ends. The start that follows carries it out: while it is pending nothing is trained, so that
a kill at any moment leaves it ordered or done.

Status: supported.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jackpot.config.config import Config
from jackpot.core.errors import CheckpointError, TrainingError
from jackpot.core.files import write_whole
from jackpot.training.limits import evaluations, fall_of, problems_of
from jackpot.training.run_folder.checkpoint import Checkpoints
from jackpot.training.run_folder.folder import RunFolder


class RollbackGuard:
    """Orders a rollback where a run has collapsed, at most `guard.rollback.times` times; does nothing without that.

    Args:
        folder: opened and rewound to where the run continues.
    """

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._settings, self._config = config.guard.rollback, config
        self._folder = folder
        self._checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep)
        self._rollbacks = Rollbacks(folder.path)
        self._evaluated = evaluations(folder.read("metrics.jsonl"))

    @property
    def metrics(self) -> dict[str, float]:
        """Return the number of rollbacks so far as a metric."""
        return {"health/rollbacks": float(len(self._rollbacks.all))} if self._settings else {}

    def check(self, line: Mapping[str, Any]) -> bool:
        """Take in a line of metrics.jsonl; return whether the run has collapsed and is to start again.

        Raises:
            TrainingError: it has collapsed and cannot go back; an event says so.
        """
        settings, newest = self._settings, evaluations([line])
        self._evaluated += newest
        if settings is None or not newest:
            return False
        fall = fall_of(self._evaluated, problems_of([line], self._config))
        if fall is None:
            return False

        if self.order(line["iteration"], fall.last_good, f"the policy has collapsed: {fall.why}"):
            return True
        done = len(self._rollbacks.all)
        cause = (
            f"after {done} rollbacks, as many as guard.rollback.times allows; lower the learning rate or "
            f"guard.rollback.factor, or change objective.correction"
            if done >= settings.times
            else f"and there is no checkpoint up to iteration {fall.last_good}, where it was still good"
        )
        why = f"the policy has collapsed, {fall.why}, {cause}"
        self._folder.event(line["iteration"], {"event": "stopped", "why": why})
        raise TrainingError(why)

    def order(self, iteration: int, last_good: int, why: str) -> bool:
        """Order the return to the newest intact checkpoint up to iteration `last_good`.

        Args:
            iteration: the newest one that is finished.

        Returns:
            Whether it was ordered: not without the setting, without such a checkpoint, or as often as is allowed.
        """
        if self._settings is None or len(self._rollbacks.all) >= self._settings.times:
            return False
        back_to = self._checkpoints.newest_until(last_good)
        if back_to is None:
            return False
        factor = self._rollbacks.rate_factor * self._settings.factor
        self._rollbacks.order(Rollback(back_from=iteration, back_to=back_to, rate_factor=factor, why=why))
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """Describes one return to an earlier checkpoint."""

    back_from: int  # iteration after which the collapse was found
    back_to: int  # iteration of the checkpoint that the run continues from
    rate_factor: float  # of every learning rate since then, those of earlier rollbacks included
    why: str
    is_pending: bool = True  # ordered, and not yet carried out

    @property
    def facts(self) -> dict[str, Any]:
        """Return what an event says about it."""
        return {name: value for name, value in asdict(self).items() if name != "is_pending"}


class Rollbacks:
    """Reads and writes the rollbacks of the run in a folder.

    Raises:
        CheckpointError: rollbacks.json is damaged.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "rollbacks.json"
        try:
            self.all = [Rollback(**one) for one in json.loads(self.path.read_text())] if self.path.exists() else []
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {error}. Bring it back from a copy: the learning rates depend on it"
            ) from error

    @property
    def pending(self) -> Rollback | None:
        """Return the rollback that the next start has to carry out; None for none."""
        return self.all[-1] if self.all and self.all[-1].is_pending else None

    @property
    def rate_factor(self) -> float:
        """Return the factor of every learning rate."""
        return self.all[-1].rate_factor if self.all else 1.0

    def order(self, rollback: Rollback) -> None:
        """Add a rollback that the next start carries out."""
        self._write([*self.all, rollback])

    def complete(self) -> None:
        """Record that the pending rollback has been carried out."""
        self._write([*self.all[:-1], replace(self.all[-1], is_pending=False)])

    def _write(self, rollbacks: Sequence[Rollback]) -> None:
        write_whole(self.path, (json.dumps([asdict(one) for one in rollbacks], indent=2) + "\n").encode())
        self.all = list(rollbacks)
