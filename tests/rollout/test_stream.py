"""Scoring and training while the engine generates in the background. A real engine on a thread of its own."""

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


def threaded(config, path="starter:rollout_model", before_step: Callable[[], None] = lambda: None) -> ThreadedEngine:
    return ThreadedEngine(make_engine(config.engine, path, pick_device(config.device), Version(0, 0)), before_step)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs get engines that write by themselves."""
    monkeypatch.setattr(
        "jackpot.launch.engines.make_engine", lambda *arguments: ThreadedEngine(make_engine(*arguments))
    )


class Watched(Arithmetic):
    """Notes at each score how many rollouts had been written. The first one waits until there are more."""

    def __init__(self, tokenizer, settings) -> None:
        super().__init__(tokenizer, settings)
        self.called = threading.Event()
        self.engine: ThreadedEngine | None = None
        self.written: list[int] = []
        self.seconds = 0.0

    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        started = time.perf_counter()
        self.written.append(self.engine.finished)
        if not self.called.is_set():
            self.called.set()
            assert self.engine.wait_for_more(self.written[0], PATIENCE)
        score = super().score(prompt, response, finished)
        self.seconds += time.perf_counter() - started
        return score


@pytest.fixture
def watched() -> Iterator[tuple[Watched, Sampler, Clock]]:
    """A sampler of 4 groups of 4, whose engine goes on to the second group while the first response is scored."""
    config = small_config(ONE_GROUP)
    task, clock = Watched(TOKENIZER, config.task), Clock()

    def hold() -> None:
        if engine.finished >= 4:
            assert task.called.wait(PATIENCE)

    with closing(threaded(config, before_step=hold)) as engine:
        task.engine = engine
        prompts = PromptStream(task, "train", 0)
        engines, costs = {"rollout_model": engine}, {"rollout_model": COST}
        yield task, Sampler(config, engines, task, TOKENIZER, costs, prompts, clock, lambda number, event: None), clock


def test_a_group_is_scored_while_the_engine_generates_the_others(watched) -> None:
    task, sampler, _ = watched
    batch = sampler.next_batch(1)
    assert len(batch.scored) == len(task.written) == 16
    assert task.written[0] == 4 < task.written[1] <= 16  # one group was there, and more came while it was scored


def test_waiting_and_scoring_are_timed_apart(watched) -> None:
    task, sampler, clock = watched
    started = time.perf_counter()
    sampler.next_batch(1)
    elapsed = time.perf_counter() - started
    seconds = {phase: spent.wall for phase, spent in clock.take().items()}
    assert task.seconds <= seconds["score"] and seconds["rollout"] > 0.0
    assert seconds["score"] + seconds["rollout"] <= elapsed


def test_responses_come_as_they_end_without_being_asked_for() -> None:
    config = small_config(ONE_GROUP)
    task = make_task(config.task, TOKENIZER)
    requests = [
        Request(uid=f"{n}", prompt=task.prompt("train", n // 4), seed=n, sampling=config.sampling) for n in range(16)
    ]
    uids = [request.uid for request in requests]
    with closing(threaded(config)) as engine:
        coming = stream_rollouts(engine, task, TOKENIZER, requests)
        assert engine.wait_for_more(15, PATIENCE)  # all are written, and not one was asked for
        came = [rollout.uid for rollout in coming]
        assert came != uids and sorted(came, key=int) == uids
        assert [rollout.uid for rollout in generate_rollouts(engine, task, TOKENIZER, requests)] == uids


def test_a_run_does_not_depend_on_how_its_rollouts_come_in(tmp_path: Path, threads: None) -> None:
    """By themselves, or in the trainer's own thread."""
    config = small_config(ONE_GROUP, "batch.filter_groups.max_num_gen_batches=2", *SHORT)
    run(config, tmp_path / "threaded")
    with pytest.MonkeyPatch.context() as undone:
        undone.setattr("jackpot.launch.engines.make_engine", make_engine)
        run(config, tmp_path / "asked")
    assert_same_run(tmp_path / "asked", tmp_path / "threaded", ["policy", "rollout_model"])
