"""The two sides of a comparison: their settings, from a model or run and the user's changes, and their names.

`verdict` rates the gap between two sides.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jackpot.config.build import lay, validated
from jackpot.config.engines import ServerEngineConfig, is_quantized, unified_formats
from jackpot.config.sampling import Sampling
from jackpot.config.tools import LearnerConfig, MismatchConfig, SideConfig
from jackpot.core.errors import ConfigError
from jackpot.rollout.tasks.registry import check_sets
from jackpot.training.limits import LARGEST_GAPS, precisions
from jackpot.training.run_folder.checkpoint import config_of_run, resolve_model_path

Changes = Sequence[Mapping[str, Any]]


def mismatch_config(
    model: str, samplers: Sequence[Changes], learners: Sequence[Changes], changes: Changes
) -> MismatchConfig:
    """Build the settings of a comparison between samplers and learners.

    By default both sides have the weights of `model`. For a run, the sampler is its engine with the rollout model of
    the best, or else newest, checkpoint. There are two learners: that model in the precision of training (the engine's
    own gap) and the policy (the whole mismatch); they are one where the policy generates its own rollouts. The prompts
    are held-out problems of the run's task, sampled as in training.

    Args:
        model: path of a model, or the folder of a run.
        samplers, learners, changes: for each side, and for all else, the settings that differ from the defaults.

    Raises:
        ConfigError: settings that do not exist or do not fit, or two sides that are the same.
        CheckpointError: a folder that is neither a model nor a run, or a run without a checkpoint.
    """
    # Default settings of the sampler, the learners and everything else: for a bare model, whose learner is the sampler.
    sampler: dict[str, Any] = {"path": model, "engine": {"name": "transformers"}}
    learner_defaults, settings = [sampler], {}
    if run := config_of_run(model):
        policy = resolve_model_path(model)
        rollout_model = policy if run.rollout_model is None else str(Path(policy).parent / "rollout_model")
        sampler = {"path": rollout_model, "engine": run.engine.model_dump()}
        training = {
            "engine": {"name": "transformers", "head_dtype": run.head_dtype},
            "autocast": "bf16" if run.precision == "bf16" else None,
        }
        if run.trained_quantization:
            training["engine"] |= run.engine.model_dump(include={"dtype", "quantization", "kv_cache_dtype"})
        learner_defaults = [{"path": path} | training for path in dict.fromkeys((policy, rollout_model))]

        sampling = run.sampling.model_dump(exclude={"num_top_log_probs"})
        settings = {"task": run.task.model_dump(), "sampling": sampling, "device": run.device}

    # Lay the user's changes over the defaults. Those of a learner are laid over the first default learner, for a run
    # the policy. If the user gives no learner, every default learner is compared.
    settings = lay(settings, changes)
    settings["samplers"] = tuple(_side("sampler", sampler, side) for side in samplers or [()])  # (): no changes
    settings["learners"] = tuple(
        [_side("learner", learner_defaults[0], side) for side in learners]
        or [_side("learner", side, ()) for side in learner_defaults]
    )

    config = validated(MismatchConfig, settings)
    if config.benchmarks:
        check_sets(config.benchmarks)
    for kind, sides in (("sampler", config.samplers), ("learner", config.learners)):
        counts = Counter(map(side_name, sides))
        if repeated := sorted(name for name, count in counts.items() if count > 1):
            raise ConfigError(f"--{kind} is given twice as {', '.join(repeated)}; give each side once")

    if config.reread and config.sampling.truncated:
        raise ConfigError(
            f"reread gives the sampler's probabilities before top_p {config.sampling.top_p} and top_k "
            f"{config.sampling.top_k}, which are not those that it sampled with; leave reread out, or use "
            f"sampling.top_p=1.0 sampling.top_k=0"
        )
    return config


def _side(role: str, base: Mapping[str, Any], changes: Changes) -> SideConfig:
    """Build the settings of a sampler or learner; in `changes`, settings of its engine may lack the prefix `engine`."""
    # Every key that is no setting of a sampler or learner itself is one of its engine.
    overrides = [
        {key: value} if key in LearnerConfig.model_fields else {"engine": {key: value}}
        for change in changes
        for key, value in change.items()
    ]

    try:
        return validated({"sampler": SideConfig, "learner": LearnerConfig}[role], lay(base, overrides))
    except ConfigError as error:
        raise ConfigError(f"--{role}: {error}") from None


def side_name(side: SideConfig) -> str:
    """Return the name of a side in messages: the model's path and the settings of the engine."""
    return f"{side.path} {_settings_name(side)}"


def short_names(sides: Sequence[SideConfig]) -> list[str]:
    """Return shorter names than `side_name`: without a path that all share, and with the last parts of folders.

    Whole paths stay where two last parts are equal.
    """
    paths = list(dict.fromkeys(side.path for side in sides))
    if len(paths) == 1:
        return [_settings_name(side) for side in sides]

    last_parts = {path: Path(path).name if Path(path).is_dir() else path for path in paths}
    are_distinct = len(set(last_parts.values())) == len(paths)
    return [f"{last_parts[side.path] if are_distinct else side.path} {_settings_name(side)}" for side in sides]


def _settings_name(side: SideConfig) -> str:
    """Return a name for a sampler or a learner without its model's path, such as `vllm bf16 fp8 kv fp8`.

    The name has the engine, its dtype, and those of the other settings that differ from their defaults.
    """
    engine = side.engine
    attention = getattr(engine, "attn_implementation", "sdpa")

    words = [
        engine.name,
        engine.dtype,
        engine.head_dtype and f"head {engine.head_dtype}",
        attention if attention != "sdpa" else None,
        engine.quantization,
        engine.kv_cache_dtype and f"kv {engine.kv_cache_dtype}",
        " ".join(engine.urls) if isinstance(engine, ServerEngineConfig) else None,
    ]
    if isinstance(side, LearnerConfig):
        words += [
            side.autocast and f"autocast {side.autocast}",
            f"temperature {side.temperature:g}" if side.temperature else None,
        ]
    return " ".join(filter(None, words))  # without the words that are None


def verdict(sampler: SideConfig, learner: LearnerConfig, device: str, sampling: Sampling, mean_gap: float) -> str:
    """Rate the mean |p - q| of two sides in a sentence, by the largest gap that training's own check allows.

    Args:
        sampler, learner: settings of the two sides.
        device: kind of device that both ran on.
        sampling: how responses were sampled.
        mean_gap: mean |p - q| over sampled tokens.
    """
    # The precisions of both sides decide which gap is allowed. Where both quantize to the same formats on a CPU, their
    # dtypes count instead, since quantization then makes no difference between the two.
    formats = unified_formats(sampler.engine)
    is_unified = formats is not None and formats == unified_formats(learner.engine)
    if is_unified and device == "cpu" and not learner.autocast:
        compared = precisions(sampler.engine.dtype, learner.engine.dtype, device, sampling)
    else:
        compared = precisions(_precision(sampler), _precision(learner), device, sampling)

    allowed = max(LARGEST_GAPS[precision] for precision in compared)
    coarsest = next(precision for precision in compared if LARGEST_GAPS[precision] == allowed)
    fact = f"mean |p - q| is {mean_gap:.2g}"

    if mean_gap == 0.0:
        return f"{fact}: the two sides are equal bit for bit"
    if sampler.path != learner.path:
        return f"{fact}, between two models; jackpot simulate shows the effect of OBRS on it"
    if mean_gap > allowed:
        return (
            f"{fact}, more than the {allowed:g} that training's own check allows ({coarsest}): training would stop. "
            f"Look for other weights, another temperature or filter, or a weight update that did not arrive"
        )
    return f"{fact}, within the {allowed:g} that training's own check allows ({coarsest})"


def _precision(side: SideConfig) -> str:
    """Return the precision in which a sampler or learner computes: quantized, or a dtype; a key of `LARGEST_GAPS`."""
    if is_quantized(side.engine):
        return "quantized"
    return "bf16" if isinstance(side, LearnerConfig) and side.autocast else side.engine.dtype
