"""What a token of the rollout model costs, as a share of a token of the policy, from the shapes of both models."""

from transformers import PreTrainedModel

from jackpot.analysis.advice.rule import Costs
from jackpot.analysis.plan.sizes import outline
from jackpot.config.config import Config
from jackpot.models.cost import forward_cost


def relative_costs(policy: PreTrainedModel, rollout_model: PreTrainedModel) -> Costs:
    """Return what a token of the rollout model costs over a token of the policy; models may be on the meta device."""
    models = (rollout_model, policy)
    flops = [forward_cost(model).per_token for model in models]
    weights = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    return Costs(flops[0] / flops[1], weights[0] / weights[1])


def costs_of_run(config: Config) -> Costs | None:
    """Return `relative_costs` of the two models of a run; None for a run without a rollout model.

    Raises:
        ModelError: one of the run's models is not there any more.
    """
    if config.rollout_model is None:
        return None
    paths = config.model_paths()
    return relative_costs(outline(paths["policy"]), outline(paths["rollout_model"]))
