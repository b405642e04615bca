"""Settings that explain why a metric is beyond its limit, so that the metric is no sign of anything wrong.

Each function takes a run's settings and the value of a metric, and returns the settings that explain such a value as
text, or "" if none does.
"""

import math
from collections.abc import Callable

from jackpot.config.config import Config

Explained = Callable[[Config, float], str]

# Corrections whose purpose is to drop tokens or responses.
_DROPPING = ("icepop", "drop", "ipo", "seq_mask", "geo_mask", "prefix", "f_tis", "dppo")
# Corrections whose weights of tokens do not average to 1, even if engine and training hold the same model.
_NOT_A_RATIO = ("icepop", "drop", "ipo", "seq_tis", "seq_mask", "geo_mask", "prefix", "min_prefix")


def unexplained(config: Config, value: float) -> str:
    """Return "" as the explanation of a metric that no setting explains."""
    return ""


def by_rejection(limit: float) -> Explained:
    """Return an explanation of a low acceptance: the setting `budget`, or a `lam` above 1.

    OBRS accepts a token with the probability min(1, p_policy / (lam p_engine)), so a lam above 1 divides the acceptance
    by lam at most.

    Args:
        limit: limit of the acceptance at lam = 1.
    """

    def explain(config: Config, value: float) -> str:
        """Return the setting that explains an acceptance as low as `value`, as text; "" if none does."""
        correction = config.objective.correction
        budget = getattr(correction, "budget", None)
        if budget is not None:
            return f"objective.correction.budget={budget:g}"

        # At lam = 1, which `limit` is for, the acceptance would be at most lam times as large. If even that product is
        # below the limit, lam explains nothing.
        lam = getattr(correction, "lam", 1.0)
        return f"objective.correction.lam={lam:g}" if lam > 1.0 and value * lam >= limit else ""

    return explain


def by_cap(*names: str) -> Explained:
    """Return an explanation of many tokens at a cap: the cap is at most 1, or the correction is made to drop tokens.

    Args:
        names: names of the cap's setting in different corrections.
    """

    def explain(config: Config, value: float) -> str:
        """Return the settings that explain why many tokens are at the cap, as text; "" if none does."""
        correction = config.objective.correction
        if correction.name in _DROPPING:
            return f"objective.correction={correction.name}"

        caps = {name: getattr(correction, name, math.inf) for name in names}
        return ", ".join(f"objective.correction.{name}={cap:g}" for name, cap in caps.items() if cap <= 1.0)

    return explain


def by_proximal(config: Config, value: float) -> str:
    """Explain why PPO clips the policy's ratio often, or never: `proximal: rollout` makes it p_policy / p_sampler."""
    return "objective.correction.proximal=rollout" if config.objective.correction.proximal == "rollout" else ""


def by_proximal_of_rollout_model(config: Config, value: float) -> str:
    """Explain why PPO clips the rollout model's ratio often: `proximal: rollout` makes it p_model / p_sampler."""
    model = config.rollout_model
    is_ratio_to_sampler = model is not None and model.correction.proximal == "rollout"
    return "rollout_model.correction.proximal=rollout" if is_ratio_to_sampler else ""


def by_capped_weights(config: Config, value: float) -> str:
    """Explain why large ratios of policy to engine do no harm: the correction caps its weights, or has no weights.

    The result names that correction; "" if large ratios may do harm. They do with `proximal: rollout`: at a negative
    advantage PPO's clip does not cap a ratio above 1.
    """
    correction = config.objective.correction
    caps = [getattr(correction, name) for name in ("cap", "c1", "high") if hasattr(correction, name)]
    # Importance sampling (`is`) has no cap, and that of a custom correction is not known.
    may_be_capped = correction.name not in ("is", "custom") and correction.proximal != "rollout"
    is_capped = may_be_capped and all(map(math.isfinite, caps))  # without weights there are no caps, and `all` is True
    return f"objective.correction={correction.name}" if is_capped else ""


def by_truncation(config: Config, value: float) -> str:
    """Explain why the engine's probabilities exceed training's: they are renormalized after top-p or top-k."""
    sampling = config.sampling
    return f"sampling.top_p={sampling.top_p:g}, top_k={sampling.top_k}" if sampling.truncated else ""


def by_unused_z(config: Config, value: float) -> str:
    """Explain why an uncertain estimate of Z, OBRS's normalizer, does no harm: the correction does not use Z."""
    correction = config.objective.correction
    # Z is used where there is a setting `normalizer`, or where another setting has the value `topk`.
    uses_z = correction.name == "custom" or hasattr(correction, "normalizer") or "topk" in vars(correction).values()
    return "" if uses_z else f"objective.correction={correction.name}"


def by_weights_of_rollout_model(config: Config, value: float) -> str:
    """Explain why weights in the rollout model's loss do not average to 1: correction, old rollouts, top-p or top-k.

    The result names the first of the three that applies; "" if none does.
    """
    correction = config.rollout_model.correction if config.rollout_model else None
    # The correction's weights are not made to average to 1, or all are capped at 1 or less.
    if correction and (correction.name in _NOT_A_RATIO or getattr(correction, "cap", math.inf) <= 1.0):
        return f"rollout_model.correction={correction.name}"
    # With `batch.ahead` older weights have generated the rollouts; top-p and top-k cut some tokens off.
    return f"batch.ahead={config.batch.ahead}" if config.batch.ahead else by_truncation(config, value)


def by_filter(config: Config, value: float) -> str:
    """Explain why tokens are no fair sample of the engine's distribution: groups were chosen by their rewards."""
    return "batch.filter_groups" if config.batch.filter_groups else ""


def by_single_responses(config: Config, value: float) -> str:
    """Explain why in most groups all responses are right, or all are wrong: each group has one response.

    `value` is the share of groups that are all right, or all wrong. A share of 1.0 is not explained.
    """
    return "batch.group_size=1" if config.batch.group_size == 1 and value < 1.0 else ""


def by_one_loss(config: Config, value: float) -> str:
    """Explain why one of the rollout model's two losses dominates: the other has the weight 0, or there is no model."""
    model = config.rollout_model
    if model is None:
        return "rollout_model=null"
    zeros = [name for name in ("ppo_weight", "distill_weight") if not getattr(model, name)]
    return ", ".join(f"rollout_model.{name}=0" for name in zeros)


def by_frozen_rollouts(config: Config, value: float) -> str:
    """Explain why rewards of rollouts do not rise: the model that generates is not trained, or its share may change."""
    model = config.rollout_model
    return "rollout_model.optimizer=null" if model and model.optimizer is None else by_share(config, value)


def by_share(config: Config, value: float) -> str:
    """Explain why rewards of rollouts fall: the share of each model in the rollouts may change."""
    return "rollout_model.share" if config.is_mixed else ""
