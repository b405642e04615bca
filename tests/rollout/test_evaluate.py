"""`jackpot eval` from within: what it asks, what it keeps, where it goes on."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, contextmanager
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from helpers.disks import largest_file
from helpers.engines.reference import save_tiny_model
from helpers.runs import FinishedRuns, Killed, run, small_config
from helpers.texts import text_tokenizer, write_problems
from jackpot.analysis.evaluate.answers import AnswerFile
from jackpot.analysis.evaluate.evaluate import BenchmarkResult, EvaluationProgress, evaluate_model, evaluation_config
from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.config.tasks import RewardConfig
from jackpot.config.tools import ENDLESS
from jackpot.core.errors import CheckpointError, ConfigError, DataError
from jackpot.core.files import PARTIAL
from jackpot.core.types import DecodedResponse, Prompt, Rollout, Version
from jackpot.launch.engines import make_engine
from jackpot.models.load import load_tokenizer
from jackpot.rollout import evaluate as evaluating
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.evaluate import eval_request, evaluate, generate_and_score
from jackpot.rollout.rewards.rewards import RewardFn
from jackpot.rollout.tasks.data import DATA_FOLDER
from jackpot.rollout.tasks.registry import SETS, make_task
from jackpot.training.run_folder.checkpoint import resolve_model_path

SHORT = ("iterations=2", "checkpoint.every=1", "batch.prompts=2", "evaluation.problems=2")
SMALL = {"benchmarks": ["arithmetic"], "k": 3, "problems": 10, "threads": 1, "sampling": {"max_new_tokens": 24}}


def evaluation(folder: Path, *changes: dict, model: str = "starter:policy", kill_after: int | None = None):
    """Evaluate until the end, or until so many answers are on the disk."""

    def listen(progress: EvaluationProgress) -> None:
        if kill_after is not None and progress.done >= kill_after:
            raise Killed

    return evaluate_model(evaluation_config(model, [SMALL, *changes]), folder, listen)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluating, "_SCORE_BATCH", 4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BenchmarkResult]:
    """A folder with an undisturbed evaluation."""
    folder = tmp_path_factory.mktemp("whole")
    [result] = evaluation(folder)
    return folder, result


def rows(folder: Path, name: str = "arithmetic") -> list[dict]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def test_every_problem_is_answered_k_times_and_counted(whole) -> None:
    folder, result = whole
    task = make_task(small_config().task, load_tokenizer("starter:policy"))
    prompts = [task.prompt("test", index) for index in range(10)]
    found = rows(folder)
    assert [(row["uid"], row["sample"]) for row in found] == [(one.uid, j) for one in prompts for j in range(3)]
    for row, prompt in zip(found, (one for one in prompts for _ in range(3)), strict=True):
        assert (row["prompt"], row["answer"], row["reward_error"]) == (prompt.text, prompt.answer, None)
        assert row["correct"] == (row["finish"] == "stop" and row["response"].partition("#")[2] == prompt.answer)
        assert row["reward"] == float(row["correct"])
        assert row["tokens"] == len(row["response"]) + (row["finish"] == "stop")  # one a character, and the end
    right = [sum(row["correct"] for row in found[first : first + 3]) for first in range(0, 30, 3)]
    assert 0 < sum(right) < 30
    summary = result.summary
    assert (summary.problems, summary.k, result.was_done) == (10, 3, False)
    assert summary.mean_at_k.value == pytest.approx(sum(right) / 30)
    pairs = [any(pair) for c in right for pair in combinations([True] * c + [False] * (3 - c), 2)]
    assert summary.pass_at_k[2].value == pytest.approx(np.mean(pairs))
    assert summary.pass_at_k[3].value == pytest.approx(np.mean([c > 0 for c in right]))
    assert summary.tokens_total == sum(row["tokens"] for row in found)
    assert summary.truncated == np.mean([row["finish"] == "length" for row in found])
    written = json.loads((folder / "summary.json").read_text())["benchmarks"]["arithmetic"]
    mean = written["mean_at_k"]
    assert mean["low"] <= mean["value"] == summary.mean_at_k.value <= mean["high"]
    assert written["pass_at_k"]["3"]["value"] == summary.pass_at_k[3].value


def test_answers_depend_neither_on_concurrency_nor_on_k(whole, tmp_path: Path) -> None:
    evaluation(tmp_path / "few", {"engine": {"max_num_seqs": 5}, "problems": 7})
    assert rows(tmp_path / "few") == rows(whole[0])[:21]
    evaluation(tmp_path / "one", {"k": 1, "problems": 7})
    assert rows(tmp_path / "one") == [row for row in rows(whole[0]) if row["sample"] == 0][:7]
    evaluation(tmp_path / "seed", {"seed": 1, "problems": 7})
    assert rows(tmp_path / "seed") != rows(tmp_path / "few")


@pytest.mark.parametrize("kills", [[1], [12, 20]])
def test_a_killed_evaluation_ends_byte_for_byte_the_same(kills, whole, tmp_path: Path) -> None:
    for kill in kills:
        with pytest.raises(Killed):
            evaluation(tmp_path, kill_after=kill)
        assert not (tmp_path / "arithmetic.parquet").exists()
    lines = (tmp_path / "arithmetic.jsonl").read_text().splitlines()
    assert kills[-1] <= len(lines) < 30
    asked: list[EvaluationProgress] = []
    [result] = evaluate_model(evaluation_config("starter:policy", [SMALL]), tmp_path, asked.append)
    assert asked[-1].done == asked[-1].total == 30 and asked[-1].fresh == 30 - len(lines)
    assert (tmp_path / "arithmetic.parquet").read_bytes() == (whole[0] / "arithmetic.parquet").read_bytes()
    assert (tmp_path / "summary.json").read_bytes() == (whole[0] / "summary.json").read_bytes()
    assert result.summary == whole[1].summary
    assert not (tmp_path / "arithmetic.jsonl").exists()


def test_a_torn_or_foreign_line_is_asked_again(whole, tmp_path: Path, caplog) -> None:
    with pytest.raises(Killed):
        evaluation(tmp_path, kill_after=15)
    path = tmp_path / "arithmetic.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    foreign = [b'{"number": 99, "sample": 0}\n', b"\x00\xff\n", b"[]\n"]
    path.write_bytes(b"".join([*lines[:5], *foreign, *lines[6:-1], lines[-1][:-9]]))
    (tmp_path / f"arithmetic.parquet{PARTIAL}").write_bytes(b"half of one")
    evaluation(tmp_path)
    assert (tmp_path / "arithmetic.parquet").read_bytes() == (whole[0] / "arithmetic.parquet").read_bytes()
    assert "3 lines cannot be read" in caplog.text


def test_a_kill_before_or_after_the_table_costs_nothing(whole, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        evaluation(tmp_path, kill_after=30)
    evaluation(tmp_path, {"device": "cuda"}, kill_after=0)  # nothing is asked, so no engine is made there
    assert (tmp_path / "arithmetic.parquet").read_bytes() == (whole[0] / "arithmetic.parquet").read_bytes()
    (tmp_path / "arithmetic.jsonl").write_text("left over")
    [result] = evaluation(tmp_path, kill_after=0)  # nothing is asked
    assert result.was_done and not (tmp_path / "arithmetic.jsonl").exists()


def test_a_finished_evaluation_loads_no_engine(whole, tmp_path: Path) -> None:
    folder, result = whole
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    servers = {"engine": {"urls": ["http://127.0.0.1:1"], "weights_folder": str(tmp_path)}}  # no server there
    with pytest.raises(CheckpointError, match=r"engine\.name"):
        evaluation(folder, {"engine": "vllm_server"}, servers)
    [again] = evaluation(folder, kill_after=0)
    assert again.was_done and again.summary == result.summary
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"} == before


OTHER = {
    "k": ({"k": 4}, "k: 3 in the folder, 4 now"),
    "sampling": ({"sampling": {"temperature": 0.5}}, "sampling.temperature: 1.0 in the folder, 0.5 now"),
    "seed": ({"seed": 5}, "seed: 0 in the folder, 5 now"),
    "problems": ({"problems": 5}, "problems: 10 in the folder, 5 now"),
    "data": ({"arithmetic": {"max_operand": 30}}, "data.arithmetic.digest"),
    "template": ({"math": {"template": "base"}}, 'math.template: "chat" in the folder, "base" now'),
}


@pytest.mark.parametrize("case", OTHER)
def test_what_decides_the_answers_may_not_change(case: str, whole) -> None:
    change, expected = OTHER[case]
    before = (whole[0] / "config.yaml").read_bytes()
    with pytest.raises(CheckpointError) as refused:
        evaluation(whole[0], change)
    assert expected in str(refused.value) and "--out" in str(refused.value)
    assert (whole[0] / "config.yaml").read_bytes() == before


def test_another_model_in_the_same_folder_is_refused(whole) -> None:
    with pytest.raises(CheckpointError, match="model_digest"):
        evaluation(whole[0], model="starter:rollout_model")


def test_how_answers_are_made_may_change_and_sets_may_be_added(whole, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        evaluation(tmp_path, kill_after=15)
    evaluation(tmp_path, {"engine": {"max_num_seqs": 7}, "device": "cpu", "math": {"reward_workers": 3}})
    assert (tmp_path / "arithmetic.parquet").read_bytes() == (whole[0] / "arithmetic.parquet").read_bytes()
    [result] = evaluation(tmp_path, {"benchmarks": "tool_arithmetic"})
    written = json.loads((tmp_path / "summary.json").read_text())["benchmarks"]
    assert list(written) == ["arithmetic", "tool_arithmetic"]
    assert result.benchmark == "tool_arithmetic" and {row["sample"] for row in rows(tmp_path, "tool_arithmetic")} == {
        0,
        1,
        2,
    }


def test_two_at_once_in_one_folder_are_refused(tmp_path: Path) -> None:
    def listen(progress: EvaluationProgress) -> None:
        with pytest.raises(CheckpointError, match="in use"):
            evaluation(tmp_path)

    evaluate_model(evaluation_config("starter:policy", [SMALL, {"problems": 2}]), tmp_path, listen)


def test_a_full_disk_ends_it_and_the_next_start_goes_on(whole, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write .*arithmetic\.jsonl.*to continue"), largest_file(3000):
        evaluation(tmp_path)
    assert 0 < (tmp_path / "arithmetic.jsonl").stat().st_size <= 3000
    evaluation(tmp_path)
    assert (tmp_path / "arithmetic.parquet").read_bytes() == (whole[0] / "arithmetic.parquet").read_bytes()


def test_a_table_that_does_not_fit_on_the_disk_costs_no_answer(whole, tmp_path: Path) -> None:
    file = AnswerFile(tmp_path, "set", problems=1, k=1)
    with pytest.raises(CheckpointError, match="lacks 1 of 1 responses"):
        file.finish(lambda number: None, {})
    with pytest.raises(Killed):
        evaluation(tmp_path, kill_after=30)
    size = (tmp_path / "arithmetic.jsonl").stat().st_size
    with pytest.raises(CheckpointError, match=r"cannot write .*arithmetic\.parquet"), largest_file(2000):
        evaluation(tmp_path)
    assert (tmp_path / "arithmetic.jsonl").stat().st_size == size
    assert not list(tmp_path.glob("*.parquet*"))
    evaluation(tmp_path)
    assert rows(tmp_path) == rows(whole[0])


@pytest.mark.slow
def test_a_kill_costs_what_was_not_scored(whole, tmp_path: Path) -> None:
    command = "from jackpot.rollout import evaluate; evaluate._SCORE_BATCH = 4; from jackpot.ui.cli import main; main()"
    arguments = ["eval", "starter:policy", "--benchmarks", "arithmetic", "--k", "3", "--out", str(tmp_path)]
    settings = ["problems=10", "threads=1", "sampling.max_new_tokens=24"]
    process = subprocess.Popen([sys.executable, "-c", command, *arguments, *settings], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while process.poll() is None and not (tmp_path / "arithmetic.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "config.yaml").exists()
    evaluation(tmp_path)
    assert (tmp_path / "arithmetic.parquet").read_bytes() == (whole[0] / "arithmetic.parquet").read_bytes()


def test_of_a_run_the_best_policy_is_taken_and_its_own_settings(tmp_path: Path, caplog) -> None:
    folder = tmp_path / "run"
    run(small_config(*SHORT, "task.max_operand=30", "sampling.temperature=0.7"), folder)
    checkpoints = folder / "checkpoints"
    (checkpoints / "best").unlink()
    (checkpoints / "best").symlink_to("step-1")
    assert resolve_model_path(str(folder)) == str(checkpoints / "step-1" / "policy")
    changes = [{"benchmarks": "arithmetic", "problems": 3}]
    config = evaluation_config(str(folder), changes)
    assert (config.arithmetic.max_operand, config.sampling.temperature, config.sampling.max_new_tokens) == (30, 0.7, 24)
    assert evaluation_config(str(folder), [*changes, {"sampling": {"temperature": 1.0}}]).sampling.temperature == 1.0
    [result] = evaluate_model(config, tmp_path / "out", lambda progress: None)
    assert result.summary.problems == 3
    (checkpoints / "step-1" / "policy" / "model.safetensors").write_bytes(b"")
    assert resolve_model_path(str(folder)) == str(checkpoints / "step-2" / "policy")
    assert "step-1" in caplog.text
    with pytest.raises(CheckpointError, match="model_digest"):
        evaluate_model(config, tmp_path / "out", lambda progress: None)


def test_a_run_without_a_checkpoint_says_when_there_is_one(finished_run: FinishedRuns) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        resolve_model_path(str(finished_run(kill_after=0)))


def test_bad_input_says_what_there_is() -> None:
    with pytest.raises(DataError, match="did you mean 'arithmetic'") as refused:
        evaluation_config("starter:policy", [{"benchmarks": "arithmetc"}])
    assert all(name in str(refused.value) for name in SETS)
    with pytest.raises(ConfigError, match=r"no benchmark was named.*aime24"):
        evaluation_config("starter:policy", [])
    with pytest.raises(DataError, match="named twice"):
        evaluation_config("starter:policy", [{"benchmarks": ["arithmetic", "arithmetic"]}])
    with pytest.raises(ConfigError, match="k: 0 was given"):
        evaluation_config("starter:policy", [SMALL, {"k": 0}])
    with pytest.raises(ConfigError, match=r"did you mean 'sampling\.temperature'"):
        evaluation_config("starter:policy", [SMALL, {"sampling": {"temprature": 1.0}}])


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model of real text that has learnt nothing."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, seed=0, vocab_size=512)
    text_tokenizer().save_pretrained(folder)
    return str(folder)


def test_benchmarks_are_read_put_and_scored_as_the_settings_say(text_model, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(DATA_FOLDER, str(tmp_path))
    write_problems(tmp_path / "aime24.jsonl", [7, 8, 9])
    write_problems(tmp_path / "math500.jsonl", ["1/2", "\\sqrt{2}"])
    math = {"system_prompt": "Hi.", "instruction": "", "rewards": ["correct", {"name": "format", "weight": 0.5}]}
    changes = {"benchmarks": "aime24", "k": 2, "problems": None, "math": math, "sampling": {"max_new_tokens": 12}}
    [result] = evaluation(tmp_path / "out", changes, {"benchmarks": ["aime24", "math500"]}, model=text_model)[:1]
    found = rows(tmp_path / "out", "aime24")
    assert [row["uid"] for row in found] == [f"aime24/test/{number}" for number in (0, 0, 1, 1, 2, 2)]
    assert found[2]["prompt"] == "<|system|>Hi.<|end|><|user|>what is 1?<|end|><|assistant|>"
    assert (found[2]["answer"], result.summary.problems) == ("8", 3)
    reward_fn = RewardFn(
        [RewardConfig(name="correct"), RewardConfig(name="format", weight=0.5)], workers=1, timeout=5.0
    )
    with closing(reward_fn):
        for row in found + rows(tmp_path / "out", "math500"):
            prompt = Prompt(uid="", text="", answer=row["answer"], token_ids=())
            [score] = reward_fn.scores([DecodedResponse(prompt, row["response"], row["finish"] == "stop")])
            assert (row["correct"], row["reward"]) == (score.correct, score.reward)
    assert {row["tokens"] for row in found} <= set(range(1, 13)) and any(row["finish"] == "length" for row in found)


def test_a_prompt_that_fills_the_context_is_refused_at_once(text_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(DATA_FOLDER, str(tmp_path))
    write_problems(tmp_path / "aime24.jsonl", [1, 2], problem=["short", "long " * 300])
    with pytest.raises(DataError, match=r"aime24: the prompt of aime24/test/1 has \d+ tokens, and the context"):
        evaluation(tmp_path / "out", {"benchmarks": "aime24"}, model=text_model)
    assert not (tmp_path / "out" / "aime24.jsonl").exists()


def test_an_endless_set_is_cut_and_a_finite_one_is_whole(tmp_path: Path) -> None:
    [result] = evaluation(tmp_path, {"k": 1, "problems": None, "sampling": {"max_new_tokens": 1}})
    assert result.summary.problems == ENDLESS == 512


class Watched:
    """A real engine, and how many requests were under way at most."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.under_way, self.most, self.submitted = engine, 0, 0, Counter()

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def submit(self, requests) -> None:
        self._engine.submit(requests)
        self.submitted.update(one.uid for one in requests)
        self.under_way += len(requests)
        self.most = max(self.most, self.under_way)

    def collect(self, *arguments, **named) -> list[Rollout]:
        ended = self._engine.collect(*arguments, **named)
        self.under_way -= len(ended)
        return ended


@contextmanager
def starter_engine():
    settings = TransformersEngineConfig()
    with closing(make_engine(settings, "starter:policy", torch.device("cpu"), Version(0, 0))) as engine:
        yield engine


@pytest.mark.parametrize("name", ["arithmetic", "tool_arithmetic"])
def test_answers_come_once_each_with_few_under_way(name: str) -> None:
    tokenizer = load_tokenizer("starter:policy")
    task = make_task(getattr(evaluation_config("starter:policy", [SMALL]), name), tokenizer)
    prompts = [task.prompt("test", index) for index in range(23)]
    drawn = 0

    def requests():
        nonlocal drawn
        for prompt in prompts:
            drawn += 1
            yield eval_request(prompt, 0, Sampling(max_new_tokens=24), seed=0)

    with starter_engine() as plain:
        engine = Watched(plain)
        groups = generate_and_score(engine, task, tokenizer, requests(), concurrency=5)
        first = next(groups)
        assert len(first) == 4 and drawn <= 10
        found = {item.rollout.uid: item for group in [first, *groups] for item in group}
        assert engine.most <= 10 and set(engine.submitted.values()) == {1}
        expected = evaluate(plain, task, tokenizer, prompts, Sampling(max_new_tokens=24), seed=0, k=1)
    assert [one.uid for one in expected.rollouts] == [f"eval/{prompt.uid}" for prompt in prompts]
    assert len(found) == 23
    for rollout, response, score in zip(expected.rollouts, expected.responses, expected.scores, strict=True):
        assert (found[rollout.uid].response, found[rollout.uid].score) == (response, score)


def test_every_sample_of_every_set_has_a_stream_of_its_own() -> None:
    task = make_task(small_config().task, load_tokenizer("starter:policy"))
    prompts = [task.prompt("test", index) for index in range(5)]
    seeds = [
        eval_request(prompt, sample, Sampling(), seed, name).seed
        for prompt in prompts
        for sample in range(4)
        for seed in (0, 1)
        for name in ("", "arithmetic", "gsm8k")
    ]
    assert len(set(seeds)) == len(seeds) == 120
