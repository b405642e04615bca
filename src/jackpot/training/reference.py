"""The KL divergence of the policy from a frozen reference model, with which a loss term holds the policy near it."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.core.digest import weights_digest
from jackpot.core.types import TokenBatch
from jackpot.models.forward import logit_softcap, output_layer, response_hidden
from jackpot.objectives.kernels.autograd import DEFAULT_OPTIONS, HeadOptions
from jackpot.objectives.kernels.linear_head import LinearHead
from jackpot.objectives.losses import SAMPLED_KL


class Reference:
    """A frozen reference model, and the estimate of KL(policy || reference) at every response token.

    Args:
        model: the reference, which is frozen here.
        policy: model whose output layer the exact estimate reads.
        estimate: `exact`, over the whole vocabulary, or a key of `SAMPLED_KL`.
        temperature: sampling temperature.
        head: options for computing the output layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: PreTrainedModel,
        *,
        estimate: str,
        temperature: float,
        head: HeadOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Freeze the reference, and build the head that computes its log-probs or, if `exact`, the divergence."""
        self.model = model.eval().requires_grad_(False)
        self._estimate, self._temperature = estimate, temperature
        # Checkpoints store the digest, so that a run does not go on with another reference.
        self.digest = weights_digest(model.named_parameters(), torch.float32)
        is_exact = estimate == "exact"
        self._head = LinearHead(  # its divergences have no gradient into its first model, here the reference
            output_layer(model),
            output_layer(policy) if is_exact else None,
            policy_soft_cap=logit_softcap(model),
            rollout_model_soft_cap=logit_softcap(policy) if is_exact else None,
            options=head,
        )

    def kl(self, batch: TokenBatch, policy_hidden: Tensor, log_probs: Tensor) -> Tensor:
        """Estimate KL(policy || reference) at each of the N sampled tokens, in nats: [N], with the policy's gradient.

        Args:
            policy_hidden: [N, H] hidden states of the policy, H numbers each, that predict the sampled tokens.
            log_probs: [N] log-probs of these tokens under the policy.
        """
        with torch.no_grad():
            hidden = response_hidden(self.model, batch)
        ids = batch.at_sampled(batch.response_ids)
        if self._estimate == "exact":
            # KL(policy || reference): the reference stands where the head expects the policy, so it is the reverse KL.
            return self._head(hidden, policy_hidden, ids, temperature=self._temperature).reverse_kl
        with torch.no_grad():
            # None: without `exact` the head has no second model, which would be the policy.
            head = self._head(hidden, None, ids, temperature=self._temperature, only_log_probs=True)
        return SAMPLED_KL[self._estimate](log_probs, head.log_probs)
