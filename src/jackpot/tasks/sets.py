"""The sets of problems that a model can be measured on, by name: benchmarks, and tasks that make theirs up. Layer 3."""

from transformers import PreTrainedTokenizerBase

from jackpot.config_evaluation import SetsConfig
from jackpot.errors import DataError, unknown_name
from jackpot.tasks import make_task
from jackpot.tasks.base import Task
from jackpot.tasks.benchmarks import BENCHMARKS
from jackpot.tasks.math import make_benchmark

MADE_UP = ("arithmetic", "tool_arithmetic")  # offline
SETS = (*sorted(BENCHMARKS), *MADE_UP)


def check_sets(names: tuple[str, ...]) -> None:
    """Raises DataError for a name that does not exist, with those that do."""
    for name in names:
        if name not in SETS:
            raise DataError(unknown_name("benchmark", name, SETS))


def make_set(name: str, tokenizer: PreTrainedTokenizerBase, settings: SetsConfig) -> Task:
    """A task whose test split is the set.

    Raises:
        DataError: no such set, or its data cannot be had.
    """
    check_sets((name,))
    if name in BENCHMARKS:
        return make_benchmark(name, tokenizer, settings.math)
    return make_task(getattr(settings, name), tokenizer)
