"""Construction of tasks and of evaluation sets by name.

Status: supported.
"""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from jackpot.config.tasks import CustomTaskConfig, DataConfig, TaskConfig
from jackpot.config.tools import SetsConfig
from jackpot.core.errors import DataError, repeated, unknown_name
from jackpot.core.imports import import_object
from jackpot.rollout.rewards.rewards import RewardFn
from jackpot.rollout.tasks.arithmetic import Arithmetic, Sums, ToolArithmetic
from jackpot.rollout.tasks.base import Task
from jackpot.rollout.tasks.benchmarks import BENCHMARKS, SETS
from jackpot.rollout.tasks.data import find_source, is_address, source_name
from jackpot.rollout.tasks.environment import EnvironmentTask
from jackpot.rollout.tasks.math import Math, make_benchmark
from jackpot.rollout.tasks.reasoning_gym import ReasoningGym

TASKS: dict[str, Callable[..., Task]] = {  # classes of tasks by name; each is called with a tokenizer and settings
    "arithmetic": Arithmetic,
    "environment": EnvironmentTask,
    "math": Math,
    "reasoning_gym": ReasoningGym,
    "sums": Sums,
    "tool_arithmetic": ToolArithmetic,
}


def make_task(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Make the task that the settings name, for models with this tokenizer.

    Raises:
        ConfigError: a custom task cannot be imported.
    """
    if isinstance(config, CustomTaskConfig):
        return import_object(config.import_path, "task")(tokenizer, config)
    return TASKS[config.name](tokenizer, config)


def set_name(benchmark: str) -> str:
    """Return the name under which results of a benchmark are reported: for a path, the last part without its ending."""
    return source_name(benchmark).rpartition("/")[2] if is_address(benchmark) else benchmark


def check_sets(benchmarks: Sequence[str]) -> None:
    """Check the benchmarks of an evaluation without reading them.

    Raises:
        DataError: a name or a path does not exist (lists the names that do), or two benchmarks have equal names.
    """
    for benchmark in (name for name in benchmarks if name not in SETS):
        if not is_address(benchmark):
            raise DataError(f"{unknown_name('benchmark', benchmark, SETS)}; or give the path of a file with problems")
        find_source(DataConfig(source=benchmark), "test")  # raises DataError where there is none

    if twice := repeated([*map(set_name, benchmarks)]):
        raise DataError(
            f"benchmarks {', '.join(benchmarks)}: {', '.join(sorted(twice))} is named twice; name each once"
        )


def make_sets(
    benchmarks: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    settings: SetsConfig,
    reward_fn: RewardFn | None = None,
) -> dict[str, Task]:
    """Make a task for each benchmark, keyed by `set_name`; the task's test split is the set to evaluate on.

    Args:
        benchmarks: names of `SETS`, and files, folders or data of the hub with problems.
        reward_fn: the reward of all benchmarks, which the caller closes; None: the first benchmark makes a reward,
            which the others share.

    Raises:
        DataError: as `check_sets`, or as `Math`.
    """
    check_sets(benchmarks)
    tasks: dict[str, Task] = {}
    for benchmark in benchmarks:
        if benchmark in SETS and benchmark not in BENCHMARKS:  # an arithmetic task, which generates its problems
            task = make_task(getattr(settings, benchmark), tokenizer)
        else:
            columns = {} if benchmark in BENCHMARKS else {"columns": settings.columns, "answers": settings.answers}
            task = make_benchmark(DataConfig(source=benchmark, **columns), tokenizer, settings.math, reward_fn)
            reward_fn = task.reward_fn  # the next benchmarks share it
        tasks[set_name(benchmark)] = task
    return tasks
