"""`batch.ahead`: the engine generates the next rollout batches while the learner trains on this one."""

import shutil
import signal
import threading
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from helpers.engines.threaded import ThreadedEngine
from helpers.runs import assert_same_run, metrics, run, run_and_copy, small_config, weights
from jackpot.config.config import Config
from jackpot.core.errors import EngineError
from jackpot.core.types import Version
from jackpot.launch.engines import make_engine
from jackpot.launch.start import launch, train_run
from jackpot.models.load import load_tokenizer
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.rollout.tasks.base import PromptStream
from jackpot.rollout.tasks.registry import make_task
from jackpot.training import guards
from jackpot.training.joint_learner import JointLearner
from jackpot.training.run_folder.checkpoint import load_state
from jackpot.training.run_folder.folder import RunFolder

FEW = ("batch.prompts=2", "batch.group_size=2", "sampling.max_new_tokens=8", "evaluation.problems=2")
SAVED = ("evaluation.every=3", "checkpoint.every=1", "checkpoint.keep=9", "rollouts.every=1")
AHEAD = ("batch.ahead=1", "iterations=3", *FEW, *SAVED)
PATIENCE = 30.0  # seconds until a test gives up


def rollout_rows(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the rows that were trained on, by iteration."""
    files = sorted((folder / "rollouts").glob("*.parquet"))
    return {int(path.stem.removeprefix("iteration-")): pq.read_table(path).to_pylist() for path in files}


def prompt_uids(folder: Path) -> list[str]:
    """Return the prompt of every group, in the order of training."""
    uids = [row["uid"].split("/", 1)[1].split("#")[0] for batch in rollout_rows(folder).values() for row in batch]
    return list(dict.fromkeys(uids))


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of `whole`, a run with text of the iteration before, and `killed`, what a kill leaves of it."""
    home = tmp_path_factory.mktemp("ahead")
    run_and_copy(small_config(*AHEAD), home / "whole", home / "killed", after=2)
    return home


@pytest.mark.parametrize("overrides", [(), ("batch.mini_batch_size=2",)])
def test_all_text_but_the_first_is_one_iteration_old(overrides: tuple[str, ...], homes: Path, tmp_path: Path) -> None:
    folder = tmp_path if overrides else homes / "whole"
    if overrides:
        run(small_config(*AHEAD, *overrides), folder)

    # optimizer steps of the policy after each iteration
    steps_after = [
        0,
        *(load_state(folder / "checkpoints" / f"step-{iteration}")["version"][1] for iteration in range(1, 4)),
    ]
    steps_per_iteration = steps_after[1]
    assert steps_per_iteration == (2 if overrides else 1)
    assert steps_after == [iteration * steps_per_iteration for iteration in range(4)]

    metric_lines = metrics(folder)
    for iteration, batch_rows in rollout_rows(folder).items():
        written_step = steps_after[max(0, iteration - 2)]
        assert {version[1] for row in batch_rows for version in row["versions"]} == {written_step}

        lag = steps_after[iteration - 1] - written_step  # at the first update of the iteration
        assert metric_lines[iteration]["lag/rollout_model_max"] == lag + steps_per_iteration - 1  # at the last one

        is_stale = iteration > 1  # the learner no longer has the weights that sampled the batch
        assert (metric_lines[iteration]["mismatch/engine_gap"] is None) == is_stale


def test_every_prompt_is_trained_on_once_and_in_the_same_order(homes: Path) -> None:
    config, folder = small_config(*AHEAD), homes / "whole"
    stream = PromptStream(make_task(config.task, load_tokenizer("starter:policy")), "train", config.seed)

    assert prompt_uids(folder) == [prompt.uid for prompt in stream.next(6)]
    assert [len(batch_rows) for batch_rows in rollout_rows(folder).values()] == [4] * 3
    for iteration, batch_rows in rollout_rows(folder).items():
        assert all(row["uid"].startswith(f"{iteration}/") for row in batch_rows)

    state = load_state(folder / "checkpoints" / "last")
    assert state["prompts"]["position"] == 6  # nothing is begun that no iteration will train on


def test_dynamic_sampling_has_the_same_weights_in_all_rounds(tmp_path: Path) -> None:
    run(small_config(*AHEAD, "batch.filter_groups.max_num_gen_batches=4", "checkpoint.every=99"), tmp_path)
    metric_lines = metrics(tmp_path)[1:]

    assert max(line["sampling/gen_batches"] for line in metric_lines[1:]) > 1
    assert [line["lag/rollout_model_max"] for line in metric_lines] == [0, 1, 1]


def test_a_tool_may_answer_what_was_begun_ahead(tmp_path: Path) -> None:
    run(
        small_config(*AHEAD, "batch.prompts=4", "sampling.max_new_tokens=24", "checkpoint.every=99", arm="tool"),
        tmp_path,
    )
    metric_lines = metrics(tmp_path)[1:]

    assert [line["lag/rollout_model_max"] for line in metric_lines] == [0, 1, 1]
    assert all(line["response/tool_tokens"] > 0 for line in metric_lines)


def test_a_killed_run_trains_on_what_was_written_ahead(homes: Path) -> None:
    state = load_state(homes / "killed" / "checkpoints" / "last")
    assert state["iteration"] == 2
    assert list(state["ahead"]) == [3]
    assert state["prompts"]["position"] == 6  # those of iteration 3 are drawn

    run(small_config(*AHEAD), homes / "killed")
    assert_same_run(homes / "whole", homes / "killed", ["policy", "rollout_model"])


# Several batches ahead

TINY = (*FEW, *SAVED, "iterations=6")
FAST = (*TINY, "rollout_model.optimizer.learning_rate=1e-2", "evaluation.every=99", "checkpoint.every=99")


def lag_of(iteration: int, ahead: int) -> int:
    """Return how many iterations were finished since the weights that generate the batch.

    Those of the start generate `ahead` batches after the first one; from then on half as many begin together.
    """
    batches_together = (ahead + 1) // 2
    weights_iteration = max(0, batches_together * ((iteration - ahead - 2) // batches_together + 1))
    return iteration - 1 - weights_iteration


def run_and_copy_at(kills: Sequence[int], home: Path, *overrides: str, arm: str | None = None) -> Config:
    """Train in home/whole; home/N is the folder as a kill leaves it after iteration N."""
    config = small_config(*TINY, *overrides, arm=arm)

    def listen(line: dict[str, Any]) -> None:
        if line["iteration"] in kills:
            shutil.copytree(home / "whole", home / f"{line['iteration']}", symlinks=True)

    train_run(config, home / "whole", listen)
    return config


def assert_equal_ends(folder: Path, other_folder: Path) -> None:
    """Check that two runs ended with the same metrics and weights."""
    roles = [path.name for path in (folder / "checkpoints" / "last").iterdir() if path.is_dir()]
    assert_same_run(folder, other_folder, roles)


def check_lags_and_prompts(folder: Path, ahead: int) -> None:
    """Check that six iterations have the lags of `lag_of`, at most `ahead`, and train on each prompt once."""
    lags = [lag_of(iteration, ahead) for iteration in range(1, 7)]
    assert max(lags) == min(ahead, 5)

    metric_lines = metrics(folder)[1:]
    assert [line["lag/iterations"] for line in metric_lines] == lags
    assert [line["lag/iterations_max"] for line in metric_lines] == lags

    for iteration, batch_rows in rollout_rows(folder).items():  # an optimizer step is an iteration
        versions = {version[1] for row in batch_rows for version in row["versions"]}
        assert versions == {iteration - 1 - lags[iteration - 1]}

    trained_uids = prompt_uids(folder)
    state = load_state(folder / "checkpoints" / "last")
    assert len(trained_uids) == 12  # two prompts an iteration
    assert len(set(trained_uids)) == 12
    assert state["prompts"]["position"] == 12


def test_several_batches_ahead_are_within_the_bound(tmp_path: Path) -> None:
    run_and_copy_at([], tmp_path, "batch.ahead=3")
    check_lags_and_prompts(tmp_path / "whole", ahead=3)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [3, 8])
def test_a_kill_after_any_iteration_changes_nothing(ahead: int, tmp_path: Path) -> None:
    config = run_and_copy_at(range(1, 6), tmp_path, f"batch.ahead={ahead}")
    check_lags_and_prompts(tmp_path / "whole", ahead)

    for iteration in range(1, 6):
        run(config, tmp_path / f"{iteration}")
        assert_equal_ends(tmp_path / "whole", tmp_path / f"{iteration}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "arm"),
    [
        (("rollout_model.share=0.5", "batch.filter_groups.max_num_gen_batches=3", "batch.group_size=3"), None),
        (("rollout_model.share=0.0", "engine.draft={tokens: 2}"), None),
        (("sampling.max_new_tokens=24",), "tool"),
        (("batch.mini_batch_size=2", "rollout_model.update=iteration"), None),
        ((), "lora"),
    ],
)
def test_a_kill_changes_nothing_whoever_generates_what(overrides, arm, tmp_path: Path) -> None:
    config = run_and_copy_at([3], tmp_path, "batch.ahead=3", *overrides, arm=arm)

    run(config, tmp_path / "3")

    assert_equal_ends(tmp_path / "whole", tmp_path / "3")
    largest_lag = max(line["lag/iterations_max"] for line in metrics(tmp_path / "whole")[1:])
    assert 0.0 <= largest_lag <= 3.0


@pytest.mark.slow
def test_when_a_run_waits_for_its_batches_changes_nothing(tmp_path: Path) -> None:
    """At a checkpoint and before an evaluation all batches are completed, else each when its turn comes."""
    overrides = ("batch.filter_groups.max_num_gen_batches=3", "batch.group_size=3")
    often_folder, seldom_folder = tmp_path / "often", tmp_path / "seldom"

    run(small_config(*TINY, "batch.ahead=3", *overrides), often_folder)
    run(small_config(*TINY, "batch.ahead=3", *overrides, "checkpoint.every=99", "evaluation.every=99"), seldom_folder)

    often_weights, seldom_weights = weights(often_folder, "policy"), weights(seldom_folder, "policy")
    for name in often_weights:
        assert torch.equal(often_weights[name], seldom_weights[name]), name
    assert rollout_rows(often_folder) == rollout_rows(seldom_folder)


def test_rollouts_are_checked_by_the_weights_that_wrote_them(tmp_path: Path, monkeypatch) -> None:
    """At this learning rate weights of another iteration would be taken for a broken engine."""
    monkeypatch.setattr(guards, "CHECKED_TOKENS", 64)

    run(small_config(*FAST, "batch.ahead=1", "iterations=3"), tmp_path)

    checks = [check for check in RunFolder(tmp_path).read("events.jsonl") if check["event"] == "engine_check"]
    assert [check["iteration"] for check in checks] == [1, 3]  # before and after the first weight update
    assert max(check["mean_gap"] for check in checks) < 1e-6


class DeafEngine(TransformersEngine):
    """Says that it took the new weights, and goes on with the old ones."""

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: Version) -> str:
        old_weights = [(name, parameter.clone()) for name, parameter in self._weights.model.named_parameters()]
        digest = super().update_weights(named_tensors, version)
        super().update_weights(old_weights, version)
        return digest


def test_an_engine_that_kept_its_old_weights_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("jackpot.launch.engines.TransformersEngine", DeafEngine)
    with pytest.raises(EngineError, match="other weights"):
        run(small_config(*FAST, "batch.ahead=1", "iterations=3"), tmp_path)
    assert metrics(tmp_path)[-1]["iteration"] <= 2  # the first batch of new weights is that of iteration 3


# While the learner trains


class Overlap:
    """Lets the engine generate the second batch only when the learner trains, and the learner only when it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trains = threading.Event()
        self.engines = []
        self.counts_while_training = []  # rollouts that the engine finished while the learner was at each iteration
        plain_train = JointLearner.train

        def train_beside_the_engine(learner: JointLearner, *arguments: Any, **keywords: Any) -> Any:
            engine, count_before = self.engines[0], self.engines[0].finished
            self.trains.set()
            if len(self.counts_while_training) < 2:  # nothing is written ahead of the last iteration
                assert engine.wait_for_more(count_before, PATIENCE)
            self.counts_while_training.append(engine.finished - count_before)
            return plain_train(learner, *arguments, **keywords)

        monkeypatch.setattr(JointLearner, "train", train_beside_the_engine)
        monkeypatch.setattr("jackpot.launch.engines.make_engine", self.make)

    def make(self, *arguments: Any) -> ThreadedEngine:
        index = len(self.engines)
        self.engines.append(ThreadedEngine(make_engine(*arguments), lambda: self.hold(index)))
        return self.engines[-1]

    def hold(self, index: int) -> None:
        if index == 0 and self.engines[0].finished >= 2 + 4:  # the first evaluation and the first batch
            assert self.trains.wait(PATIENCE)


def test_the_engine_generates_while_the_learner_trains(homes: Path, tmp_path: Path, monkeypatch) -> None:
    overlap = Overlap(monkeypatch)

    run(small_config(*AHEAD), tmp_path)

    assert len(overlap.counts_while_training) == 3
    assert all(count > 0 for count in overlap.counts_while_training[:2])
    assert_same_run(homes / "whole", tmp_path, ["policy", "rollout_model"])


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_while_a_batch_is_written_ends_the_run_cleanly(signals: int, tmp_path: Path, monkeypatch) -> None:
    """The first one after the iteration, with a checkpoint; the second one at once."""
    overlap = Overlap(monkeypatch)
    plain_train = JointLearner.train

    def train_and_interrupt(learner: JointLearner, *arguments: Any, **keywords: Any) -> Any:
        results = plain_train(learner, *arguments, **keywords)
        if len(overlap.counts_while_training) == 2:
            for _ in range(signals):
                signal.raise_signal(signal.SIGINT)
        return results

    monkeypatch.setattr(JointLearner, "train", train_and_interrupt)

    with closing(launch(small_config(*AHEAD), tmp_path, lambda line: None)) as trainer:
        if signals == 1:
            assert not trainer.train()
            assert trainer.iteration == 2
        else:
            with pytest.raises(KeyboardInterrupt):
                trainer.train()

    assert not any(engine._thread.is_alive() for engine in overlap.engines)

    monkeypatch.undo()
    run(small_config(*AHEAD), tmp_path)
    uids = [row["uid"] for row in chain(*rollout_rows(tmp_path).values())]
    assert len(uids) == 12
    assert len(set(uids)) == 12
    assert len(prompt_uids(tmp_path)) == 6
