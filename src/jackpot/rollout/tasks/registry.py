"""Makes tasks and evaluation sets by name."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from jackpot.config.tasks import CustomTaskConfig, TaskConfig
from jackpot.config.tools import SetsConfig
from jackpot.core.errors import DataError, unknown_name
from jackpot.core.imports import import_object
from jackpot.rollout.rewards.rewards import RewardFn
from jackpot.rollout.tasks.arithmetic import Arithmetic, ToolArithmetic
from jackpot.rollout.tasks.base import Task
from jackpot.rollout.tasks.benchmarks import BENCHMARKS, SETS
from jackpot.rollout.tasks.math import Math, make_benchmark

TASKS: dict[str, type[Task]] = {"arithmetic": Arithmetic, "math": Math, "tool_arithmetic": ToolArithmetic}


def make_task(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Make the task that the settings name, for models with this tokenizer.

    Raises:
        ConfigError: a custom task cannot be imported.
    """
    if isinstance(config, CustomTaskConfig):
        return import_object(config.import_path, "task")(tokenizer, config)
    return TASKS[config.name](tokenizer, config)


def check_sets(names: Sequence[str]) -> None:
    """Check names of evaluation sets.

    Raises:
        DataError: a name does not exist (lists those that do) or is given twice.
    """
    for name in names:
        if name not in SETS:
            raise DataError(unknown_name("benchmark", name, SETS))
    if len(set(names)) < len(names):
        raise DataError(f"benchmarks {', '.join(names)}: one is named twice; name each once")


def make_sets(
    names: Sequence[str], tokenizer: PreTrainedTokenizerBase, settings: SetsConfig, reward_fn: RewardFn | None = None
) -> dict[str, Task]:
    """Make one task for each evaluation set; the set is its test split.

    Args:
        reward_fn: the reward of the benchmarks, which the caller closes; None: the first benchmark's is shared by all.

    Raises:
        DataError: as `check_sets`, or as `Math`.
    """
    check_sets(names)
    tasks: dict[str, Task] = {}
    for name in names:
        if name in BENCHMARKS:
            task = make_benchmark(name, tokenizer, settings.math, reward_fn)
            reward_fn = task.reward_fn
        else:
            task = make_task(getattr(settings, name), tokenizer)
        tasks[name] = task
    return tasks
