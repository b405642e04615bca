"""What `check_start` refuses before anything is made, and whose model an error is about."""

import pytest

from helpers.runs import small_config
from jackpot.config.config import Config
from jackpot.core.errors import EngineError, ModelError
from jackpot.launch.checks import check_start, role_named

EXACT = "objective.correction.normalizer=exact"
IN_BF16 = "{name: transformers, dtype: bf16}"


def checked(config: Config) -> set[str]:
    """Check a run of one process; return the roles of its models."""
    return set(check_start(config, config.model_paths(), ranks=1))


def test_an_error_about_a_model_begins_with_its_role():
    with pytest.raises(ModelError, match=r"^rollout_model: no such folder$"), role_named("rollout_model"):
        raise ModelError("no such folder")


def test_exact_z_is_refused_where_rollouts_are_generated_in_bf16():
    with pytest.raises(EngineError, match="computes in bf16"):
        checked(small_config(EXACT, f"engine={IN_BF16}", arm="obrs"))


def test_exact_z_does_not_depend_on_the_engine_of_evaluations():
    config = small_config(EXACT, f"evaluation.engine={IN_BF16}", arm="obrs")
    assert checked(config) == {"policy", "rollout_model"}


def test_exact_z_is_refused_where_the_policy_generates_in_bf16():
    settings = (EXACT, "rollout_model.share=0.5", f"evaluation.engine={IN_BF16}")
    with pytest.raises(EngineError, match="computes in bf16"):
        checked(small_config(*settings, arm="obrs"))
