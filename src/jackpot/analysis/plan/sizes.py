"""The sizes of a run's models and prompts, found without loading weights."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
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
    """The number of all parameters of a model, and the number of trained parameters."""

    parameters: int  # parameters of the model without an adapter; tied ones count once
    trained: int  # equal to `parameters`, or the number of the adapter's parameters, or 0 for a frozen model


def model_sizes(config: Config) -> dict[Role, ModelSize]:
    """Count the parameters of policy, rollout model and critic from their configs alone, by role.

    Raises:
        ModelError: a path without a model, or LoRA on a target module that the model does not have.
    """
    sizes: dict[Role, ModelSize] = {role: _size(config, role, path) for role, path in config.model_paths().items()}
    if config.critic:
        count = parameter_count(critic_outline(config.critic.path or config.policy.path))
        sizes["critic"] = ModelSize(parameters=count, trained=count)
    return sizes


def parameter_count(model: nn.Module) -> int:
    """Count the parameters of a model; weights that layers share (tied) count once."""
    return sum(parameter.numel() for parameter in model.parameters())


@lru_cache(maxsize=8)
def outline(path: str) -> PreTrainedModel:
    """Make the model of `path` on the meta device, to count parameters. Callers share it, and must not change it."""
    return load_meta_model(path)


def critic_outline(path: str) -> PreTrainedModel:
    """Make a critic on the meta device, with the shape of the model at `path`."""
    settings = load_config(path)
    settings.num_labels = 1
    with torch.device("meta"):
        return AutoModelForTokenClassification.from_config(settings)


def _size(config: Config, role: Role, path: str) -> ModelSize:
    """Count the parameters, and the trained parameters, of policy or rollout model."""
    model, settings = outline(path), getattr(config, role)
    count = parameter_count(model)
    if settings.optimizer is None:
        return ModelSize(parameters=count, trained=0)
    return ModelSize(parameters=count, trained=count if settings.lora is None else adapter_size(model, settings.lora))


PROMPTS_LOOKED_AT = 256  # number of prompts of the training split that are measured
LONGEST_PROMPT = 1024  # tokens; assumed if no prompt can be read and task.max_prompt_tokens is not set


class PromptLengths(NamedTuple):
    """The lengths of a task's prompts, tokens."""

    longest: int
    mean: float
    assumed: str  # why both lengths are assumed; empty where prompts were counted
    left_out: str = ""  # how many problems the task leaves out, and why; empty if it leaves out none


def prompt_lengths(config: Config) -> PromptLengths:
    """Measure the task's first prompts, or assume lengths if tokenizer or problems are on a hub that does not answer.

    Raises:
        DataError, ModelError: a model or data on this machine cannot be read.
    """
    try:
        paths = config.model_paths()
        tokenizer = load_tokenizers(paths)
        head_rows(paths | reference_path(config), tokenizer)  # raises if models and tokenizer do not fit
        with closing(run_task(config, paths, tokenizer)) as task:
            prompts = PromptStream(task, "train", config.seed).next(PROMPTS_LOOKED_AT)
            left_out = _left_out(task.take_events())
    except DataError as error:
        if not _is_unreachable(config):
            raise
        longest = getattr(config.task, "max_prompt_tokens", None) or LONGEST_PROMPT
        why = str(error).partition(": ")[0]  # what the error says before its details, which follow a colon
        return PromptLengths(longest=longest, mean=min(longest, MEAN_PROMPT), assumed=why)

    lengths = [len(prompt.token_ids) for prompt in prompts]
    return PromptLengths(longest=max(lengths), mean=sum(lengths) / len(lengths), assumed="", left_out=left_out)


def _left_out(events: Sequence[Mapping[str, Any]]) -> str:
    """Return text, made from a task's events, on how many problems the task leaves out, and why; "" for none."""
    reasons = {
        "too_long": "have prompts of more than {max_prompt_tokens} tokens",
        "without_answer": "have no answer",
        "long_answer": "have answers too long to verify",
    }

    sentences = []
    for event in events:
        counts = [f"{event[key]:,} {reason.format(**event)}" for key, reason in reasons.items() if event.get(key)]
        if counts:
            sentences.append(f"{event['source']} ({event['split']}): of {event['rows']:,} problems {', '.join(counts)}")

    return "; ".join(sentences)


def _is_unreachable(config: Config) -> bool:
    """Return whether models or problems are on the hub and the hub does not answer."""
    on_hub = isinstance(config.task, MathConfig) and not all(
        source.is_local for source in find_sources(config.task.sources("train"), "train")
    )
    paths = config.model_paths().values()
    return not hub_answers() and (on_hub or any(not Path(resolve_path(path)).is_dir() for path in paths))
