"""Responses of several turns: which tokens are sampled, the limits, and a single turn equals the engine's rollout."""

import re
from collections import Counter, deque
from dataclasses import fields, replace

import pytest
import torch

from helpers.engines.reference import CONTEXT, EOS, VOCAB_SIZE, tiny_model, tiny_prompt, tiny_request
from helpers.turns import Numbers, Tool
from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.recipes import resolve
from jackpot.config.sampling import Sampling
from jackpot.core.errors import EngineError
from jackpot.core.prng import fold_in
from jackpot.core.types import Rollout, Version
from jackpot.models.load import eos_token_ids, load_model, load_tokenizer
from jackpot.rollout.engines.base import Capabilities, Engine, Request
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.rollout.evaluate import evaluate
from jackpot.rollout.multi_turn import generate_rollouts
from jackpot.rollout.tasks.registry import make_task

TOKENIZER = load_tokenizer("starter:policy")
SINGLE, TOOL = (make_task(resolve("quickstart", arm, []).task, TOKENIZER) for arm in ("obrs", "tool"))
VERSION = Version(2, 5)
TINY = tiny_model(0).eval()


def starter_engine(max_num_seqs=64) -> TransformersEngine:
    model = load_model("starter:policy", torch.float32)
    return TransformersEngine(
        model,
        TransformersEngineConfig(max_num_seqs=max_num_seqs),
        eos_token_ids=eos_token_ids(model),
        version=VERSION,
    )


def tiny_engine(max_num_seqs=64) -> TransformersEngine:
    return TransformersEngine(
        TINY, TransformersEngineConfig(max_num_seqs=max_num_seqs), eos_token_ids=(EOS,), version=VERSION
    )


def problems(count, max_new_tokens=32, **sampling):
    """Two answers to each problem."""
    sampling = Sampling(max_new_tokens=max_new_tokens, **sampling)
    prompts = [SINGLE.prompt("train", number // 2) for number in range(count)]
    return [Request(uid=f"{n}", prompt=prompt, seed=n, sampling=sampling) for n, prompt in enumerate(prompts)]


def talk(engine, requests, turn_end_token_ids=range(2, 10)):
    return generate_rollouts(engine, Tool(turn_end_token_ids, VOCAB_SIZE), Numbers(), requests)


def assert_equal(first: Rollout, second: Rollout) -> None:
    for field in fields(Rollout):
        mine, others = getattr(first, field.name), getattr(second, field.name)
        assert torch.equal(mine, others) if isinstance(mine, torch.Tensor) else mine == others, field.name


# With a real model


def test_without_a_tool_rollouts_are_those_of_the_engine():
    requests = problems(40)
    found = generate_rollouts(starter_engine(), SINGLE, TOKENIZER, requests)
    for mine, engines in zip(found, starter_engine().generate(requests), strict=True):
        assert_equal(mine, engines)


def test_the_model_and_the_calculator_write_in_turn():
    """Every `=` that the model sampled is followed by the sum of the two numbers before it, and by nothing else."""
    rollouts = generate_rollouts(starter_engine(), TOOL, TOKENIZER, problems(80))
    calls = 0
    for rollout in rollouts:
        tokens, model = TOKENIZER.convert_ids_to_tokens(rollout.token_ids), rollout.sampled_mask.tolist()
        place, text = 0, ""
        while place < len(tokens):
            assert model[place]
            text, place = text + tokens[place], place + 1
            if text[-1] == "=" and place < len(tokens):
                two = re.search(r"(?:^|[=#])(\d+)\+(\d+)=$", text)
                answer = str(sum(map(int, two.groups()))) if two else "?"
                assert tokens[place : place + len(answer)] == list(answer)
                assert not any(model[place : place + len(answer)])
                text, place, calls = text + answer, place + len(answer), calls + 1
        assert rollout.finish == "stop" and tokens[-1] == "<end>"
    assert calls > 20


def test_a_whole_response_is_scored_as_its_turns_were_sampled():
    engine = starter_engine()
    rollouts = generate_rollouts(engine, TOOL, TOKENIZER, problems(60, temperature=0.8))
    for rollout, score in zip(rollouts, engine.score(rollouts, 0.8), strict=True):
        sampled = rollout.sampled_mask
        torch.testing.assert_close(rollout.rollout_log_probs[sampled], score[sampled], rtol=0, atol=1e-5)


def test_a_token_of_the_tool_has_no_distribution():
    rollouts = generate_rollouts(starter_engine(), TOOL, TOKENIZER, problems(40, num_top_log_probs=5))
    assert not all(rollout.sampled_mask.all() for rollout in rollouts)
    for request, rollout in zip(problems(40), rollouts, strict=True):
        length, tool = len(rollout.token_ids), ~rollout.sampled_mask
        assert rollout.uid == request.uid and rollout.prompt == request.prompt  # a group shares its prompt
        assert rollout.versions.tolist() == [list(VERSION)] * length
        assert rollout.top_ids.shape == rollout.top_log_probs.shape == (length, 5)
        assert (rollout.rollout_log_probs[tool] == 0).all() and (rollout.top_log_probs[tool] == -torch.inf).all()
        assert rollout.rollout_log_probs.isfinite().all() and rollout.top_log_probs[~tool].isfinite().all()
        dtypes = [getattr(rollout, name).dtype for name in ("token_ids", "sampled_mask", "top_ids", "versions")]
        assert dtypes == [torch.int64, torch.bool, torch.int64, torch.int64]


def test_responses_do_not_depend_on_the_batch_or_the_order():
    requests = [tiny_request(f"{n}", 1 + n % 5, seed=n, max_new_tokens=24) for n in range(10)]
    together = talk(tiny_engine(), requests)
    assert max(len(rollout.token_ids) for rollout in together) > 20
    for found in (talk(tiny_engine(1), requests), talk(tiny_engine(4), requests[::-1])[::-1]):
        for one, other in zip(together, found, strict=True):
            assert one.uid == other.uid and one.finish == other.finish
            assert torch.equal(one.token_ids, other.token_ids)
            assert torch.equal(one.sampled_mask, other.sampled_mask)


@pytest.mark.parametrize(("prompt", "max_new", "limit"), [(5, 1, 1), (5, 12, 12), (CONTEXT - 9, 50, 9)])
def test_a_reply_that_leaves_no_room_is_not_written(prompt, max_new, limit):
    """The limit is max_new_tokens or what the context leaves."""
    requests = [tiny_request(f"{n}", prompt, seed=n, max_new_tokens=max_new) for n in range(120)]
    tool = Tool(range(2, 10), VOCAB_SIZE)
    ends = Counter()
    for rollout in talk(tiny_engine(), requests):
        said = rollout.token_ids.tolist()
        assert len(said) <= limit and rollout.sampled_mask[-1]
        if rollout.finish == "stop":
            assert said[-1] == EOS
            ends["end of sequence"] += 1
        elif said[-1] in tool.turn_end_token_ids:
            reply = tool.step(rollout.prompt, " ".join(map(str, said))).split()
            assert len(said) + len(reply) >= limit
            ends["no room"] += 1
        else:
            assert len(said) == limit
            ends["full"] += 1
        assert rollout.finish in ("stop", "length")
    assert ends.keys() == {"end of sequence", "no room", "full"}


def test_evaluation_takes_turns_too():
    prompts = [TOOL.prompt("test", number) for number in range(40)]
    result = evaluate(starter_engine(), TOOL, TOKENIZER, prompts, Sampling(max_new_tokens=32), seed=0, k=1)
    assert not all(rollout.sampled_mask.all() for rollout in result.rollouts)
    pairs = [match for text in result.responses for match in re.finditer(r"(?:^|[=#])(\d+)\+(\d+)=(\d+)", text)]
    assert pairs and all(int(pair[1]) + int(pair[2]) == int(pair[3]) for pair in pairs)


# With a scripted engine


class Scripted(Engine):
    """Gives each request the next of its turns, the newest request first; another's rollout is in flight throughout."""

    def __init__(self, turns):
        self.turns = {uid: deque(of_uid) for uid, of_uid in turns.items()}
        self.requests, self.waiting = [], []
        self.submit([tiny_request("other")])

    @property
    def capabilities(self):
        return Capabilities(
            vocab_size=VOCAB_SIZE,
            num_top_log_probs=9,
            max_model_len=CONTEXT,
            quantized=False,
            dtype=torch.float32,
            device="cpu",
        )

    @property
    def version(self):
        return Version(0, len(self.requests))

    def submit(self, requests):
        self.requests += requests
        self.waiting += [(request, self.version) for request in requests]

    def collect(self, n, timeout=None, uids=None):
        mine = [entry for entry in self.waiting[::-1] if uids is None or entry[0].uid in uids][:n]
        self.waiting = [entry for entry in self.waiting if entry not in mine]
        return [rollout for request, version in mine for rollout in self.rollouts(request, version)]

    def rollouts(self, request, version):
        script = self.turns[request.uid.split("/")[0]]
        if script:
            finish, *tokens = script.popleft()
            length, top = len(tokens), request.sampling.num_top_log_probs
            yield Rollout(
                uid=request.uid,
                prompt=request.prompt,
                finish=finish,
                token_ids=torch.tensor(tokens, dtype=torch.int64),
                rollout_log_probs=-torch.ones(length),
                sampled_mask=torch.ones(length, dtype=torch.bool),
                top_ids=torch.ones(length, top, dtype=torch.int64),
                top_log_probs=-torch.ones(length, top),
                versions=torch.tensor([version] * length).view(length, 2),
            )

    score = update_weights = close = None


class Lines(Tool):
    """A tool with its lines written down, None among them."""

    def __init__(self, lines):
        super().__init__((5, EOS), VOCAB_SIZE)
        self.lines, self.heard = deque(lines), []

    def step(self, prompt, response):
        self.heard.append(response)
        return self.lines.popleft()


def play(turns, lines, **sampling):
    engine, task = Scripted({"a": turns}), Lines(lines)
    request = replace(tiny_request("a", 3, seed=8, **sampling), exact_drafts=True)
    [rollout] = generate_rollouts(engine, task, Numbers(), [request])
    assert rollout.uid == "a" and rollout.prompt == tiny_prompt(3)
    return rollout, engine.requests[1:], task


def test_each_turn_is_a_request_with_all_that_was_said():
    turns = [("stop", 7, 5), ("stop", 5), ("length", 8, 8)]
    rollout, requests, task = play(turns, ["11 12", ""], max_new_tokens=7, stop_token_ids=(9,))
    assert rollout.token_ids.tolist() == [7, 5, 11, 12, 5, 8, 8] and rollout.finish == "length"
    assert rollout.sampled_mask.tolist() == [True, True, False, False, True, True, True]
    assert rollout.versions[:, 1].tolist() == [2, 2, 2, 2, 3, 4, 4]
    assert task.heard == ["7 5", "7 5 11 12 5"]
    said = [(), (7, 5, 11, 12), (7, 5, 11, 12, 5)]
    assert [request.prompt.token_ids for request in requests] == [tiny_prompt(3).token_ids + words for words in said]
    assert [request.sampling.max_new_tokens for request in requests] == [7, 3, 2]
    assert {request.sampling.stop_token_ids for request in requests} == {(9, 5, EOS)}
    assert [request.uid for request in requests] == ["a", "a/turn 1", "a/turn 2"]
    assert all(request.exact_drafts for request in requests)
    assert [request.seed for request in requests] == [8, fold_in("turn", 8, 1), fold_in("turn", 8, 2)]


@pytest.mark.parametrize(
    ("turns", "lines", "finish", "tokens"),
    [
        ([("stop", 7, 5)], [None], "stop", [7, 5]),
        ([("stop", 7, EOS)], [None], "stop", [7, EOS]),  # the end of a turn may be the end of sequence
        ([("stop", EOS), ("stop", 9)], ["3"], "stop", [EOS, 3, 9]),  # 9 ends no turn: the tool is not asked
        ([("length", 7, 5)], [], "length", [7, 5]),
        ([("aborted", 7, 5)], [], "aborted", [7, 5]),
        ([("aborted",)], [], "aborted", []),
        ([("stop", 7, 5), ("aborted", 8)], ["3"], "aborted", [7, 5, 3, 8]),
        ([("stop", 7, 5), ("aborted",)], ["3"], "aborted", [7, 5, 3]),
        ([("stop", 7, 5), ("stop", 9)], ["3 " * 9], "stop", [7, 5, *[3] * 9, 9]),  # 12 tokens
        ([("stop", 7, 5)], ["3 " * 10], "length", [7, 5]),
    ],
)
def test_how_a_response_ends(turns, lines, finish, tokens):
    rollout, requests, task = play(turns, lines, max_new_tokens=12)
    assert (rollout.finish, rollout.token_ids.tolist()) == (finish, tokens)
    assert len(requests) == len(turns) and not task.lines
    columns = ("rollout_log_probs", "sampled_mask", "top_ids", "top_log_probs", "versions")
    assert {len(getattr(rollout, name)) for name in columns} == {len(tokens)}


def test_conversations_come_in_the_order_of_their_requests():
    turns = {uid: [("stop", 6 + n, 5), ("stop", 6 + n, 5), ("stop", 6 + n)] for n, uid in enumerate("abc")}
    engine = Scripted(turns)
    found = generate_rollouts(engine, Tool([5], VOCAB_SIZE), Numbers(), [tiny_request(uid) for uid in turns])
    assert [rollout.uid for rollout in found] == ["a", "b", "c"]
    for n, rollout in enumerate(found):
        assert rollout.token_ids[rollout.sampled_mask].tolist() == [6 + n, 5, 6 + n, 5, 6 + n]
    assert [request.uid for request, _ in engine.waiting] == ["other"]
    assert generate_rollouts(engine, Tool([5], VOCAB_SIZE), Numbers(), []) == []


def test_a_turn_that_the_engine_does_not_return_is_named():
    with pytest.raises(EngineError, match="missing: a/turn 1"):
        play([("stop", 5)], ["3"])


def test_without_turns_neither_requests_nor_rollouts_are_copied(monkeypatch):
    engine, requests = Scripted({"a": [("stop", 7, 5)], "b": [("length", 8)]}), [tiny_request("a"), tiny_request("b")]
    wrote, collect = [], engine.collect
    monkeypatch.setattr(engine, "collect", lambda *args, **kwargs: wrote.extend(got := collect(*args, **kwargs)) or got)
    found = generate_rollouts(engine, SINGLE, TOKENIZER, requests)
    assert [rollout.token_ids.tolist() for rollout in found] == [[7, 5], [8]]
    assert set(map(id, found)) == set(map(id, wrote)) and list(map(id, engine.requests[1:])) == list(map(id, requests))
    with pytest.raises(EngineError, match="missing: a"):
        generate_rollouts(engine, SINGLE, TOKENIZER, requests)
