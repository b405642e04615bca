"""What `jackpot eval` makes of a folder that is already there, and of a run's settings."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from jackpot.config_engines import VLLMEngineConfig
from jackpot.errors import CheckpointError
from jackpot.evaluate import judge
from jackpot.launch.evaluation import Result, evaluate_model, evaluation_config
from jackpot.tasks.data import DATA_FOLDER
from jackpot.tasks.sets import make_sets
from jackpot.types import Rollout
from runs import run, small_config
from tasks.texts import text_tokenizer, write_problems

SMALL = {"benchmarks": ["arithmetic"], "k": 2, "problems": 4, "threads": 1, "sampling": {"max_new_tokens": 24}}


def evaluation(folder: Path, *changes: dict) -> list[Result]:
    return evaluate_model(evaluation_config("starter:policy", [SMALL, *changes]), folder, lambda progress: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole evaluation; nobody changes it."""
    folder = tmp_path_factory.mktemp("whole")
    evaluation(folder)
    return folder


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "finished"))


def test_another_context_is_refused_because_answers_are_cut_elsewhere(finished: Path) -> None:
    record = yaml.safe_load((finished / "config.yaml").read_text())
    record["asked"]["engine"] = json.loads(VLLMEngineConfig(context_length=512).model_dump_json())
    (finished / "config.yaml").write_text(yaml.safe_dump(record))
    engine = {"engine": {"name": "vllm", "context_length": 512, "memory_share": 0.3}}
    assert evaluation(finished, engine)[0].was_done
    with pytest.raises(CheckpointError, match=r"engine\.context_length: 512 in the folder, 64 now"):
        evaluation(finished, engine, {"engine": {"context_length": 64}})


def test_another_engine_keeps_the_number_format_of_the_run_unless_told_otherwise(tmp_path: Path) -> None:
    run(small_config("engine.dtype=bf16", "precision=bf16"), tmp_path, kill_after=0)
    model, named = str(tmp_path), {"benchmarks": "arithmetic"}
    for changes in ([], [{"engine": "vllm"}], [{"engine": {"name": "vllm"}}], [{"engine": {"max_batch_size": 3}}]):
        assert evaluation_config(model, [named, *changes]).engine.dtype == "bf16"
    told = evaluation_config(model, [named, {"engine": "vllm"}, {"engine": {"dtype": "fp32"}}])
    assert (told.engine.name, told.engine.dtype) == ("vllm", "fp32")
    assert evaluation_config("starter:policy", [named, {"engine": "vllm"}]).engine.dtype == "fp32"


def test_a_cut_answer_may_stand_in_a_closed_box_and_one_that_was_given_up_is_wrong(tmp_path: Path, monkeypatch) -> None:
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
        responses, scores = judge(rollouts, task, tokenizer)
    finally:
        task.close()
    assert responses == [text for text, _ in ended.values()]
    found = dict(zip(ended, scores, strict=True))
    assert {uid for uid, score in found.items() if score.correct} == {"closed", "right"}
    assert found["given up"].reward == 0.0 and found["right"].reward == 1.5
