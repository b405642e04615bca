"""Decoding in fixed shapes against decoding in those of the batch, and what a CUDA graph needs of a step.

The graphs themselves need a GPU. Here a recording of the step's operators takes their place: it too knows nothing but
the tensors that it was recorded with.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.engines.architectures import CHANGES, CONTEXT, make_engine, make_model, make_requests
from helpers.waits import waits
from jackpot.core.types import Rollout
from jackpot.rollout.engines.transformers import static_decoding
from jackpot.rollout.engines.transformers.static_decoding import STEPS, GraphCapture, StaticBatch, Step

LENGTHS = [5, 9, 2, 9, 30]  # of prompts
STATIC, GROWING = "static", "growing"


def generate(name: str, num_new: int = 24, lengths: list[int] = LENGTHS, **settings: Any) -> list[Rollout]:
    """Generate with a new engine of the model of this name, in float64."""
    return make_engine(make_model(name).double(), **settings).generate(make_requests(lengths, num_new=num_new))


def assert_equal_rollouts(rollouts: list[Rollout], expected_rollouts: list[Rollout]) -> None:
    """Check tokens to the bit and log-probs up to rounding."""
    for rollout, expected_rollout in zip(rollouts, expected_rollouts, strict=True):
        assert (rollout.uid, rollout.finish) == (expected_rollout.uid, expected_rollout.finish)
        assert torch.equal(rollout.token_ids, expected_rollout.token_ids)
        assert torch.equal(rollout.top_ids, expected_rollout.top_ids)
        assert torch.allclose(rollout.rollout_log_probs, expected_rollout.rollout_log_probs, rtol=0.0, atol=1e-6)
        assert torch.allclose(rollout.top_log_probs, expected_rollout.top_log_probs, rtol=0.0, atol=1e-6)


# Gemma 3 and Qwen 3 mix windows with full attention, GPT-2 has as many positions as the context.
@pytest.mark.parametrize("name", ["qwen3 with windows", "mistral", "gemma3_text", "gpt2"])
def test_fixed_shapes_write_what_growing_ones_write(name: str) -> None:
    stops = {"eos_token_ids": [1, 8, 9]}
    expected_rollouts = generate(name, **stops)

    assert "stop" in {rollout.finish for rollout in expected_rollouts}
    assert len({len(rollout.token_ids) for rollout in expected_rollouts}) > 5

    assert_equal_rollouts(generate(name, **stops, enforce_eager=False), expected_rollouts)


@pytest.mark.parametrize("sampling", [{"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}], ids=str)
def test_fixed_shapes_draw_from_the_same_distribution(sampling: dict[str, float]) -> None:
    requests = [
        replace(request, sampling=request.sampling.model_copy(update=sampling))
        for request in make_requests([5, 9], num_new=16)
    ]
    engines = [make_engine(make_model("qwen3").double(), enforce_eager=eager) for eager in (True, False)]
    expected_rollouts, rollouts = (engine.generate(requests) for engine in engines)

    assert_equal_rollouts(rollouts, expected_rollouts)


def test_rows_may_write_to_the_end_of_the_context() -> None:
    """The others, which ended there, compute on behind it."""
    lengths, settings = [CONTEXT - 10, 3], {"eos_token_ids": [], "num_new": 40}
    expected_rollouts = generate("gpt2", lengths=lengths, **settings)
    assert {len(rollout.token_ids) for rollout in expected_rollouts} >= {10, 40}
    assert_equal_rollouts(generate("gpt2", lengths=lengths, **settings, enforce_eager=False), expected_rollouts)


class Recording(TorchDispatchMode):
    """Keeps the operators of a step with their tensors, and runs them again on these, as a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            for old_output, new_output in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old_output, Tensor) and old_output.data_ptr() != new_output.data_ptr():
                    old_output.copy_(new_output)


class Recordings(GraphCapture):
    """Records steps in place of capturing them."""

    made = replayed = 0

    def __call__(self, step: Step) -> Step:
        batch: StaticBatch = step.__self__
        caches = [states for layer in batch._cache.layers for states in (layer.keys, layer.values)]
        written_tensors = [batch._column, batch._last_tokens, batch._draws, *caches]
        old_values, recording = [tensor.clone() for tensor in written_tensors], Recording()
        with recording:
            step()
        for tensor, old_value in zip(written_tensors, old_values, strict=True):  # a capture runs nothing
            tensor.copy_(old_value)
        self.made += 1

        def replay() -> None:
            self.replayed += 1
            recording.replay()

        return replay


def test_a_step_keeps_operators_and_memory_until_rows_move() -> None:
    name = "gemma3_text"
    expected_rollouts = generate(name, eos_token_ids=[])
    engine = make_engine(make_model(name).double(), enforce_eager=False, eos_token_ids=[])
    engine._capture = recordings = Recordings("cpu", [])

    assert_equal_rollouts(engine.generate(make_requests(LENGTHS, num_new=24)), expected_rollouts)
    assert recordings.made < 5
    assert recordings.replayed > 15


def test_the_host_waits_once_in_several_tokens() -> None:
    model = make_model("llama")
    engine = make_engine(model, enforce_eager=False, eos_token_ids=[])
    engine.submit(make_requests([5, 9], num_new=60))
    engine.collect(0)
    for _ in range(2):
        engine._step()

    with waits(
        on_host=[engine._batch._rows, engine._batch._slots, engine._batch._stops, engine._batch._limits]
    ) as wait_list:
        old_count = engine._batch._num_generated
        engine._step()

    assert engine._batch._num_generated == old_count + STEPS
    assert len(wait_list) == 1

    engine.collect(100)


def test_a_growing_step_waits_for_its_draws_alone() -> None:
    engine = make_engine(make_model("llama"), eos_token_ids=[])
    engine.submit(make_requests([5, 9], num_new=60))
    engine.collect(0)
    engine._step()

    with waits(on_host=[engine._batch._rows, engine._batch._stops, engine._batch._limits]) as wait_list:
        engine._step()

    assert engine._batch._num_generated == 2, wait_list  # one a step
    assert len(wait_list) == 1, wait_list

    engine.collect(100)


def test_memory_follows_the_rows_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_decoding, "_FEW_ROWS", 2)
    shapes, original_move = [], StaticBatch._move

    def spy(batch: StaticBatch) -> None:
        original_move(batch)
        shapes.append((batch._cache.layers[0].keys.shape[0], batch._cache.layers[0].keys.shape[2]))

    monkeypatch.setattr(StaticBatch, "_move", spy)

    assert_equal_rollouts(
        generate("llama", num_new=80, lengths=[5, 9, 30], enforce_eager=False),
        generate("llama", num_new=80, lengths=[5, 9, 30]),
    )

    rows, lengths = zip(*shapes, strict=True)
    assert list(rows) == sorted(rows, reverse=True)
    assert list(lengths) == sorted(lengths)
    assert len(set(rows)) > 2
    assert lengths[0] == 96
    assert lengths[-1] > 96


def test_an_error_in_a_step_loses_no_request() -> None:
    engine = make_engine(make_model("llama").double(), enforce_eager=False)
    engine.submit(make_requests(LENGTHS, num_new=24))
    engine.collect(0, timeout=0)
    while not (finished_rollouts := engine.collect(1, timeout=0)):
        pass

    original_take, calls = StaticBatch._take, []

    def fail(batch: StaticBatch, records: Tensor) -> list[Rollout]:
        calls.append(original_take(batch, records))
        if calls[-1]:
            raise InterruptedError
        return calls[-1]

    StaticBatch._take = fail
    try:
        with pytest.raises(InterruptedError):
            engine.collect(100)
    finally:
        StaticBatch._take = original_take

    rollouts_by_uid = {rollout.uid: rollout for rollout in [*finished_rollouts, *engine.collect(100)]}
    expected_rollouts = generate("llama")

    assert_equal_rollouts([rollouts_by_uid[rollout.uid] for rollout in expected_rollouts], expected_rollouts)


@pytest.mark.parametrize(
    ("name", "settings", "event"),
    [
        ("llama", {}, None),
        ("llama", {"enforce_eager": True}, None),
        ("llama", {"enforce_eager": False}, (STATIC, None)),
        ("llama", {"enforce_eager": False, "attn_implementation": "eager"}, (GROWING, "LlamaForCausalLM")),
        ("llama", {"enforce_eager": False, "kv_cache_dtype": "fp8"}, (GROWING, "LlamaForCausalLM")),
        ("gemma2", {"enforce_eager": False}, (GROWING, "Gemma2ForCausalLM")),
        ("lfm2", {"enforce_eager": False}, (GROWING, "Lfm2ForCausalLM")),
    ],
)
def test_an_event_says_how_the_engine_decodes(name: str, settings: dict, event: tuple | None) -> None:
    assert name in CHANGES

    engine = make_engine(make_model(name), **settings)
    events = engine.take_events()
    assert [(entry["event"], entry["shapes"], entry["cuda_graphs"]) for entry in events] == (
        [] if event is None else [("decoding", event[0], False)]
    )
    if event:
        assert (event[1] or "") in events[0].get("why", "")
    assert engine.take_events() == []


def test_a_step_that_cannot_be_captured_runs_as_it_is() -> None:
    events, calls = [], []
    capture = GraphCapture("cuda", events)

    def step() -> None:
        calls.append(1)
        raise RuntimeError("it waits\nfor the device")

    assert capture(step) is step
    assert capture(step) is step

    try_event, failure_event = events
    assert try_event["cuda_graphs"]
    assert not failure_event["cuda_graphs"]
    assert failure_event["why"]
    assert "\n" not in failure_event["why"]


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_allocator_is_told_of_a_failed_capture(has_ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    end_calls, pool = [], (0, 7)

    def step() -> None:
        raise RuntimeError("it waits for the device")

    def end(device: int, ended_pool: tuple[int, int]) -> None:
        end_calls.append((device, ended_pool))
        if has_ended:  # by torch itself
            raise RuntimeError("not currently recording")

    names = {"CUDAGraph": object, "graph_pool_handle": lambda: pool, "current_device": lambda: 3}
    names |= {"current_stream": lambda: None, "stream": nullcontext, "graph": lambda *_, **__: nullcontext()}
    for name, replacement in names.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)

    events = []
    capture = GraphCapture("cuda", events)

    assert capture(step) is step
    assert end_calls == [(3, pool)]
    assert events[-1]["why"] == "it waits for the device"
