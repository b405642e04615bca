"""`batch.ahead`: the engine generates the next rollout batch while the learner trains on this one."""

import json
import shutil
import signal
import threading
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from helpers.engines.threaded import ThreadedEngine
from helpers.runs import FinishedRuns, metrics, run, small_config, weights
from jackpot.launch import local
from jackpot.launch.engines import make_engine
from jackpot.launch.local import launch
from jackpot.training.joint_learner import JointLearner
from jackpot.training.run.checkpoint import load_state

AHEAD = ("batch.ahead=1", "rollouts.every=1")
PATIENCE = 30.0  # seconds until a test gives up


def rows(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What was trained on, by iteration."""
    files = sorted((folder / "rollouts").glob("*.parquet"))
    return {int(path.stem.removeprefix("iteration-")): pq.read_table(path).to_pylist() for path in files}


def prompts(folder: Path) -> list[str]:
    """Of every group, in the order of training."""
    uids = [row["uid"].split("/", 1)[1].split("#")[0] for batch in rows(folder).values() for row in batch]
    return list(dict.fromkeys(uids))


@pytest.fixture(scope="module")
def whole(finished_run: FinishedRuns) -> tuple[Path, Path]:
    """A run with the text of the iteration before, and its folder as a kill after iteration 3 leaves it."""
    return finished_run(*AHEAD), finished_run(*AHEAD, kill_after=3)


@pytest.mark.parametrize("overrides", [(), ("batch.mini_batch_size=8",), ("rollout_model.update=iteration",)])
def test_all_text_but_the_first_is_one_iteration_old(overrides: tuple[str, ...], tmp_path: Path) -> None:
    run(small_config(*AHEAD, *overrides, "checkpoint.every=1", "checkpoint.keep=9"), tmp_path)
    after = [0, *(load_state(tmp_path / "checkpoints" / f"step-{n}")["version"][1] for n in range(1, 5))]
    lines, steps = metrics(tmp_path), after[1]
    assert steps == (1 if overrides != ("batch.mini_batch_size=8",) else 2) and after == [n * steps for n in range(5)]
    for iteration, batch in rows(tmp_path).items():
        written = after[max(0, iteration - 2)]
        assert {version[1] for row in batch for version in row["versions"]} == {written}
        lag = after[iteration - 1] - written  # at the first update; the last one of the iteration is steps - 1 later
        assert lines[iteration]["lag/rollout_model_max"] == lag + steps - 1
        is_stale = iteration > 1  # the learner no longer has the weights that sampled the batch
        assert (lines[iteration]["mismatch/engine_gap"] is None) == is_stale


def test_every_prompt_is_trained_on_once_and_in_the_same_order(whole, tmp_path: Path) -> None:
    ahead, _ = whole
    run(small_config("rollouts.every=1"), tmp_path)
    assert prompts(ahead) == prompts(tmp_path)
    assert [len(batch) for batch in rows(ahead).values()] == [16] * 4
    assert all(row["uid"].startswith(f"{iteration}/") for iteration, batch in rows(ahead).items() for row in batch)
    state = load_state(ahead / "checkpoints" / "last")
    assert state["prompts"]["position"] == 16  # nothing is begun that no iteration will train on


def test_dynamic_sampling_writes_its_further_rounds_with_the_same_weights(tmp_path: Path) -> None:
    run(small_config(*AHEAD, "batch.filter_groups.max_num_gen_batches=4"), tmp_path)
    lines = metrics(tmp_path)[1:]
    assert max(line["sampling/gen_batches"] for line in lines[1:]) > 1
    assert [line["lag/rollout_model_max"] for line in lines] == [0, 1, 1, 1]


def test_a_tool_may_answer_what_was_begun_ahead(tmp_path: Path) -> None:
    run(small_config(*AHEAD, arm="tool"), tmp_path)
    lines = metrics(tmp_path)[1:]
    assert [line["lag/rollout_model_max"] for line in lines] == [0, 1, 1, 1]
    assert all(line["response/tool_tokens"] > 0 for line in lines)


def test_a_checkpoint_neither_loses_nor_repeats_what_was_written_ahead(whole, tmp_path: Path) -> None:
    ahead, killed = whole
    folder = shutil.copytree(killed, tmp_path / "killed", symlinks=True)
    assert load_state(folder / "checkpoints" / "last")["prompts"]["position"] == 8  # that of iteration 2
    run(small_config(*AHEAD), folder)
    assert prompts(folder) == prompts(ahead)
    lags = [line["lag/rollout_model_max"] for line in metrics(folder)[1:]]
    assert lags == [0, 1, 0, 1]  # iteration 3 is generated again, with the weights of the checkpoint


def test_only_text_of_the_weights_in_training_is_checked_against_them(tmp_path: Path) -> None:
    """At this learning rate a model that has moved on would be taken for a broken engine."""
    run(small_config(*AHEAD, "rollout_model.optimizer.learning_rate=1e-2", "iterations=3"), tmp_path)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["iteration"] for event in events if event["event"] == "engine_check"] == [1]


class Overlap:
    """Lets the engine generate the second batch only when the learner trains, and the learner only when it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trains, self.engines, self.during = threading.Event(), [], []
        train = JointLearner.train

        def watched(learner: JointLearner, *arguments: Any, **named: Any) -> Any:
            engine, written = self.engines[0], self.engines[0].finished
            self.trains.set()
            if len(self.during) < 3:  # nothing is written ahead of the last iteration
                assert engine.wait_for_more(written, PATIENCE)
            self.during.append(engine.finished - written)
            return train(learner, *arguments, **named)

        monkeypatch.setattr(JointLearner, "train", watched)
        monkeypatch.setattr(local, "make_engine", self.make)

    def make(self, *arguments: Any) -> ThreadedEngine:
        number = len(self.engines)
        self.engines.append(ThreadedEngine(make_engine(*arguments), lambda: self.hold(number)))
        return self.engines[-1]

    def hold(self, number: int) -> None:
        if number == 0 and self.engines[0].finished >= 8 + 16:  # the first evaluation and the first batch
            assert self.trains.wait(PATIENCE)


def test_the_engine_writes_the_next_batch_while_the_learner_trains(whole, tmp_path: Path, monkeypatch) -> None:
    overlap = Overlap(monkeypatch)
    run(small_config(*AHEAD), tmp_path)
    assert len(overlap.during) == 4 and all(count > 0 for count in overlap.during[:3])
    asked, _ = whole
    for role in ("policy", "rollout_model"):
        mine, other = weights(tmp_path, role), weights(asked, role)
        assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert metrics(tmp_path) == metrics(asked)


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_while_a_batch_is_being_written_ends_the_run_cleanly(signals: int, tmp_path: Path, monkeypatch) -> None:
    """The first one after the iteration, with a checkpoint; the second one at once."""
    overlap = Overlap(monkeypatch)
    train = JointLearner.train

    def interrupted(learner: JointLearner, *arguments: Any, **named: Any) -> Any:
        results = train(learner, *arguments, **named)
        if len(overlap.during) == 3:
            for _ in range(signals):
                signal.raise_signal(signal.SIGINT)
        return results

    monkeypatch.setattr(JointLearner, "train", interrupted)
    with closing(launch(small_config(*AHEAD), tmp_path, lambda line: None)) as trainer:
        if signals == 1:
            assert not trainer.train() and trainer.iteration == 3
        else:
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
    assert not any(engine._thread.is_alive() for engine in overlap.engines)
    monkeypatch.undo()
    run(small_config(*AHEAD), tmp_path)
    uids = [row["uid"] for row in chain(*rows(tmp_path).values())]
    assert len(uids) == len(set(uids)) == 64 and len(prompts(tmp_path)) == 16
