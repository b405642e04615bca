"""`SGLangServerEngine` with a stand-in that speaks SGLang's protocol and has a tiny model.

test_server.py runs the engine with the real server.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from aiohttp import web

from helpers.engines.conformance import NEW, OLD, EngineConformance
from helpers.engines.joint_run import check_joint_run
from helpers.engines.reference import CONTEXT, EOS, VOCAB_SIZE, Reference, rollout_of, tiny_prompt, tiny_request
from helpers.engines.sglang_server import DECLARED, SAMPLING, SGLangStandIn
from jackpot.config.engines import SGLangServerEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.core.digest import weights_digest
from jackpot.core.errors import EngineError
from jackpot.core.prng import fold_in
from jackpot.core.types import Version
from jackpot.launch.engines import make_engine
from jackpot.rollout.engines.sglang.server_engine import SGLangServerEngine

Make = Callable[..., SGLangServerEngine]


def script_changing_the_first_answer(change: Callable[[dict], Any]):
    """Return a script that changes the first answer."""
    remaining_changes = [1]

    async def script(body: dict, usual_answer: dict) -> Any:
        remaining_changes[0] -= 1
        return usual_answer if remaining_changes[0] < 0 else (change(usual_answer) or usual_answer)

    return script


@pytest.fixture
def server() -> Iterator[SGLangStandIn]:
    server = SGLangStandIn()
    yield server
    server.close()


@pytest.fixture
def make(tmp_path: Path, folder: Path) -> Iterator[Make]:
    """Return a function that makes engines; close them after the test."""
    engines = []

    def make(*servers: SGLangStandIn, path: Path = folder, version: Version = OLD, **changes: Any):
        settings = {"weights_folder": str(tmp_path / "weights"), "timeout": 30.0, "connect_timeout": 30.0} | changes
        config = SGLangServerEngineConfig(urls=[server.url for server in servers], **settings)
        engines.append(make_engine(config, str(path), torch.device("cpu"), version))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


class Checks(EngineConformance):
    """The shared checks of log-probs, without the shared tests: many of those sample with top-p and top-k."""

    make_engine = None


def check_log_probs(rollouts: list, path: Path, **sampling: Any) -> None:
    """Check the log-probs against the model in this folder."""
    settings = tiny_request("", **sampling).sampling
    Checks().check_log_probs(rollouts, Reference(path, torch.float32), settings)


def requests(count: int, **sampling: Any) -> list:
    """Return requests of 5 tokens each, for 6 new ones with 3 top log-probs unless changed."""
    return [
        tiny_request(f"{i}", seed=i, **{"max_new_tokens": 6, "num_top_log_probs": 3} | sampling) for i in range(count)
    ]


def bodies_sent_to(server: SGLangStandIn, path: str) -> list[dict[str, Any]]:
    """Return what was sent to this path."""
    return [body for request_path, body in server.asked if request_path == path]


# What is generated and scored


def test_responses_have_exact_log_probs_and_their_ends(make, server, folder):
    engine = make(server)

    for sampling in ({"num_top_log_probs": 0}, {"temperature": 0.7, "stop_token_ids": (5, 6)}):
        sent_requests = requests(8, **sampling)

        rollouts = engine.generate(sent_requests)

        check_log_probs(rollouts, folder, **{"num_top_log_probs": 3} | sampling)
        end_ids = {EOS, *sampling.get("stop_token_ids", ())}
        for rollout in rollouts:
            tokens = rollout.token_ids.tolist()
            assert rollout.finish == ("stop" if tokens[-1] in end_ids else "length")
            assert not end_ids & set(tokens[:-1])
            assert len(tokens) == 6 or rollout.finish == "stop"
            assert rollout.versions.tolist() == [list(OLD)] * len(tokens)
        assert {rollout.finish for rollout in rollouts} == {"stop", "length"}

        later_rollouts = engine.generate(sent_requests[::-1])[::-1]
        assert all(
            torch.equal(rollout.token_ids, later_rollout.token_ids)
            for rollout, later_rollout in zip(rollouts, later_rollouts, strict=True)
        )


def test_a_response_ends_where_the_server_ends_it(make, server):
    engine = make(server)
    assert engine.capabilities.max_model_len == CONTEXT - 6  # SGLang reserves six
    rollouts = engine.generate([tiny_request(f"{i}", CONTEXT - 8, seed=i, max_new_tokens=50) for i in range(4)])
    assert max(len(rollout.token_ids) for rollout in rollouts) == 2  # what is left after a prompt of CONTEXT - 8


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_equal_a_full_forward(make, server, folder, temperature):
    """The last token of the vocabulary is among them, whose id SGLang reports as 0."""
    replies = [(4,), (2, VOCAB_SIZE - 1, 7), tiny_prompt(9, seed=2).token_ids]
    rollouts = [rollout_of(tiny_prompt(3 + i), reply) for i, reply in enumerate(replies)]

    scores = make(server).score(rollouts, temperature)

    for rollout, score in zip(rollouts, scores, strict=True):
        tokens, sampling = rollout.token_ids.tolist(), Sampling(temperature=temperature)
        exact_log_probs = Reference(folder, torch.float32).log_probs(rollout.prompt, tokens, sampling)
        assert score.numpy() == pytest.approx(exact_log_probs[np.arange(len(tokens)), tokens], abs=2e-5)


def test_the_bodies_of_all_calls_are_those_that_sglang_declares(make, server):
    """`ignore_eos` would switch off stop tokens as well."""
    engine = make(server)
    engine.generate([tiny_request("one", 3, seed=7, temperature=0.5, stop_token_ids=(5,), max_new_tokens=4)])
    engine.score([rollout_of(tiny_prompt(3), [2, 3, 4])], 1.0)

    generate, score = bodies_sent_to(server, "/generate")

    prompt = list(tiny_prompt(3).token_ids)
    sampling = {
        **{"temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        **{"max_new_tokens": 4, "min_new_tokens": 0, "n": 1, "ignore_eos": False, "no_stop_trim": True},
        **{"stop_token_ids": [EOS, 5], "sampling_seed": fold_in("sglang", 7) >> 1},
    }

    assert generate == {
        "input_ids": prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 20,
        "return_text_in_logprobs": False,
        "return_prompt_token_ids": True,
        "stream": False,
    }

    score_sampling = {"temperature": 1.0, "max_new_tokens": 1, "stop_token_ids": [], "sampling_seed": 0}
    assert score == generate | {
        "input_ids": [*prompt, 2, 3],
        "sampling_params": sampling | score_sampling,
        "logprob_start_len": 2,
        "top_logprobs_num": 0,
        "token_ids_logprob": [4],
    }

    assert bodies_sent_to(server, "/weights_checker")[0] == {"action": "checksum"}

    [update] = bodies_sent_to(server, "/update_weights_from_disk")
    assert update.pop("model_path").endswith(update["weight_version"])
    assert update.pop("weight_version") == server.tag
    assert update == {"load_format": "auto", "flush_cache": True}

    for path, declared_keys in DECLARED.items():
        assert all(body.keys() <= declared_keys for body in bodies_sent_to(server, path))
    assert sampling.keys() <= SAMPLING


@pytest.mark.slow
def test_a_joint_training_run_goes_through_the_engine(make, server, folder, new_folder):
    def make_engine(path: Path, version: Version) -> SGLangServerEngine:
        return make(server, path=path, version=version)

    check_joint_run(make_engine, policy=new_folder, rollout_model=folder, gap=2e-5)


# Weights


def test_new_weights_generate_what_comes_next(make, server, folder, new_folder):
    engine = make(server)
    new_model = Reference(new_folder, torch.float32).model

    assert engine.update_weights(new_model.named_parameters(), NEW) == weights_digest(
        new_model.named_parameters(), torch.float32
    )

    rollouts = engine.generate(requests(4))
    check_log_probs(rollouts, new_folder, num_top_log_probs=3)
    assert rollouts[0].versions[0].tolist() == list(NEW)


def load_nothing(server: SGLangStandIn) -> None:
    """From now on no weights are loaded."""
    server.load = lambda folder: None


def keep_one_tensor(server: SGLangStandIn) -> None:
    """Keep one tensor under a name that the model has too."""
    norm_weight, load = dict(server.model.named_parameters())["model.norm.weight"], server.load

    def load_others(folder: str) -> None:
        old_values = norm_weight.detach().clone()
        load(folder)
        norm_weight.data.copy_(old_values)

    server.load = load_others


@pytest.mark.parametrize("damage", [load_nothing, keep_one_tensor])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_that_a_server_did_not_take_are_an_error(make, server, damage, device):
    """On a GPU the checksums are numbers of another function, whose change is all that is seen."""
    server.settings["device"] = device
    server.salt = b"" if device == "cpu" else b"another function"
    engine = make(server)
    damage(server)
    weights = [(name, tensor + 1.0) for name, tensor in server.model.named_parameters()]

    with pytest.raises(EngineError, match="holds stale ones"):
        engine.update_weights(weights, NEW)
    assert engine.version == OLD


def test_a_server_that_cannot_load_weights_is_an_error(make, server):
    async def refuse(body: dict, usual_answer: dict) -> Any:
        return web.json_response({"success": False, "message": "Failed to update weights: no file"}, status=400)

    server.script["/update_weights_from_disk"] = refuse

    with pytest.raises(EngineError, match=r"HTTP 400 .*Failed to update weights: no file.*engine.weights_folder"):
        make(server)


def test_after_an_unseen_restart_the_weights_are_sent_again(make, server, folder):
    engine = make(server)
    server.restart()
    check_log_probs(engine.generate(requests(8)), folder, num_top_log_probs=3)
    assert [event["event"] for event in engine.take_events()] == ["server_lost", "server_restarted"]


def test_after_a_restart_within_an_update_weights_are_sent_again(make, server, folder):
    server.script["/update_weights_from_disk"] = script_changing_the_first_answer(lambda usual_answer: server.restart())
    check_log_probs(make(server).generate(requests(8)), folder, num_top_log_probs=3)
    assert server.count("/update_weights_from_disk") == 2


# Servers that fail, and answers that must not be used


def set_meta(**changes: Any):
    """Return a script that changes entries of the first answer's `meta_info`."""
    return script_changing_the_first_answer(lambda usual_answer: usual_answer["meta_info"].update(changes))


def set_first_token(row: int, entry: int, value: Any):
    """Change an entry of the first token: of the sampled one (row -1) or of a top one."""

    def change(usual_answer: dict) -> None:
        meta = usual_answer["meta_info"]
        target = meta["output_token_logprobs"][0] if row < 0 else meta["output_top_logprobs"][0][row]
        target[entry] = value

    return script_changing_the_first_answer(change)


@pytest.mark.parametrize(
    "script",
    [
        script_changing_the_first_answer(lambda usual_answer: web.Response(status=503)),
        script_changing_the_first_answer(lambda usual_answer: web.Response(text='{"meta_info": {')),
        set_meta(finish_reason={"type": "abort", "message": "Aborted"}),
        set_meta(output_top_logprobs=[]),
        set_first_token(row=-1, entry=0, value=None),  # SGLang's JSON of NaN
        set_first_token(row=0, entry=1, value="7"),
    ],
    ids=["503", "garbage", "abort", "no top log-probs", "NaN", "text for an id"],
)
def test_a_failed_request_is_sent_again_and_answered_once(make, server, script):
    engine = make(server)
    server.script["/generate"] = script

    assert len(engine.generate(requests(3))) == 3
    assert engine.collect(1) == []
    assert server.count("/generate") >= 4
    assert [event["event"] for event in engine.take_events()] == ["server_lost", "server_back"]


def drop_one(usual_answer: dict) -> None:
    """Leave out the least probable of the top tokens."""
    for top in usual_answer["meta_info"]["output_top_logprobs"]:
        top.pop()


@pytest.mark.parametrize(
    ("script", "advice"),
    [
        (
            script_changing_the_first_answer(lambda usual_answer: usual_answer.update(prompt_token_ids=[2])),
            "another prompt",
        ),
        (set_first_token(row=-1, entry=1, value=VOCAB_SIZE), "another vocabulary"),
        (set_first_token(row=-1, entry=0, value=0.5), "not log-probs"),
        (set_first_token(row=1, entry=0, value=-1e-6), "without SGLANG_RETURN_ORIGINAL_LOGPROB"),
        (set_meta(finish_reason={"type": "stop", "matched": 9}), "not a stop token.*--preferred-sampling-params"),
        (script_changing_the_first_answer(drop_one), "2 top log-probs of a token in place of 3"),
    ],
    ids=["prompt", "vocabulary", "above 0", "mass above 1", "stop", "too few"],
)
def test_a_response_that_must_not_be_trained_on_is_an_error(make, server, script, advice):
    engine = make(server)
    server.script["/generate"] = script
    with pytest.raises(EngineError, match=advice):
        engine.generate(requests(1))


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("dtype", "bfloat16", "--dtype float32"),
        ("dtype", "auto", "--dtype float32"),
        ("enable_deterministic_inference", False, "--enable-deterministic-inference"),
        ("preferred_sampling_params", {"top_p": 0.9}, "start it without"),
        ("speculative_algorithm", "EAGLE", "without --speculative-algorithm"),
        ("quantization", "fp8", "without --quantization"),
        ("kv_cache_dtype", "fp8_e4m3", "--kv-cache-dtype"),
        ("enable_fp32_lm_head", True, "without --enable-fp32-lm-head"),
        ("max_req_input_len", None, "made for SGLang 0.5.23"),
    ],
)
def test_a_server_with_other_settings_is_an_error_with_advice(make, server, name, value, advice):
    server.settings |= {"device": "cuda", name: value}
    with pytest.raises(EngineError, match=advice):
        make(server)
    assert server.count("/update_weights_from_disk") == 0


def test_a_server_on_a_cpu_may_ignore_seeds(make, server):
    server.settings["enable_deterministic_inference"] = False
    assert make(server).capabilities.device == "cpu"


def test_an_output_layer_in_fp32_needs_the_flag(make, server):
    with pytest.raises(EngineError, match="with --enable-fp32-lm-head"):
        make(server, head_dtype="fp32")


def test_a_server_of_another_architecture_is_an_error(make, server):
    server.model.extra_norm = torch.nn.LayerNorm(2)
    with pytest.raises(EngineError, match="another model: extra_norm"):
        make(server)


def test_filters_are_refused(make, server):
    for filters in ({"top_p": 0.9}, {"top_k": 5}):
        with pytest.raises(EngineError, match=r"before these filters.*engine=vllm_server"):
            make(server).submit(requests(1, **filters))


def test_quantization_and_an_fp8_cache_are_refused():
    for settings in ({"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}):
        with pytest.raises(pydantic.ValidationError, match="not for sglang_server"):
            SGLangServerEngineConfig(urls="http://127.0.0.1:1", **settings)


def test_the_api_key_comes_from_the_environment(make, server, monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", "secret")
    monkeypatch.setenv("VLLM_API_KEY", "another")
    make(server)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
