"""From settings to the objectives of eq. 8. The one place where the objectives meet the config."""

import math

from jackpot.config.run import Config
from jackpot.objectives.corrections import make_correction
from jackpot.objectives.joint import PolicyObjective, RolloutModelObjective
from jackpot.objectives.losses import DISTILLATIONS, LOSS_AGG_MODES


def policy_objective(config: Config) -> PolicyObjective:
    """Eq. 5 as the settings say."""
    objective = config.objective
    settings = objective.correction.model_dump()
    name, proximal = settings.pop("name"), settings.pop("proximal")
    own_target = "old" if proximal == "rollout" else proximal  # of a correction that has no target to choose
    target, normalizer = settings.pop("target", own_target), settings.pop("normalizer", "topk")
    if "kappa" in settings:
        settings["totals"] = settings.pop("kappa")
    return PolicyObjective(
        correction=make_correction(name, **settings),
        target=target,
        proximal=proximal,
        normalizer=normalizer,
        clip_low=_clip(objective.clip_low),
        clip_high=_clip(objective.clip_high),
        aggregate=LOSS_AGG_MODES[objective.loss_agg_mode],
        count=objective.count,
        entropy_coeff=objective.entropy_coeff,
        kl_loss_coef=objective.reference.kl_loss_coef if objective.reference else 0.0,
    )


def rollout_model_objective(config: Config) -> RolloutModelObjective:
    """Eqs. 6 and 7 as the settings say."""
    objective = config.rollout_model
    settings = objective.correction.model_dump()
    name, proximal = settings.pop("name"), settings.pop("proximal")
    return RolloutModelObjective(
        correction=make_correction(name, **settings),
        proximal=proximal,
        clip_low=_clip(objective.clip_low),
        clip_high=_clip(objective.clip_high),
        ppo_weight=objective.ppo_weight,
        distill_weight=objective.distill_weight,
        distill=DISTILLATIONS[objective.distill],
        aggregate=LOSS_AGG_MODES[config.objective.loss_agg_mode],
    )


def _clip(value: float | None) -> float:
    return math.inf if value is None else value
