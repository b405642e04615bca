"""What a run would need, found out without running it. Layer 6."""

from collections.abc import Mapping

import torch
from transformers import AutoModelForCausalLM

from jackpot.models.load import load_config
from jackpot.types import Role


def parameter_counts(paths: Mapping[Role, str]) -> dict[Role, int]:
    """Parameters of each model, tied ones once, from its config alone: the weights are not read."""
    return {role: _parameter_count(path) for role, path in paths.items()}


def _parameter_count(path: str) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(path))
    return sum(parameter.numel() for parameter in model.parameters())
