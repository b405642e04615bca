"""Requests to vLLM and its responses, without vLLM; the real vLLM is in test_engine.py."""

import importlib.util
from contextlib import suppress
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers.engines.reference import CONTEXT, EOS, rollout_of, tiny_prompt, tiny_request
from jackpot.config.engines import VLLMEngineConfig
from jackpot.core.errors import ConfigError, EngineError
from jackpot.core.types import Version
from jackpot.launch.engines import make_engine
from jackpot.rollout.engines.background import BackgroundEngine
from jackpot.rollout.engines.servers.protocol import LogProbRequest, log_prob_requests, make_rollout, score_by_requests
from jackpot.rollout.engines.vllm.engine import VLLMEngine
from jackpot.rollout.engines.vllm.library import import_vllm
from jackpot.rollout.engines.vllm.protocol import log_prob_params, to_sampling_params


def sampling_params(**sampling) -> dict:
    """What vLLM is asked for a request of these settings, whose prompt has `length` tokens."""
    seed, length = sampling.pop("seed", 0), sampling.pop("length", 5)
    return to_sampling_params(tiny_request("one", length, seed=seed, **sampling), (EOS,), CONTEXT)


def test_every_setting_that_shapes_the_distribution_is_named():
    """A server takes parameters that a request does not set from generation_config.json."""
    params = sampling_params(temperature=0.7, top_p=0.9, top_k=8, num_top_log_probs=3, stop_token_ids=(5, EOS))

    assert params.pop("seed") >= 0
    assert params == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 8,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 12,
        "stop_token_ids": [EOS, 5],
        "ignore_eos": True,
        "logprobs": 3,
    }


def test_a_response_may_fill_the_context_and_no_more():
    assert sampling_params(length=CONTEXT - 3, max_new_tokens=50)["max_tokens"] == 3
    assert sampling_params(length=CONTEXT - 3, max_new_tokens=2)["max_tokens"] == 2


def test_seeds_differ_in_the_32_bits_that_a_cpu_keeps():
    seeds = [sampling_params(seed=seed)["seed"] for seed in (0, 1, 2**31, 2**32, 2**33, 2**63, 2**64 - 1)]
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [sampling_params(seed=seed)["seed"] for seed in (0, 1, 2**31, 2**32, 2**33, 2**63, 2**64 - 1)]


def test_an_answer_becomes_a_rollout():
    request = tiny_request("one", num_top_log_probs=2)
    ids = np.array([[7, 4, 7], [5, 3, 2]])
    log_probs = np.array([[-1.5, -0.5, -1.5], [-4.0, -0.25, -np.inf]])

    rollout = make_rollout(request, [7, 5], ids, log_probs, "stop", Version(3, 4))

    assert (rollout.uid, rollout.prompt, rollout.finish) == ("one", request.prompt, "stop")
    assert rollout.token_ids.tolist() == [7, 5]
    assert rollout.rollout_log_probs.tolist() == [-1.5, -4.0]
    assert rollout.top_ids.tolist() == [[4, 7], [3, 2]]
    assert rollout.top_log_probs.tolist() == [[-0.5, -1.5], [-0.25, -float("inf")]]
    assert rollout.sampled_mask.tolist() == [True, True]
    assert rollout.versions.tolist() == [[3, 4], [3, 4]]


@pytest.mark.parametrize(
    ("word", "finish"), [("stop", "stop"), ("length", "length"), ("abort", "aborted"), ("error", "aborted")]
)
def test_only_stop_and_length_are_whole_responses(word, finish):
    empty_lists = np.zeros((0, 1))
    rollout = make_rollout(tiny_request("one", num_top_log_probs=0), [], empty_lists, empty_lists, word, Version(0, 0))
    assert rollout.finish == finish
    assert rollout.versions.shape == (0, 2)
    assert rollout.top_ids.shape == (0, 0)


def test_a_score_at_temperature_one_is_one_request():
    rollout = rollout_of(tiny_prompt(3), [5, 6, 7])
    [request] = log_prob_requests(rollout, 1.0)

    assert request.prompt == (*rollout.prompt.token_ids, 5, 6)
    assert request.token == 7
    assert log_prob_params(request)["prompt_logprobs"] == 0
    assert log_prob_params(request)["logprob_token_ids"] == [7]


def test_a_score_at_another_temperature_asks_for_every_token():
    rollout = rollout_of(tiny_prompt(3), [5, 6, 7])
    requests = log_prob_requests(rollout, 0.7)

    assert [request.prompt[3:] for request in requests] == [(), (5,), (5, 6)]
    assert [request.token for request in requests] == [5, 6, 7]
    assert all(log_prob_params(request)["temperature"] == 0.7 for request in requests)
    assert not any("prompt_logprobs" in log_prob_params(request) for request in requests)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_joined_from_the_answers_to_all_requests(temperature):
    """Each token is given minus its id as its log-prob."""

    def answers(requests: list[tuple[str, LogProbRequest]]) -> list[list[float]]:
        tokens = [(*request.prompt, request.token)[-1 - request.num_prompt_log_probs :] for _, request in requests]
        return [[-float(token) for token in ids] for ids in tokens]

    rollouts = [rollout_of(tiny_prompt(3), [5, 6, 7]), rollout_of(tiny_prompt(2), []), rollout_of(tiny_prompt(2), [4])]
    scores = score_by_requests(rollouts, temperature, answers)

    assert [score.tolist() for score in scores] == [[-5.0, -6.0, -7.0], [], [-4.0]]


@pytest.mark.parametrize("settings", [{"enable_sleep_mode": True}, {"device": 1}])
def test_settings_for_gpus_are_refused_on_a_cpu(folder, settings):
    with pytest.raises(ConfigError, match="for GPUs"):
        make_engine(VLLMEngineConfig(**settings), str(folder), torch.device("cpu"), Version(0, 0))


def test_drafts_on_the_second_model_runner_are_refused(folder, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ConfigError, match="first model runner only"):
        make_engine(VLLMEngineConfig(draft={}), str(folder), torch.device("cpu"), Version(0, 0))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_error_says_how_to_install_it(folder):
    with pytest.raises(EngineError, match=r"pip install -c constraints\.txt '\.\[vllm\]'"):
        make_engine(VLLMEngineConfig(), str(folder), torch.device("cpu"), Version(0, 0))


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 has this setting once for all threads; vLLM 0.32 needs 2.13"
)
def test_torch_compile_is_disabled_on_the_thread_of_vllm_alone():
    disable_settings = []

    def run() -> None:
        with suppress(EngineError):  # vLLM may not be installed
            import_vllm(compiles=False)
        disable_settings.append(torch._dynamo.config.disable)

    thread = Thread(target=run)
    thread.start()
    thread.join()

    assert disable_settings == [True]
    assert not torch._dynamo.config.disable


@pytest.mark.parametrize(("device", "expected_calls"), [("cuda", ["wait", "load", "wait"]), ("cpu", ["load"])])
def test_new_weights_wait_for_the_streams_of_both_threads(device, expected_calls, monkeypatch):
    calls = []
    engine = VLLMEngine.__new__(VLLMEngine)
    BackgroundEngine.__init__(engine, Version(0, 0))
    engine._device = torch.device(device)
    engine._followers, engine._shapes = [], {}
    engine._capabilities = SimpleNamespace(coded_weights=None)
    engine._call = lambda function: calls.append("load")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))

    engine.update_weights([], Version(1, 1))

    assert calls == expected_calls
    assert engine.version == Version(1, 1)
