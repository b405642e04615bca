"""Runs whose engine samples from a quantized copy of a model, and runs whose training computes in its numbers.

The first show a gap between engine and training, and are given its limit; the second must leave none.
"""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.engines.reference import rollout_of, tiny_prompt
from helpers.runs import BRIEF, SHORT, assert_same_run, metrics, run, run_and_copy, small_config
from jackpot.analysis.diagnose.causes import ENGINE_GAP
from jackpot.analysis.diagnose.limits import MetricHistory, quantization_limit, rounding_limit
from jackpot.config.engines import cache_format
from jackpot.config.sampling import Sampling
from jackpot.core.errors import ConfigError, EngineError
from jackpot.core.types import Version
from jackpot.launch.build import computed_differently
from jackpot.launch.checks import engine_is_exact
from jackpot.launch.engines import make_engine
from jackpot.models.quantization.quantizer import E4M3
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.rollout.engines.transformers.weights import ModelWeights
from jackpot.training.guards import check_gap
from jackpot.training.limits import CPU_FP32, LARGEST_GAPS

TWO_ITERATIONS = (SHORT, "iterations=2", "evaluation.problems=2")
POLICY_ALONE = ("rollout_model=null", "objective.correction=tis", *TWO_ITERATIONS, "evaluation.engine=transformers")


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "settings",
    [
        ("engine.quantization=int8_w8a8", "engine.dtype=bf16"),
        ("engine.kv_cache_dtype=fp8", "engine.attn_implementation=eager"),
    ],
    ids=" ".join,
)
def test_the_policy_sees_the_gap_to_its_quantized_copy(settings, tmp_path):
    config = small_config(*POLICY_ALONE, *settings)
    run(config, tmp_path)
    lines, run_events = metrics(tmp_path), events(tmp_path)
    checked_gaps = [event["mean_gap"] for event in run_events if event["event"] == "engine_check"]

    assert len(checked_gaps) == 2
    assert all(1e-4 < gap < 0.1 for gap in checked_gaps)

    gaps = [line["mismatch/engine_gap"] for line in lines if "mismatch/engine_gap" in line]
    assert len(gaps) == 2
    assert all(1e-4 < gap < 0.1 for gap in gaps)
    assert lines[-1]["eval/policy_engine_gap"] < 1e-4  # of the evaluation's engine, which is not quantized
    assert lines[-1]["eval/rollout_model_engine_gap"] > 1e-4

    quantizations = [event["to"] for event in run_events if event["event"] == "quantized"]
    assert quantizations == [config.engine.quantization] * (config.engine.quantization is not None)
    assert "stopped" not in {event["event"] for event in run_events}

    (differing_layers,) = [event["layers"] for event in run_events if event["event"] == "computed_differently"]
    assert differing_layers
    assert all(engine != training for _, engine, training in differing_layers)

    assert config.kl_metric == "mismatch/kl_k3"
    assert lines[-1][config.kl_metric] > 0.0


# training computes as the engine does
FP8_FLOW = ("precision=fp8", "engine.quantization=fp8")
INT8_FLOW = ("precision=int8", "engine.quantization=int8_w8a8")
POLICY_WRITES = ("rollout_model.share=0.0",)  # all rollouts
SGLANG = "engine={name: sglang_server, urls: [http://127.0.0.1:8000]}"


@pytest.mark.parametrize(
    "settings",
    [
        (*POLICY_ALONE[:2], "engine.kv_cache_dtype=fp8", "fp8_backward=fp8"),
        ("engine.dtype=bf16", "head_dtype=fp32", "engine.head_dtype=fp32"),
        pytest.param(("precision=int8", "engine.quantization=int8_w8a8", "engine.dtype=bf16"), marks=pytest.mark.slow),
        pytest.param(
            ("batch.ahead=1", "batch.mini_batch_size=8", "objective.reference={kl_loss_coef: 0.1}"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("policy.lora={rank: 4, alpha: 8}", "activation_checkpointing=true", "batch.micro_batch_tokens=100"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("engine.dtype=bf16", "policy.lora={rank: 4, alpha: 8}", "activation_checkpointing=true"),
            marks=pytest.mark.slow,
        ),
        pytest.param((POLICY_ALONE[0], "placement.engines=1"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_training_in_the_flow_of_the_engine_leaves_no_gap(settings, tmp_path):
    config = small_config(*FP8_FLOW, *TWO_ITERATIONS, *settings)
    run(config, tmp_path)
    run_events = events(tmp_path)
    lines = [line for line in metrics(tmp_path) if line.get("mismatch/engine_gap") is not None]
    training_events = [event for event in run_events if event["event"] == f"{config.precision}_training"]

    assert [(event["product"], event["backward"]) for event in training_events] == [("exact", config.fp8_backward)]
    assert "computed_differently" not in {event["event"] for event in run_events}

    checks = [event for event in run_events if event["event"] == "engine_check"]
    allowed_gap = LARGEST_GAPS[CPU_FP32 if config.engine.dtype == "fp32" else "bf16"]

    assert checks
    assert all(event["mean_gap"] < 1e-6 for event in checks)
    assert all(event["allowed"] == allowed_gap > 1e-6 for event in checks)
    assert all(line["mismatch/engine_gap"] < 1e-6 for line in lines)
    assert all(line["mismatch/engine_gap_max"] < 1e-5 for line in lines)
    assert {line["mismatch/codes_differ"] for line in lines} <= {0, None}  # None: no weights were due

    grad_norms = [line["policy/grad_norm"] for line in lines]
    assert lines
    assert all(norm > 0.0 for norm in grad_norms)
    assert rounding_limit(ENGINE_GAP)(MetricHistory([], run_events, config), [0.0]) == allowed_gap


def test_equal_codes_in_another_dtype_have_the_quantized_limit(tmp_path):
    """Keys and values are FP8 in both, and only the dtype of the rest differs."""
    bf16 = ("engine.kv_cache_dtype=fp8", "evaluation.engine={dtype: bf16}", "iterations=1")
    run(small_config(*POLICY_ALONE, *FP8_FLOW, *bf16), tmp_path)
    assert 1e-5 < metrics(tmp_path)[-1]["eval/policy_engine_gap"] < LARGEST_GAPS["quantized"]


def test_an_fp8_engine_gets_codes_and_scales(tmp_path, monkeypatch):
    dtypes_by_engine = {}  # whether it is quantized: the dtype of each tensor that it got
    update_weights = TransformersEngine.update_weights

    def listen(engine, named_tensors, version):
        tensors = dict(named_tensors)
        dtypes_by_engine[engine.capabilities.quantized] = {name: tensor.dtype for name, tensor in tensors.items()}
        return update_weights(engine, tensors.items(), version)

    monkeypatch.setattr(TransformersEngine, "update_weights", listen)
    run(small_config(*POLICY_ALONE, "engine.quantization=fp8", "iterations=1"), tmp_path)

    codes = [name for name, dtype in dtypes_by_engine[True].items() if dtype == E4M3]

    assert len(codes) > 20
    assert all(dtypes_by_engine[True][f"{name}_scale_inv"] == torch.float32 for name in codes)
    assert set(dtypes_by_engine[False].values()) == {torch.float32}
    assert metrics(tmp_path)[-1]["mismatch/codes_differ"] == 0


@pytest.mark.parametrize("quantization", ["fp8", "int8_w8a8"])
def test_a_code_or_scale_that_differs_stops_the_run(quantization, tmp_path, monkeypatch):
    load = ModelWeights.load

    def flip(weights, named_tensors):
        tensors = [(name, tensor.clone()) for name, tensor in named_tensors]
        last_scale = max(index for index, (name, _) in enumerate(tensors) if "_scale" in name)
        tensors[last_scale][1].view(torch.uint8).view(-1)[0] ^= 1
        return load(weights, tensors)

    monkeypatch.setattr(ModelWeights, "load", flip)
    with pytest.raises(EngineError, match=r"holds codes and scales of digest .* would be training on unknown weights"):
        run(small_config(*POLICY_ALONE[:-1], f"engine.quantization={quantization}", "iterations=1"), tmp_path)


@pytest.mark.slow
def test_a_killed_fp8_run_continues_bit_equal(tmp_path):
    config = small_config(*BRIEF, *FP8_FLOW, "engine.kv_cache_dtype=fp8")
    run_and_copy(config, tmp_path / "whole", tmp_path / "killed", after=3)
    run(config, tmp_path / "killed")
    assert_same_run(tmp_path / "whole", tmp_path / "killed", ["policy", "rollout_model"])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("precision=fp8",), "set engine.quantization=fp8"),
        (("precision=fp8", "engine.quantization=int8_w8a8"), "engine.quantization is int8_w8a8"),
        ((*FP8_FLOW, "engine.attn_implementation=eager"), "leave engine.attn_implementation"),
        (("fp8_backward=fp8",), "set precision=fp8 and engine.quantization=fp8, or leave"),
        (("precision=int8", "engine.quantization=int8_w8a16"), "set engine.quantization=int8_w8a8"),
        (("precision=int8", "engine=vllm"), "set engine.quantization=int8_w8a8, or precision"),
        (("precision=int8", SGLANG), "set engine=transformers engine.quantization=int8_w8a8, or precision"),
        (("precision=fp8", SGLANG), "set engine=transformers engine.quantization=fp8, or precision"),
        ((SGLANG, "engine.quantization=int8_w8a8"), "leave quantization and kv_cache_dtype out, or take vllm_server"),
        (
            (*FP8_FLOW, *POLICY_WRITES, "evaluation.engine=transformers"),
            "set evaluation.engine.quantization=fp8, or prec",
        ),
        (
            (*FP8_FLOW, "rollout_model.share=0.5", "evaluation.engine=transformers"),
            "but evaluation.engine.quantization is",
        ),
        (
            (*FP8_FLOW, *POLICY_WRITES, "evaluation.engine={quantization: fp8, draft: {}}"),
            "evaluation.engine.draft out",
        ),
        (
            (*INT8_FLOW, *POLICY_WRITES, "evaluation.engine=vllm"),
            "set evaluation.engine.quantization=int8_w8a8, or prec",
        ),
    ],
)
def test_what_the_fp8_flow_does_not_have_is_refused_by_name(settings, why):
    with pytest.raises(ConfigError, match=why):
        small_config(*settings)


def test_layers_computed_differently_are_named():
    cache = "evaluation.engine={quantization: fp8, kv_cache_dtype: fp8}"
    cache_difference = [["keys and values", "fp8", "fp32"]]

    assert computed_differently(small_config(*FP8_FLOW, *POLICY_WRITES, cache)) == cache_difference
    assert computed_differently(small_config(*FP8_FLOW, "rollout_model.share=0.5", cache)) == cache_difference
    assert computed_differently(small_config(*FP8_FLOW, cache)) == []  # it evaluates alone
    assert computed_differently(small_config(*FP8_FLOW, *POLICY_ALONE[:2], cache)) == []

    unwritten_settings = ("engine.kv_cache_dtype=fp8", "evaluation.engine=transformers")
    assert computed_differently(small_config(*POLICY_WRITES, *unwritten_settings)) == []
    assert computed_differently(small_config("rollout_model.share=0.5", *unwritten_settings)) == cache_difference


def test_a_cache_that_vllm_truncates_is_named():
    vllm_settings = ("engine={name: vllm, quantization: int8_w8a8, kv_cache_dtype: fp8}", *POLICY_ALONE[:2])
    emulated_settings = (vllm_settings[0].replace("vllm", "transformers"), *vllm_settings[1:])
    truncated_format = "fp8, truncated by vLLM on a CPU"
    config = small_config("precision=int8", *vllm_settings)

    assert computed_differently(config) == [["keys and values", truncated_format, "fp8"]]
    assert computed_differently(small_config("precision=int8", *vllm_settings, "engine.kv_cache_dtype=null")) == []
    assert computed_differently(small_config("precision=int8", *emulated_settings)) == []
    assert ["keys and values", truncated_format, "fp32"] in computed_differently(small_config(*vllm_settings))
    assert cache_format(config.engine, "cuda") == "fp8"  # whose conversion rounds


def test_the_headline_kl_is_that_of_all_engines_that_write():
    quantized_evaluation = "evaluation.engine={quantization: fp8}"
    kl_of_samples, kl_of_weights = "mismatch/kl_k3", "mismatch/kl_rollout_policy"

    assert small_config(*POLICY_WRITES, quantized_evaluation).kl_metric == kl_of_samples
    assert small_config("rollout_model.share=0.5", quantized_evaluation).kl_metric == kl_of_samples
    assert small_config(quantized_evaluation).kl_metric == kl_of_weights  # it evaluates alone
    assert small_config(*POLICY_ALONE[:2], quantized_evaluation).kl_metric == kl_of_weights

    unwritten_settings = ("engine.quantization=fp8", "evaluation.engine=transformers")
    assert small_config(*POLICY_WRITES, *unwritten_settings).kl_metric == kl_of_weights
    assert small_config("rollout_model.share=0.5", *unwritten_settings).kl_metric == kl_of_samples


def test_a_separate_rollout_model_is_quantized_alone(finished_run, tmp_path):
    settings = ("engine.quantization=fp8", "evaluation.engine=transformers")
    run(small_config(*TWO_ITERATIONS, *settings, "iterations=1"), tmp_path / "quantized")
    quantized_line = metrics(tmp_path / "quantized")[-1]
    plain_line = metrics(finished_run("iterations=2"))[-1]

    assert quantized_line["mismatch/engine_gap"] > 1e-3
    assert plain_line["mismatch/engine_gap"] < 1e-5
    assert quantized_line["eval/rollout_model_engine_gap"] > 1e-3
    assert quantized_line["eval/policy_engine_gap"] < 1e-5


def test_the_exact_normalizer_is_refused_on_a_quantized_engine():
    exact = ("objective.correction.normalizer=exact",)
    config = small_config(*exact)

    with pytest.raises(ConfigError, match="normalizer 'exact' takes p_inf from training"):
        small_config(*exact, "engine.quantization=int8_w8a16")
    with pytest.raises(ConfigError, match="normalizer 'exact' takes p_inf from training"):
        small_config(*exact, "engine.kv_cache_dtype=fp8")

    settings = small_config("engine.quantization=fp8").engine
    with closing(make_engine(settings, "starter:rollout_model", torch.device("cpu"), Version(0, 0))) as engine:
        assert not engine_is_exact(small_config(), engine.capabilities.quantized)
        with pytest.raises(EngineError, match="computes in fp32, quantized, and training in fp32"):
            engine_is_exact(config, engine.capabilities.quantized)  # what a server was started with, no setting tells


def test_a_quantized_engine_may_have_a_gap_of_a_quarter():
    rollout = rollout_of(tiny_prompt(3), [4, 5])  # probability 1 each, as the engine says

    def gap(precision: str, probability: float) -> float:
        scores = {rollout.uid: torch.full((2, 1), probability).log()}
        return check_gap([rollout], Sampling(), [precision, "fp32"], lambda sampling: scores)["mean_gap"]

    assert gap("quantized", 0.8) == pytest.approx(0.2)

    for precision, probability in (("bf16", 0.8), ("fp32", 0.8), ("quantized", 0.7)):
        with pytest.raises(EngineError, match="not those of the distribution"):
            gap(precision, probability)


def test_the_usual_gap_of_a_quantized_engine_is_no_sign_of_a_bug():
    vllm = ("precision=int8", "engine={name: vllm, quantization: int8_w8a8}")  # kernels of its own
    settings = ((), ("precision=bf16",), FP8_FLOW, ("engine.quantization=fp8",), ("engine.kv_cache_dtype=fp8",), vllm)
    histories = [MetricHistory([], [], small_config(*overrides)) for overrides in settings]

    rounding_limits = [rounding_limit(ENGINE_GAP)(history, [0.0]) for history in histories]
    quantization_limits = [quantization_limit(ENGINE_GAP)(history, [0.0]) for history in histories]

    assert rounding_limits == [1e-3, 2e-2, 1e-3, None, None, None]
    assert quantization_limits == [None, None, 2e-2, 2e-2, 2e-2, 2e-2]


@pytest.mark.parametrize(
    ("settings", "expected_rounding_limit", "expected_quantization_limit"),
    [
        ((*FP8_FLOW, "evaluation.engine=transformers"), None, None),
        (
            ("precision=int8", "engine={name: vllm, quantization: int8_w8a8}", "evaluation.engine=transformers"),
            None,
            None,
        ),
        (("engine.quantization=fp8", "evaluation.engine=transformers"), 1e-3, None),
        (("evaluation.engine={dtype: bf16}",), 2e-2, None),
        (("evaluation.engine={quantization: fp8}",), None, 2e-2),
        ((*FP8_FLOW, "evaluation.engine={quantization: fp8}"), 1e-3, 2e-2),
        ((*FP8_FLOW, "evaluation.engine={quantization: fp8, dtype: bf16}"), None, 2e-2),
        ((*FP8_FLOW, "evaluation.engine={quantization: fp8, attn_implementation: eager}"), None, 2e-2),
    ],
    ids=str,
)
def test_a_gap_in_evaluations_has_the_limit_of_its_engine(
    settings, expected_rounding_limit, expected_quantization_limit
):
    metric, history = "eval/policy_engine_gap", MetricHistory([], [], small_config(*settings))
    assert rounding_limit(metric)(history, [0.0]) == expected_rounding_limit
    assert quantization_limit(metric)(history, [0.0]) == expected_quantization_limit


def test_the_gap_of_rollouts_has_the_limit_of_all_engines():
    quantized = ("engine.quantization=fp8", "evaluation.engine=transformers")
    bf16 = ("rollout_model.share=0.5", "evaluation.engine={dtype: bf16}")

    for settings, expected_limits in (
        ((*quantized, *POLICY_WRITES), (1e-3, None)),
        ((*quantized, "rollout_model.share=0.5"), (None, 2e-2)),
        (bf16, (2e-2, None)),
    ):
        history = MetricHistory([], [], small_config(*settings))
        limits = rounding_limit(ENGINE_GAP)(history, [0.0]), quantization_limit(ENGINE_GAP)(history, [0.0])
        assert limits == expected_limits
