"""What a run's models are when they are loaded."""

import torch

from helpers.runs import small_config
from jackpot.launch.build import load_models
from jackpot.models.forward import output_layer
from jackpot.objectives.kernels.linear_head import Fp32Linear


def test_head_dtype_widens_every_output_layer():
    settings = ("objective.reference.kl_loss_coef=0.1", "policy.lora.rank=2")
    for is_wide, added in ((False, ()), (True, ("head_dtype=fp32",))):
        models = load_models(small_config(*settings, *added), None, torch.device("cpu"))
        heads = {role: isinstance(output_layer(model), Fp32Linear) for role, model in models.items()}
        assert heads == dict.fromkeys(("policy", "rollout_model", "reference"), is_wide)
