"""`jackpot export`: a run's rollouts in every format that is written come back by that format's reader."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.runs import SHORT, FinishedRuns
from helpers.synthetic_rollouts import noise, records, write
from jackpot.analysis.replay.export import export_rollouts
from jackpot.analysis.replay.formats import WRITABLE, find_format
from jackpot.analysis.replay.formats.base import read_files
from jackpot.analysis.replay.replay import replay
from jackpot.analysis.replay.responses import SavedResponse
from jackpot.analysis.replay.rewards import score_again
from jackpot.core.errors import CheckpointError, ConfigError, DataError

# Two iterations of eight responses, all saved.
SETTINGS = ("rollouts.every=1", "iterations=2", "batch.prompts=2", "evaluation.problems=1", SHORT)


@pytest.fixture(scope="module")
def trained(finished_run: FinishedRuns) -> Path:
    """A run folder with two files of saved rollouts."""
    return finished_run(*SETTINGS)


def read(path: Path) -> tuple[str, list[SavedResponse]]:
    """Read a dump without a complaint: the name of its format and its responses."""
    complaints: list[str] = []
    saved_format, files = find_format(path, "auto")
    responses = list(read_files(saved_format, files, complaints.append))
    assert complaints == []
    return saved_format.name, responses


@pytest.mark.parametrize("name", WRITABLE)
def test_every_token_comes_back(name, trained, tmp_path):
    exported = export_rollouts(trained, name, tmp_path / "out")
    form, copies = read(tmp_path / "out")
    _, originals = read(trained)

    assert form == name and exported.responses == len(copies) == len(originals) == 16
    assert exported.tokens == sum(len(original.token_ids) for original in originals)
    assert len(exported.files) == 2 and all(file.is_file() for file in exported.files)
    for original, copy in zip(originals, copies, strict=True):
        assert copy.prompt_ids.tolist() == original.prompt_ids.tolist()
        assert copy.token_ids.tolist() == original.token_ids.tolist()
        assert copy.sampled_mask.tolist() == original.sampled_mask.tolist()
        assert copy.rollout_log_probs.tolist() == original.rollout_log_probs.tolist()
        assert copy.advantages[copy.sampled_mask].tolist() == original.advantages[original.sampled_mask].tolist()
        assert copy.old_log_probs.tolist() == original.old_log_probs.tolist()
        assert copy.has_lists == (name == "jsonl")


def test_a_tools_tokens_stay_masked(finished_run: FinishedRuns, tmp_path):
    """Their log-probs are no ratio of two models."""
    run = finished_run("task.name=tool_arithmetic", "iterations=1", "rollouts.every=1", "evaluation.problems=1")
    _, originals = read(run)

    assert not all(response.sampled_mask.all() for response in originals)
    for name in WRITABLE:
        export_rollouts(run, name, tmp_path / name)
        _, copies = read(tmp_path / name)
        assert [response.sampled_mask.tolist() for response in copies] == [
            response.sampled_mask.tolist() for response in originals
        ], name


def test_the_files_have_what_the_other_trainer_writes_itself(trained, tmp_path):
    [row] = pq.read_table(trained / "rollouts" / "iteration-000002.parquet").slice(0, 1).to_pylist()
    export_rollouts(trained, "verl", tmp_path / "verl")
    line = json.loads((tmp_path / "verl" / "2.jsonl").read_text().splitlines()[0])
    # in the order of verl's own columns
    of_verl = {
        "input": row["prompt"],
        "output": row["response"],
        "gts": row["answer"],
        "score": row["reward"],
        "step": 2,
    }

    assert list(line)[:5] == list(of_verl) and {name: line[name] for name in of_verl} == of_verl


def test_what_cannot_be_exported_is_refused_by_name(trained, tmp_path):
    with pytest.raises(
        ConfigError, match=r"unknown format to write 'verrl'; did you mean 'verl'\? Valid: jackpot, jsonl, verl"
    ):
        export_rollouts(trained, "verrl", tmp_path / "out")
    with pytest.raises(CheckpointError, match="is not a run folder"):
        export_rollouts(tmp_path, "verl", tmp_path / "out")

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(ConfigError, match="give --out a folder that is empty"):
        export_rollouts(trained, "verl", tmp_path / "full")
    assert not (tmp_path / "out").exists()


def test_damaged_files_are_named_and_the_others_exported(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    first, second = sorted((run / "rollouts").iterdir())
    second.write_bytes(second.read_bytes()[:500])

    exported = export_rollouts(run, "verl", tmp_path / "out")
    assert len(exported.files) == 1 and "iteration-000002.parquet cannot be read" in exported.problems[0]

    table = pq.read_table(first)
    pq.write_table(table.drop_columns("old_log_probs"), first)
    with pytest.raises(DataError, match=r"has no saved rollouts to export: .*old_log_probs"):
        export_rollouts(run, "verl", tmp_path / "again")

    first.unlink()
    second.unlink()
    with pytest.raises(DataError, match=r"has no saved rollouts to export: rollouts\.every"):
        export_rollouts(run, "verl", tmp_path / "again")


def test_a_bundle_has_one_step_or_one_response_and_its_settings(trained, tmp_path):
    step = export_rollouts(trained, "jackpot", tmp_path / "step", iteration=2)
    [file] = step.files
    assert step.responses == 8 and pq.read_schema(file).metadata[b"schema_version"] == b"1"

    saved = trained / "rollouts" / file.name
    assert pq.read_table(file).equals(pq.read_table(saved)) and replay(file, names=["none"]).format == "jackpot"

    uid = pq.read_table(saved)["uid"].to_pylist()[3]
    [alone] = export_rollouts(trained, "jackpot", tmp_path / "alone", sample=uid).files
    assert pq.read_table(alone).equals(pq.read_table(saved).slice(3, 1))

    [line] = export_rollouts(trained, "verl", tmp_path / "line", sample=uid).files
    assert json.loads(line.read_text())["uid"] == uid

    with pytest.raises(DataError, match="iteration 3 is not saved; saved are 1, 2"):
        export_rollouts(trained, "jackpot", tmp_path / "none", iteration=3)
    with pytest.raises(DataError, match="no saved response has the uid 'x'"):
        export_rollouts(trained, "jackpot", tmp_path / "none", sample="x")


def test_rewards_are_computed_again_from_a_bundle(finished_run: FinishedRuns, tmp_path):
    overlong = "objective.overlong_buffer={len: 6, penalty_factor: 0.5}"
    run = finished_run(*SETTINGS, overlong)
    [file] = export_rollouts(run, "jackpot", tmp_path / "bundle", iteration=1).files

    again = score_again(file)
    assert len(again) == 8 and all(reward.is_same for reward in again) and min(reward.saved for reward in again) < 0.0

    table = pq.read_table(file)
    rewards = table["reward"].to_pylist()
    wrong = table.set_column(table.column_names.index("reward"), "reward", pa.array([rewards[0] + 1.0, *rewards[1:]]))
    pq.write_table(wrong, file)

    first, *others = score_again(file)
    assert (first.saved, first.now) == (rewards[0] + 1.0, rewards[0]) and all(reward.is_same for reward in others)

    with pytest.raises(DataError, match="leave out --rewards"):
        score_again(write(tmp_path / "a.jsonl", records(noise(0.3), responses=1)))
