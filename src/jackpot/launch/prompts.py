"""How long the prompts of a run are, as far as that can be known before it runs. Layer 6."""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from jackpot.config import Config
from jackpot.config_tasks import MathConfig
from jackpot.errors import DataError
from jackpot.launch.cost_model import MEAN_PROMPT
from jackpot.launch.local import load_tokenizers, model_paths
from jackpot.models.load import hub_answers, resolve_path
from jackpot.tasks import make_task
from jackpot.tasks.base import PromptStream
from jackpot.tasks.data import locate

PROMPTS_LOOKED_AT = 256
LONGEST_PROMPT = 1024  # tokens, where nothing is known and nothing is set


class Prompts(NamedTuple):
    """Tokens."""

    longest: int
    mean: float
    assumed: str  # why both are assumed; empty where they were counted


def prompt_lengths(config: Config) -> Prompts:
    """Of the first prompts of the task; assumed where the tokenizer or the problems are on a hub that cannot be asked.

    Raises:
        DataError, ModelError: something is here and cannot be read.
    """
    try:
        tokenizer = load_tokenizers(model_paths(config, None))
        with closing(make_task(config.task, tokenizer)) as task:
            prompts = PromptStream(task, "train", config.seed).next(PROMPTS_LOOKED_AT)
    except DataError as error:
        if not _is_elsewhere(config):
            raise
        return _assumed(config, str(error).partition(": ")[0])
    lengths = [len(prompt.token_ids) for prompt in prompts]
    return Prompts(max(lengths), sum(lengths) / len(lengths), "")


def _is_elsewhere(config: Config) -> bool:
    """Whether some of it is on the hub, which does not answer."""
    on_hub = isinstance(config.task, MathConfig) and not locate(config.task.train, "train").is_local
    paths = model_paths(config, None).values()
    return not hub_answers() and (on_hub or any(not Path(resolve_path(path)).is_dir() for path in paths))


def _assumed(config: Config, why: str) -> Prompts:
    longest = getattr(config.task, "max_prompt_tokens", None) or LONGEST_PROMPT
    return Prompts(longest, min(longest, MEAN_PROMPT), why)
