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
    """Return an engine of the starter policy, which knows the format of a call."""
    model = load_model("starter:policy", torch.float32)
    return TransformersEngine(
        model,
        TransformersEngineConfig(max_num_seqs=max_num_seqs),
        eos_token_ids=eos_token_ids(model),
        version=VERSION,
    )


def tiny_engine(max_num_seqs=64) -> TransformersEngine:
    """Return an engine of a tiny random model."""
    return TransformersEngine(
        TINY, TransformersEngineConfig(max_num_seqs=max_num_seqs), eos_token_ids=(EOS,), version=VERSION
    )


def problem_requests(count, max_new_tokens=32, **sampling):
    """Return requests for two answers to each problem."""
    sampling = Sampling(max_new_tokens=max_new_tokens, **sampling)
    prompts = [SINGLE.prompt("train", index // 2) for index in range(count)]
    return [
        Request(uid=f"{index}", prompt=prompt, seed=index, sampling=sampling) for index, prompt in enumerate(prompts)
    ]


def tool_rollouts(engine, requests, turn_end_token_ids=range(2, 10)):
    """Return the rollouts of the requests with a tool that answers after these tokens."""
    return generate_rollouts(engine, Tool(turn_end_token_ids, VOCAB_SIZE), Numbers(), requests)


def assert_equal(first: Rollout, second: Rollout) -> None:
    """Check that two rollouts are equal in every field."""
    for field in fields(Rollout):
        first_value, second_value = getattr(first, field.name), getattr(second, field.name)
        is_equal = (
            torch.equal(first_value, second_value)
            if isinstance(first_value, torch.Tensor)
            else first_value == second_value
        )
        assert is_equal, field.name


# With a real model


def test_without_a_tool_rollouts_are_those_of_the_engine():
    requests = problem_requests(40)

    rollouts = generate_rollouts(starter_engine(), SINGLE, TOKENIZER, requests)

    for rollout, engine_rollout in zip(rollouts, starter_engine().generate(requests), strict=True):
        assert_equal(rollout, engine_rollout)


def test_the_model_and_the_calculator_write_in_turn():
    """Every `=` that the model sampled is followed by the sum of the two numbers before it, and by nothing else."""
    rollouts = generate_rollouts(starter_engine(), TOOL, TOKENIZER, problem_requests(80))

    call_count = 0
    for rollout in rollouts:
        tokens = TOKENIZER.convert_ids_to_tokens(rollout.token_ids)
        is_sampled = rollout.sampled_mask.tolist()

        position, text = 0, ""
        while position < len(tokens):
            assert is_sampled[position]
            text, position = text + tokens[position], position + 1
            if text[-1] == "=" and position < len(tokens):
                sum_call = re.search(r"(?:^|[=#])(\d+)\+(\d+)=$", text)
                answer = str(sum(map(int, sum_call.groups()))) if sum_call else "?"
                assert tokens[position : position + len(answer)] == list(answer)
                assert not any(is_sampled[position : position + len(answer)])
                text, position = text + answer, position + len(answer)
                call_count += 1

        assert rollout.finish == "stop"
        assert tokens[-1] == "<end>"

    assert call_count > 20


def test_a_whole_response_is_scored_as_its_turns_were_sampled():
    engine = starter_engine()
    rollouts = generate_rollouts(engine, TOOL, TOKENIZER, problem_requests(60, temperature=0.8))
    for rollout, score in zip(rollouts, engine.score(rollouts, 0.8), strict=True):
        sampled = rollout.sampled_mask
        torch.testing.assert_close(rollout.rollout_log_probs[sampled], score[sampled], rtol=0, atol=1e-5)


def test_a_token_of_the_tool_has_no_distribution():
    rollouts = generate_rollouts(starter_engine(), TOOL, TOKENIZER, problem_requests(40, num_top_log_probs=5))
    assert not all(rollout.sampled_mask.all() for rollout in rollouts)

    for request, rollout in zip(problem_requests(40), rollouts, strict=True):
        length, is_of_tool = len(rollout.token_ids), ~rollout.sampled_mask
        assert rollout.uid == request.uid
        assert rollout.prompt == request.prompt  # a group shares its prompt
        assert rollout.versions.tolist() == [list(VERSION)] * length
        assert rollout.top_ids.shape == (length, 5)
        assert rollout.top_log_probs.shape == (length, 5)

        assert (rollout.rollout_log_probs[is_of_tool] == 0).all()
        assert (rollout.top_log_probs[is_of_tool] == -torch.inf).all()

        assert rollout.rollout_log_probs.isfinite().all()
        assert rollout.top_log_probs[~is_of_tool].isfinite().all()

        dtypes = [getattr(rollout, name).dtype for name in ("token_ids", "sampled_mask", "top_ids", "versions")]
        assert dtypes == [torch.int64, torch.bool, torch.int64, torch.int64]


def test_responses_do_not_depend_on_the_batch_or_the_order():
    requests = [tiny_request(f"{index}", 1 + index % 5, seed=index, max_new_tokens=24) for index in range(10)]
    batch_rollouts = tool_rollouts(tiny_engine(), requests)
    assert max(len(rollout.token_ids) for rollout in batch_rollouts) > 20

    single_rollouts = tool_rollouts(tiny_engine(max_num_seqs=1), requests)
    reversed_rollouts = tool_rollouts(tiny_engine(max_num_seqs=4), list(reversed(requests)))
    for rollouts in (single_rollouts, list(reversed(reversed_rollouts))):
        for first_rollout, rollout in zip(batch_rollouts, rollouts, strict=True):
            assert first_rollout.uid == rollout.uid
            assert first_rollout.finish == rollout.finish
            assert torch.equal(first_rollout.token_ids, rollout.token_ids)
            assert torch.equal(first_rollout.sampled_mask, rollout.sampled_mask)


@pytest.mark.parametrize(("prompt", "max_new", "limit"), [(5, 1, 1), (5, 12, 12), (CONTEXT - 9, 50, 9)])
def test_a_reply_that_leaves_no_room_is_not_written(prompt, max_new, limit):
    """The limit is max_new_tokens or what the context leaves."""
    requests = [tiny_request(f"{index}", prompt, seed=index, max_new_tokens=max_new) for index in range(120)]
    tool = Tool(range(2, 10), VOCAB_SIZE)
    end_counts = Counter()

    for rollout in tool_rollouts(tiny_engine(), requests):
        token_ids = rollout.token_ids.tolist()
        assert len(token_ids) <= limit
        assert rollout.sampled_mask[-1]

        if rollout.finish == "stop":
            assert token_ids[-1] == EOS
            end_counts["end of sequence"] += 1
        elif token_ids[-1] in tool.turn_end_token_ids:
            reply = tool.step(rollout.prompt, " ".join(map(str, token_ids))).split()
            assert len(token_ids) + len(reply) >= limit
            end_counts["no room"] += 1
        else:
            assert len(token_ids) == limit
            end_counts["full"] += 1

        assert rollout.finish in ("stop", "length")

    assert end_counts.keys() == {"end of sequence", "no room", "full"}


def test_evaluation_takes_turns_too():
    prompts = [TOOL.prompt("test", index) for index in range(40)]

    result = evaluate(starter_engine(), TOOL, TOKENIZER, prompts, Sampling(max_new_tokens=32), seed=0, k=1)

    assert not all(rollout.sampled_mask.all() for rollout in result.rollouts)
    sums = [sum_match for text in result.responses for sum_match in re.finditer(r"(?:^|[=#])(\d+)\+(\d+)=(\d+)", text)]
    assert sums
    assert all(int(sum_match[1]) + int(sum_match[2]) == int(sum_match[3]) for sum_match in sums)


# With a scripted engine


class ScriptedEngine(Engine):
    """Gives each request the next of its turns, the newest request first; another's rollout is in flight throughout."""

    def __init__(self, turns):
        self.turns = {uid: deque(uid_turns) for uid, uid_turns in turns.items()}
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
        entries = [entry for entry in self.waiting[::-1] if uids is None or entry[0].uid in uids][:n]
        self.waiting = [entry for entry in self.waiting if entry not in entries]
        return [rollout for request, version in entries for rollout in self.rollouts(request, version)]

    def rollouts(self, request, version):
        script = self.turns[request.uid.split("/")[0]]
        if script:
            finish, *tokens = script.popleft()
            length, top_count = len(tokens), request.sampling.num_top_log_probs
            yield Rollout(
                uid=request.uid,
                prompt=request.prompt,
                finish=finish,
                token_ids=torch.tensor(tokens, dtype=torch.int64),
                rollout_log_probs=-torch.ones(length),
                sampled_mask=torch.ones(length, dtype=torch.bool),
                top_ids=torch.ones(length, top_count, dtype=torch.int64),
                top_log_probs=-torch.ones(length, top_count),
                versions=torch.tensor([version] * length).view(length, 2),
            )

    score = update_weights = close = None


class ScriptedTool(Tool):
    """A tool with its lines written down, None among them."""

    def __init__(self, lines):
        super().__init__((5, EOS), VOCAB_SIZE)
        self.lines, self.heard = deque(lines), []

    def step(self, prompt, response):
        self.heard.append(response)
        return self.lines.popleft()


def play_script(turns, lines, **sampling):
    """Return the rollout of a scripted response, the requests of its turns, and the tool."""
    engine, task = ScriptedEngine({"a": turns}), ScriptedTool(lines)
    request = replace(tiny_request("a", 3, seed=8, **sampling), exact_drafts=True)
    [rollout] = generate_rollouts(engine, task, Numbers(), [request])
    assert rollout.uid == "a"
    assert rollout.prompt == tiny_prompt(3)
    return rollout, engine.requests[1:], task


def test_each_turn_is_a_request_with_all_that_was_said():
    turns = [("stop", 7, 5), ("stop", 5), ("length", 8, 8)]
    rollout, requests, task = play_script(turns, ["11 12", ""], max_new_tokens=7, stop_token_ids=(9,))

    assert rollout.token_ids.tolist() == [7, 5, 11, 12, 5, 8, 8]
    assert rollout.finish == "length"
    assert rollout.sampled_mask.tolist() == [True, True, False, False, True, True, True]
    assert rollout.versions[:, 1].tolist() == [2, 2, 2, 2, 3, 4, 4]
    assert task.heard == ["7 5", "7 5 11 12 5"]

    earlier_tokens = [(), (7, 5, 11, 12), (7, 5, 11, 12, 5)]
    assert [request.prompt.token_ids for request in requests] == [
        tiny_prompt(3).token_ids + token_ids for token_ids in earlier_tokens
    ]

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
def test_a_response_ends_as_its_last_turn_or_at_the_limit(turns, lines, finish, tokens):
    rollout, requests, task = play_script(turns, lines, max_new_tokens=12)

    assert (rollout.finish, rollout.token_ids.tolist()) == (finish, tokens)
    assert len(requests) == len(turns)
    assert not task.lines

    columns = ("rollout_log_probs", "sampled_mask", "top_ids", "top_log_probs", "versions")
    assert {len(getattr(rollout, name)) for name in columns} == {len(tokens)}


def test_conversations_come_in_the_order_of_their_requests():
    turns = {
        uid: [("stop", 6 + index, 5), ("stop", 6 + index, 5), ("stop", 6 + index)] for index, uid in enumerate("abc")
    }
    engine = ScriptedEngine(turns)

    rollouts = generate_rollouts(engine, Tool([5], VOCAB_SIZE), Numbers(), [tiny_request(uid) for uid in turns])

    assert [rollout.uid for rollout in rollouts] == ["a", "b", "c"]
    for index, rollout in enumerate(rollouts):
        assert rollout.token_ids[rollout.sampled_mask].tolist() == [6 + index, 5, 6 + index, 5, 6 + index]
    assert [request.uid for request, _ in engine.waiting] == ["other"]
    assert generate_rollouts(engine, Tool([5], VOCAB_SIZE), Numbers(), []) == []


def test_a_turn_that_the_engine_does_not_return_is_named():
    with pytest.raises(EngineError, match="missing: a/turn 1"):
        play_script([("stop", 5)], ["3"])


def test_without_turns_neither_requests_nor_rollouts_are_copied(monkeypatch):
    engine = ScriptedEngine({"a": [("stop", 7, 5)], "b": [("length", 8)]})
    requests = [tiny_request("a"), tiny_request("b")]
    engine_rollouts, plain_collect = [], engine.collect

    def collect_and_note(*arguments, **keywords):
        rollouts = plain_collect(*arguments, **keywords)
        engine_rollouts.extend(rollouts)
        return rollouts

    monkeypatch.setattr(engine, "collect", collect_and_note)

    rollouts = generate_rollouts(engine, SINGLE, TOKENIZER, requests)

    assert [rollout.token_ids.tolist() for rollout in rollouts] == [[7, 5], [8]]
    assert set(map(id, rollouts)) == set(map(id, engine_rollouts))
    assert list(map(id, engine.requests[1:])) == list(map(id, requests))

    with pytest.raises(EngineError, match="missing: a"):
        generate_rollouts(engine, SINGLE, TOKENIZER, requests)
