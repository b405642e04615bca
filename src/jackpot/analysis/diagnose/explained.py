"""Says where the settings of a run explain a sign, which then is no finding.

Each function takes the settings and the value of a metric that is beyond its limit, and returns the settings that
explain it, or "" where they do not: then the value is worse than the settings alone make it.
"""

import math
from collections.abc import Callable

from jackpot.config.config import Config
from jackpot.config.corrections import PolicyCorrection, RolloutModelCorrection

Explained = Callable[[Config, float], str]

# corrections that drop tokens or responses, on purpose; and those of a rollout model whose mean weight is not 1
_DROPPING = ("icepop", "drop", "ipo", "seq_mask", "geo_mask", "prefix", "f_tis", "dppo")
_NOT_A_RATIO = ("icepop", "drop", "ipo", "seq_tis", "seq_mask", "geo_mask", "prefix", "min_prefix")


def unexplained(config: Config, value: float) -> str:
    """Return "": no setting explains the metric."""
    return ""


def by_rejection(limit: float) -> Explained:
    """Explain that tokens are rejected by `lam`, which divides the acceptance by lam at most, or by `budget`."""

    def of(config: Config, value: float) -> str:
        correction = config.objective.correction
        budget, lam = getattr(correction, "budget", None), getattr(correction, "lam", 1.0)
        if budget is not None:
            return f"objective.correction.budget={budget:g}"
        return f"objective.correction.lam={lam:g}" if lam > 1.0 and value * lam >= limit else ""

    return of


def by_cap(*names: str) -> Explained:
    """Explain that tokens are at a cap that is at most 1, or dropped by a correction whose purpose that is.

    Args:
        names: of the setting that is the cap, which differ between corrections.
    """

    def of(config: Config, value: float) -> str:
        correction = config.objective.correction
        if correction.name in _DROPPING:
            return f"objective.correction={correction.name}"
        caps = {name: getattr(correction, name, math.inf) for name in names}
        return ", ".join(f"objective.correction.{name}={cap:g}" for name, cap in caps.items() if cap <= 1.0)

    return of


def by_proximal(config: Config, value: float) -> str:
    """Explain that the policy's clip bounds the mismatch too."""
    return _by_proximal("objective.correction", config.objective.correction)


def by_proximal_of_rollout_model(config: Config, value: float) -> str:
    """Explain that the clip of the rollout model bounds the mismatch too."""
    model = config.rollout_model
    return _by_proximal("rollout_model.correction", model.correction) if model else ""


def _by_proximal(setting: str, correction: PolicyCorrection | RolloutModelCorrection) -> str:
    return f"{setting}.proximal=rollout" if correction.proximal == "rollout" else ""


def by_capped_weights(config: Config, value: float) -> str:
    """Explain that ratios are large: the correction caps the weights, or has none.

    PPO's clip caps no ratio above 1 of a negative advantage, so it does not count where its ratio is taken from the
    engine.
    """
    correction = config.objective.correction
    caps = [getattr(correction, name) for name in ("cap", "c1", "high") if hasattr(correction, name)]
    has_cap = correction.name not in ("is", "custom") and correction.proximal != "rollout"
    is_bounded = has_cap and all(map(math.isfinite, caps))
    return f"objective.correction={correction.name}" if is_bounded else ""


def by_truncation(config: Config, value: float) -> str:
    """Explain that the engine's probabilities are larger: top-p or top-k take a part of the others."""
    sampling = config.sampling
    return f"sampling.top_p={sampling.top_p:g}, top_k={sampling.top_k}" if sampling.truncated else ""


def by_unused_z(config: Config, value: float) -> str:
    """Explain that Z is uncertain: the correction does not use it."""
    correction = config.objective.correction
    uses_z = correction.name == "custom" or hasattr(correction, "normalizer") or "topk" in vars(correction).values()
    return "" if uses_z else f"objective.correction={correction.name}"


def by_weights_of_rollout_model(config: Config, value: float) -> str:
    """Explain that the rollout model's weights do not average to 1: its correction, stale rollouts or truncation."""
    correction = config.rollout_model.correction if config.rollout_model else None
    if correction and (correction.name in _NOT_A_RATIO or getattr(correction, "cap", math.inf) <= 1.0):
        return f"rollout_model.correction={correction.name}"
    return f"batch.ahead={config.batch.ahead}" if config.batch.ahead else by_truncation(config, value)


def by_filter(config: Config, value: float) -> str:
    """Explain that tokens are no fair sample: groups are chosen by their rewards."""
    return "batch.filter_groups" if config.batch.filter_groups else ""


def by_single_responses(config: Config, value: float) -> str:
    """Explain that most groups are all right or all wrong: a group is one response."""
    return "batch.group_size=1" if config.batch.group_size == 1 and value < 1.0 else ""


def by_one_loss(config: Config, value: float) -> str:
    """Explain that one of the rollout model's losses is far larger: the weight of the other is 0."""
    model = config.rollout_model
    if model is None:
        return "rollout_model=null"
    zeros = [name for name in ("ppo_weight", "distill_weight") if not getattr(model, name)]
    return ", ".join(f"rollout_model.{name}=0" for name in zeros)


def by_frozen_rollouts(config: Config, value: float) -> str:
    """Explain that the rollouts earn no more: the model that generates them is not trained."""
    model = config.rollout_model
    return "rollout_model.optimizer=null" if model and model.optimizer is None else by_share(config, value)


def by_share(config: Config, value: float) -> str:
    """Explain that the rollouts' rewards change: another model generates a growing part of them."""
    return "rollout_model.share" if config.is_mixed else ""
