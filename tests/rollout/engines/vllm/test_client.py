"""`VLLMServerEngine` with servers that fail, report false facts or serve another model, all played by a script."""

import asyncio
import contextlib
import gzip
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from aiohttp import web

from helpers.engines.reference import CONTEXT, EOS, VOCAB_SIZE, rollout_of, tiny_model, tiny_prompt, tiny_request
from helpers.engines.scripted_server import ScriptedServer
from jackpot.config.engines import VLLMServerEngineConfig
from jackpot.core.digest import weights_digest
from jackpot.core.errors import EngineError
from jackpot.core.types import Version
from jackpot.rollout.engines.vllm.server_engine import VLLMServerEngine

OLD, NEW = Version(0, 0), Version(1, 1)
KEY = "a key that no log may show"
Make = Callable[..., VLLMServerEngine]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def other_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes engines; close them after the test."""
    engines = []

    def make(*servers: ScriptedServer | str, **changes: Any) -> VLLMServerEngine:
        settings = {
            "weights_folder": str(tmp_path / "weights"),
            "dtype": "fp32",
            "max_num_seqs": 8,
            "timeout": 20.0,
            "max_retries": 5,
            "connect_timeout": 20.0,
        }
        urls = [server if isinstance(server, str) else server.url for server in servers]
        engine = VLLMServerEngine(
            tiny_model(seed=0),
            VLLMServerEngineConfig(urls=urls, **settings | changes),
            eos_token_ids=(EOS,),
            version=OLD,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def requests(count: int, **sampling: Any) -> list:
    """Return requests of 5 tokens each, for 12 new ones with 3 top log-probs unless changed."""
    return [tiny_request(f"{i}", seed=i, **{"num_top_log_probs": 3} | sampling) for i in range(count)]


def constant_weights(value: float) -> list[tuple[str, torch.Tensor]]:
    """Return weights with which the scripted server's log-probs are lower by `value`."""
    return [(name, torch.full_like(p, value)) for name, p in tiny_model(seed=0).named_parameters()]


def first_answers(times: int, answer: Callable[[dict, dict], Any]):
    """Return a script that gives the first responses by `then` and the usual ones afterwards."""
    remaining_answers = [times]

    async def script(body: dict, usual_answer: dict) -> Any:
        remaining_answers[0] -= 1
        return answer(body, usual_answer) if remaining_answers[0] >= 0 else usual_answer

    return script


def every_answer(answer: Any):
    """Return a script that gives this answer, or that of this function, to every request."""

    async def script(body: dict, usual_answer: dict) -> Any:
        return answer(body, usual_answer) if callable(answer) else answer

    return script


def failure(status: int, text: str = '{"error": {"message": "as scripted"}}') -> Callable[[dict, dict], web.Response]:
    """Return a function that answers with this HTTP status."""
    return lambda body, usual_answer: web.Response(status=status, text=text)


def completion_with(**changes: Any) -> Callable[[dict, dict], dict]:
    """Return a function that changes entries of the usual completion."""
    return lambda body, usual_answer: {"choices": [usual_answer["choices"][0] | changes]}


def completion_with_log_probs(**changes: Any) -> Callable[[dict, dict], dict]:
    """Return a function that changes log-probs of the first token of the usual completion.

    `sampled` is that of the token itself, `sampled_in_top` the same in the list of the most probable, `top` the others.
    """

    def change(body: dict, usual_answer: dict) -> dict:
        entries = usual_answer["choices"][0]["logprobs"]
        top = entries["top_logprobs"][0]
        sampled_name, *other_names = top
        if "sampled" in changes:
            entries["token_logprobs"][0] = changes["sampled"]
        if "sampled_in_top" in changes:
            top[sampled_name] = changes["sampled_in_top"]
        elif "top" in changes:
            top |= dict.fromkeys(other_names, changes["top"])
        return usual_answer

    return change


def compressed(body: dict, usual_answer: dict) -> web.Response:
    """Return the completion after 4 MB of spaces, in 4 kB."""
    data = gzip.compress(b" " * 2**22 + json.dumps(usual_answer).encode())
    return web.Response(body=data, headers={"Content-Encoding": "gzip"})


class Endless:
    """Answers with 40 MB, whose length it announces or not, and counts those that were taken."""

    def __init__(self, server: ScriptedServer, is_announced: bool) -> None:
        self.server, self.is_announced, self.sent = server, is_announced, 0

    async def __call__(self, body: dict, usual_answer: dict) -> Any:
        response = web.StreamResponse()
        if self.is_announced:
            response.content_length = 40 * 2**20
        await response.prepare(self.server.request)
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                await response.write(b" " * 2**20)
                self.sent += 1
        return response


# One bad answer


@pytest.mark.parametrize(
    "bad_answer",
    [
        failure(429),
        failure(503, "<html>a proxy says no</html>"),
        failure(200, '{"choices": [{"tok'),
        failure(200, "[]"),
        completion_with(finish_reason="abort"),
        completion_with(logprobs=None),
        completion_with_log_probs(top=None),
        completion_with_log_probs(sampled_in_top=True),
        lambda body, usual_answer: completion_with(token_ids=[*usual_answer["choices"][0]["token_ids"][:-1], 3.7])(
            body, usual_answer
        ),
        compressed,
    ],
    ids=["429", "503", "garbage", "list", "abort", "no log-probs", "null", "a boolean", "a broken id", "compressed"],
)
def test_a_failed_request_is_sent_again_and_answered_once(make, server, bad_answer):
    engine = make(server)
    server.script["/v1/completions"] = first_answers(3, bad_answer)
    rollouts = engine.generate(requests(8))

    assert sorted(int(rollout.uid) for rollout in rollouts) == list(range(8))
    assert engine.collect(1) == []
    assert server.count("/v1/completions") == 11  # 8 requests and 3 failures

    loss_event, return_event = engine.take_events()[:2]
    assert (loss_event["event"], loss_event["server"]) == ("server_lost", server.url)
    assert return_event["event"] == "server_back"
    assert loss_event["sent_again"] >= 1
    assert engine.take_events() == []


def test_a_request_that_fails_everywhere_is_named(make, server):
    engine = make(server, max_retries=2)
    server.script["/v1/completions"] = every_answer(failure(500))

    with pytest.raises(EngineError, match=r"only failed engine.max_retries = 2 times .*as scripted") as error:
        engine.generate([tiny_request("only")])

    assert server.url in str(error.value)
    with pytest.raises(EngineError, match="only failed"):
        engine.update_weights(constant_weights(1.0), NEW)
    with pytest.raises(EngineError, match="only failed"):
        engine.score([rollout_of(tiny_prompt(3), [2, 3])], 1.0)


def test_a_server_that_is_too_slow_loses_its_request_to_another(make, server, other_server):
    """It sends a byte now and then: the time limit is of the whole answer."""
    engine = make(server, other_server, timeout=1.0)

    async def never(body: dict, usual_answer: dict) -> Any:
        response = web.StreamResponse()
        await response.prepare(server.request)
        with contextlib.suppress(ConnectionError):
            for _ in range(600):
                await asyncio.sleep(0.1)
                await response.write(b" ")
        return response

    server.script["/v1/completions"] = never

    assert len(engine.generate(requests(6))) == 6
    assert "longer than 1 seconds" in engine.take_events()[0]["why"]


def test_closing_while_a_server_writes_leaves_nothing_behind(make, server, tmp_path):
    engine = make(server, timeout=3600.0)

    async def never(body: dict, usual_answer: dict) -> Any:
        await asyncio.Event().wait()

    server.script["/v1/completions"] = never
    engine.submit(requests(3))

    assert len(list(tmp_path.rglob("*.safetensors"))) == 1

    engine.close()
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_servers_share_the_work(make, server, other_server):
    """Both servers get prompts although one could run all of them at once."""
    engine = make(server, other_server, max_num_seqs=64)

    async def wait_for_all(body: dict, usual_answer: dict) -> Any:
        while server.count("/v1/completions") + other_server.count("/v1/completions") < 20:
            await asyncio.sleep(0.001)
        return usual_answer

    server.script["/v1/completions"] = other_server.script["/v1/completions"] = wait_for_all
    engine.generate(requests(20))

    assert server.count("/v1/completions") == other_server.count("/v1/completions")
    assert other_server.count("/v1/completions") == 10
    assert engine.take_events() == []


def test_no_server_is_asked_for_more_at_once_than_the_batch_size(make, server):
    engine = make(server, max_num_seqs=4)
    num_running, most_running = [0], [0]

    async def watch(body: dict, usual_answer: dict) -> Any:
        num_running[0] += 1
        most_running[0] = max(most_running[0], num_running[0])
        await asyncio.sleep(0.005)
        num_running[0] -= 1
        return usual_answer

    server.script["/v1/completions"] = watch
    engine.generate(requests(40))

    assert most_running[0] == 4


# What a response says


def fewer_log_probs(body: dict, usual_answer: dict) -> dict:
    """Two top log-probs of each token, where three were asked for."""
    log_probs = usual_answer["choices"][0]["logprobs"]
    shorter_lists = [dict(list(top.items())[:2]) for top in log_probs["top_logprobs"]]
    return completion_with(logprobs=log_probs | {"top_logprobs": shorter_lists})(body, usual_answer)


def other_vocabulary(body: dict, usual_answer: dict) -> dict:
    """A completion of the first token that the model does not have."""
    log_probs, tokens = usual_answer["choices"][0]["logprobs"], [VOCAB_SIZE] * body["max_tokens"]
    tops = [{f"token_id:{VOCAB_SIZE + k}": -1.0 - k for k in range(body["logprobs"])}] * len(tokens)
    changed_log_probs = {"token_logprobs": [-1.0] * len(tokens), "top_logprobs": tops}
    return completion_with(token_ids=tokens, logprobs=log_probs | changed_log_probs)(body, usual_answer)


def cut_short(body: dict, usual_answer: dict) -> dict:
    """The first four tokens of the usual completion."""
    choice = usual_answer["choices"][0]
    log_probs = {name: values[:4] for name, values in choice["logprobs"].items()}
    return completion_with(token_ids=choice["token_ids"][:4], logprobs=log_probs)(body, usual_answer)


def too_long(body: dict, usual_answer: dict) -> dict:
    """Twice as many tokens as were asked for, the last of them a stop token."""
    choice = usual_answer["choices"][0]
    doubled_log_probs = {name: values * 2 for name, values in choice["logprobs"].items()}
    doubled_log_probs["top_logprobs"][-1] = {f"token_id:{token}": -4.0 for token in (EOS, 7, 8, 9)}
    doubled_log_probs["token_logprobs"][-1] = -4.0
    tokens = [*choice["token_ids"] * 2]
    tokens[-1] = EOS
    return completion_with(token_ids=tokens, logprobs=doubled_log_probs, finish_reason="stop")(body, usual_answer)


@pytest.mark.parametrize(
    "bad_answer, advice",
    [
        (fewer_log_probs, "2 top log-probs of a token in place of 3.*--max-logprobs"),
        (other_vocabulary, "another vocabulary"),
        (completion_with(prompt_token_ids=[5, 6]), "another prompt"),
        (cut_short, "ended .* after 4 tokens of 12.*--generation-config vllm"),
        (completion_with(finish_reason="stop"), "not a stop token"),
        (failure(400), "HTTP 400 to /v1/completions: as scripted"),
        (failure(404), "HTTP 404 to /v1/completions: as scripted; is engine.urls right"),
        (failure(405), "HTTP 405 to /v1/completions: as scripted; is engine.urls right"),
        (completion_with_log_probs(sampled=math.nan), "numbers that are not log-probs"),
        (completion_with_log_probs(top=math.nan), "numbers that are not log-probs"),
        (completion_with_log_probs(sampled=0.5, sampled_in_top=0.5), "numbers that are not log-probs"),
        (completion_with_log_probs(top=-0.9), r"top log-probs of a token whose probabilities sum to 1\.2\d"),
        (completion_with_log_probs(sampled=-3.0), r"two log-probs of the sampled token \d+: -3, and -\d\.17805"),
        (too_long, "ended .* after 24 tokens of 12"),
    ],
    ids=[
        *("too few log-probs", "vocabulary", "prompt", "short", "stop", "400", "404", "405", "NaN", "NaN in the list"),
        *("above 0", "mass above 1", "two log-probs of a token", "too long"),
    ],
)
def test_a_response_that_must_not_be_trained_on_is_an_error(make, server, bad_answer, advice):
    engine = make(server)
    server.script["/v1/completions"] = first_answers(1, bad_answer)
    with pytest.raises(EngineError, match=advice):
        engine.generate(requests(1))


@pytest.mark.parametrize("is_announced", [True, False])
def test_an_answer_longer_than_what_was_asked_for_is_not_read(make, server, is_announced):
    engine, answer = make(server, max_retries=2), Endless(server, is_announced)
    server.script["/v1/completions"] = answer
    with pytest.raises(EngineError, match=r"max_retries = 2 times .*of more than 1,0\d\d,\d{3} bytes"):
        engine.generate(requests(1))
    assert answer.sent < 40  # of 2 x 40


def test_a_long_error_of_a_server_is_cut(make, server):
    engine = make(server)
    server.script["/v1/completions"] = first_answers(1, failure(400, json.dumps({"error": {"message": "x" * 10_000}})))
    with pytest.raises(EngineError, match=r"HTTP 400 .*xxx") as error:
        engine.generate(requests(1))
    assert len(str(error.value)) < 1_000


def test_a_redirect_to_another_server_is_not_followed(make, server, other_server):
    engine = make(server)
    location = f"{other_server.url}/v1/completions"
    server.script["/v1/completions"] = every_answer(
        lambda body, usual_answer: web.Response(status=307, headers={"Location": location}, text="moved")
    )

    with pytest.raises(EngineError, match=r"HTTP 307 to /v1/completions.*redirects are not followed.*engine.urls"):
        engine.generate(requests(1))
    assert other_server.asked == []


def test_scores_that_are_no_log_probs_are_refused(make, server):
    engine = make(server)

    def score(body: dict, usual_answer: dict) -> dict:
        token = body["logprob_token_ids"][0]
        entries = [{str(token_id): {"logprob": -1.0}} for token_id in body["prompt"]]
        tops = {"top_logprobs": [{f"token_id:{token}": math.nan}]}
        return {"choices": [usual_answer["choices"][0] | {"logprobs": tops, "prompt_logprobs": entries}]}

    server.script["/v1/completions"] = every_answer(score)

    with pytest.raises(EngineError, match="numbers that are not log-probs"):
        engine.score([rollout_of(tiny_prompt(3), [2, 3])], 1.0)


def test_log_probs_are_sorted_and_minus_infinity_is_restored(make, server):
    engine = make(server)
    top = {"token_id:7": -2.0, "token_id:9": -9999.0, "token_id:4": -0.5}
    logprobs = {"token_logprobs": [-2.0], "top_logprobs": [top]}
    server.script["/v1/completions"] = first_answers(1, completion_with(token_ids=[7], logprobs=logprobs))
    [rollout] = engine.generate(requests(1, max_new_tokens=1))

    assert rollout.top_ids.tolist() == [[4, 7, 9]]
    assert rollout.top_log_probs.tolist() == [[-0.5, -2.0, -np.inf]]
    assert rollout.rollout_log_probs.tolist() == [-2.0]


# Weights


def test_the_weights_of_the_run_are_sent_before_any_request(make, server):
    engine = make(server)
    engine.generate(requests(2))

    paths = [path for path, _ in server.asked]
    expected_paths = [
        "/pause",
        "reload_weights",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
        "/v1/completions",
    ]

    assert [path for path in paths if path in expected_paths][:6] == expected_paths
    assert server.weights["lm_head.weight"] == pytest.approx(server.weights["model.embed_tokens.weight"])  # tied


def test_new_weights_generate_and_older_files_are_removed(make, server, tmp_path):
    engine = make(server)
    for iteration in (1, 2):
        version = Version(iteration, iteration)

        engine.update_weights(constant_weights(float(iteration)), version)
        rollout = engine.generate(requests(1))[0]

        assert rollout.rollout_log_probs.numpy() == pytest.approx(-np.log(VOCAB_SIZE) - iteration)
        assert rollout.versions.tolist() == [list(version)] * 12
        assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_servers_of_this_machine_read_weights_from_memory(make, server, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    engine = make(server, weights_folder=None)

    assert engine.update_weights(constant_weights(0.5), NEW) == weights_digest(constant_weights(0.5), torch.float32)
    assert server.weights["model.norm.weight"].mean() == 0.5

    [link] = tmp_path.glob("jackpot-*/*/*")
    memory = link.readlink()
    assert memory.parts[:2] == ("/", "proc")
    assert memory.exists()
    assert not link.resolve().exists()

    engine.close()
    assert not memory.exists()
    assert not list(tmp_path.glob("jackpot-*"))


def test_after_an_unseen_restart_the_newest_weights_are_sent(make, server):
    engine = make(server)
    engine.update_weights(constant_weights(2.0), NEW)
    server.restart()
    rollouts = engine.generate(requests(20))

    for rollout in rollouts:
        assert rollout.rollout_log_probs.numpy() == pytest.approx(-np.log(VOCAB_SIZE) - 2.0)

    loss_event, return_event = engine.take_events()
    assert (loss_event["event"], return_event["event"]) == ("server_lost", "server_restarted")
    assert "restarted" in loss_event["why"]
    assert loss_event["sent_again"] >= 1


def test_weights_that_another_run_sent_are_an_error(make, server):
    engine = make(server)
    server.tag = "jackpot-another-3"

    for call in (lambda: engine.generate(requests(1)), lambda: engine.update_weights(constant_weights(1.0), NEW)):
        with pytest.raises(EngineError, match=r"another run updates the weights of .*jackpot-another-3"):
            call()
    assert server.tag == "jackpot-another-3"


def test_a_server_of_an_earlier_run_is_taken_over(make, server):
    server.tag = "jackpot-earlier-7"
    server.script["/pause"] = first_answers(1, failure(500))
    assert len(make(server).generate(requests(3))) == 3
    assert server.count("/pause") == 2


def test_a_server_that_keeps_its_first_weights_is_an_error(make, server):
    server.load = lambda folder: None
    with pytest.raises(EngineError, match="stale"):
        make(server)


def keep_tensor(server: ScriptedServer, name: str) -> None:
    """From now on one tensor stays as it is."""

    def load(folder: str) -> None:
        old_values = server.weights[name]
        ScriptedServer.load(server, folder)
        server.weights[name] = old_values

    server.load = load


@pytest.mark.parametrize("kept_name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_one_old_tensor_is_enough_to_be_noticed(make, server, kept_name):
    engine = make(server)
    keep_tensor(server, kept_name)
    with pytest.raises(EngineError, match=f"stale.*{kept_name}"):
        engine.update_weights(constant_weights(3.0), NEW)


def test_an_old_tensor_is_noticed_after_a_failed_update(make, server, other_server):
    """A server that could not be resumed holds the weights that were checked all the same."""
    engine = make(server, other_server)
    other_server.script["/resume"] = every_answer(failure(503))
    engine.update_weights(constant_weights(2.0), NEW)
    keep_tensor(other_server, "model.norm.weight")

    with pytest.raises(EngineError, match=r"stale.*model\.norm\.weight"):
        engine.update_weights(constant_weights(3.0), NEW)
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            engine.generate(requests(1))


def once_failing(server: ScriptedServer, path: str):
    """One route fails once and works afterwards."""
    calls_to_failure = [1]

    async def script(body: dict, usual_answer: dict) -> Any:
        calls_to_failure[0] -= 1
        if calls_to_failure[0] == 0:
            return web.Response(status=500)
        body = {"kwargs": body.get("kwargs"), **body}
        return server._usual(path, body)

    return script


@pytest.mark.parametrize("path", ["reload_weights", "/weight_checker"])
def test_a_server_that_fails_at_an_update_gets_weights_later(make, server, path):
    engine = make(server)
    server.script[path] = once_failing(server, path)
    server.script["/health"] = every_answer(failure(503))
    engine.update_weights(constant_weights(1.0), NEW)

    assert server.count("/pause") == server.count("/resume")
    assert server.count("/resume") == 3  # at the start, at the update that failed, and when it is sent again

    rollout = engine.generate(requests(1))[0]
    assert rollout.rollout_log_probs.numpy() == pytest.approx(-np.log(VOCAB_SIZE) - 1.0)


def test_a_healthy_server_that_cannot_read_the_file_is_an_error(make, server):
    server.script["reload_weights"] = every_answer(failure(500))
    with pytest.raises(EngineError, match=r"cannot load the weights .*as scripted.*engine.weights_folder"):
        make(server)


def test_an_update_succeeds_with_the_servers_that_are_there(make, server, other_server):
    engine = make(server, other_server)
    other_server.script["/pause"] = every_answer(failure(500))
    engine.update_weights(constant_weights(1.0), NEW)

    old_count = other_server.count("/v1/completions")

    for rollout in engine.generate(requests(30)):
        assert rollout.rollout_log_probs.numpy() == pytest.approx(-np.log(VOCAB_SIZE) - 1.0)

    assert other_server.count("/v1/completions") == old_count

    del other_server.script["/pause"]
    deadline = time.monotonic() + 20.0
    while not any(event["event"] == "server_back" for event in engine.take_events()):
        assert time.monotonic() < deadline
        time.sleep(0.05)

    assert other_server.weights["model.norm.weight"].mean() == 1.0


def test_a_folder_that_cannot_be_written_is_an_error(make, server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"cannot write weights to .*engine.weights_folder"):
        make(server, weights_folder=str(tmp_path / "file"))


# Servers that are not what they should be


@pytest.mark.parametrize(
    "section, name, value, advice",
    [
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("model_config", "dtype", "torch.bfloat16", "--dtype float32"),
    ],
)
def test_a_server_with_other_settings_is_an_error_with_advice(make, server, section, name, value, advice):
    server.settings[section][name] = value
    with pytest.raises(EngineError, match=advice):
        make(server)


@pytest.mark.parametrize(
    "old_text, new_text, message",
    [
        ("org_vocab_size=24", "org_vocab_size=32", "vocab_size 32, ours 24"),
        ("embedding_dim=64", "embedding_dim=128", "hidden_size 128, ours 64"),
        ("(0-1): 2 x", "(0-3): 4 x", "num_hidden_layers 4, ours 2"),
        ("num_kv_heads=1", "num_kv_heads=2", "num_key_value_heads 2, ours 1"),
        ("in_features=96", "in_features=97", "intermediate_size 97, ours 96"),
    ],
)
def test_a_server_of_another_model_is_named_with_the_difference(make, server, old_text, new_text, message):
    server.structure = server.structure.replace(old_text, new_text)
    with pytest.raises(EngineError, match=f"another model: {message}"):
        make(server)
    assert server.count("reload_weights") == 0


def test_a_server_of_another_architecture_is_an_error(make, server):
    server.weights["model.layers.0.extra_norm.weight"] = np.zeros(2, np.float32)
    with pytest.raises(EngineError, match=r"another model: model.layers.0.extra_norm.weight"):
        make(server)


@pytest.mark.parametrize(
    "section, name, value, advice",
    [
        ("speculative_config", "num_speculative_tokens", 3, "without --speculative-config"),
        ("scheduler_config", "enable_chunked_prefill", True, "--no-enable-chunked-prefill"),
        (None, None, None, "untied copy"),
    ],
)
def test_what_vllm_gets_wrong_on_a_cpu_is_refused_there_alone(make, server, section, name, value, advice):
    if section:
        server.settings.setdefault(section, {"method": "draft_model"})[name] = value
    else:
        del server.weights["lm_head.weight"]

    with pytest.raises(EngineError, match=advice):
        make(server)

    server.settings["device_config"]["device"] = "cuda"
    make(server)


def test_what_the_servers_can_do_is_what_all_of_them_can(make, server, other_server):
    server.settings["model_config"]["max_logprobs"] = 5
    other_server.settings["model_config"] |= {"max_model_len": 32, "quantization": "fp8"}
    capabilities = make(server, other_server).capabilities

    assert (capabilities.num_top_log_probs, capabilities.max_model_len, capabilities.quantized) == (5, 32, True)
    assert (capabilities.vocab_size, capabilities.dtype) == (VOCAB_SIZE, torch.float32)
    assert make(server).capabilities.max_model_len == CONTEXT


def test_a_quantized_server_gets_codes_and_the_digest_of_weights(make, server):
    server.settings["model_config"]["quantization"] = "compressed-tensors"
    server.settings["device_config"]["device"] = "cuda"
    engine = make(server, quantization="int8_w8a8")

    assert engine.capabilities.quantized

    new_weights = constant_weights(0.5)
    assert engine.update_weights(new_weights, NEW) == weights_digest(new_weights, torch.float32)

    codes = {name: array for name, array in server.weights.items() if name.endswith("_proj.weight")}
    assert len(codes) == 14  # two layers of seven
    assert all(array.dtype == np.int8 and (array == 127).all() for array in codes.values())
    assert all(server.weights[f"{name}_scale"] == pytest.approx(0.5 / 127) for name in codes)
    assert [event["to"] for event in engine.take_events()] == ["int8_w8a8"]


@pytest.mark.parametrize(("quantization", "method"), [("int8_w8a8", "compressed-tensors"), ("fp8", "fp8")])
def test_a_server_of_another_quantization_is_refused(make, server, quantization, method):
    with pytest.raises(EngineError, match=rf"quantization none, and engine.quantization needs {method}.*in that form"):
        make(server, quantization=quantization)

    server.settings["model_config"]["quantization"] = "gptq"
    with pytest.raises(EngineError, match=rf"quantization gptq, and engine.quantization needs {method}"):
        make(server, quantization=quantization)

    server.settings["model_config"]["quantization"] = method
    with pytest.raises(EngineError, match=r"runs on a CPU, where vLLM computes with scales that it freed"):
        make(server, quantization=quantization)


def test_plain_servers_get_int8_weights_multiplied_out(make, server):
    engine = make(server, quantization="int8_w8a16")

    assert engine.capabilities.quantized

    new_weights = [(name, tensor.detach()) for name, tensor in tiny_model(seed=1).named_parameters()]
    assert engine.update_weights(new_weights, NEW) == weights_digest(new_weights, torch.float32)

    name = "model.layers.0.mlp.up_proj.weight"
    weight, server_weight = dict(new_weights)[name], torch.from_numpy(server.weights[name])
    steps = server_weight / (weight.abs().amax(1, keepdim=True) / 127)

    assert not torch.equal(server_weight, weight)
    assert (steps - steps.round()).abs().max() < 1e-4


def test_a_server_whose_cache_is_of_another_kind_is_refused(make, server):
    with pytest.raises(EngineError, match=r"keeps keys and values in auto.*--kv-cache-dtype fp8"):
        make(server, kv_cache_dtype="fp8")
    server.settings["cache_config"]["cache_dtype"] = "fp8_e4m3"
    assert make(server, kv_cache_dtype="fp8").capabilities.quantized


def test_a_server_whose_head_has_another_dtype_is_refused(make, server):
    with pytest.raises(EngineError, match=r"output layer in float32, and .*float32.*--hf-overrides '{\"head_dtype"):
        make(server, head_dtype="fp32")

    server.settings["model_config"]["hf_overrides"] = {"head_dtype": "float32"}
    make(server, head_dtype="fp32")
    with pytest.raises(EngineError, match=r"in float32, and engine.head_dtype says float32"):
        make(server)


def test_the_api_key_of_the_environment_goes_to_servers_alone(make, server, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    engine = make(server)
    engine.generate(requests(1))

    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}

    server.script["/v1/completions"] = every_answer(failure(401, '{"error": "Unauthorized"}'))
    with pytest.raises(EngineError, match="VLLM_API_KEY") as error:
        engine.generate(requests(1))
    assert KEY not in str(error.value)
    assert KEY not in str(engine.take_events())


@pytest.mark.parametrize("remote_url", ["http://node7:8000", "http://[2001:db8::1]:8000"])
def test_servers_of_other_machines_need_a_key(make, server, monkeypatch, remote_url):
    """It is said before anything is sent to them."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(EngineError, match="VLLM_API_KEY") as error:
        make(server, remote_url)
    assert str(error.value).startswith(f"{remote_url}: not on this machine's loopback interface")


def test_servers_out_of_reach_are_an_error_after_the_patience(make):
    urls = ["http://127.0.0.1:9", "http://127.0.0.1:11"]
    start = time.monotonic()

    with pytest.raises(EngineError, match=r"engine.connect_timeout = 1 seconds") as error:
        make(*urls, connect_timeout=1.0)
    assert time.monotonic() - start >= 1.0
    assert all(url in str(error.value) for url in urls)


def test_one_server_in_reach_is_enough(make, server):
    engine = make("http://127.0.0.1:9", server)
    assert len(engine.generate(requests(5))) == 5


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_model_len": 32}, "max_model_len 32, and the others 64"),
        ({"max_logprobs": 5}, "num_top_log_probs 5, and the others 24"),
        ({"quantization": "fp8"}, "is quantized"),
    ],
)
def test_a_server_that_comes_later_and_can_do_less_is_an_error(make, server, other_server, settings, message):
    other_server.script["/v1/models"] = first_answers(1, failure(503))
    other_server.settings["model_config"] |= settings
    engine = make(server, other_server)

    with pytest.raises(EngineError, match=message):
        for index in range(500):
            engine.generate([tiny_request(f"{index}", num_top_log_probs=3)])
            time.sleep(0.02)


# Between two batches, and while weights are on their way


def test_a_server_restarted_between_batches_is_inspected_again(make, server):
    engine = make(server)
    engine.generate(requests(2))
    server.restart()
    server.settings["model_config"]["logprobs_mode"] = "raw_logprobs"

    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        engine.update_weights(constant_weights(1.0), NEW)


def test_a_restart_between_two_batches_is_told_and_costs_nothing(make, server):
    engine = make(server)
    engine.generate(requests(2))
    server.restart()
    engine.update_weights(constant_weights(1.0), NEW)

    assert [event["event"] for event in engine.take_events()] == ["server_lost", "server_restarted"]
    assert engine.generate(requests(1))[0].rollout_log_probs[0].item() == pytest.approx(-np.log(VOCAB_SIZE) - 1.0)


@pytest.mark.parametrize("path", ["/pause", "/resume"])
def test_a_server_is_never_left_paused(make, server, path):
    """Either `/pause` or `/resume` fails at first."""
    engine, is_paused = make(server), [False]

    async def pause(body: dict, usual_answer: dict) -> Any:
        is_paused[0] = True
        return fail(body, usual_answer) if path == "/pause" and failing_calls.pop(0) else usual_answer

    async def resume(body: dict, usual_answer: dict) -> Any:
        if path == "/resume" and failing_calls.pop(0):
            return fail(body, usual_answer)
        is_paused[0] = False
        return usual_answer

    failing_calls, fail = [True, False, False, False], failure(503)
    server.script |= {"/pause": pause, "/resume": resume}

    engine.update_weights(constant_weights(1.0), NEW)

    assert not is_paused[0]
    assert len(engine.generate(requests(2))) == 2


def test_weights_that_a_server_still_reads_stay(make, server, other_server):
    engine = make(server, other_server)
    load_began, load_may_end = threading.Event(), threading.Event()
    completions_fail = [True]

    async def complete(body: dict, usual_answer: dict) -> Any:
        return failure(500)(body, usual_answer) if completions_fail[0] else usual_answer

    async def load(body: dict, usual_answer: dict) -> Any:
        load_began.set()
        while not load_may_end.is_set():
            await asyncio.sleep(0.01)
        other_server.load(body["kwargs"]["weights_path"])
        return {"results": [None]}

    other_server.script |= {"/v1/completions": complete, "reload_weights": load}

    engine.submit(requests(12))
    collected_rollouts = engine.collect(6)

    other_server.restart()
    completions_fail[0] = False

    assert len(collected_rollouts + engine.collect(6)) == 12
    assert load_began.wait(30.0)

    engine.update_weights(constant_weights(1.0), NEW)  # `server` has them, `other_server` still reads the ones before
    load_may_end.set()
    rollouts = engine.generate(requests(40))
    values = [rollout.rollout_log_probs[0].item() for rollout in rollouts]

    assert values == pytest.approx([-np.log(VOCAB_SIZE) - 1.0] * 40)


def test_unchanged_weights_are_stale_at_the_second_try_too(make, server):
    engine = make(server)
    old_weights = tiny_model(seed=0).named_parameters()
    weights_with_old_norms = [(name, tensor if "norm" in name else tensor + 1.0) for name, tensor in old_weights]
    server.script |= {
        "reload_weights": every_answer({"results": [None]}),
        "/weight_checker": first_answers(1, failure(503)),
    }

    with pytest.raises(EngineError, match="holds stale ones"):
        engine.update_weights(weights_with_old_norms, NEW)


def test_a_server_without_a_parameter_of_ours_can_prove_nothing(make, server):
    engine = make(server)
    checksums = {"tp0:model.fused.weight": "0" * 64, "tp0:lm_head.weight_scale": "1" * 64}
    server.script["/weight_checker"] = every_answer({"checksums": checksums})
    with pytest.raises(EngineError, match="none has a name of the model's"):
        engine.update_weights(constant_weights(1.0), NEW)


def test_a_key_that_cannot_be_sent_is_not_shown_in_the_error(make, server, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", f"{KEY}\n")
    with pytest.raises(EngineError, match="VLLM_API_KEY has a line break") as message:
        make(server)
    assert KEY not in str(message.value)


@pytest.mark.parametrize(
    "urls",
    [
        "localhost:8000",
        "http://",
        "ftp://host",
        "http://host:65536",
        "http://host:0",
        " http://host",
        "http://a b",
        "http://host/v1",
        "http://user:secret@host",
        ["http://a:1", "http://a:1/"],
    ],
)
def test_what_is_no_address_is_refused(urls):
    with pytest.raises(pydantic.ValidationError, match=r"http://HOST:PORT|more than once"):
        VLLMServerEngineConfig(urls=urls, weights_folder="w")


@pytest.mark.parametrize("urls", ["http://127.0.0.1:8000", ["https://a", "http://b:80/", "http://[::1]:8000"]])
def test_addresses_are_taken_as_given(urls):
    addresses = (urls,) if isinstance(urls, str) else tuple(urls)
    assert VLLMServerEngineConfig(urls=urls, weights_folder="w").urls == addresses
