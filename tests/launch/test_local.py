"""The models of a run have the output layers that the settings ask for; its engines close with the run."""

from contextlib import ExitStack

import pytest
import torch

from helpers.runs import small_config
from jackpot.core.errors import EngineError
from jackpot.core.types import Version
from jackpot.launch.build import load_models
from jackpot.launch.engines import engine_specs, make_each
from jackpot.models.forward import output_layer
from jackpot.objectives.kernels.linear_head import Fp32Linear


def test_head_dtype_widens_every_output_layer():
    settings = ("objective.reference.kl_loss_coef=0.1", "policy.lora.rank=2")

    for is_wide, override in ((False, ()), (True, ("head_dtype=fp32",))):
        models = load_models(small_config(*settings, *override), None, torch.device("cpu"))

        wide_heads = {role: isinstance(output_layer(model), Fp32Linear) for role, model in models.items()}
        assert wide_heads == dict.fromkeys(("policy", "rollout_model", "reference"), is_wide)


def test_engines_close_with_the_stack_that_they_were_given():
    config = small_config("evaluation.engine=transformers")
    specs = engine_specs(config, config.model_paths())
    undo = ExitStack()
    engines = make_each(specs, torch.device("cpu"), Version(0, 0), drafts=False, undo=undo)
    assert engines.keys() == {"engine", "evaluation.engine"}

    undo.close()  # as it does where what comes after the engines fails

    for engine in engines.values():
        with pytest.raises(EngineError, match="closed"):
            engine.submit([])
