"""A correction of Jackpot in OpenRLHF 0.11.2, as a subclass of its loss.

There is no plug-in point: in `openrlhf/trainer/ray/ppo_actor.py` import `PolicyLoss` from this file in place of
`openrlhf.models`. Weights ride on the advantages, which commutes with PPO's minimum since they are at least 0. Leave
`--algo.advantage.is_correction_level token` on, or vLLM is not asked for log-probs; the class switches OpenRLHF's own
weights off. The two numbers of it that OpenRLHF logs are ours then. Versions before 0.11.2 name these settings
otherwise. With `policy_loss_type` `gspo` the ratio is taken from the policy before the update.
"""

from openrlhf.models import loss

import jackpot

CORRECTION = {"correction": "tis", "cap": 2.0}


class PolicyLoss(loss.PolicyLoss):
    def __init__(self, **settings):
        super().__init__(**settings | {"is_correction_level": "off"})

    def forward(self, log_probs, old_log_probs, advantages, action_mask=None, rollout_log_probs=None, **others):
        weights, accept_mask, metrics = jackpot.correct(
            **CORRECTION,
            rollout_log_probs=rollout_log_probs,
            target_log_probs=old_log_probs,
            response_mask=action_mask.bool(),
            advantages=advantages,
        )
        corrected = advantages * weights * accept_mask
        found = super().forward(log_probs, old_log_probs, corrected, action_mask, rollout_log_probs, **others)
        return *found[:3], metrics["mismatch/kl_k1"], 1 - metrics["correction/accepted"]
