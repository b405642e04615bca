"""Tasks by name."""

from transformers import PreTrainedTokenizerBase

from jackpot.config_tasks import TaskConfig
from jackpot.tasks.arithmetic import Arithmetic
from jackpot.tasks.base import Task
from jackpot.tasks.math import Math
from jackpot.tasks.tool_arithmetic import ToolArithmetic

TASKS: dict[str, type[Task]] = {"arithmetic": Arithmetic, "math": Math, "tool_arithmetic": ToolArithmetic}


def make_task(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The task that the settings name, for models with this tokenizer."""
    return TASKS[config.name](tokenizer, config)
