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


def train(cwd: Path, *settings: str) -> str:
    done = jackpot("train", "regimes", "--arm", "fp8_unified", *TINY, *settings, "--run", "run", cwd=cwd)
    return done.stderr if done.returncode else ""


def diagnosis(cwd: Path) -> dict[str, Any]:
    return json.loads(jackpot("diagnose", "run", "--json", cwd=cwd).stdout)


def mismatch(cwd: Path, *sides: str) -> tuple[dict[str, Any], str]:
    asked = ("--responses", "8", "--max-new-tokens", "12", "--out", "found", "threads=1")
    done = jackpot("mismatch", "run", *asked, *sides, cwd=cwd)
    assert done.returncode == 0, done.stderr
    [pair] = json.loads((cwd / "found" / "mismatch.json").read_text())["pairs"]
    return pair, " ".join(done.stdout.split())


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("unified")
    assert not train(home)
    return home


@pytest.mark.slow
def test_no_tool_calls_a_unified_run_broken(healthy):
    found = diagnosis(healthy)
    assert (found["verdict"], found["findings"]) == ("no finding", [])
    assert found["summary"].startswith("No finding: after 5 iterations ") and "differently" not in found["summary"]
    pair, printed = mismatch(healthy)
    assert pair["layers"] == [] and pair["numbers"]["gap"]["value"] < 1e-6 and pair["numbers"]["max_gap"] < 1e-5
    assert "within the 1e-05 that training's own check allows" in printed and "Layers that" not in printed
    assert printed.endswith("# what the run's mismatch does to training")


def test_mismatch_names_the_layers_in_another_precision(healthy):
    pair, printed = mismatch(healthy, "--learner", "quantization=null,kv_cache_dtype=fp8")
    assert pair["numbers"]["gap"]["value"] > 1e-3
    named = {layers: (first, second) for layers, first, second in pair["layers"]}
    assert named.pop("keys and values") == ("fp32", "fp8")
    assert len(named) == 7 and set(named.values()) == {("weights fp8 by 128 x 128, activations fp8 by 1 x 128", "fp32")}
    assert "model.layers.*.self_attn.q_proj (3)" in printed and "keys and values" in printed


def test_diagnose_names_an_engine_that_is_not_unified(tmp_path):
    others = ("rollout_model={path: 'starter:rollout_model', optimizer: null, share: 0.0}",)
    assert not train(tmp_path, "iterations=1", *others, "evaluation.engine={quantization: fp8, kv_cache_dtype: fp8}")
    found = diagnosis(tmp_path)
    wanted = "not in one flow, as precision fp8 asks. They compute differently: keys and values: fp8 there, fp32 in"
    assert wanted in found["summary"]


def test_diagnose_says_that_other_scales_stopped_a_run(tmp_path, monkeypatch):
    own = weights.quantize_linears
    monkeypatch.setattr(weights, "quantize_linears", lambda model, scheme: own(model, with_scales(scheme, "float32")))
    assert "the engine's log-probs are not those of the distribution" in train(tmp_path)
    assert_named(diagnosis(tmp_path), "at most 1e-05 is allowed in fp32 on a CPU")


def test_diagnose_says_that_other_codes_stopped_a_run(tmp_path, monkeypatch):
    own = weights.ModelWeights.load

    def flip(held, named_tensors):
        named = [(name, tensor.clone()) for name, tensor in named_tensors]
        for _, codes in [one for one in named if one[1].dtype == torch.float8_e4m3fn][:1]:
            codes.view(torch.uint8)[0, 0] ^= 1
        return own(held, named)

    monkeypatch.setattr(weights.ModelWeights, "load", flip)
    assert "codes and scales of digest" in train(tmp_path)
    assert_named(diagnosis(tmp_path), "the engine holds codes and scales of digest")


def assert_named(found: dict[str, Any], why: str) -> None:
    assert found["verdict"] == "unhealthy" and why in found["summary"]
    assert [finding["metric"] for finding in found["findings"]] == ["events/stopped"]
    assert "learning_rate" not in found["findings"][0]["suggestion"]
