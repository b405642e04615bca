"""Make an engine from its settings, with its own copy of a model."""

from functools import partial

import torch

from jackpot.config.engines import EngineConfig, VLLMEngineConfig, VLLMServerEngineConfig
from jackpot.core.types import Version
from jackpot.models.load import DTYPES, eos_token_ids, load_model
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.rollout.engines.vllm.engine import VLLMEngine
from jackpot.rollout.engines.vllm.server_engine import VLLMServerEngine


def make_engine(
    settings: EngineConfig, path: str, device: torch.device, version: Version, drafter: Engine | None = None
) -> Engine:
    """Make the engine that the settings name, with the model in `path`.

    Args:
        device: the learner's device.
        drafter: engine of the model that drafts for this one, of the same class, which drafts; None: none does.

    Raises:
        ConfigError: a setting that the engine does not have on this device.
        EngineError, ModelError: the engine cannot be made, or not with this model.
    """
    if isinstance(settings, VLLMEngineConfig):
        return VLLMEngine(path, settings, device=device, version=version, drafter=drafter)
    is_remote = isinstance(settings, VLLMServerEngineConfig)
    model = load_model(path, DTYPES[settings.dtype], "cpu" if is_remote else device)
    engine = VLLMServerEngine if is_remote else partial(TransformersEngine, drafter=drafter)
    return engine(model, settings, eos_token_ids=eos_token_ids(model), version=version)
