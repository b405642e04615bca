"""One FP8 flow as a user meets it: train an arm of a recipe, then ask what is wrong with it and where the gap is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.commands import jackpot
from jackpot.rollout.engines.transformers import weights
from research.parity import with_scales

TINY = (
    "iterations=5",
    "batch.prompts=2",
    "batch.group_size=4",
    "evaluation.problems=8",
    "policy.optimizer.learning_rate=1e-6",  # five iterations change no accuracy
    "evaluation.engine=null",
    "rollouts.every=5",
    "threads=1",
)


def train_error(cwd: Path, *settings: str) -> str:
    """Train the arm of one FP8 flow, and return the error, empty where there is none."""
    result = jackpot("train", "regimes", "--arm", "fp8_unified", *TINY, *settings, "--run", "run", cwd=cwd)
    return result.stderr if result.returncode else ""


def diagnosis(cwd: Path) -> dict[str, Any]:
    """Return what `jackpot diagnose` says of the run."""
    return json.loads(jackpot("diagnose", "run", "--json", cwd=cwd).stdout)


def mismatch(cwd: Path, *sides: str) -> tuple[dict[str, Any], str]:
    """Return the pair that `jackpot mismatch` compares, and what it prints."""
    arguments = ("--responses", "8", "--max-new-tokens", "12", "--out", "found", "threads=1")
    result = jackpot("mismatch", "run", *arguments, *sides, cwd=cwd)
    assert result.returncode == 0, result.stderr
    [pair] = json.loads((cwd / "found" / "mismatch.json").read_text())["pairs"]
    return pair, " ".join(result.stdout.split())


def assert_stopped_because(report: dict[str, Any], message: str) -> None:
    """Check that the run is unhealthy for this reason alone, and that no learning rate is blamed."""
    assert report["verdict"] == "unhealthy"
    assert message in report["summary"]
    assert [finding["metric"] for finding in report["findings"]] == ["events/stopped"]
    assert "learning_rate" not in report["findings"][0]["suggestion"]


@pytest.fixture(scope="module")
def unified_home(tmp_path_factory) -> Path:
    """Return the folder of a run whose engine and learner compute alike."""
    cwd = tmp_path_factory.mktemp("unified")
    assert not train_error(cwd)
    return cwd


@pytest.mark.slow
def test_no_tool_calls_a_unified_run_broken(unified_home):
    report = diagnosis(unified_home)
    assert (report["verdict"], report["findings"]) == ("no finding", [])
    assert report["summary"].startswith("No finding: after 5 iterations ")
    assert "differently" not in report["summary"]

    pair, output = mismatch(unified_home)
    assert pair["layers"] == []
    assert pair["numbers"]["gap"]["value"] < 1e-6
    assert pair["numbers"]["max_gap"] < 1e-5
    assert "within the 1e-05 that training's own check allows" in output
    assert "Layers that" not in output
    assert output.endswith("# what the run's mismatch does to training")


def test_mismatch_names_the_layers_in_another_precision(unified_home):
    pair, output = mismatch(unified_home, "--learner", "quantization=null,kv_cache_dtype=fp8")

    assert pair["numbers"]["gap"]["value"] > 1e-3

    precisions = {
        layers: (engine_precision, learner_precision) for layers, engine_precision, learner_precision in pair["layers"]
    }
    assert precisions.pop("keys and values") == ("fp32", "fp8")
    assert len(precisions) == 7
    assert set(precisions.values()) == {("weights fp8 by 128 x 128, activations fp8 by 1 x 128", "fp32")}
    assert "model.layers.*.self_attn.q_proj (3)" in output
    assert "keys and values" in output


def test_diagnose_names_an_engine_that_is_not_unified(tmp_path):
    frozen_model = "rollout_model={path: 'starter:rollout_model', optimizer: null, share: 0.0}"
    evaluation_engine = "evaluation.engine={quantization: fp8, kv_cache_dtype: fp8}"
    assert not train_error(tmp_path, "iterations=1", frozen_model, evaluation_engine)

    report = diagnosis(tmp_path)
    message = "not in one flow, as precision fp8 asks. They compute differently: keys and values: fp8 there, fp32 in"
    assert message in report["summary"]


def test_diagnose_says_that_other_scales_stopped_a_run(tmp_path, monkeypatch):
    plain_quantize = weights.quantize_linears
    monkeypatch.setattr(
        weights, "quantize_linears", lambda model, scheme: plain_quantize(model, with_scales(scheme, "float32"))
    )

    assert "the engine's log-probs are not those of the distribution" in train_error(tmp_path)
    assert_stopped_because(diagnosis(tmp_path), "at most 1e-05 is allowed in fp32 on a CPU")


def test_diagnose_says_that_other_codes_stopped_a_run(tmp_path, monkeypatch):
    plain_load = weights.ModelWeights.load

    def flip(model_weights, named_tensors):
        tensors = [(name, tensor.clone()) for name, tensor in named_tensors]
        coded_tensors = [tensor for _, tensor in tensors if tensor.dtype == torch.float8_e4m3fn]
        for codes in coded_tensors[:1]:
            codes.view(torch.uint8)[0, 0] ^= 1
        return plain_load(model_weights, tensors)

    monkeypatch.setattr(weights.ModelWeights, "load", flip)
    assert "codes and scales of digest" in train_error(tmp_path)
    assert_stopped_because(diagnosis(tmp_path), "the engine holds codes and scales of digest")
