"""The shared suite on `VLLMEngine` with the real vLLM in this process, and tests of what only this engine promises."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs this in .venv-vllm")

from helpers.engines.conformance import NEW, OLD, EngineConformance, LogProbConformance, RunConformance
from helpers.engines.reference import CONTEXT, Reference, rollout_of, tiny_model, tiny_prompt, tiny_request
from jackpot.config.engines import VLLMEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout, Version
from jackpot.launch.engines import make_engine
from jackpot.rollout.engines.vllm.engine import VLLMEngine

pytestmark = pytest.mark.vllm


def make(folder: Path, version: Version = OLD, **settings) -> VLLMEngine:
    """Make an engine of the model in this folder, with little memory."""
    config = VLLMEngineConfig(**{"kv_cache_memory_bytes": 2**28, "max_num_seqs": 32} | settings)
    return make_engine(config, str(folder), torch.device("cpu"), version)


class TestVLLMEngine(EngineConformance):
    @staticmethod
    def make_engine(folder: Path, version: Version) -> VLLMEngine:
        return make(folder, version)


class TestVLLMEngineInBfloat16(RunConformance, LogProbConformance):
    reference_dtype = torch.bfloat16
    tolerance = 0.2
    moved_supports = 0.2
    moved_responses = 0.5

    @staticmethod
    def make_engine(folder: Path, version: Version) -> VLLMEngine:
        return make(folder, version, dtype="bf16")


@pytest.fixture(scope="module")
def old_engine(folder) -> Iterator[VLLMEngine]:
    """An engine with the old weights, for tests that leave it as it was."""
    engine = make(folder)
    yield engine
    engine.close()


def largest_gap(rollouts: list[Rollout], reference: Reference) -> float:
    """Return the largest difference in probability over the sampled tokens."""
    gaps = []
    for rollout in rollouts:
        tokens = rollout.token_ids.tolist()
        exact_log_probs = reference.log_probs(rollout.prompt, tokens, tiny_request("").sampling)[
            np.arange(len(tokens)), tokens
        ]
        gaps.append(np.abs(np.exp(exact_log_probs) - rollout.rollout_log_probs.double().exp().numpy()).max())
    return float(max(gaps))


@pytest.mark.parametrize("is_tied", [True, False])
def test_new_weights_reach_cached_prompts_and_the_output_layer(tmp_path, is_tied):
    """Prompts of more than two cache blocks (128 tokens on a CPU) are sent again after the update."""
    for name, seed in (("old", 0), ("new", 1)):
        model = tiny_model(seed, max_position_embeddings=400, tie_word_embeddings=is_tied)
        model.save_pretrained(tmp_path / name)

    old_reference, new_reference = (Reference(tmp_path / name, torch.float32) for name in ("old", "new"))
    requests = [tiny_request(f"{i}", prompt=tiny_prompt(300, seed=i % 2), seed=i) for i in range(6)]
    engine = make(tmp_path / "old")

    assert largest_gap(engine.generate(requests), old_reference) < 1e-5
    assert largest_gap(engine.generate(requests), old_reference) < 1e-5

    engine.update_weights(new_reference.model.named_parameters(), NEW)
    assert largest_gap(engine.generate(requests), new_reference) < 1e-5

    engine.close()


def test_rollouts_are_generated_while_the_caller_does_not_wait(old_engine):
    old_engine.submit([tiny_request(f"{i}", seed=i, max_new_tokens=30) for i in range(50)])

    collected_rollouts, deadline = [], time.monotonic() + 300.0
    while len(collected_rollouts) < 50 and time.monotonic() < deadline:
        collected_rollouts += old_engine.collect(50, timeout=0.0)  # takes what is there and lets nothing happen
        time.sleep(0.05)  # a loop without a pause would take the interpreter from the engine's thread

    assert len({rollout.uid for rollout in collected_rollouts}) == 50


def test_vllm_makes_no_python_object_of_a_top_log_prob(old_engine, monkeypatch):
    def refuse(*args) -> None:
        raise AssertionError("vLLM makes lists of log-probs")

    monkeypatch.setattr("vllm.v1.engine.logprobs.append_logprobs_for_next_position", refuse)
    sampling = Sampling(max_new_tokens=3, num_top_log_probs=2)
    [rollout] = old_engine.generate([replace(tiny_request("one"), sampling=sampling)])

    assert rollout.top_ids.shape == rollout.top_log_probs.shape
    assert rollout.top_log_probs.shape == (len(rollout.token_ids), 2)


def test_an_engine_that_ends_leaves_the_others_of_its_process(old_engine, folder):
    make(folder).close()
    assert len(old_engine.generate([tiny_request("one")])) == 1


def test_the_number_of_threads_stays_the_learners(folder):
    old_threads = torch.get_num_threads()
    engine = make(folder)

    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.get_num_threads() == threads
            engine.generate([tiny_request("one")])
            assert engine._call(torch.get_num_threads) == threads
    finally:
        torch.set_num_threads(old_threads)
        engine.close()


def test_gradients_and_the_default_dtype_stay_the_learners(folder):
    engine = make(folder, dtype="bf16")
    weight = torch.ones(3, requires_grad=True)
    (weight * weight).sum().backward()

    assert weight.grad.tolist() == [2.0, 2.0, 2.0]
    assert weight.dtype == torch.float32

    engine.close()


@pytest.mark.parametrize("temperature", [0.009, 2.1])
def test_temperatures_that_vllm_replaces_are_refused(old_engine, temperature):
    with pytest.raises(EngineError, match="hot or cold has temperature"):
        old_engine.submit([tiny_request("hot or cold", temperature=temperature)])
    assert old_engine.collect(1) == []
    with pytest.raises(EngineError, match="temperature"):
        old_engine.score(old_engine.generate([tiny_request("fine")]), temperature)


def test_scores_are_right_while_responses_are_unfinished(old_engine, folder):
    reference = Reference(folder, torch.float32)
    [rollout] = old_engine.generate([tiny_request("read")])
    tokens = rollout.token_ids.tolist()

    for temperature in (1.0, 0.7):
        old_engine.submit([tiny_request(f"{i}", seed=i, max_new_tokens=40) for i in range(8)])
        sampling = tiny_request("", temperature=temperature).sampling
        exact_log_probs = reference.log_probs(rollout.prompt, tokens, sampling)[np.arange(len(tokens)), tokens]
        assert old_engine.score([rollout], temperature)[0].numpy() == pytest.approx(exact_log_probs, abs=2e-5)
        assert len(old_engine.collect(8)) == 8


def test_a_whole_context_can_be_scored_and_no_more(old_engine, folder):
    reference = Reference(folder, torch.float32)
    rollouts = old_engine.generate([tiny_request(f"{i}", 60, seed=i, max_new_tokens=4) for i in range(20)])
    full_rollout = next(rollout for rollout in rollouts if len(rollout.token_ids) == 4)
    tokens = full_rollout.token_ids.tolist()

    for temperature in (1.0, 0.7):
        sampling = tiny_request("", temperature=temperature).sampling
        exact_log_probs = reference.log_probs(full_rollout.prompt, tokens, sampling)[np.arange(4), tokens]
        assert old_engine.score([full_rollout], temperature)[0].numpy() == pytest.approx(exact_log_probs, abs=2e-5)
    with pytest.raises(EngineError, match="65 tokens"):
        old_engine.score([replace(full_rollout, prompt=tiny_prompt(61))], 1.0)
    assert old_engine.score([], 1.0) == []


def test_vllm_for_another_kind_of_device_is_refused(folder):
    with pytest.raises(EngineError, match=r"training runs on a GPU and vLLM here is for the CPU.*set device: cpu"):
        make_engine(VLLMEngineConfig(), str(folder), torch.device("cuda", 0), OLD)


def test_vllm_runs_in_this_process_whatever_the_environment(folder, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    engine = make(folder)
    engine.update_weights(tiny_model(1).named_parameters(), NEW)

    assert engine.generate([tiny_request("one")])[0].versions[0].tolist() == list(NEW)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"

    engine.close()


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_when_vllm_fails_finished_rollouts_stay(folder, monkeypatch, error):
    engine = make(folder)
    engine.submit([tiny_request("short", max_new_tokens=1)])
    deadline = time.monotonic() + 30.0
    while engine._in_flight.num_unfinished and time.monotonic() < deadline:
        time.sleep(0.01)

    def out_of_memory() -> None:
        raise error("out of memory")

    monkeypatch.setattr(engine._llm, "step", out_of_memory)
    engine.submit([tiny_request("long", seed=1)])

    assert [rollout.uid for rollout in engine.collect(2)] == ["short"]
    with pytest.raises(EngineError, match="out of memory"):
        engine.collect(1)
    with pytest.raises(EngineError, match="out of memory"):
        engine.submit([tiny_request("later")])
    with pytest.raises(EngineError, match="out of memory"):
        engine.score([], 1.0)

    engine.close()


def test_a_shorter_context_than_the_models_can_be_asked_for(folder):
    engine = make(folder, max_model_len=32)
    assert engine.capabilities.max_model_len == 32
    rollouts = engine.generate([tiny_request(f"{i}", 30, seed=i, max_new_tokens=50) for i in range(10)])
    assert max(len(rollout.token_ids) for rollout in rollouts) == 2
    engine.close()


def test_what_vllm_cannot_serve_is_refused_with_its_reason(folder):
    with pytest.raises(EngineError, match=r"(?s)cannot serve.*max_model_len"):
        make(folder, max_model_len=2 * CONTEXT)


def test_a_model_that_vllm_cannot_run_is_an_error(tmp_path):
    tiny_model(0, head_dim=16).save_pretrained(tmp_path)
    engine = make(tmp_path)
    with pytest.raises(EngineError, match=r"cannot go on.*head_dim=16"):
        engine.generate([tiny_request("one")])
    engine.close()


def test_weights_that_fail_on_the_way_in_end_the_engine(folder, monkeypatch):
    engine, weights = make(folder), list(tiny_model(1).named_parameters())
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: False)

    with pytest.raises(EngineError, match="prefix cache"):
        engine.update_weights(weights, NEW)
    with pytest.raises(EngineError, match="prefix cache"):
        engine.submit([tiny_request("stale")])
    assert engine.version == OLD

    engine.close()


def test_a_saved_model_without_eos_writes_to_the_limit(tmp_path):
    model = tiny_model(0)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    engine = make(tmp_path)
    rollouts = engine.generate([tiny_request(f"{i}", seed=i, max_new_tokens=20) for i in range(20)])

    assert all(rollout.finish == "length" for rollout in rollouts)
    assert all(len(rollout.token_ids) == 20 for rollout in rollouts)

    engine.close()


def test_an_engine_that_sleeps_wakes_with_the_new_weights(folder, new_folder):
    """On a CPU vLLM keeps the memory but goes through the same states."""
    engine, new_reference = make(folder), Reference(new_folder, torch.float32)
    engine._capabilities = replace(engine.capabilities, sleeps=True)
    requests = [tiny_request(f"{i}", seed=i) for i in range(4)]
    engine.generate(requests)

    engine.sleep()
    engine.sleep()

    with pytest.raises(EngineError, match="sleeps and has no weights"):
        engine.submit(requests)
    with pytest.raises(EngineError, match="sleeps and has no weights"):
        engine.score([], 1.0)

    engine.update_weights(new_reference.model.named_parameters(), NEW)
    assert largest_gap(engine.generate(requests), new_reference) < 1e-5

    engine.submit(requests)
    with pytest.raises(EngineError, match="in flight"):
        engine.sleep()
    assert len(engine.collect(4)) == 4

    engine.close()


def test_more_prompts_than_fit_a_step_of_vllm_are_scored(folder):
    """A prompt read in two steps would end vLLM on a CPU, whose generators cannot go back by a number."""
    engine, reference = make(folder, max_num_seqs=128), Reference(folder, torch.float32)
    requests = [tiny_request(f"{i}", prompt=tiny_prompt(50, i), max_new_tokens=2) for i in range(120)]

    assert largest_gap(engine.generate(requests)[::10], reference) < 1e-5

    scores = engine.score([rollout_of(request.prompt, [2, 3, 4]) for request in requests], 1.0)
    engine.close()

    exact_log_probs = reference.log_probs(requests[-1].prompt, [2, 3, 4], requests[-1].sampling)

    assert scores[-1].tolist() == pytest.approx([exact_log_probs[t, t + 2] for t in range(3)], abs=2e-5)
