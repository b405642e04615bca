"""Scoring and training while the engine generates in the background: a real engine on a thread of its own."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from helpers.engines.threaded import ThreadedEngine
from helpers.runs import COST, assert_same_run, run, small_config
from jackpot.core.clock import Clock
from jackpot.core.types import Prompt, Score, Version
from jackpot.launch.engines import make_engine
from jackpot.models.device import pick_device
from jackpot.models.load import load_tokenizer
from jackpot.rollout.engines.base import Request
from jackpot.rollout.multi_turn import generate_rollouts, stream_rollouts
from jackpot.rollout.sampler import Sampler
from jackpot.rollout.tasks.arithmetic import Arithmetic
from jackpot.rollout.tasks.base import PromptStream
from jackpot.rollout.tasks.registry import make_task

PATIENCE = 30.0  # seconds until a test gives up
ONE_GROUP = "engine.max_num_seqs=4"  # decoded at once: the groups end one after the other
SHORT = ("iterations=2", "batch.prompts=2", "sampling.max_new_tokens=12", "evaluation.problems=2")
TOKENIZER = load_tokenizer("starter:policy")


def threaded_engine(
    config, path="starter:rollout_model", before_step: Callable[[], None] = lambda: None
) -> ThreadedEngine:
    """Return an engine that generates on a thread of its own."""
    return ThreadedEngine(make_engine(config.engine, path, pick_device(config.device), Version(0, 0)), before_step)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs get engines that write by themselves."""
    monkeypatch.setattr(
        "jackpot.launch.engines.make_engine", lambda *arguments: ThreadedEngine(make_engine(*arguments))
    )


class WatchedTask(Arithmetic):
    """Notes at each score how many rollouts had been written. The first one waits until there are more."""

    def __init__(self, tokenizer, settings) -> None:
        super().__init__(tokenizer, settings)
        self.called = threading.Event()
        self.engine: ThreadedEngine | None = None
        self.written: list[int] = []
        self.seconds = 0.0

    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        start_time = time.perf_counter()
        self.written.append(self.engine.finished)
        if not self.called.is_set():
            self.called.set()
            assert self.engine.wait_for_more(self.written[0], PATIENCE)
        score = super().score(prompt, response, finished)
        self.seconds += time.perf_counter() - start_time
        return score


@pytest.fixture
def watched_sampling() -> Iterator[tuple[WatchedTask, Sampler, Clock]]:
    """Yield a task, its sampler of 4 groups of 4, and their clock.

    The engine goes on to the second group while the first response is scored.
    """
    config = small_config(ONE_GROUP)
    task, clock = WatchedTask(TOKENIZER, config.task), Clock()

    def hold() -> None:
        if engine.finished >= 4:
            assert task.called.wait(PATIENCE)

    with closing(threaded_engine(config, before_step=hold)) as engine:
        task.engine = engine
        prompts = PromptStream(task, "train", 0)
        engines, costs = {"rollout_model": engine}, {"rollout_model": COST}
        sampler = Sampler(config, engines, task, TOKENIZER, costs, prompts, clock, lambda iteration, event: None)
        yield task, sampler, clock


def test_a_group_is_scored_while_the_engine_generates_the_others(watched_sampling) -> None:
    task, sampler, _ = watched_sampling
    batch = sampler.next_batch(1)

    assert len(batch.scored) == 16
    assert len(task.written) == 16
    assert task.written[0] == 4  # one group was there
    assert 4 < task.written[1] <= 16  # and more came while it was scored


def test_waiting_and_scoring_are_timed_apart(watched_sampling) -> None:
    task, sampler, clock = watched_sampling

    start_time = time.perf_counter()
    sampler.next_batch(1)
    elapsed_seconds = time.perf_counter() - start_time

    seconds = {phase: duration.wall for phase, duration in clock.take().items()}
    assert task.seconds <= seconds["score"]
    assert seconds["rollout"] > 0.0
    assert seconds["score"] + seconds["rollout"] <= elapsed_seconds


def test_responses_come_as_they_end_without_being_asked_for() -> None:
    config = small_config(ONE_GROUP)
    task = make_task(config.task, TOKENIZER)
    requests = [
        Request(uid=f"{index}", prompt=task.prompt("train", index // 4), seed=index, sampling=config.sampling)
        for index in range(16)
    ]
    uids = [request.uid for request in requests]

    with closing(threaded_engine(config)) as engine:
        stream = stream_rollouts(engine, task, TOKENIZER, requests)
        assert engine.wait_for_more(15, PATIENCE)  # all are written, and not one was asked for
        arrival_uids = [rollout.uid for rollout in stream]
        assert arrival_uids != uids
        assert sorted(arrival_uids, key=int) == uids
        assert [rollout.uid for rollout in generate_rollouts(engine, task, TOKENIZER, requests)] == uids


def test_a_run_does_not_depend_on_how_its_rollouts_come_in(tmp_path: Path, threads: None) -> None:
    """By themselves, or in the trainer's own thread."""
    config = small_config(ONE_GROUP, "batch.filter_groups.max_num_gen_batches=2", *SHORT)

    run(config, tmp_path / "threaded")

    with pytest.MonkeyPatch.context() as plain_engine_patch:
        plain_engine_patch.setattr("jackpot.launch.engines.make_engine", make_engine)
        run(config, tmp_path / "asked")

    assert_same_run(tmp_path / "asked", tmp_path / "threaded", ["policy", "rollout_model"])
