"""Is an answer right, and what is it worth? Layer 3. See docs/rewards.md."""

from collections.abc import Sequence

from jackpot.config_tasks import RewardConfig
from jackpot.tasks.base import Answer
from jackpot.types import Score


class Judge:
    """Scores answers against `Prompt.answer`: plain numbers here, everything else in processes of its own.

    Args:
        rewards: summed by their weights. `Score.correct` is the verdict whatever the rewards are.
        workers: processes, at least 1.
        seconds: for one verdict, or one call of a reward function; then it counts as wrong, with `Score.problem`.

    Raises:
        ConfigError: a reward that does not exist or cannot be imported.
    """

    def __init__(self, rewards: Sequence[RewardConfig], *, workers: int, seconds: float) -> None:
        self._rewards = tuple(rewards)

    def scores(self, answers: Sequence[Answer]) -> list[Score]:
        """One for each answer, in their order."""
        raise NotImplementedError

    def close(self) -> None:
        """End the processes; a second time does nothing."""
