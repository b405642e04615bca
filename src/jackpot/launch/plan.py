"""What a run would need, found out without running it. Layer 6."""

from typing import NamedTuple

import torch
from transformers import AutoModelForTokenClassification, PreTrainedModel

from jackpot.config import Config
from jackpot.launch.local import model_paths
from jackpot.models.load import load_config, load_outline
from jackpot.models.lora import adapter_size
from jackpot.types import Role


class Size(NamedTuple):
    parameters: int  # of the model, tied ones once, without an adapter
    trained: int  # all of them, those of the adapter alone, or 0 where it is frozen


def model_sizes(config: Config) -> dict[Role, Size]:
    """The size of each model from its config alone, the critic's too: the weights are not read.

    Raises:
        ModelError: no model there, or LoRA on a target module that it does not have.
    """
    sizes = {role: _size(config, role, path) for role, path in model_paths(config, None).items()}
    if config.critic:
        count = sum(parameter.numel() for parameter in critic_outline(config).parameters())
        sizes["critic"] = Size(count, count)
    return sizes


def critic_outline(config: Config) -> PreTrainedModel:
    """The critic on the meta device."""
    settings = load_config(config.critic.path or config.policy.path)
    settings.num_labels = 1
    with torch.device("meta"):
        return AutoModelForTokenClassification.from_config(settings)


def _size(config: Config, role: Role, path: str) -> Size:
    model = load_outline(path)
    settings, parameters = getattr(config, role), sum(parameter.numel() for parameter in model.parameters())
    if settings.optimizer is None:
        return Size(parameters, 0)
    return Size(parameters, parameters if settings.lora is None else adapter_size(model, settings.lora))
