"""What a run's models are when they are loaded."""

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
    for is_wide, added in ((False, ()), (True, ("head_dtype=fp32",))):
        models = load_models(small_config(*settings, *added), None, torch.device("cpu"))
        heads = {role: isinstance(output_layer(model), Fp32Linear) for role, model in models.items()}
        assert heads == dict.fromkeys(("policy", "rollout_model", "reference"), is_wide)


def test_engines_are_closed_where_what_comes_after_them_fails():
    config = small_config("evaluation.engine=transformers")
    undo = ExitStack()
    engines = make_each(engine_specs(config, config.model_paths()), torch.device("cpu"), Version(0, 0), False, undo)
    assert engines.keys() == {"engine", "evaluation.engine"}
    undo.close()
    for engine in engines.values():
        with pytest.raises(EngineError, match="closed"):
            engine.submit([])
