"""A whole run: the files, metrics and events that it leaves, and what becomes of it when something goes wrong."""

import gc
import json
import math
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.runs import SHORT, FinishedRuns, metrics, run, small_config
from jackpot.config.recipes import load_recipe
from jackpot.core.digest import weights_digest
from jackpot.core.errors import EngineError
from jackpot.core.types import Prompt, Rollout, Score
from jackpot.launch import build, start
from jackpot.launch.engines import make_engine
from jackpot.models.load import load_tokenizer
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.rollout.tasks.arithmetic import Arithmetic
from jackpot.rollout.tasks.base import PromptStream, Task
from jackpot.rollout.tasks.registry import make_task
from jackpot.training.run_folder.folder import RunFolder

ARMS = set(load_recipe("quickstart")["arms"]) - {"obrs", "tool", "on_policy", "annealed"}  # which other tests train
ONE_ITERATION = (SHORT, "iterations=1", "evaluation.problems=2", "batch.prompts=2")
REQUIRED = {
    "iteration",
    "reward/mean",
    "obrs/acceptance",
    "obrs/kappa",
    "obrs/z",
    "obrs/acceptance_minus_z",
    "obrs/acceptance_minus_z_stderr",
    "obrs/kappa_z_above_1",
    "obrs/z_bound_width",
    "mismatch/kl_rollout_policy",
    "mismatch/ratio",
    "mismatch/ratio_stderr",
    "mismatch/engine_gap_max",
    "policy/grad_norm",
    "rollout_model/grad_norm",
    "rollout_model/distill_kl",
    "speed/tokens_per_second",
}


@pytest.fixture(scope="module")
def plain_run(finished_run: FinishedRuns) -> Path:
    """A run without any setting of its own."""
    return finished_run()


@pytest.mark.parametrize("arm", sorted(ARMS))
def test_every_arm_of_the_quickstart_runs(arm: str, tmp_path: Path) -> None:
    lines = run(small_config(*ONE_ITERATION, arm=arm), tmp_path)

    assert [line["iteration"] for line in lines] == [0, 1]
    assert all(line["eval/policy_accuracy"] is not None for line in lines)
    assert math.isfinite(lines[1]["policy/grad_norm"])


def test_metrics_have_the_documented_keys(plain_run: Path) -> None:
    lines = RunFolder(plain_run).read("metrics.jsonl")
    assert not REQUIRED - lines[1].keys()
    assert {"eval/policy_accuracy", "eval/rollout_model_accuracy"} <= lines[2].keys()
    assert list((plain_run / "tensorboard").iterdir())

    for line in (plain_run / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_evaluations_and_rollouts_are_due_as_the_settings_say(tmp_path: Path) -> None:
    overrides = ("iterations=4", "evaluation.every=3", "rollouts.every=2", "batch.prompts=1")
    lines = run(small_config(*ONE_ITERATION, *overrides), tmp_path)

    assert [line["iteration"] for line in lines if "eval/policy_accuracy" in line] == [0, 3, 4]

    file_names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert file_names == [f"iteration-{iteration:06d}.parquet" for iteration in (1, 2, 4)]


def test_the_engine_and_training_agree_on_what_was_sampled(plain_run: Path) -> None:
    """The rollout model re-scored in training is the distribution that the engine sampled from, at every iteration."""
    gaps = [line["mismatch/engine_gap_max"] for line in metrics(plain_run)[1:]]
    assert len(gaps) == 4
    assert max(gaps) < 1e-4


def test_saved_rollouts_hold_every_token_of_both_sides(plain_run: Path) -> None:
    table = pq.read_table(plain_run / "rollouts" / "iteration-000001.parquet")
    assert table.schema.metadata[b"schema_version"] == b"1"

    rows = table.to_pylist()
    assert len(rows) == 16
    assert len({row["uid"] for row in rows}) == 16

    per_token = (
        "tokens",
        "rollout_log_probs",
        "old_log_probs",
        "accept_mask",
        "weights",
        "z",
        "acceptance",
        "versions",
    )
    for row in rows:
        length = len(row["token_ids"])
        assert all(len(row[name]) == length for name in per_token)
        assert all(len(top) == 20 for top in row["rollout_top_ids"] + row["policy_top_ids"])
        assert row["versions"] == [[0, 0]] * length
        assert row["response"] == "".join(token for token in row["tokens"] if not token.startswith("<"))


def test_a_tool_task_trains_on_sampled_tokens_alone(tmp_path: Path) -> None:
    lines = run(small_config("iterations=1", arm="tool"), tmp_path)
    rows = pq.read_table(tmp_path / "rollouts" / "iteration-000001.parquet").to_pylist()
    sampled_masks = [row["sampled_mask"] for row in rows]

    assert lines[1]["response/tokens"] == sum(map(len, sampled_masks)) / len(rows)
    assert lines[1]["response/tool_tokens"] == sum(mask.count(False) for mask in sampled_masks) / len(rows)
    assert lines[1]["response/tool_tokens"] > 0
    assert lines[1]["policy/grad_norm"] > 0
    assert lines[1]["rollout_model/grad_norm"] > 0
    assert all(line["mismatch/engine_gap_max"] < 1e-4 for line in lines[1:])
    for row in rows:
        assert row["response"] == "".join(token for token in row["tokens"] if not token.startswith("<"))
        for name in ("accept_mask", "weights", "z", "acceptance", "old_log_probs", "rollout_log_probs"):
            pairs = zip(row[name], row["sampled_mask"], strict=True)
            assert all(value == 0 for value, is_sampled in pairs if not is_sampled), name


def test_a_checkpoint_loads_with_plain_transformers(plain_run: Path) -> None:
    for role in ("policy", "rollout_model"):
        folder = plain_run / "checkpoints" / "last" / role
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model(**tokenizer("1+2=", return_tensors="pt")).logits.isfinite().all()


def test_aborted_rollouts_are_counted_and_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collect = TransformersEngine.collect

    def abort_some(engine, n, timeout=None, uids=None):
        rollouts = collect(engine, n, timeout, uids)
        aborted_rollouts = [replace(rollout, finish="aborted") for rollout in rollouts if rollout.uid.endswith("#0")]
        return aborted_rollouts + [rollout for rollout in rollouts if not rollout.uid.endswith("#0")]

    monkeypatch.setattr(TransformersEngine, "collect", abort_some)
    line = run(small_config(*ONE_ITERATION), tmp_path)[1]

    assert line["response/aborted"] == 0.25  # one of four for each of two prompts

    events = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("aborted_rollout") == 2

    rows = pq.read_table(tmp_path / "rollouts" / "iteration-000001.parquet").to_pylist()
    assert len(rows) == 6
    assert not any(row["uid"].endswith("#0") for row in rows)


@pytest.mark.parametrize("iteration", [1, 2, 3])
def test_a_run_goes_on_after_only_aborted_rollouts(
    iteration: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first iteration and the last one are those whose rollouts are saved, and whose columns are traced."""
    collect = TransformersEngine.collect

    def abort(engine, n, timeout=None, uids=None):
        rollouts = collect(engine, n, timeout, uids)
        return [
            replace(rollout, finish="aborted") if rollout.uid.startswith(f"{iteration}/") else rollout
            for rollout in rollouts
        ]

    monkeypatch.setattr(TransformersEngine, "collect", abort)
    lines = run(small_config(*ONE_ITERATION, "iterations=3", "rollouts.every=100"), tmp_path)

    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]
    assert lines[iteration]["response/aborted"] == 1.0

    expected_names = {f"iteration-{saved_iteration:06d}.parquet" for saved_iteration in {1, 3} - {iteration}}
    assert {path.name for path in (tmp_path / "rollouts").iterdir()} == expected_names
    assert (tmp_path / "checkpoints" / "step-3").exists()


@pytest.mark.parametrize("accident", ["one weight is another", "the last tensor is never asked for"])
def test_other_weights_than_were_sent_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accident: str
) -> None:
    update_weights = TransformersEngine.update_weights

    def lose_something(engine, named_tensors, version):
        if accident == "one weight is another":
            tensors = [(name, tensor.clone()) for name, tensor in named_tensors]
            tensors[3][1].view(-1)[5] += 1e-3
            return update_weights(engine, tensors, version)
        count = len(list(engine._weights.model.named_parameters()))
        return weights_digest(islice(named_tensors, count - 1), engine.capabilities.dtype)  # of what it looked at

    monkeypatch.setattr(TransformersEngine, "update_weights", lose_something)
    with pytest.raises(EngineError, match=r"the learner sent .* unknown weights"):
        run(small_config("iterations=1"), tmp_path)

    events = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["iteration"] for event in events if event["event"] == "stopped"] == [1]


@pytest.mark.parametrize("failing_step", ["check_top_log_probs", "Trainer", "the second engine"])
def test_a_launch_that_fails_closes_what_it_made(
    failing_step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[TransformersEngine] = []
    closed_tasks: list[Task] = []
    monkeypatch.setattr(Arithmetic, "close", lambda task: closed_tasks.append(task))

    def fail(*arguments: object) -> None:
        raise EngineError("no more")

    def make(*arguments: Any) -> TransformersEngine:
        if engines and failing_step == "the second engine":
            fail()
        engines.append(make_engine(*arguments))
        return engines[-1]

    monkeypatch.setattr("jackpot.launch.engines.make_engine", make)
    if failing_step != "the second engine":
        monkeypatch.setattr(start if failing_step == "Trainer" else build, failing_step, fail)

    with pytest.raises(EngineError, match="no more"):
        run(small_config(), tmp_path)

    assert len(engines) == (1 if failing_step == "the second engine" else 2)
    assert closed_tasks
    for engine in engines:
        with pytest.raises(EngineError, match="closed"):
            engine.submit([])


def test_a_trainer_closes_all_though_an_engine_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(engine: TransformersEngine) -> None:
        raise EngineError("no events")

    closed_tasks: list[Task] = []
    monkeypatch.setattr(Arithmetic, "close", lambda task: closed_tasks.append(task))
    trainer = start.launch(small_config(), tmp_path, lambda line: None)
    engines = {trainer._components.engine, trainer._components.policy_engine}
    closed_tasks.clear()  # that of the prompts that the launch looked at
    monkeypatch.setattr(TransformersEngine, "take_events", fail)

    with pytest.raises(EngineError, match="no events"):
        trainer.close()

    assert closed_tasks == [trainer._components.task]
    for engine in engines:
        with pytest.raises(EngineError, match="closed"):
            engine.submit([])

    monkeypatch.undo()
    start.launch(small_config(), tmp_path, lambda line: None).close()  # the folder is free again


@pytest.mark.parametrize("share", ["some", "all"])
def test_an_evaluation_leaves_out_of_its_gap_what_is_not_finite(
    share: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = TransformersEngine.collect

    def is_broken(rollout: Rollout) -> bool:
        is_of_evaluation = rollout.uid.startswith("eval/")
        return is_of_evaluation and (share == "all" or int(rollout.uid.rsplit("/")[-1]) % 2 == 1)

    def collect_broken(engine: TransformersEngine, *arguments: Any, **options: Any) -> list[Rollout]:
        return [
            replace(rollout, rollout_log_probs=rollout.rollout_log_probs * math.nan) if is_broken(rollout) else rollout
            for rollout in collect(engine, *arguments, **options)
        ]

    monkeypatch.setattr(TransformersEngine, "collect", collect_broken)

    gap = run(small_config(SHORT), tmp_path, kill_after=0)[0]["eval/policy_engine_gap"]

    if share == "all":
        assert gap is None or math.isnan(gap)
    else:
        assert gap < 1e-4


def test_ppo_is_reports_the_overlap_of_two_models(tmp_path: Path) -> None:
    overrides = (SHORT, "iterations=1", "batch.prompts=16", "objective.correction.proximal=rollout")
    line = run(small_config(*overrides, arm="none"), tmp_path)[1]

    assert line["obrs/acceptance"] < 0.99
    assert abs(line["obrs/acceptance_minus_z"]) < 5 * line["obrs/acceptance_minus_z_stderr"]


def test_a_correction_of_the_protocol_trains_as_its_formula(tmp_path: Path) -> None:
    custom_correction = "{name: custom, import_path: helpers.own_correction:Plain, kwargs: {cap: 1.3}}"

    custom_line, tis_line = (
        run(small_config(*ONE_ITERATION, f"objective.correction={correction}"), tmp_path / name)[1]
        for name, correction in (("own", custom_correction), ("tis", "{name: tis, cap: 1.3}"))
    )
    names = [name for name in tis_line if name.startswith(("policy/", "rollout_model/", "correction/", "obrs/"))]

    assert custom_line.keys() == tis_line.keys()
    assert "obrs/acceptance" in names
    custom_values = {name: repr(custom_line[name]) for name in names}  # repr, as NaN does not equal itself
    assert custom_values == {name: repr(tis_line[name]) for name in names}


def test_standard_errors_count_a_token_once_however_many_epochs(tmp_path: Path) -> None:
    one_epoch_line, two_epochs_line = (
        run(
            small_config(*ONE_ITERATION, "policy.optimizer.learning_rate=1e-12", f"batch.ppo_epochs={epochs}"),
            tmp_path / f"{epochs}",
        )[1]
        for epochs in (1, 2)
    )

    assert two_epochs_line["mismatch/ratio_stderr"] == pytest.approx(one_epoch_line["mismatch/ratio_stderr"], rel=1e-3)


class Finite(Task):
    """A given number of problems without an answer."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self, split: str) -> int:
        return self._size

    def prompt(self, split: str, index: int) -> Prompt:
        return Prompt(uid=str(index), text=str(index), answer="", token_ids=(index,))

    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        raise NotImplementedError


def test_a_prompt_stream_gives_each_prompt_once_an_epoch() -> None:
    stream = PromptStream(Finite(7), "train", seed=3)
    first_epoch, second_epoch = stream.next(7), stream.next(7)

    assert sorted(prompt.text for prompt in first_epoch) == list("0123456")
    assert sorted(prompt.text for prompt in second_epoch) == list("0123456")
    assert [prompt.text for prompt in first_epoch] != [prompt.text for prompt in second_epoch]
    assert len({prompt.uid for prompt in first_epoch + second_epoch}) == 14

    resumed_stream = PromptStream(Finite(7), "train", seed=3)
    resumed_stream.load_state_dict({"position": 5, "sizes": [7]})

    assert resumed_stream.next(5) == (first_epoch + second_epoch)[5:10]


def test_seeds_draw_other_problems_from_an_endless_split() -> None:
    task = make_task(small_config().task, load_tokenizer("starter:policy"))
    prompts, prompts_again, prompts_of_another_seed = (PromptStream(task, "train", seed).next(20) for seed in (0, 0, 1))

    assert prompts == prompts_again
    assert not {prompt.uid for prompt in prompts} & {prompt.uid for prompt in prompts_of_another_seed}


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no problems"):
        PromptStream(Finite(0), "train", seed=0)


def test_the_collector_does_not_search_older_objects(tmp_path: Path) -> None:
    frozen_counts: list[int] = []
    config = small_config(*ONE_ITERATION)
    with closing(start.launch(config, tmp_path, lambda line: frozen_counts.append(gc.get_freeze_count()))) as trainer:
        trainer.train()

    assert min(frozen_counts) > 1000
    assert gc.get_freeze_count() == 0
