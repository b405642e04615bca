"""The sets of problems that a model can be measured on, by name: benchmarks, and tasks that make theirs up. Layer 3."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from jackpot.config_evaluation import SetsConfig
from jackpot.errors import DataError, unknown_name
from jackpot.tasks import make_task
from jackpot.tasks.base import Task
from jackpot.tasks.benchmarks import BENCHMARKS
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


def make_sets(names: Sequence[str], tokenizer: PreTrainedTokenizerBase, settings: SetsConfig) -> dict[str, Task]:
    """All of them by name. DataError as `check_sets` and `make_set`."""
    check_sets(names)
    return {name: make_set(name, tokenizer, settings) for name in names}


def make_set(name: str, tokenizer: PreTrainedTokenizerBase, settings: SetsConfig) -> Task:
    """A task whose test split is the set.

    Args:
        name: one of `SETS`.

    Raises:
        DataError: its data cannot be had.
    """
    if name in BENCHMARKS:
        return make_benchmark(name, tokenizer, settings.math)
    return make_task(getattr(settings, name), tokenizer)
