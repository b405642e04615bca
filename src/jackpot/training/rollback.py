"""The rollback guard takes a run whose policy has collapsed back to a checkpoint from before that.

Status: supported.
"""

from collections.abc import Mapping
from typing import Any

from jackpot.config.config import Config
from jackpot.core.errors import TrainingError
from jackpot.training.collapse import evaluations, fall_of, problems_of
from jackpot.training.run_folder.checkpoint import Checkpoints
from jackpot.training.run_folder.folder import RunFolder
from jackpot.training.run_folder.rollbacks import Rollback, Rollbacks


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
        newest = evaluations([line])
        self._evaluated += newest
        fall = fall_of(self._evaluated, problems_of([line], self._config)) if self._settings and newest else None
        if fall is None:
            return False
        if self.order(line["iteration"], fall.last_good, f"the policy has collapsed: {fall.why}"):
            return True
        done = len(self._rollbacks.all)
        cause = (
            f"after {done} rollbacks, as many as guard.rollback.times allows; lower the learning rate or "
            f"guard.rollback.factor, or change objective.correction"
            if done >= self._settings.times
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
