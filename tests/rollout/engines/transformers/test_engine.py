"""The shared suite on `TransformersEngine`, and tests of what only this engine promises."""

import weakref
from collections import Counter
from pathlib import Path

import pydantic
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.engines.conformance import (
    EngineConformance,
    LogProbConformance,
    NumberConformance,
    QueueConformance,
    RunConformance,
)
from helpers.engines.reference import VOCAB_SIZE, rollout_of, save_tiny_model, tiny_prompt, tiny_request
from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.errors import EngineError
from jackpot.core.types import Version
from jackpot.models import scoring
from jackpot.models.load import eos_token_ids, load_model
from jackpot.rollout.engines.transformers import decoding
from jackpot.rollout.engines.transformers import engine as engine_module
from jackpot.rollout.engines.transformers.decoding import ModelRunner
from jackpot.rollout.engines.transformers.engine import TransformersEngine


def make(folder: Path, dtype: torch.dtype = torch.float32, version: Version = Version(0, 0), **settings):  # noqa: B008
    """Make an engine of the model in this folder."""
    model = load_model(folder, dtype)
    config = TransformersEngineConfig(**settings)
    return TransformersEngine(model, config, eos_token_ids=eos_token_ids(model), version=version)


class TestTransformersEngine(EngineConformance):
    @staticmethod
    def make_engine(folder: Path, version: Version) -> TransformersEngine:
        return make(folder, torch.float32, version, max_num_seqs=64)


class TestTransformersEngineInBfloat16(RunConformance, LogProbConformance):
    reference_dtype = torch.bfloat16
    tolerance = 0.1
    moved_supports = 0.2
    moved_responses = 0.5

    @staticmethod
    def make_engine(folder: Path, version: Version) -> TransformersEngine:
        return make(folder, torch.bfloat16, version)


@pytest.mark.slow
class TestTransformersEngineInFixedShapes(QueueConformance, NumberConformance):
    @staticmethod
    def make_engine(folder: Path, version: Version) -> TransformersEngine:
        return make(folder, torch.float32, version, max_num_seqs=32, enforce_eager=False)


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the shape of the token ids of every forward pass."""
    shapes: list[tuple[int, int]] = []
    forward = torch.nn.Embedding.forward

    def spy(layer: torch.nn.Embedding, ids: Tensor) -> Tensor:
        shapes.append(tuple(ids.shape))
        return forward(layer, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", spy)
    return shapes


def test_rows_that_finish_leave_the_batch(folder, rows_read):
    engine = make(folder)
    rows_read.clear()

    rollouts = engine.generate([tiny_request(f"{i}", 3 + i % 5, seed=i, max_new_tokens=4 + i) for i in range(24)])

    lengths = [len(rollout.token_ids) for rollout in rollouts]
    unfinished_counts = [sum(length > step for length in lengths) for step in range(1, max(lengths))]

    assert rows_read[1:] == [(rows, 1) for rows in unfinished_counts]
    assert len(set(unfinished_counts)) > 5


def test_a_prompt_that_rows_share_is_read_once(folder, rows_read):
    engine = make(folder)
    rows_read.clear()
    engine.generate([tiny_request(f"{i}", 3 + i // 8, seed=i, max_new_tokens=2) for i in range(24)])
    assert rows_read[0] == (3, 5)  # three prompts, the longest of 5 tokens


def test_batches_are_no_larger_than_asked(folder, rows_read):
    engine = make(folder, max_num_seqs=5)
    rows_read.clear()
    engine.generate([tiny_request(f"{i}", 1 + i, seed=i, max_new_tokens=1) for i in range(12)])
    assert [rows for rows, _ in rows_read] == [5, 5, 2]  # of 12 requests


class LiveDistributions(TorchDispatchMode):
    """Counts the most elements of tensors [..., V] alive at once, without the output layer's weight."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.elements, self._live, self._width, self._weight = 0, [], vocab_size, (hidden_size, vocab_size)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._live += [weakref.ref(t) for t in tensors if t.shape[-1:] == (self._width,) and t.shape != self._weight]
        self._live = [live for live in self._live if live() is not None]
        self.elements = max(self.elements, sum(live().numel() for live in self._live))
        return result


def test_the_distributions_of_a_response_are_not_kept(tmp_path):
    engine, tokens = make(save_tiny_model(tmp_path, seed=0, vocab_size=200)), 20
    with LiveDistributions(vocab_size=200, hidden_size=64) as distributions:
        rollout = engine.generate([tiny_request("one", seed=3, max_new_tokens=tokens, num_top_log_probs=1)])[0]
    assert len(rollout.token_ids) == tokens
    assert 200 < distributions.elements <= 10 * 200  # those of one step; a response has 20


def test_scores_need_the_logits_of_a_few_positions_at_once(folder, monkeypatch):
    engine = make(folder)
    row_counts: list[int] = []
    head_logits = scoring.head_logits
    monkeypatch.setattr(scoring, "MAX_LOGITS", 5 * VOCAB_SIZE)
    monkeypatch.setattr(
        scoring, "head_logits", lambda model, hidden: row_counts.append(len(hidden)) or head_logits(model, hidden)
    )

    rollouts = [rollout_of(tiny_prompt(4), tiny_prompt(length).token_ids) for length in (7, 12, 3)]
    all_chunked_scores = engine.score(rollouts, 1.0)

    assert row_counts == [5, 5, 5, 5, 2]  # 7 + 12 + 3 positions, five at a time

    monkeypatch.undo()
    assert all(
        torch.allclose(chunked_scores, whole_scores, atol=1e-6)
        for chunked_scores, whole_scores in zip(all_chunked_scores, engine.score(rollouts, 1.0), strict=True)
    )


def test_scores_of_bounded_batches_come_in_order(folder, rows_read, monkeypatch):
    engine = make(folder)
    monkeypatch.setattr(engine_module, "_SCORE_TOKENS", 60)
    rollouts = [rollout_of(tiny_prompt(1 + i % 4), tiny_prompt(1 + (7 * i) % 40).token_ids) for i in range(20)]
    single_scores = [engine.score([rollout], 1.0)[0] for rollout in rollouts]

    rows_read.clear()
    batch_scores = engine.score(rollouts, 1.0)

    assert all(rows * width <= 60 for rows, width in rows_read)
    assert len(rows_read) < 16  # of 20 rollouts
    assert all(
        torch.allclose(single_score, batch_score, atol=2e-5)
        for single_score, batch_score in zip(single_scores, batch_scores, strict=True)
    )


def test_too_long_a_rollout_or_temperature_zero_is_not_scored(folder):
    engine = make(folder)

    with pytest.raises(EngineError, match="65 tokens"):
        engine.score([rollout_of(tiny_prompt(60), tiny_prompt(5).token_ids)], 1.0)
    with pytest.raises(EngineError, match="temperature"):
        engine.score([rollout_of(tiny_prompt(6), tiny_prompt(5).token_ids)], 0.0)
    assert engine.score([], 1.0) == []


def test_collect_leaves_rows_in_the_middle_and_goes_on_with_them(folder, rows_read):
    engine = make(folder)
    requests = [tiny_request("short", max_new_tokens=1), tiny_request("long", seed=2)]
    single_rollout = engine.generate(requests[1:])[0]

    rows_read.clear()
    engine.submit(requests)

    assert [rollout.uid for rollout in engine.collect(1)] == ["short"]
    assert rows_read == [(1, 5)]  # the prompt of both

    later_rollout = engine.collect(1)[0]
    assert torch.equal(later_rollout.token_ids, single_rollout.token_ids)
    assert rows_read[1:] == [(1, 1)] * (len(later_rollout.token_ids) - 1)


def test_lengths_and_stops_share_a_batch_temperatures_do_not(folder, rows_read):
    engine = make(folder)
    settings = [{"max_new_tokens": 2}, {"max_new_tokens": 3, "stop_token_ids": (4,)}, {"temperature": 0.9}]
    rows_read.clear()
    engine.generate([tiny_request(f"{i}", 3 + i, **sampling) for i, sampling in enumerate(settings)])

    # prompts of 3 and 4 tokens at one temperature, that of 5 at another
    assert [shape for shape in rows_read if shape[1] > 1] == [(2, 4), (1, 5)]


@pytest.mark.parametrize("failing_pass", [1, 6])
def test_a_step_that_fails_loses_no_request(folder, monkeypatch, failing_pass):
    engine = make(folder)
    requests = [tiny_request(f"{i}", seed=i, max_new_tokens=3 + i) for i in range(8)]
    undisturbed_rollouts = engine.generate(requests)
    forward, passes = torch.nn.Embedding.forward, Counter()

    def fail_once(layer: torch.nn.Embedding, ids: Tensor) -> Tensor:
        passes["all"] += 1
        if passes["all"] == failing_pass:
            raise RuntimeError("out of memory")
        return forward(layer, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", fail_once)

    engine.submit(requests)

    with pytest.raises(RuntimeError, match="out of memory"):
        engine.collect(8)

    later_rollouts = sorted(engine.collect(20), key=lambda rollout: int(rollout.uid))
    assert [rollout.uid for rollout in later_rollouts] == [request.uid for request in requests]
    assert all(
        torch.equal(later_rollout.token_ids, undisturbed_rollout.token_ids)
        for later_rollout, undisturbed_rollout in zip(later_rollouts, undisturbed_rollouts, strict=True)
    )


def test_an_error_while_rows_leave_the_cache_loses_no_response(folder, monkeypatch):
    engine = make(folder)
    requests = [tiny_request(f"{i}", seed=i, max_new_tokens=3 + i) for i in range(8)]
    reorder, calls = ModelRunner.reorder, Counter()

    def fail_once(runner: ModelRunner, order: Tensor) -> None:
        calls["all"] += 1
        if calls["all"] == 2:
            raise RuntimeError("out of memory")
        reorder(runner, order)

    monkeypatch.setattr(ModelRunner, "reorder", fail_once)

    engine.submit(requests)

    with pytest.raises(RuntimeError, match="out of memory"):
        engine.collect(8)

    later_rollouts = engine.collect(20)
    assert sorted(rollout.uid for rollout in later_rollouts) == sorted(request.uid for request in requests)


def test_weights_that_give_nan_are_an_error_with_the_version(folder):
    engine = make(folder)
    weights = {name: tensor.detach().clone() for name, tensor in engine._weights.model.named_parameters()}
    nan_weights = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
    engine.update_weights(nan_weights.items(), Version(1, 2))

    with pytest.raises(EngineError, match=r"token 0 of victim at Version\(policy=1, rollout_model=2\)"):
        engine.generate([tiny_request("victim")])


def test_a_tensor_sent_twice_is_refused(folder):
    engine = make(folder)
    weights = list(engine._weights.model.named_parameters())
    with pytest.raises(EngineError, match="1 sent twice"):
        engine.update_weights([*weights, weights[0]], Version(1, 1))


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_a_token_that_the_model_does_not_know_is_refused(folder, token):
    prompt = tiny_prompt(3)
    odd_prompt = prompt.__class__(uid="odd", text="", answer="", token_ids=(*prompt.token_ids, token))
    with pytest.raises(EngineError, match="odd"):
        make(folder).submit([tiny_request("odd", prompt=odd_prompt)])


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_64_bits_is_refused(folder, seed):
    with pytest.raises(EngineError, match="seed of odd"):
        make(folder).submit([tiny_request("odd", seed=seed)])


def test_the_cache_and_the_model_go_when_the_engine_closes(folder):
    engine = make(folder)
    engine.submit([tiny_request("left", max_new_tokens=30)])
    engine.collect(1, timeout=0.0)
    engine.close()

    assert not hasattr(engine, "_weights")
    assert engine._batch is None


def test_settings_that_cannot_work_are_refused(folder):
    with pytest.raises(pydantic.ValidationError, match="max_num_seqs"):
        make(folder, max_num_seqs=0)

    mixed_model = load_model(folder, torch.float32)
    mixed_model.lm_head.bfloat16()
    mixed_model.model.norm.bfloat16()

    with pytest.raises(EngineError, match="one dtype"):
        TransformersEngine(mixed_model, TransformersEngineConfig(), eos_token_ids=[], version=Version(0, 0))

    boundless_model = load_model(folder, torch.float32)
    boundless_model.config.max_position_embeddings = 0
    with pytest.raises(EngineError, match="max_position_embeddings"):
        TransformersEngine(boundless_model, TransformersEngineConfig(), eos_token_ids=[], version=Version(0, 0))


@pytest.mark.parametrize(("limit", "threads"), [(decoding.ONE_THREAD_BELOW, 1), (0, 2)])
def test_a_small_step_takes_one_thread_and_the_others_all(folder, monkeypatch, limit, threads):
    monkeypatch.setattr(decoding, "ONE_THREAD_BELOW", limit)
    engine, forward = make(folder), torch.nn.Embedding.forward
    thread_counts = []

    def spy(layer: torch.nn.Embedding, ids: Tensor) -> Tensor:
        thread_counts.append(torch.get_num_threads())
        if len(thread_counts) == 3:
            raise InterruptedError
        return forward(layer, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", spy)

    old_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(InterruptedError):  # at the third pass, after which the threads are all there again too
            engine.generate([tiny_request("a", max_new_tokens=8, stop_token_ids=())])
        assert thread_counts == [threads] * 3
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(old_threads)
