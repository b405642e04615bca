"""`jackpot eval` from within: what it asks and keeps, where it goes on after a kill, and what it refuses."""

import json
import math
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
from jackpot.core.types import DecodedResponse, Prompt, Rollout, Score, Version
from jackpot.launch.engines import make_engine
from jackpot.models.load import load_tokenizer
from jackpot.rollout import evaluate as evaluating
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.evaluate import Evaluation, eval_request, evaluate, generate_and_score
from jackpot.rollout.rewards.rewards import RewardFn
from jackpot.rollout.tasks.data import DATA_FOLDER
from jackpot.rollout.tasks.registry import SETS, make_task
from jackpot.training.run_folder.checkpoint import resolve_model_path

SHORT = ("iterations=2", "checkpoint.every=1", "batch.prompts=2", "evaluation.problems=2")
SMALL = {"benchmarks": ["arithmetic"], "k": 3, "problems": 10, "threads": 1, "sampling": {"max_new_tokens": 24}}


def run_evaluation(folder: Path, *changes: dict, model: str = "starter:policy", kill_after: int | None = None):
    """Evaluate until the end, or until so many answers are on the disk."""

    def listen(progress: EvaluationProgress) -> None:
        if kill_after is not None and progress.done >= kill_after:
            raise Killed

    return evaluate_model(evaluation_config(model, [SMALL, *changes]), folder, listen)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score four responses at a time."""
    monkeypatch.setattr(evaluating, "_SCORE_BATCH", 4)


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BenchmarkResult]:
    """Return the folder and the result of an undisturbed evaluation."""
    folder = tmp_path_factory.mktemp("whole")
    [result] = run_evaluation(folder)
    return folder, result


@pytest.fixture
def undisturbed_folder(undisturbed_run: tuple[Path, BenchmarkResult]) -> Path:
    return undisturbed_run[0]


def table_bytes(folder: Path) -> bytes:
    return (folder / "arithmetic.parquet").read_bytes()


def answer_rows(folder: Path, name: str = "arithmetic") -> list[dict]:
    """Return the rows of the table of answers."""
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def test_every_problem_is_answered_k_times_and_counted(undisturbed_run) -> None:
    folder, result = undisturbed_run
    task = make_task(small_config().task, load_tokenizer("starter:policy"))
    prompts = [task.prompt("test", index) for index in range(10)]

    rows = answer_rows(folder)
    assert [(row["uid"], row["sample"]) for row in rows] == [
        (prompt.uid, sample) for prompt in prompts for sample in range(3)
    ]

    for row, prompt in zip(rows, (prompt for prompt in prompts for _ in range(3)), strict=True):
        assert (row["prompt"], row["answer"], row["reward_error"]) == (prompt.text, prompt.answer, None)
        assert row["correct"] == (row["finish"] == "stop" and row["response"].partition("#")[2] == prompt.answer)
        assert row["reward"] == float(row["correct"])
        assert row["tokens"] == len(row["response"]) + (row["finish"] == "stop")  # one a character, and the end

    right_counts = [sum(row["correct"] for row in rows[start : start + 3]) for start in range(0, 30, 3)]
    assert 0 < sum(right_counts) < 30

    summary = result.summary
    assert (summary.problems, summary.k, result.was_done) == (10, 3, False)
    assert summary.mean_at_k.value == pytest.approx(sum(right_counts) / 30)

    # whether a right answer is in each pair of the three answers
    is_any_right = [
        any(pair) for count in right_counts for pair in combinations([True] * count + [False] * (3 - count), 2)
    ]
    assert summary.pass_at_k[2].value == pytest.approx(np.mean(is_any_right))
    assert summary.pass_at_k[3].value == pytest.approx(np.mean([count > 0 for count in right_counts]))

    assert summary.tokens_total == sum(row["tokens"] for row in rows)
    assert summary.truncated == np.mean([row["finish"] == "length" for row in rows])

    summary_row = json.loads((folder / "summary.json").read_text())["benchmarks"]["arithmetic"]
    mean_row = summary_row["mean_at_k"]
    assert mean_row["value"] == summary.mean_at_k.value
    assert mean_row["low"] <= mean_row["value"] <= mean_row["high"]
    assert summary_row["pass_at_k"]["3"]["value"] == summary.pass_at_k[3].value


def test_answers_depend_on_the_seed_not_on_concurrency_or_k(undisturbed_folder, tmp_path: Path) -> None:
    run_evaluation(tmp_path / "few", {"engine": {"max_num_seqs": 5}, "problems": 7})
    assert answer_rows(tmp_path / "few") == answer_rows(undisturbed_folder)[:21]

    run_evaluation(tmp_path / "single", {"k": 1, "problems": 7})
    first_samples = [row for row in answer_rows(undisturbed_folder) if row["sample"] == 0]
    assert answer_rows(tmp_path / "single") == first_samples[:7]

    run_evaluation(tmp_path / "seed", {"seed": 1, "problems": 7})
    assert answer_rows(tmp_path / "seed") != answer_rows(tmp_path / "few")


@pytest.mark.parametrize("kills", [[1], [12, 20]])
def test_a_killed_evaluation_ends_byte_for_byte_the_same(kills, undisturbed_run, tmp_path: Path) -> None:
    undisturbed_folder, undisturbed_result = undisturbed_run
    for kill in kills:
        with pytest.raises(Killed):
            run_evaluation(tmp_path, kill_after=kill)
        assert not (tmp_path / "arithmetic.parquet").exists()

    lines = (tmp_path / "arithmetic.jsonl").read_text().splitlines()
    assert kills[-1] <= len(lines) < 30

    progress_list: list[EvaluationProgress] = []
    [result] = evaluate_model(evaluation_config("starter:policy", [SMALL]), tmp_path, progress_list.append)
    assert progress_list[-1].done == 30
    assert progress_list[-1].total == 30
    assert progress_list[-1].fresh == 30 - len(lines)

    assert table_bytes(tmp_path) == table_bytes(undisturbed_folder)
    assert (tmp_path / "summary.json").read_bytes() == (undisturbed_folder / "summary.json").read_bytes()
    assert result.summary == undisturbed_result.summary
    assert not (tmp_path / "arithmetic.jsonl").exists()


def test_a_torn_or_foreign_line_is_asked_again(undisturbed_folder, tmp_path: Path, caplog) -> None:
    with pytest.raises(Killed):
        run_evaluation(tmp_path, kill_after=15)

    path = tmp_path / "arithmetic.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    foreign_lines = [b'{"number": 99, "sample": 0}\n', b"\x00\xff\n", b"[]\n"]
    path.write_bytes(b"".join([*lines[:5], *foreign_lines, *lines[6:-1], lines[-1][:-9]]))
    (tmp_path / f"arithmetic.parquet{PARTIAL}").write_bytes(b"half of one")

    run_evaluation(tmp_path)

    assert table_bytes(tmp_path) == table_bytes(undisturbed_folder)
    assert "3 lines cannot be read" in caplog.text


def test_a_kill_before_or_after_the_table_costs_nothing(undisturbed_folder, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run_evaluation(tmp_path, kill_after=30)

    run_evaluation(tmp_path, {"device": "cuda"}, kill_after=0)  # nothing is asked, so no engine is made there
    assert table_bytes(tmp_path) == table_bytes(undisturbed_folder)

    (tmp_path / "arithmetic.jsonl").write_text("left over")
    [result] = run_evaluation(tmp_path, kill_after=0)  # nothing is asked
    assert result.was_done
    assert not (tmp_path / "arithmetic.jsonl").exists()


def test_a_finished_evaluation_loads_no_engine(undisturbed_run, tmp_path: Path) -> None:
    folder, result = undisturbed_run
    files_before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    servers = {"engine": {"urls": ["http://127.0.0.1:1"], "weights_folder": str(tmp_path)}}  # no server there

    with pytest.raises(CheckpointError, match=r"engine\.name"):
        run_evaluation(folder, {"engine": "vllm_server"}, servers)

    [second_result] = run_evaluation(folder, kill_after=0)

    assert second_result.was_done
    assert second_result.summary == result.summary
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"} == files_before


CHANGES = {  # settings that decide the answers, each with a change and the text of its refusal
    "k": ({"k": 4}, "k: 3 in the folder, 4 now"),
    "sampling": ({"sampling": {"temperature": 0.5}}, "sampling.temperature: 1.0 in the folder, 0.5 now"),
    "seed": ({"seed": 5}, "seed: 0 in the folder, 5 now"),
    "problems": ({"problems": 5}, "problems: 10 in the folder, 5 now"),
    "data": ({"arithmetic": {"max_operand": 30}}, "data.arithmetic.digest"),
    "template": ({"math": {"template": "base"}}, 'math.template: "chat" in the folder, "base" now'),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_decides_the_answers_may_not_change(case: str, undisturbed_folder) -> None:
    change, message = CHANGES[case]
    config_before = (undisturbed_folder / "config.yaml").read_bytes()

    with pytest.raises(CheckpointError) as refusal:
        run_evaluation(undisturbed_folder, change)

    assert message in str(refusal.value)
    assert "--out" in str(refusal.value)
    assert (undisturbed_folder / "config.yaml").read_bytes() == config_before


def test_another_model_in_the_same_folder_is_refused(undisturbed_folder) -> None:
    with pytest.raises(CheckpointError, match="model_digest"):
        run_evaluation(undisturbed_folder, model="starter:rollout_model")


def test_how_answers_are_made_may_change_and_sets_may_be_added(undisturbed_folder, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run_evaluation(tmp_path, kill_after=15)

    run_evaluation(tmp_path, {"engine": {"max_num_seqs": 7}, "device": "cpu", "math": {"reward_workers": 3}})
    assert table_bytes(tmp_path) == table_bytes(undisturbed_folder)

    [result] = run_evaluation(tmp_path, {"benchmarks": "tool_arithmetic"})
    summaries = json.loads((tmp_path / "summary.json").read_text())["benchmarks"]
    assert list(summaries) == ["arithmetic", "tool_arithmetic"]
    assert result.benchmark == "tool_arithmetic"
    assert {row["sample"] for row in answer_rows(tmp_path, "tool_arithmetic")} == {0, 1, 2}


def test_two_at_once_in_one_folder_are_refused(tmp_path: Path) -> None:
    def listen(progress: EvaluationProgress) -> None:
        with pytest.raises(CheckpointError, match="in use"):
            run_evaluation(tmp_path)

    evaluate_model(evaluation_config("starter:policy", [SMALL, {"problems": 2}]), tmp_path, listen)


def test_a_full_disk_ends_an_evaluation_and_the_next_goes_on(undisturbed_folder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write .*arithmetic\.jsonl.*to continue"), largest_file(3000):
        run_evaluation(tmp_path)
    assert 0 < (tmp_path / "arithmetic.jsonl").stat().st_size <= 3000

    run_evaluation(tmp_path)
    assert table_bytes(tmp_path) == table_bytes(undisturbed_folder)


def test_no_table_is_written_while_answers_are_missing(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path, "set", problems=1, k=1)
    with pytest.raises(CheckpointError, match="lacks 1 of 1 responses"):
        file.finish(lambda index: None, {})


def test_a_table_that_does_not_fit_on_the_disk_costs_no_answer(undisturbed_folder, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run_evaluation(tmp_path, kill_after=30)

    size = (tmp_path / "arithmetic.jsonl").stat().st_size
    with pytest.raises(CheckpointError, match=r"cannot write .*arithmetic\.parquet"), largest_file(2000):
        run_evaluation(tmp_path)
    assert (tmp_path / "arithmetic.jsonl").stat().st_size == size
    assert not list(tmp_path.glob("*.parquet*"))

    run_evaluation(tmp_path)
    assert answer_rows(tmp_path) == answer_rows(undisturbed_folder)


@pytest.mark.slow
def test_a_kill_costs_what_was_not_scored(undisturbed_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "from jackpot.rollout import evaluate; evaluate._SCORE_BATCH = 4; from jackpot.ui.cli import main; main()"
    arguments = ["eval", "starter:policy", "--benchmarks", "arithmetic", "--k", "3", "--out", str(tmp_path)]
    settings = ["problems=10", "threads=1", "sampling.max_new_tokens=24"]

    process = subprocess.Popen([sys.executable, "-c", command, *arguments, *settings], stdout=subprocess.DEVNULL)

    lines = tmp_path / "arithmetic.jsonl"
    deadline = time.monotonic() + 200
    while process.poll() is None and not (lines.exists() and lines.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.002)

    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "config.yaml").exists()

    kept_count = lines.read_bytes().count(b"\n") if lines.exists() else 30  # without the file all is done
    assert kept_count > 0

    added_counts = [0]
    add = AnswerFile.add

    def count_and_add(file: AnswerFile, answers) -> None:
        answers = list(answers)
        added_counts.append(len(answers))
        add(file, answers)

    monkeypatch.setattr(AnswerFile, "add", count_and_add)
    run_evaluation(tmp_path)
    assert sum(added_counts) == 30 - kept_count
    assert table_bytes(tmp_path) == table_bytes(undisturbed_folder)


def test_of_a_run_the_best_policy_is_taken_and_its_own_settings(tmp_path: Path, caplog) -> None:
    folder = tmp_path / "run"
    run(small_config(*SHORT, "task.max_operand=30", "sampling.temperature=0.7"), folder)

    checkpoints = folder / "checkpoints"
    (checkpoints / "best").unlink()
    (checkpoints / "best").symlink_to("step-1")
    assert resolve_model_path(str(folder)) == str(checkpoints / "step-1" / "policy")

    changes = [{"benchmarks": "arithmetic", "problems": 3}]
    config = evaluation_config(str(folder), changes)
    assert config.arithmetic.max_operand == 30
    assert config.sampling.temperature == 0.7
    assert config.sampling.max_new_tokens == 24
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
    with pytest.raises(DataError, match="did you mean 'arithmetic'") as refusal:
        evaluation_config("starter:policy", [{"benchmarks": "arithmetc"}])
    assert all(name in str(refusal.value) for name in SETS)

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


def test_math_benchmarks_are_asked_and_scored_by_their_settings(text_model, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(DATA_FOLDER, str(tmp_path))
    write_problems(tmp_path / "aime24.jsonl", [7, 8, 9])
    write_problems(tmp_path / "math500.jsonl", ["1/2", "\\sqrt{2}"])
    math_settings = {
        "system_prompt": "Hi.",
        "instruction": "",
        "rewards": ["correct", {"name": "format", "weight": 0.5}],
    }
    changes = {
        "benchmarks": "aime24",
        "k": 2,
        "problems": None,
        "math": math_settings,
        "sampling": {"max_new_tokens": 12},
    }

    [result] = run_evaluation(tmp_path / "out", changes, {"benchmarks": ["aime24", "math500"]}, model=text_model)[:1]
    rows = answer_rows(tmp_path / "out", "aime24")

    assert [row["uid"] for row in rows] == [f"aime24/test/{index}" for index in (0, 0, 1, 1, 2, 2)]
    assert rows[2]["prompt"] == "<|system|>Hi.<|end|><|user|>what is 1?<|end|><|assistant|>"
    assert rows[2]["answer"] == "8"
    assert result.summary.problems == 3

    reward_fn = RewardFn(
        [RewardConfig(name="correct"), RewardConfig(name="format", weight=0.5)], workers=1, timeout=5.0
    )
    with closing(reward_fn):
        for row in rows + answer_rows(tmp_path / "out", "math500"):
            prompt = Prompt(uid="", text="", answer=row["answer"], token_ids=())
            [score] = reward_fn.scores([DecodedResponse(prompt, row["response"], finished=row["finish"] == "stop")])
            assert (row["correct"], row["reward"]) == (score.correct, score.reward)

    assert {row["tokens"] for row in rows} <= set(range(1, 13))
    assert any(row["finish"] == "length" for row in rows)


def test_a_prompt_that_fills_the_context_is_refused_at_once(text_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(DATA_FOLDER, str(tmp_path))
    write_problems(tmp_path / "aime24.jsonl", [1, 2], problem=["short", "long " * 300])
    with pytest.raises(DataError, match=r"aime24: the prompt of aime24/test/1 has \d+ tokens, and the context"):
        run_evaluation(tmp_path / "out", {"benchmarks": "aime24"}, model=text_model)
    assert not (tmp_path / "out" / "aime24.jsonl").exists()


def test_an_endless_set_is_cut_at_512_problems(tmp_path: Path) -> None:
    [result] = run_evaluation(tmp_path, {"k": 1, "problems": None, "sampling": {"max_new_tokens": 1}})
    assert ENDLESS == 512
    assert result.summary.problems == ENDLESS


class WatchedEngine:
    """A real engine, and how many requests were under way at most."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.under_way = self.most = 0
        self.submitted = Counter()

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def submit(self, requests) -> None:
        self._engine.submit(requests)
        self.submitted.update(request.uid for request in requests)
        self.under_way += len(requests)
        self.most = max(self.most, self.under_way)

    def collect(self, *arguments, **keywords) -> list[Rollout]:
        finished_rollouts = self._engine.collect(*arguments, **keywords)
        self.under_way -= len(finished_rollouts)
        return finished_rollouts


@contextmanager
def starter_engine():
    """Yield a real engine of the starter policy."""
    settings = TransformersEngineConfig()
    with closing(make_engine(settings, "starter:policy", torch.device("cpu"), Version(0, 0))) as engine:
        yield engine


@pytest.mark.parametrize("name", ["arithmetic", "tool_arithmetic"])
def test_answers_come_once_each_with_few_under_way(name: str) -> None:
    tokenizer = load_tokenizer("starter:policy")
    task = make_task(getattr(evaluation_config("starter:policy", [SMALL]), name), tokenizer)
    prompts = [task.prompt("test", index) for index in range(23)]
    drawn_count = 0

    def requests():
        nonlocal drawn_count
        for prompt in prompts:
            drawn_count += 1
            yield eval_request(prompt, 0, Sampling(max_new_tokens=24), seed=0)

    with starter_engine() as plain_engine:
        engine = WatchedEngine(plain_engine)
        groups = generate_and_score(engine, task, tokenizer, requests(), concurrency=5)

        first_group = next(groups)
        assert len(first_group) == 4
        assert drawn_count <= 10

        item_by_uid = {item.rollout.uid: item for group in [first_group, *groups] for item in group}
        assert engine.most <= 10
        assert set(engine.submitted.values()) == {1}

        whole_evaluation = evaluate(plain_engine, task, tokenizer, prompts, Sampling(max_new_tokens=24), seed=0, k=1)

    assert [rollout.uid for rollout in whole_evaluation.rollouts] == [f"eval/{prompt.uid}" for prompt in prompts]
    assert len(item_by_uid) == 23
    for rollout, response, score in zip(
        whole_evaluation.rollouts, whole_evaluation.responses, whole_evaluation.scores, strict=True
    ):
        assert (item_by_uid[rollout.uid].response, item_by_uid[rollout.uid].score) == (response, score)


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

    assert len(seeds) == 120  # 5 prompts, 4 samples, 2 seeds, 3 sets
    assert len(set(seeds)) == 120


def evaluation_of(rewards: list[float], k: int) -> Evaluation:
    """Return an evaluation whose scores alone are filled in: `k` rewards for each problem."""
    return Evaluation(k=k, rollouts=(), responses=(), scores=tuple(Score(reward=reward) for reward in rewards))


def test_the_error_of_a_mean_reward_is_over_problems():
    rewards = [1.0, 3.0, 2.0, 6.0, 0.0, 0.0]  # means of three problems: 2, 4 and 0
    evaluation = evaluation_of(rewards, k=2)

    assert evaluation.reward == 2.0
    assert evaluation.reward_stderr == pytest.approx(2.0 / math.sqrt(3))
    assert math.isnan(evaluation_of([1.0, 3.0], k=2).reward_stderr)
