"""What a correction of ours cannot be combined with in TRL is an error at construction that names it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from helpers.trl_runs import ROLLOUT_MODEL, arguments
from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.errors import ConfigError
from jackpot.core.types import Version
from jackpot.models.load import load_model
from jackpot.rollout.engines.transformers.engine import TransformersEngine

pytestmark = pytest.mark.trl


@pytest.mark.parametrize(
    ("correction", "has_rollouts", "changes", "named"),
    [
        ("obrs", False, {"use_vllm": True}, "set GRPOConfig(vllm_importance_sampling_correction=False)"),
        ("tis", True, {"use_vllm": True}, "set GRPOConfig(vllm_importance_sampling_correction=False)"),
        ("obrs", False, {}, "neither use_vllm=True nor a rollout_func"),
        ("obrs", True, {"importance_sampling_level": "sequence"}, "importance_sampling_level is 'sequence'"),
        ("obrs", True, {"use_liger_kernel": True}, "use_liger_kernel is True"),
        ({"name": "obrs", "normalizer": "exact"}, True, {}, "normalizer 'exact'"),
        ({"name": "obrs", "normalizer": "exact", "budget": 0.5}, True, {}, "normalizer 'exact'"),
        ("obsr", True, {}, "did you mean 'obrs'"),
        ({"name": "tis", "c1": 2.0}, True, {}, "unknown setting"),
    ],
)
def test_settings_are_refused_by_name(adapter: ModuleType, tmp_path, correction, has_rollouts, changes, named):
    rollouts = {"rollout_func": adapter.EngineRollouts(ROLLOUT_MODEL)} if has_rollouts else {}
    with pytest.raises(ConfigError) as caught:
        adapter.CorrectedGRPOTrainer(**arguments(tmp_path, **changes), **rollouts, correction=correction)
    assert named in str(caught.value)


def test_what_would_not_be_read_is_refused(adapter: ModuleType, tmp_path):
    rollouts = {"rollout_func": adapter.EngineRollouts(ROLLOUT_MODEL)}
    vllm = arguments(tmp_path, use_vllm=True, vllm_importance_sampling_correction=False)

    for trainer_arguments in (arguments(tmp_path) | rollouts, vllm | {"correction": "tis"}):
        with pytest.raises(ConfigError, match="num_top_log_probs is 5"):
            adapter.CorrectedGRPOTrainer(**trainer_arguments, num_top_log_probs=5)

    model = load_model(ROLLOUT_MODEL, torch.float32)
    engine = TransformersEngine(model, TransformersEngineConfig(), eos_token_ids=[1], version=Version(0, 0))
    with pytest.raises(ConfigError, match="dtype is 'bf16', but an engine was given"):
        adapter.EngineRollouts(engine, dtype="bf16")

    with pytest.raises(ConfigError, match="dtype"):
        adapter.EngineRollouts(ROLLOUT_MODEL, dtype="bf61")


def test_tools_need_a_correction_that_reads_the_ratio_alone(adapter: ModuleType, tmp_path):
    rollouts = adapter.EngineRollouts(ROLLOUT_MODEL)
    with pytest.raises(ConfigError, match="between the turns of tools"):
        adapter.CorrectedGRPOTrainer(**arguments(tmp_path), rollout_func=rollouts, tools=[len], correction="obrs")


def test_unsloth_is_refused(adapter: ModuleType, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace())
    with pytest.raises(ConfigError, match="Unsloth"):
        adapter.CorrectedGRPOTrainer(**arguments(tmp_path), rollout_func=adapter.EngineRollouts(ROLLOUT_MODEL))


def test_a_learned_prompt_is_refused(adapter: ModuleType, tmp_path):
    """peft puts it before the model, which is read without it: its log-probs are 3 nats off."""
    peft = pytest.importorskip("peft")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    rollouts = adapter.EngineRollouts(ROLLOUT_MODEL)
    with pytest.raises(ConfigError, match="of type PROMPT_TUNING"):
        adapter.CorrectedGRPOTrainer(**arguments(tmp_path), peft_config=prompt, rollout_func=rollouts)


def test_a_model_in_shards_is_refused(adapter: ModuleType, tmp_path):
    from jackpot.adapters.trl.refusals import refuse_placement

    for sharded, plugin, name in ((True, None, "FSDP"), (False, SimpleNamespace(zero_stage=3), "ZeRO-3")):
        state = SimpleNamespace(deepspeed_plugin=plugin)
        trainer = SimpleNamespace(accelerator=SimpleNamespace(state=state), is_fsdp_enabled=sharded)
        with pytest.raises(ConfigError, match=name):
            refuse_placement(trainer)


def test_a_rollout_function_must_return_what_is_needed(adapter: ModuleType, tmp_path):
    complete = adapter.EngineRollouts(ROLLOUT_MODEL)
    for missing, named in (("top_ids", "needs the top-k"), ("logprobs", "returned logprobs None")):

        def rollouts(prompts, trainer, missing=missing):
            return complete(prompts, trainer) | {missing: None}

        trainer = adapter.CorrectedGRPOTrainer(**arguments(tmp_path, max_steps=1), rollout_func=rollouts)
        with pytest.raises(ConfigError, match=named):
            trainer.train()


def test_settings_that_our_engines_lack_are_an_error(adapter: ModuleType, tmp_path):
    with pytest.raises(ConfigError, match=r"min_p is 0\.1"):
        adapter.CorrectedGRPOTrainer(
            **arguments(tmp_path, min_p=0.1), rollout_func=adapter.EngineRollouts(ROLLOUT_MODEL)
        )
