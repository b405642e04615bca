"""What a run does and writes down."""

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
ONE = (SHORT, "iterations=1", "evaluation.problems=2", "batch.prompts=2")
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
def finished(finished_run: FinishedRuns) -> Path:
    """A run without any setting of its own."""
    return finished_run()


@pytest.mark.parametrize("arm", sorted(ARMS))
def test_every_arm_of_the_quickstart_runs(arm: str, tmp_path: Path) -> None:
    lines = run(small_config(*ONE, arm=arm), tmp_path)
    assert [line["iteration"] for line in lines] == [0, 1]
    assert all(line["eval/policy_accuracy"] is not None for line in lines)
    assert math.isfinite(lines[1]["policy/grad_norm"])


def test_metrics_have_the_documented_keys(finished: Path) -> None:
    lines = RunFolder(finished).read("metrics.jsonl")
    assert not REQUIRED - lines[1].keys()
    assert {"eval/policy_accuracy", "eval/rollout_model_accuracy"} <= lines[2].keys()
    assert list((finished / "tensorboard").iterdir())

    for line in (finished / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_evaluations_and_rollouts_are_due_as_the_settings_say(tmp_path: Path) -> None:
    overrides = ("iterations=4", "evaluation.every=3", "rollouts.every=2", "batch.prompts=1")
    lines = run(small_config(*ONE, *overrides), tmp_path)
    assert [line["iteration"] for line in lines if "eval/policy_accuracy" in line] == [0, 3, 4]
    saved = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert saved == [f"iteration-{number:06d}.parquet" for number in (1, 2, 4)]


def test_the_engine_and_training_agree_on_what_was_sampled(finished: Path) -> None:
    """The rollout model re-scored in training is the distribution that the engine sampled from, at every iteration."""
    gaps = [line["mismatch/engine_gap_max"] for line in metrics(finished)[1:]]
    assert len(gaps) == 4
    assert max(gaps) < 1e-4


def test_saved_rollouts_hold_every_token_of_both_sides(finished: Path) -> None:
    table = pq.read_table(finished / "rollouts" / "iteration-000001.parquet")
    assert table.schema.metadata[b"schema_version"] == b"1"

    rows = table.to_pylist()
    assert len(rows) == 16
    assert len({row["uid"] for row in rows}) == 16
    for row in rows:
        length = len(row["token_ids"])
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
        assert all(len(row[name]) == length for name in per_token)
        assert all(len(top) == 20 for top in row["rollout_top_ids"] + row["policy_top_ids"])
        assert row["versions"] == [[0, 0]] * length
        assert row["response"] == "".join(token for token in row["tokens"] if not token.startswith("<"))


def test_a_tool_task_trains_on_sampled_tokens_alone(tmp_path: Path) -> None:
    lines = run(small_config("iterations=1", arm="tool"), tmp_path)
    rows = pq.read_table(tmp_path / "rollouts" / "iteration-000001.parquet").to_pylist()
    sampled = [row["sampled_mask"] for row in rows]

    assert lines[1]["response/tokens"] == sum(map(len, sampled)) / len(rows)
    assert lines[1]["response/tool_tokens"] == sum(mask.count(False) for mask in sampled) / len(rows) > 0
    assert lines[1]["policy/grad_norm"] > 0
    assert lines[1]["rollout_model/grad_norm"] > 0
    assert all(line["mismatch/engine_gap_max"] < 1e-4 for line in lines[1:])
    for row in rows:
        assert row["response"] == "".join(token for token in row["tokens"] if not token.startswith("<"))
        for name in ("accept_mask", "weights", "z", "acceptance", "old_log_probs", "rollout_log_probs"):
            assert all(value == 0 for value, own in zip(row[name], row["sampled_mask"], strict=True) if not own), name


def test_a_checkpoint_loads_with_plain_transformers(finished: Path) -> None:
    for role in ("policy", "rollout_model"):
        folder = finished / "checkpoints" / "last" / role
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model(**tokenizer("1+2=", return_tensors="pt")).logits.isfinite().all()


def test_aborted_rollouts_are_counted_and_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collect = TransformersEngine.collect

    def abort_some(engine, n, timeout=None, uids=None):
        rollouts = collect(engine, n, timeout, uids)
        aborted = [replace(rollout, finish="aborted") for rollout in rollouts if rollout.uid.endswith("#0")]
        return aborted + [rollout for rollout in rollouts if not rollout.uid.endswith("#0")]

    monkeypatch.setattr(TransformersEngine, "collect", abort_some)
    line = run(small_config(*ONE), tmp_path)[1]

    assert line["response/aborted"] == 0.25

    events = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("aborted_rollout") == 2

    rows = pq.read_table(tmp_path / "rollouts" / "iteration-000001.parquet").to_pylist()
    assert len(rows) == 6
    assert not any(row["uid"].endswith("#0") for row in rows)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_run_goes_on_after_only_aborted_rollouts(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first iteration and the last one are those whose rollouts are saved, and whose columns are traced."""
    collect = TransformersEngine.collect

    def abort(engine, n, timeout=None, uids=None):
        rollouts = collect(engine, n, timeout, uids)
        return [replace(one, finish="aborted") if one.uid.startswith(f"{number}/") else one for one in rollouts]

    monkeypatch.setattr(TransformersEngine, "collect", abort)
    lines = run(small_config(*ONE, "iterations=3", "rollouts.every=100"), tmp_path)

    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]
    assert lines[number]["response/aborted"] == 1.0

    saved = {f"iteration-{iteration:06d}.parquet" for iteration in {1, 3} - {number}}
    assert {path.name for path in (tmp_path / "rollouts").iterdir()} == saved
    assert (tmp_path / "checkpoints" / "step-3").exists()


@pytest.mark.parametrize("accident", ["one weight is another", "the last tensor is never asked for"])
def test_other_weights_than_were_sent_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accident: str
) -> None:
    update_weights = TransformersEngine.update_weights

    def lose_something(engine, named_tensors, version):
        if accident == "one weight is another":
            sent = [(name, tensor.clone()) for name, tensor in named_tensors]
            sent[3][1].view(-1)[5] += 1e-3
            return update_weights(engine, sent, version)
        count = len(list(engine._weights.model.named_parameters()))
        return weights_digest(islice(named_tensors, count - 1), engine.capabilities.dtype)  # of what it looked at

    monkeypatch.setattr(TransformersEngine, "update_weights", lose_something)
    with pytest.raises(EngineError, match=r"the learner sent .* unknown weights"):
        run(small_config("iterations=1"), tmp_path)

    events = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["iteration"] for event in events if event["event"] == "stopped"] == [1]


@pytest.mark.parametrize("where", ["check_top_log_probs", "Trainer", "the second engine"])
def test_a_launch_that_fails_closes_what_it_made(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[TransformersEngine] = []
    closed: list[Task] = []
    monkeypatch.setattr(Arithmetic, "close", lambda task: closed.append(task))

    def fail(*arguments: object) -> None:
        raise EngineError("no more")

    def make(*arguments: Any) -> TransformersEngine:
        if engines and where == "the second engine":
            fail()
        engines.append(make_engine(*arguments))
        return engines[-1]

    monkeypatch.setattr("jackpot.launch.engines.make_engine", make)
    if where != "the second engine":
        monkeypatch.setattr(start if where == "Trainer" else build, where, fail)

    with pytest.raises(EngineError, match="no more"):
        run(small_config(), tmp_path)
    assert len(engines) == (1 if where == "the second engine" else 2)
    assert closed
    for engine in engines:
        with pytest.raises(EngineError, match="closed"):
            engine.submit([])


def test_a_trainer_closes_all_though_an_engine_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(engine: TransformersEngine) -> None:
        raise EngineError("no events")

    closed: list[Task] = []
    monkeypatch.setattr(Arithmetic, "close", lambda task: closed.append(task))
    trainer = start.launch(small_config(), tmp_path, lambda line: None)
    engines = {trainer._components.engine, trainer._components.policy_engine}
    closed.clear()  # that of the prompts that the launch looked at
    monkeypatch.setattr(TransformersEngine, "take_events", fail)

    with pytest.raises(EngineError, match="no events"):
        trainer.close()
    assert closed == [trainer._components.task]
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

    def broken(engine: TransformersEngine, *arguments: Any, **named: Any) -> list[Rollout]:
        return [
            replace(one, rollout_log_probs=one.rollout_log_probs * math.nan)
            if one.uid.startswith("eval/") and (share == "all" or int(one.uid.rsplit("/")[-1]) % 2)
            else one
            for one in collect(engine, *arguments, **named)
        ]

    monkeypatch.setattr(TransformersEngine, "collect", broken)
    gap = run(small_config(SHORT), tmp_path, kill_after=0)[0]["eval/policy_engine_gap"]

    assert gap is None or math.isnan(gap) if share == "all" else gap < 1e-4


def test_ppo_is_reports_the_overlap_of_two_models(tmp_path: Path) -> None:
    overrides = (SHORT, "iterations=1", "batch.prompts=16", "objective.correction.proximal=rollout")
    line = run(small_config(*overrides, arm="none"), tmp_path)[1]
    assert line["obrs/acceptance"] < 0.99
    assert abs(line["obrs/acceptance_minus_z"]) < 5 * line["obrs/acceptance_minus_z_stderr"]


def test_a_correction_of_the_protocol_trains_as_its_formula(tmp_path: Path) -> None:
    own = "{name: custom, import_path: helpers.own_correction:Plain, kwargs: {cap: 1.3}}"
    found, wanted = (
        run(small_config(*ONE, f"objective.correction={correction}"), tmp_path / name)[1]
        for name, correction in (("own", own), ("tis", "{name: tis, cap: 1.3}"))
    )
    measured = [name for name in wanted if name.startswith(("policy/", "rollout_model/", "correction/", "obrs/"))]

    assert found.keys() == wanted.keys()
    assert "obrs/acceptance" in measured
    assert {name: repr(found[name]) for name in measured} == {name: repr(wanted[name]) for name in measured}


def test_standard_errors_count_a_token_once_however_many_epochs(tmp_path: Path) -> None:
    once, often = (
        run(
            small_config(*ONE, "policy.optimizer.learning_rate=1e-12", f"batch.ppo_epochs={n}"),
            tmp_path / f"{n}",
        )[1]
        for n in (1, 2)
    )

    assert often["mismatch/ratio_stderr"] == pytest.approx(once["mismatch/ratio_stderr"], rel=1e-3)


class Finite(Task):
    """Seven problems without an answer."""

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
    first, second = stream.next(7), stream.next(7)

    assert sorted(prompt.text for prompt in first) == sorted(prompt.text for prompt in second) == list("0123456")
    assert [prompt.text for prompt in first] != [prompt.text for prompt in second]
    assert len({prompt.uid for prompt in first + second}) == 14

    resumed = PromptStream(Finite(7), "train", seed=3)
    resumed.load_state_dict({"position": 5, "sizes": [7]})

    assert resumed.next(5) == (first + second)[5:10]


def test_seeds_draw_other_problems_from_an_endless_split() -> None:
    task = make_task(small_config().task, load_tokenizer("starter:policy"))
    first, again, other = (PromptStream(task, "train", seed).next(20) for seed in (0, 0, 1))
    assert first == again
    assert not {prompt.uid for prompt in first} & {prompt.uid for prompt in other}


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no problems"):
        PromptStream(Finite(0), "train", seed=0)


def test_the_collector_does_not_search_older_objects(tmp_path: Path) -> None:
    frozen: list[int] = []
    config = small_config(*ONE)
    with closing(start.launch(config, tmp_path, lambda line: frozen.append(gc.get_freeze_count()))) as trainer:
        trainer.train()

    assert min(frozen) > 1000
    assert gc.get_freeze_count() == 0
