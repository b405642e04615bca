"""Makes engines from their settings, each with its own copy of a model."""

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
        drafter: engine whose model drafts tokens for this engine, of the same class as this engine; None: no drafts.
        rows: the engine draws only from the first `rows` token ids; None: from all. A server always draws from all.

    Raises:
        ConfigError: the engine does not support a setting on this device.
        EngineError, ModelError: the engine cannot be made, or not with this model.
    """
    if isinstance(settings, VLLMEngineConfig):
        assert drafter is None or isinstance(drafter, VLLMEngine)  # Config has checked that both engines are vLLM's
        return VLLMEngine(path, settings, device=device, version=version, drafter=drafter, rows=rows)

    # An engine of servers only reads the model's shapes and sends its weights, so this model stays on the CPU.
    model = load_model(path, DTYPES[settings.dtype], "cpu" if is_remote(settings) else device)
    end_tokens = eos_token_ids(model)
    if isinstance(settings, TransformersEngineConfig):
        cut_head(model, rows or output_layer(model).out_features)
        assert drafter is None or isinstance(drafter, TransformersEngine)
        return TransformersEngine(model, settings, eos_token_ids=end_tokens, version=version, drafter=drafter)

    server = SGLangServerEngine if isinstance(settings, SGLangServerEngineConfig) else VLLMServerEngine
    return server(model, settings, eos_token_ids=end_tokens, version=version)


class EngineSpec(NamedTuple):
    """The settings of one engine of a run, the path of its model, and how many token ids it may draw from."""

    settings: EngineConfig
    path: str  # folder or name of the engine's model
    rows: int  # the engine draws only from the first `rows` token ids (`run_rows`)


def engines_of(config: Config) -> dict[str, tuple[Role, EngineConfig]]:
    """Return (role of its model, settings) of each engine of a run, by the engine's key in the settings.

    The key `engine` stands for the engine that generates rollouts, with the rollout model or else the policy. The key
    `evaluation.engine` stands for the policy's engine in evaluations; it is missing where that is `engine` itself.
    """
    generating: Role = "rollout_model" if config.rollout_model else "policy"
    engines: dict[str, tuple[Role, EngineConfig]] = {"engine": (generating, config.engine)}
    if config.rollout_model or config.evaluation.engine:
        engines["evaluation.engine"] = ("policy", config.evaluation.engine or config.engine)
    return engines


def engine_specs(config: Config, paths: Mapping[Role, str]) -> dict[str, EngineSpec]:
    """Return what is needed to make each engine of a run (`EngineSpec`), by the engine's key as in `engines_of`.

    Args:
        paths: where each model is read from, by role.
    """
    rows = run_rows(config, paths)
    return {key: EngineSpec(settings, paths[role], rows) for key, (role, settings) in engines_of(config).items()}


def run_rows(config: Config, paths: Mapping[Role, str]) -> int:
    """Return how many token ids a run may sample: the rows of the shortest output layer of all models of the run."""
    return head_rows({**paths, **reference_path(config)})


def reference_path(config: Config) -> dict[str, str]:
    """Return where the reference model is read from, under the key `reference`; {} for a run without a reference."""
    reference = config.objective.reference
    return {"reference": reference.path or config.policy.path} if reference else {}


def make_each(
    specs: Mapping[str, EngineSpec], device: torch.device, version: Version, drafts: bool, undo: ExitStack
) -> dict[str, Engine]:
    """Make engines in this process, and return them by the keys of their specs.

    Args:
        specs: what `engine_specs` returns, or a part of it.
        drafts: whether the model of `engine` drafts for that of `evaluation.engine`.
        undo: gets each engine's `close` as a callback.
    """
    engines: dict[str, Engine] = {}
    for name, spec in specs.items():
        drafter = engines.get("engine") if drafts else None  # None for `engine` itself, which is made first
        engines[name] = make_engine(spec.settings, spec.path, device, version, drafter, spec.rows)
        undo.callback(engines[name].close)
    return engines
