"""The sets of problems that a model can be measured on, by name: benchmarks, and tasks that make theirs up. Layer 3."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from jackpot.config_evaluation import SetsConfig
from jackpot.errors import DataError, unknown_name
from jackpot.tasks import make_task
from jackpot.tasks.base import Task
from jackpot.tasks.benchmarks import BENCHMARKS
from jackpot.tasks.judging import Judge
from jackpot.tasks.math import make_benchmark

MADE_UP = ("arithmetic", "tool_arithmetic")  # offline
SETS = (*sorted(BENCHMARKS), *MADE_UP)


def check_sets(names: Sequence[str]) -> None:
    """Raises DataError for a name that does not exist, with those that do, and for one that is given twice."""
    for name in names:
        if name not in SETS:
            raise DataError(unknown_name("benchmark", name, SETS))
    if len(set(names)) < len(names):
        raise DataError(f"benchmarks {', '.join(names)}: one is named twice; name each once")


def make_sets(
    names: Sequence[str], tokenizer: PreTrainedTokenizerBase, settings: SetsConfig, judge: Judge | None = None
) -> dict[str, Task]:
    """A task for each set, whose test split it is.

    Args:
        judge: of the benchmarks, which somebody else closes; None: the first of them has one that all share.

    Raises:
        DataError: as `check_sets`, or data that cannot be had.
    """
    check_sets(names)
    tasks: dict[str, Task] = {}
    for name in names:
        if name in BENCHMARKS:
            task = make_benchmark(name, tokenizer, settings.math, judge)
            judge = task.judge
        else:
            task = make_task(getattr(settings, name), tokenizer)
        tasks[name] = task
    return tasks
