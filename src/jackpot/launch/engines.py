"""Make engines from their settings, each with its own copy of a model."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import NamedTuple

import torch

from jackpot.config.config import Config
from jackpot.config.engines import (
    EngineConfig,
    SGLangServerEngineConfig,
    TransformersEngineConfig,
    VLLMEngineConfig,
    is_remote,
)
from jackpot.core.roles import Role
from jackpot.core.types import Version
from jackpot.models.forward import cut_head, output_layer
from jackpot.models.load import DTYPES, eos_token_ids, head_rows, load_model
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.engines.sglang.server_engine import SGLangServerEngine
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.rollout.engines.vllm.engine import VLLMEngine
from jackpot.rollout.engines.vllm.server_engine import VLLMServerEngine


def make_engine(
    settings: EngineConfig,
    path: str,
    device: torch.device,
    version: Version,
    drafter: Engine | None = None,
    rows: int | None = None,
) -> Engine:
    """Make the engine that the settings name, with the model in `path`.

    Args:
        device: the learner's device.
        drafter: engine of the model that drafts for this one, of the same class, which drafts; None: none does.
        rows: as in `EnginePart`; servers sample from all that they have. None: all.

    Raises:
        ConfigError: a setting that the engine does not have on this device.
        EngineError, ModelError: the engine cannot be made, or not with this model.
    """
    if isinstance(settings, VLLMEngineConfig):
        assert drafter is None or isinstance(drafter, VLLMEngine)  # as the settings of both have one name
        return VLLMEngine(path, settings, device=device, version=version, drafter=drafter, rows=rows)

    model = load_model(path, DTYPES[settings.dtype], "cpu" if is_remote(settings) else device)
    ends = eos_token_ids(model)
    if isinstance(settings, TransformersEngineConfig):
        cut_head(model, rows or output_layer(model).out_features)
        assert drafter is None or isinstance(drafter, TransformersEngine)
        return TransformersEngine(model, settings, eos_token_ids=ends, version=version, drafter=drafter)
    server = SGLangServerEngine if isinstance(settings, SGLangServerEngineConfig) else VLLMServerEngine
    return server(model, settings, eos_token_ids=ends, version=version)


class EnginePart(NamedTuple):
    """Describes one engine of a run."""

    settings: EngineConfig
    path: str  # of its model
    rows: int  # of the output layer that it samples from, as of `run_rows`


def engine_parts(config: Config, paths: Mapping[Role, str]) -> dict[str, EnginePart]:
    """Return the engines of a run by the setting that describes each: `engine`, and for the policy `evaluation.engine`.

    The second is missing where the policy generates its own rollouts and has no other engine for evaluations.

    Args:
        paths: where each model is read from.
    """
    settings, rows = config.evaluation.engine, run_rows(config, paths)
    parts = {"engine": EnginePart(config.engine, paths.get("rollout_model", paths["policy"]), rows)}
    if settings is not None or "rollout_model" in paths:
        parts["evaluation.engine"] = EnginePart(settings or config.engine, paths["policy"], rows)
    return parts


def run_rows(config: Config, paths: Mapping[Role, str]) -> int:
    """Return `head_rows` of all models of a run, the reference too."""
    return head_rows({**paths, **reference_path(config)})


def reference_path(config: Config) -> dict[str, str]:
    """Return where the reference is read from by its name, nothing for a run without one."""
    reference = config.objective.reference
    return {"reference": reference.path or config.policy.path} if reference else {}


def make_each(
    parts: Mapping[str, EnginePart], device: torch.device, version: Version, drafts: bool, undo: ExitStack
) -> dict[str, Engine]:
    """Make engines in this process; `undo` gets their `close`.

    Args:
        parts: of `engine_parts`.
        drafts: whether the model of `engine` drafts for that of `evaluation.engine`.
    """
    engines: dict[str, Engine] = {}
    for name, (settings, path, rows) in parts.items():
        drafter = engines.get("engine") if drafts else None
        engines[name] = make_engine(settings, path, device, version, drafter, rows)
        undo.callback(engines[name].close)
    return engines
