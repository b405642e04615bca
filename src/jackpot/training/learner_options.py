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
    """K of the policy's own top-k."""
    max_length: int
    """The sampling limit on response tokens, for `loss_agg_mode: seq-mean-token-sum-norm`."""
    advantage: str
    """Key of `objectives.advantages.ADVANTAGES`; a critic takes its place."""
    within_model: bool = False
    """As in `response_advantages`."""
    beta: float = 1.0
    """As in `response_advantages`."""
    on_support: bool = False
    """Whether both models' log-probs are renormalized on the tokens that a truncated sampler kept, which its lists
    name. Entropies and divergences stay those of the whole vocabulary."""
    exact_engines: Collection[Role] = ()
    """Models whose engine samples from the weights it is sent, neither quantized nor truncated, so that their
    forward pass can stand in for p_inf."""
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
    """As in `JointOptimizer`."""
    head: HeadOptions = DEFAULT_OPTIONS
    """How the joint head is computed."""
