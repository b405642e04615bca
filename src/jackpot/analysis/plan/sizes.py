"""Finds the sizes of a run's models and prompts without loading weights."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForTokenClassification, PreTrainedModel

from jackpot.analysis.plan.cost_model import MEAN_PROMPT
from jackpot.config.config import Config
from jackpot.config.tasks import MathConfig
from jackpot.core.errors import DataError
from jackpot.core.roles import Role
from jackpot.launch.build import run_task
from jackpot.launch.engines import reference_path
from jackpot.models.hub import hub_answers, resolve_path
from jackpot.models.load import head_rows, load_config, load_meta_model, load_tokenizers
from jackpot.models.lora import adapter_size
from jackpot.rollout.tasks.base import PromptStream
from jackpot.rollout.tasks.data import find_sources


class ModelSize(NamedTuple):
    """Holds how many parameters a model has, and how many of them are trained."""

    parameters: int  # of the model, tied ones once, without an adapter
    trained: int  # all of them, those of the adapter alone, or 0 where it is frozen


def model_sizes(config: Config) -> dict[Role, ModelSize]:
    """Count the parameters of each model, the critic's too, from its config alone.

    Raises:
        ModelError: no model there, or LoRA on a target module that it does not have.
    """
    sizes: dict[Role, ModelSize] = {role: _size(config, role, path) for role, path in config.model_paths().items()}
    if config.critic:
        count = sum(
            parameter.numel() for parameter in critic_outline(config.critic.path or config.policy.path).parameters()
        )
        sizes["critic"] = ModelSize(count, count)
    return sizes


@lru_cache(maxsize=8)
def outline(path: str) -> PreTrainedModel:
    """Make the model of `path` on the meta device, once for all that only count its parameters; do not change it."""
    return load_meta_model(path)


def critic_outline(path: str) -> PreTrainedModel:
    """Make a critic with the shape of the model in `path` on the meta device."""
    settings = load_config(path)
    settings.num_labels = 1
    with torch.device("meta"):
        return AutoModelForTokenClassification.from_config(settings)


def _size(config: Config, role: Role, path: str) -> ModelSize:
    model = outline(path)
    settings, parameters = getattr(config, role), sum(parameter.numel() for parameter in model.parameters())
    if settings.optimizer is None:
        return ModelSize(parameters, 0)
    return ModelSize(parameters, parameters if settings.lora is None else adapter_size(model, settings.lora))


PROMPTS_LOOKED_AT = 256
LONGEST_PROMPT = 1024  # tokens, where nothing is known and nothing is set


class PromptLengths(NamedTuple):
    """Holds the lengths of the task's prompts, tokens."""

    longest: int
    mean: float
    assumed: str  # why both lengths are assumed; empty where prompts were counted
    left_out: str = ""  # how many problems are left out, and why; empty where none is


def prompt_lengths(config: Config) -> PromptLengths:
    """Measure the first prompts of the task, or assume lengths where the hub that has tokenizer or problems is not
    reached.

    Raises:
        DataError, ModelError: something is here and cannot be read.
    """
    try:
        paths = config.model_paths()
        tokenizer = load_tokenizers(paths)
        head_rows(paths | reference_path(config), tokenizer)
        with closing(run_task(config, paths, tokenizer)) as task:
            prompts = PromptStream(task, "train", config.seed).next(PROMPTS_LOOKED_AT)
            left_out = _left_out(task.take_events())
    except DataError as error:
        if not _is_elsewhere(config):
            raise
        return _assumed(config, str(error).partition(": ")[0])
    lengths = [len(prompt.token_ids) for prompt in prompts]
    return PromptLengths(max(lengths), sum(lengths) / len(lengths), "", left_out)


def _left_out(events: Sequence[Mapping[str, Any]]) -> str:
    """Say how many problems the task leaves out, from its events."""
    reasons = {
        "too_long": "have prompts of more than {max_prompt_tokens} tokens",
        "without_answer": "have no answer",
        "long_answer": "have answers too long to verify",
    }
    said = []
    for event in events:
        found = [f"{event[key]:,} {text.format(**event)}" for key, text in reasons.items() if event.get(key)]
        if found:
            said.append(f"{event['source']} ({event['split']}): of {event['rows']:,} problems {', '.join(found)}")
    return "; ".join(said)


def _is_elsewhere(config: Config) -> bool:
    """Return whether models or problems are on the hub and the hub cannot be reached."""
    on_hub = isinstance(config.task, MathConfig) and not all(
        source.is_local for source in find_sources(config.task.sources("train"), "train")
    )
    paths = config.model_paths().values()
    return not hub_answers() and (on_hub or any(not Path(resolve_path(path)).is_dir() for path in paths))


def _assumed(config: Config, why: str) -> PromptLengths:
    longest = getattr(config.task, "max_prompt_tokens", None) or LONGEST_PROMPT
    return PromptLengths(longest, min(longest, MEAN_PROMPT), why)
