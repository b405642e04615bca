"""The settings of the joint learner that neither its objectives nor its optimizers hold."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from jackpot.config.schedules import DistillControlConfig
from jackpot.core.roles import Role
from jackpot.objectives.kernels.autograd import DEFAULT_OPTIONS, HeadOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerOptions:
    """The settings of a joint learner, beside its models, optimizers and objectives."""

    temperature: float
    """Temperature of the sampling; every log-prob of the learner uses it."""
    num_top_log_probs: int
    """K, the number of most probable tokens that the policy's head returns at each position."""
    max_length: int
    """The sampling limit on response tokens, for `loss_agg_mode: seq-mean-token-sum-norm`."""
    advantage: str
    """Key of `objectives.advantages.ADVANTAGES`; not used by a learner with a critic."""
    within_model: bool = False
    """Whether advantages compare the responses of each model with each other alone (`response_advantages`)."""
    beta: float = 1.0
    """Coefficient of the advantage `oapl` (`response_advantages`)."""
    on_support: bool = False
    """Whether both models' log-probs are renormalized on the tokens that a truncated sampler kept, which its lists
    name. Entropies and divergences stay those of the whole vocabulary."""
    exact_engines: Collection[Role] = ()
    """Models whose engine samples from the weights that it is sent, in training's dtype, neither quantized nor
    truncated. So their forward pass in training gives the distribution p_inf that the engine samples from."""
    is_mixed: bool = False
    """Whether the policy generates some of the rollouts beside a rollout model."""
    autocast: torch.dtype | None = None
    """Dtype of the forward pass; None for the weights' own."""
    rollout_model_each_step: bool = True
    """Whether the rollout model steps with the policy; else once for each rollout batch, on the gradient of all its
    steps."""
    distill_control: DistillControlConfig | None = None
    """Adapts the objective's `distill_weight` after every step of the rollout model; None for a constant weight."""
    ess_scaling: str | None = None
    """Key of `EFFECTIVE_SHARES`, by which `JointOptimizer` scales the policy's learning rate; None: no scaling."""
    head: HeadOptions = DEFAULT_OPTIONS
    """How the outputs of the joint head are computed."""
