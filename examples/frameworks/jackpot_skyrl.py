"""A correction of Jackpot in SkyRL, as a policy loss that is registered there. Read at SkyRL 0.3.0 and a956457.

This file is the entry point, as in SkyRL's `examples/train/algorithms/custom_policy_loss`: what it registers is pickled
by value and sent to the workers. Put the `main` of that example at its end, and start it with

    trainer.algorithm.policy_loss_type=jackpot generator.sampling_params.logprobs=1

A loss of one's own does not read `off_policy_correction`, so nothing comes on top. The loss is a masked sum, as SkyRL
has scaled the advantages before. Use Python 3.12: on 3.11 `import skyrl.backends` of 0.3.0 fails, as pydantic refuses
one of its `TypedDict`s.
"""

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, reduce_loss

import jackpot

CORRECTION = {"correction": "tis", "cap": 2.0}


def jackpot_loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    weights, accept_mask, metrics = jackpot.correct(
        **CORRECTION,
        rollout_log_probs=rollout_logprobs,
        target_log_probs=old_log_probs,
        response_mask=loss_mask.bool(),
        advantages=advantages.expand_as(log_probs),
    )
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss = reduce_loss(-accept_mask * weights * surrogate, loss_mask)
    return loss, {f"jackpot/{name}": float(value) for name, value in metrics.items()}


PolicyLossRegistry.register("jackpot", jackpot_loss)
