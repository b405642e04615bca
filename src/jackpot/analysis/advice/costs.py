"""The costs of a token for the rollout model, as shares of its costs for the policy, from the shapes of both models."""

from transformers import PreTrainedModel

from jackpot.analysis.advice.rule import Costs
from jackpot.models.cost import forward_cost


def relative_costs(policy: PreTrainedModel, rollout_model: PreTrainedModel) -> Costs:
    """Divide the rollout model's costs of a token by the policy's; both models may be on the meta device."""
    return Costs(
        flops=forward_cost(rollout_model).per_token / forward_cost(policy).per_token,
        weights=rollout_model.num_parameters() / policy.num_parameters(),
    )
