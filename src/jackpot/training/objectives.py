"""Construction of the objectives of policy and rollout model, eq. 8 of Jackpot (arXiv 2602.06107), from settings."""

import math
from functools import partial

from jackpot.config.config import RolloutModelConfig
from jackpot.config.corrections import KAPPA_TOLERANCE, TargetCorrection, ZCorrection
from jackpot.config.objective import ObjectiveConfig
from jackpot.corrections import construct_correction
from jackpot.objectives.joint import PolicyObjective, RolloutModelObjective
from jackpot.objectives.losses import DISTILLATIONS, LOSS_AGG_MODES, SURROGATES, oapl


def policy_objective(objective: ObjectiveConfig) -> PolicyObjective:
    """Build the policy's objective, eq. 5, from the settings.

    The target, with which acceptance and its expectation Z compare the rollout model, is the correction's `target`
    setting. Without that setting it is the proximal point, or the old policy where the proximal point is the rollout
    model. A correction without `normalizer` only reports Z, estimated from the top-k lists.
    """
    correction = objective.correction
    default_target = "old" if correction.proximal == "rollout" else correction.proximal
    regresses = objective.surrogate == "oapl"  # its loss regresses a log-ratio on the advantage

    # Corrections without a budget or a `kappa_tolerance` get the defaults; `_clip` turns None into infinity, no clip.
    return PolicyObjective(
        correction=construct_correction(correction),
        target=correction.target if isinstance(correction, TargetCorrection) else default_target,
        proximal=correction.proximal,
        normalizer=correction.normalizer if isinstance(correction, ZCorrection) else "topk",
        budget=getattr(correction, "budget", None),
        surrogate=partial(oapl, beta=objective.oapl_beta) if regresses else SURROGATES[objective.surrogate],
        clip_low=_clip(objective.clip_low),
        clip_high=_clip(objective.clip_high),
        aggregate=LOSS_AGG_MODES[objective.loss_agg_mode],
        count=objective.count,
        entropy_coeff=objective.entropy_coeff,
        kl_loss_coef=objective.reference.kl_loss_coef if objective.reference else 0.0,
        kappa_tolerance=getattr(correction, "kappa_tolerance", KAPPA_TOLERANCE),
        regresses=regresses,
    )


def rollout_model_objective(objective: RolloutModelConfig, loss_agg_mode: str) -> RolloutModelObjective:
    """Build the rollout model's objective, eqs. 6 and 7, from the settings.

    Args:
        objective: the settings of the block `rollout_model`.
        loss_agg_mode: how token losses are averaged, a key of `LOSS_AGG_MODES`: that of the policy's objective.
    """
    return RolloutModelObjective(
        correction=construct_correction(objective.correction),
        proximal=objective.correction.proximal,
        clip_low=_clip(objective.clip_low),  # `_clip` turns None into infinity, which clips nothing
        clip_high=_clip(objective.clip_high),
        ppo_weight=objective.ppo_weight,
        distill_weight=objective.distill_weight,
        distill=DISTILLATIONS[objective.distill],
        aggregate=LOSS_AGG_MODES[loss_agg_mode],
    )


def _clip(value: float | None) -> float:
    """Return a clip setting as a number: infinity, which clips nothing, for None."""
    return math.inf if value is None else value
