"""`jackpot replay` judges corrections on the rollouts of a run or a dump: what a user types and reads."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from helpers.commands import jackpot
from helpers.runs import SHORT, FinishedRuns, run, small_config
from helpers.synthetic_rollouts import noise, records, write
from jackpot.analysis.replay.gradient import known_states
from jackpot.analysis.replay.replay import replay

WHOLE_VOCABULARY = "sampling.num_top_log_probs=32"
SETTINGS = ("rollouts.every=1", "iterations=2", "batch.prompts=8", "evaluation.every=9", "checkpoint.every=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Two iterations of the quickstart that save every rollout with both whole distributions."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    run(small_config(*SETTINGS, WHOLE_VOCABULARY, "objective.correction.kappa=none"), folder)
    return folder


def replayed_numbers(*arguments: str, cwd: Path) -> dict:
    """Return the JSON that the command prints."""
    process = jackpot("replay", *arguments, "--json", cwd=cwd)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def saved_columns(folder: Path, *columns: str) -> dict[str, torch.Tensor]:
    """Return columns of all saved rollouts, each as [tokens]."""
    tables = [pq.read_table(path, columns=list(columns)) for path in sorted((folder / "rollouts").iterdir())]
    return {
        name: torch.tensor([value for table in tables for row in table[name].to_pylist() for value in row])
        for name in columns
    }


@pytest.fixture(scope="module")
def numbers(trained) -> dict:
    return replayed_numbers(str(trained), cwd=trained.parent)


def test_the_runs_correction_is_replayed_as_it_was_applied(trained, numbers):
    run_correction = next(correction for correction in numbers["corrections"] if correction["is_own"])
    columns = saved_columns(trained, "acceptance", "weights", "old_log_probs", "rollout_log_probs")
    factors = columns["acceptance"] * columns["weights"]

    assert run_correction["accepted"] == pytest.approx(float(columns["acceptance"].mean()), abs=1e-5)
    assert run_correction["weight_mean"] == pytest.approx(float(factors.mean()), abs=1e-4)
    assert run_correction["weight_max"] == pytest.approx(float(factors.max()), rel=1e-3)

    ratios = (columns["old_log_probs"] - columns["rollout_log_probs"]).double().exp()
    tis_correction = next(correction for correction in numbers["corrections"] if correction["label"] == "tis cap=2")

    assert tis_correction["weight_mean"] == pytest.approx(float(ratios.clamp(max=2.0).mean()), rel=1e-6)
    assert tis_correction["capped"] == pytest.approx(float((ratios > 2.0).double().mean()), rel=1e-6)
    assert numbers["run"]["tokens"] == len(ratios)
    assert numbers["format"] == "jackpot"


def test_the_command_begins_with_the_answer(trained, numbers):
    process = jackpot("replay", str(trained), "--all", cwd=trained.parent)
    assert process.returncode == 0, process.stderr

    output = " ".join(process.stdout.split())
    for text in (
        "jackpot, 2 files",
        "as training scored it when it saved the batch",
        "mean of rho, must be 1",
        "On the sampled tokens",
        "Summed over the vocabulary",
        "Rejected, by position and by the policy's entropy",
        "obrs kappa=none *",
    ):
        assert text in output

    lines = numbers["answer"]["lines"]
    verdict = " ".join(f"{label}: {text}" for label, text in lines.items())
    order = [output.index(text) for text in (verdict, "What a rollout is worth", "On the sampled")]
    assert 1 <= len(lines) <= 5
    assert order == sorted(order)

    without_all = jackpot("replay", str(trained), "--corrections", "none", cwd=trained.parent)
    short_output = " ".join(without_all.stdout.split())
    assert "What a rollout is worth" in short_output
    assert "On the sampled tokens" not in short_output
    assert "--all prints" in short_output


def test_only_the_named_corrections_are_replayed(trained):
    numbers = replayed_numbers(str(trained), "--corrections", "tis,icepop", cwd=trained.parent)
    assert {correction["label"].split()[0] for correction in numbers["corrections"]} == {"tis", "icepop"}

    refusal = jackpot("replay", str(trained), "--corrections", "tiss", cwd=trained.parent)
    assert refusal.returncode == 2
    assert "did you mean 'tis'" in refusal.stderr


def test_the_damaged_file_of_an_unfinished_run_is_named(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder, symlinks=True)
    shutil.rmtree(folder / "checkpoints")
    broken_file = folder / "rollouts" / "iteration-000002.parquet"
    broken_file.write_bytes(broken_file.read_bytes()[:2000])
    (folder / "rollouts" / "iteration-000003.parquet.partial").write_bytes(b"being written")

    process = jackpot("replay", str(folder), "--corrections", "none", cwd=tmp_path)
    assert process.returncode == 0, process.stderr

    output = " ".join(process.stdout.split())
    assert "Not read: run/rollouts/iteration-000002.parquet cannot be read and is left out" in output

    numbers = replayed_numbers(str(folder), "--corrections", "none", cwd=tmp_path)
    assert numbers["unreadable"] == 1
    assert numbers["run"]["responses"] == 32

    (folder / "rollouts" / "iteration-000001.parquet").unlink()
    refusal_without_responses = jackpot("replay", str(folder), cwd=tmp_path)
    assert refusal_without_responses.returncode == 2
    assert "no response to replay" in refusal_without_responses.stderr

    broken_file.unlink()
    refusal_without_files = jackpot("replay", str(folder), cwd=tmp_path)
    assert refusal_without_files.returncode == 2
    assert "has saved no rollouts yet" in refusal_without_files.stderr


def test_a_model_scores_what_a_dump_lacks_as_training_would(trained, tmp_path):
    """The saved rollouts of iteration 1 as bare JSONL without the policy: the policy that the run began with reads
    them."""
    rows = pq.read_table(trained / "rollouts" / "iteration-000001.parquet").to_pylist()
    columns = ("prompt_ids", "token_ids", "rollout_log_probs", "rollout_top_ids", "rollout_top_log_probs", "uid")
    path = tmp_path / "bare.jsonl"
    path.write_text("".join(json.dumps({name: row[name] for name in columns}) + "\n" for row in rows))

    refusal = jackpot("replay", str(path), cwd=tmp_path)

    assert refusal.returncode == 2
    assert "give --model PATH" in refusal.stderr

    result = replay(path, model="starter:policy", names=["tis"])
    assert "starter:policy" in result.policy

    old_log_probs = torch.tensor([value for row in rows for value in row["old_log_probs"]], dtype=torch.float64)
    written_log_probs = torch.tensor([value for row in rows for value in row["rollout_log_probs"]], dtype=torch.float64)

    assert float(result.run["ratio"].value) == pytest.approx(
        float((old_log_probs - written_log_probs).exp().mean()), rel=1e-4
    )
    assert known_states(result.corrections[0].sums) > 0  # the model gives its half of the lists too

    top_ids = saved_columns(trained, "rollout_top_ids")["rollout_top_ids"]
    assert top_ids.shape[1] == 32  # the whole vocabulary
    assert float(result.run["z"].count) == len(old_log_probs)


def test_the_folder_of_a_run_stands_for_its_best_policy(trained):
    """A checkpoint of the run that wrote iteration 2: its policy after one step is the old policy there."""
    result = replay(trained, model=str(trained), names=["none"])

    assert result.policy.endswith("at temperature 1")
    assert "/checkpoints/" in result.policy

    step_result = replay(trained, model=str(trained / "checkpoints" / "step-1" / "policy"), names=["none"])
    first_gap, second_gap = dict(step_result.ends).values()  # by iteration
    saved_gap = dict(replay(trained, names=["none"]).ends)["iteration 2"]

    assert first_gap > 0.0
    assert second_gap == pytest.approx(saved_gap, rel=1e-4)


def test_of_a_mixed_run_the_rollout_models_rollouts_are_judged(finished_run: FinishedRuns):
    result = replay(finished_run("rollout_model.share=0.5", "iterations=1", "rollouts.every=1"), names=["none"])
    notes = [text for text in result.left_out if "the policy sampled them itself" in text]
    count = int(notes[0].split()[0])

    assert count > 0
    assert count == int(result.run["responses"].value)
    assert float(result.run["total_variation"].value) > 0.01


@pytest.mark.parametrize(
    ("is_priced", "overrides"),
    [
        (True, ()),
        (False, ("rollout_model.share=0.0", "engine.draft={tokens: 2}")),
    ],
)
def test_shares_are_priced_by_rollouts_of_the_rollout_model(is_priced, overrides, finished_run):
    overrides_for_an_answer = ("iterations=1", "batch.prompts=60", "evaluation.problems=1", SHORT)

    result = replay(finished_run(*overrides, *overrides_for_an_answer), names=["none", "tis"])

    assert result.answer.verdict != "cannot tell"
    assert bool(result.answer.generation) == is_priced
    assert any("the policy generated all of this run" in why for why in result.left_out) != is_priced


def test_imported_jsonl_is_replayed(tmp_path):
    write(tmp_path / "dump.jsonl", records(noise(0.8)))

    process = jackpot("replay", "dump.jsonl", "--format", "jsonl", "--corrections", "tis,obrs", "--all", cwd=tmp_path)
    assert process.returncode == 0, process.stderr

    output = " ".join(process.stdout.split())
    assert "dump.jsonl: jsonl, 1 files" in output
    assert "as the file has it" in output
    assert "Use: tis; a rollout is then worth" in output
    assert "jackpot train RECIPE objective.correction=tis" in output

    refusal = jackpot("replay", "dump.jsonl", "--format", "verl", cwd=tmp_path)
    assert refusal.returncode == 2
    assert "lacks responses" in refusal.stderr
    assert "_log_rollout_data" in refusal.stderr
