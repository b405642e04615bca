"""What `jackpot eval` makes of a folder that is already there, and of a run's settings."""

import gzip
import io
import json
import re
import shlex
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from rich.console import Console

from helpers.commands import jackpot
from helpers.runs import FinishedRuns, run, small_config
from helpers.texts import text_tokenizer, write_problems
from jackpot.analysis.evaluate.evaluate import BenchmarkResult, evaluate_model, evaluation_config, evaluation_tasks
from jackpot.config.engines import VLLMEngineConfig
from jackpot.config.tasks import MathConfig
from jackpot.core.errors import CheckpointError, ConfigError, DataError
from jackpot.core.types import Rollout
from jackpot.models.load import load_tokenizer
from jackpot.rollout.evaluate import score_rollouts
from jackpot.rollout.tasks.data import DATA_FOLDER
from jackpot.rollout.tasks.registry import make_sets
from jackpot.ui.commands import evaluate as evaluate_command

SMALL = {"benchmarks": ["arithmetic"], "k": 2, "problems": 4, "threads": 1, "sampling": {"max_new_tokens": 24}}


def evaluation(folder: Path, *changes: dict) -> list[BenchmarkResult]:
    """Evaluate the starter on four problems into a folder, with settings changed."""
    return evaluate_model(evaluation_config("starter:policy", [SMALL, *changes]), folder, lambda progress: None)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole evaluation, which no test changes."""
    folder = tmp_path_factory.mktemp("whole")
    evaluation(folder)
    return folder


@pytest.fixture
def finished(evaluated: Path, tmp_path: Path) -> Path:
    """A copy of `evaluated`, which a test may change."""
    return Path(shutil.copytree(evaluated, tmp_path / "finished"))


def test_another_context_is_refused_as_answers_are_cut_elsewhere(finished: Path) -> None:
    record = yaml.safe_load((finished / "config.yaml").read_text())
    record["asked"]["engine"] = json.loads(VLLMEngineConfig(max_model_len=512).model_dump_json())
    (finished / "config.yaml").write_text(yaml.safe_dump(record))
    engine = {"engine": {"name": "vllm", "max_model_len": 512, "gpu_memory_utilization": 0.3}}

    assert evaluation(finished, engine)[0].was_done

    with pytest.raises(CheckpointError, match=r"engine\.max_model_len: 512 in the folder, 64 now"):
        evaluation(finished, engine, {"engine": {"max_model_len": 64}})


def test_other_kernels_are_refused_and_so_are_unnamed_ones(finished: Path) -> None:
    record = yaml.safe_load((finished / "config.yaml").read_text())
    kernels = {"attn_implementation": "sdpa", "quantization": None, "kv_cache_dtype": None}

    assert record["asked"]["engine"].items() >= kernels.items()

    for name, value in (("attn_implementation", "eager"), ("quantization", "fp8"), ("kv_cache_dtype", "fp8")):
        told = f"engine.{name}: {json.dumps(kernels[name])} in the folder, {json.dumps(value)} now"
        with pytest.raises(CheckpointError, match=re.escape(told)):
            evaluation(finished, {"engine": {name: value}})

    del record["asked"]["engine"]["attn_implementation"]
    (finished / "config.yaml").write_text(yaml.safe_dump(record))
    with pytest.raises(
        CheckpointError, match=r"engine\.attn_implementation: null in (?s:.*) --out with another folder"
    ):
        evaluation(finished)


def test_another_engine_keeps_the_number_format_of_the_run(tmp_path: Path) -> None:
    run(small_config("engine.dtype=bf16", "precision=bf16", "evaluation.problems=1"), tmp_path, kill_after=0)
    model, named = str(tmp_path), {"benchmarks": "arithmetic"}

    for changes in ([], [{"engine": "vllm"}], [{"engine": {"name": "vllm"}}], [{"engine": {"max_num_seqs": 3}}]):
        assert evaluation_config(model, [named, *changes]).engine.dtype == "bf16"

    told = evaluation_config(model, [named, {"engine": "vllm"}, {"engine": {"dtype": "fp32"}}])
    assert (told.engine.name, told.engine.dtype) == ("vllm", "fp32")
    assert evaluation_config("starter:policy", [named, {"engine": "vllm"}]).engine.dtype == "fp32"


def test_a_cut_answer_may_stand_in_a_closed_box(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(DATA_FOLDER, str(tmp_path))
    write_problems(tmp_path / "aime24.jsonl", [7])
    rewards = ["correct", {"name": "format", "weight": 0.5}]
    config = evaluation_config("starter:policy", [{"benchmarks": "aime24", "math": {"rewards": rewards}}])
    tokenizer = text_tokenizer()
    task = make_sets(config.benchmarks, tokenizer, config)["aime24"]
    ended = {"closed": ("\\boxed{7} so", "length"), "open": ("\\boxed{7", "length"), "line": ("#### 7", "length")}
    ended |= {"given up": ("\\boxed{7} so", "aborted"), "right": ("\\boxed{7}", "stop")}

    rollouts = []
    for uid, (text, finish) in ended.items():
        ids, prompt = torch.tensor(tokenizer.encode(text)), task.prompt("test", 0)
        rollouts.append(
            Rollout(
                uid=uid,
                prompt=prompt,
                finish=finish,
                token_ids=ids,
                rollout_log_probs=torch.zeros(len(ids)),
                sampled_mask=torch.ones(len(ids), dtype=torch.bool),
                top_ids=torch.zeros(len(ids), 0, dtype=torch.int64),
                top_log_probs=torch.zeros(len(ids), 0),
                versions=torch.zeros(len(ids), 2, dtype=torch.int64),
            )
        )

    try:
        responses, scores = score_rollouts(rollouts, task, tokenizer)
    finally:
        task.close()

    assert responses == [text for text, _ in ended.values()]
    score_of = dict(zip(ended, scores, strict=True))
    assert {uid for uid, score in score_of.items() if score.correct} == {"closed", "right"}
    assert score_of["given up"].reward == 0.0 and score_of["right"].reward == 1.5


def test_a_set_without_a_verdict_is_measured_by_its_mean_reward(finished: Path) -> None:
    path = finished / "arithmetic.parquet"
    table = pq.read_table(path)
    index = table.schema.get_field_index("correct")
    none = pa.nulls(len(table), pa.bool_())
    pq.write_table(table.set_column(index, table.schema.field(index), none), path)

    [result] = evaluation(finished)

    assert result.summary.mean_at_k is None and result.summary.reward == pytest.approx(np.mean(table["reward"]))

    console = Console(file=io.StringIO(), width=200)
    evaluate_command.show_results(console, [result], finished, "greedy")
    assert "to each problem, greedy" in console.file.getvalue()
    assert "mean reward" in console.file.getvalue() and f"{result.summary.reward:.4g}" in console.file.getvalue()


@pytest.mark.parametrize("is_option", [True, False])
def test_the_command_for_more_answers_runs_as_it_is_printed(tmp_path: Path, is_option: bool) -> None:
    small = ["problems=2", "threads=1", "sampling.max_new_tokens=2"]
    named = ["--benchmarks", "arithmetic"] if is_option else ["benchmarks=[arithmetic]", "k=1"]
    first = jackpot("eval", "starter:policy", *small, *named, "--engine", "transformers", "--out", "a b", cwd=tmp_path)
    [command] = [line for line in first.stdout.splitlines() if "jackpot eval" in line]

    again = jackpot(*shlex.split(command, comments=True)[1:], cwd=tmp_path)

    assert (first.returncode, again.returncode) == (0, 0), again.stderr

    record = yaml.safe_load((tmp_path / "a b-k16" / "config.yaml").read_text())["asked"]
    assert (record["k"], record["problems"], record["benchmarks"]) == (16, 2, ["arithmetic"])


@pytest.mark.parametrize("answers_file", ["arithmetic.parquet", "aime24.jsonl"])
def test_answers_without_a_word_on_what_was_asked_are_not_taken(finished: Path, answers_file: str) -> None:
    (finished / "config.yaml").unlink()
    (finished / "arithmetic.parquet").rename(finished / answers_file)
    before = (finished / answers_file).read_bytes()

    with pytest.raises(
        CheckpointError, match=rf"holds answers \({answers_file}\) but no config\.yaml .*--out another folder"
    ):
        evaluation(finished)

    assert (finished / answers_file).read_bytes() == before and not (finished / "config.yaml").exists()


def test_files_of_somebody_else_are_no_answers(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("{}")
    assert not evaluation(tmp_path)[0].was_done


RECORDS = {
    "no yaml": (b"asked: [1", r"cannot read what was asked in .*config\.yaml"),
    "no text": (b"\xff\xfe\xff", r"cannot read what was asked in .*config\.yaml"),
    "a list": (b"[1, 2]", "is not of an evaluation"),
    "empty": (b"", "is not of an evaluation"),
    "a part": (b"schema_version: 1\nmodel_digest: x\ndata: {}\n", "is not of an evaluation"),
    "another shape": (b"schema_version: 1\nmodel_digest: x\nasked: {}\ndata: [1]\n", "is not of an evaluation"),
}


@pytest.mark.parametrize("record", RECORDS)
def test_a_broken_record_is_an_error_that_says_what_to_do(record: str, finished: Path) -> None:
    content, message = RECORDS[record]
    (finished / "config.yaml").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"(?s){message}.*--out another folder"):
        evaluation(finished)
    assert (finished / "config.yaml").read_bytes() == content


@pytest.mark.parametrize("kept", [0, 500])
def test_a_table_that_was_cut_short_says_what_to_do(kept: int, finished: Path) -> None:
    table = finished / "arithmetic.parquet"
    table.write_bytes(table.read_bytes()[:kept])

    with pytest.raises(CheckpointError, match=r"(?s)cannot read the responses in .*arithmetic\.parquet.*remove it"):
        evaluation(finished)

    table.unlink()
    assert not evaluation(finished)[0].was_done


LINE = {"number": 0, "sample": 0, "response": "2#4", "correct": False, "reward": 0.0, "tokens": 4, "finish": "stop"}
LINE |= {"reward_error": None}
DAMAGE = {"number": "0", "sample": True, "response": None, "correct": 1, "reward": float("nan"), "tokens": None}
DAMAGE |= {"finish": 3, "reward_error": 0}


def test_lines_with_nonsense_in_them_are_asked_again(evaluated: Path, tmp_path: Path, caplog) -> None:
    shutil.copy(evaluated / "config.yaml", tmp_path)
    lacking = [{field: value for field, value in LINE.items() if field != name} for name in DAMAGE]
    damaged = [LINE | {name: value} for name, value in DAMAGE.items()]
    lines = [*lacking, *damaged, LINE | {"number": 1}]
    (tmp_path / "arithmetic.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    evaluation(tmp_path)
    rows, expected = (pq.read_table(folder / "arithmetic.parquet").to_pylist() for folder in (tmp_path, evaluated))

    assert rows[2]["response"] == "2#4"  # the whole line was taken
    del rows[2], expected[2]
    assert rows == expected
    assert "16 lines cannot be read" in caplog.text


OWN_FILE = [{"question": f"{index}+1=", "gold": [str(index + 1)]} for index in range(3)]
OWN_SETTINGS = {"columns": {"problem": "question", "answer": "gold"}, "math": {"template": "plain", "instruction": ""}}


def test_a_file_of_ones_own_is_a_benchmark_with_its_columns(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl.gz"
    with gzip.open(file, "wt") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in OWN_FILE)
    named = {"benchmarks": [str(file)], "problems": None, **OWN_SETTINGS}

    (result,) = evaluation(tmp_path / "eval", named)

    assert (result.benchmark, result.summary.problems, result.table.name) == ("mine", 3, "mine.parquet")

    rows = pq.read_table(result.table).to_pylist()
    first_answers = rows[::2]  # of two to each problem
    assert [(row["uid"], row["prompt"], row["answer"]) for row in first_answers] == [
        (f"mine/test/{index}", f"{index}+1=", str(index + 1)) for index in range(3)
    ]
    assert evaluation(tmp_path / "eval", named)[0].was_done

    with gzip.open(file, "at") as lines:
        lines.write(json.dumps(OWN_FILE[0]) + "\n")
    with pytest.raises(CheckpointError, match=r"data\.mine\.problems"):
        evaluation(tmp_path / "eval", named)


def test_own_is_the_held_out_problems_of_the_run(tmp_path: Path) -> None:
    data = write_problems(tmp_path / "a.jsonl", range(5), problem=[f"{index}+1=" for index in range(5)])
    task = {"name": "math", "train": str(data), "test": {"source": str(data), "limit": 3}}
    config = small_config("evaluation.problems=1").model_copy(
        update={"task": MathConfig.model_validate(task | {"template": "plain", "instruction": ""})}
    )
    run(config, tmp_path / "run", kill_after=0)

    asked = evaluation_config(str(tmp_path / "run"), [SMALL, {"benchmarks": "own"}])
    assert asked.task == config.task

    tasks = evaluation_tasks(asked, load_tokenizer("starter:policy"))
    with closing(tasks["own"]) as held_out:
        assert [held_out.prompt("test", index).uid for index in range(held_out.size("test"))] == [
            f"a/test/{n}" for n in range(3)
        ]

    assert evaluation_config(str(tmp_path / "run"), [SMALL]).task is None


def test_the_task_of_own_may_not_change(finished_run: FinishedRuns, tmp_path: Path) -> None:
    def asked(*sets: str, longest: int = 2) -> list[bool]:
        changes = [SMALL, {"benchmarks": list(sets), "task": {"max_terms": longest}}]
        config = evaluation_config(str(finished_run()), changes)
        return [result.was_done for result in evaluate_model(config, tmp_path / "eval", lambda progress: None)]

    assert asked("arithmetic") == [False]
    assert asked("arithmetic", "own", longest=3) == [True, False]
    assert asked("arithmetic") == [True]
    assert asked("own", longest=3) == [True]
    with pytest.raises(CheckpointError, match=r"task\.max_terms: 3 in the folder, 2 now"):
        asked("own")


@pytest.mark.parametrize(
    ("model", "benchmarks", "message"),
    [
        ("starter:policy", "own", "own is the held-out problems of a run, and starter:policy is not the folder of one"),
        ("starter:policy", "gsm9k", "unknown benchmark 'gsm9k'; did you mean 'gsm8k'.* path of a file with problems"),
        ("starter:policy", "no/such.jsonl", r"no/such\.jsonl does not exist"),
        ("starter:policy", ["gsm8k", "hub:openai/gsm8k"], "gsm8k is named twice"),
    ],
)
def test_unknown_benchmarks_are_refused_before_a_model_is_loaded(model, benchmarks, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        evaluation_config(model, [SMALL, {"benchmarks": benchmarks}])


def test_without_a_chat_template_the_setting_of_eval_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(DATA_FOLDER, str(tmp_path))
    write_problems(tmp_path / "aime24.jsonl", [7])
    with pytest.raises(DataError, match=r"math\.template in jackpot eval"):
        evaluation(tmp_path / "eval", {"benchmarks": "aime24"})
