"""`jackpot replay` on runs of our own and on imported rollouts: what a user types and reads."""

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


def as_json(*arguments: str, cwd: Path) -> dict:
    done = jackpot("replay", *arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def saved(folder: Path, *columns: str) -> dict[str, torch.Tensor]:
    """[tokens] of all saved rollouts."""
    tables = [pq.read_table(path, columns=list(columns)) for path in sorted((folder / "rollouts").iterdir())]
    return {
        name: torch.tensor([value for table in tables for row in table[name].to_pylist() for value in row])
        for name in columns
    }


@pytest.fixture(scope="module")
def numbers(trained) -> dict:
    return as_json(str(trained), cwd=trained.parent)


def test_the_runs_correction_is_replayed_as_it_was_applied(trained, numbers):
    found = numbers
    own = next(one for one in found["corrections"] if one["is_own"])
    columns = saved(trained, "acceptance", "weights", "old_log_probs", "rollout_log_probs")
    factor = columns["acceptance"] * columns["weights"]
    assert own["accepted"] == pytest.approx(float(columns["acceptance"].mean()), abs=1e-5)
    assert own["weight_mean"] == pytest.approx(float(factor.mean()), abs=1e-4)
    assert own["weight_max"] == pytest.approx(float(factor.max()), rel=1e-3)
    ratio = (columns["old_log_probs"] - columns["rollout_log_probs"]).double().exp()
    tis = next(one for one in found["corrections"] if one["label"] == "tis cap=2")
    assert tis["weight_mean"] == pytest.approx(float(ratio.clamp(max=2.0).mean()), rel=1e-6)
    assert tis["capped"] == pytest.approx(float((ratio > 2.0).double().mean()), rel=1e-6)
    assert found["run"]["tokens"] == len(ratio) and found["format"] == "jackpot"


def test_the_command_begins_with_the_answer(trained, numbers):
    done = jackpot("replay", str(trained), "--all", cwd=trained.parent)
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    for text in (
        "jackpot, 2 files",
        "as training scored it when it saved the batch",
        "mean of rho, must be 1",
        "On the sampled tokens",
        "Summed over the vocabulary",
        "Rejected, by position and by the policy's entropy",
        "obrs kappa=none *",
    ):
        assert text in printed
    lines = numbers["answer"]["lines"]
    verdict = " ".join(f"{label}: {text}" for label, text in lines.items())
    order = [printed.index(text) for text in (verdict, "What a rollout is worth", "On the sampled")]
    assert 1 <= len(lines) <= 5 and order == sorted(order)
    short = " ".join(jackpot("replay", str(trained), "--corrections", "none", cwd=trained.parent).stdout.split())
    assert "What a rollout is worth" in short
    assert "On the sampled tokens" not in short and "--all prints" in short


def test_some_corrections_alone(trained):
    found = as_json(str(trained), "--corrections", "tis,icepop", cwd=trained.parent)
    assert {one["label"].split()[0] for one in found["corrections"]} == {"tis", "icepop"}
    wrong = jackpot("replay", str(trained), "--corrections", "tiss", cwd=trained.parent)
    assert wrong.returncode == 2 and "did you mean 'tis'" in wrong.stderr


def test_the_damaged_file_of_an_unfinished_run_is_named(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder, symlinks=True)
    shutil.rmtree(folder / "checkpoints")
    broken = folder / "rollouts" / "iteration-000002.parquet"
    broken.write_bytes(broken.read_bytes()[:2000])
    (folder / "rollouts" / "iteration-000003.parquet.partial").write_bytes(b"being written")
    done = jackpot("replay", str(folder), "--corrections", "none", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    assert "Not read: run/rollouts/iteration-000002.parquet cannot be read and is left out" in printed
    found = as_json(str(folder), "--corrections", "none", cwd=tmp_path)
    assert found["unreadable"] == 1 and found["run"]["responses"] == 32
    (folder / "rollouts" / "iteration-000001.parquet").unlink()
    nothing = jackpot("replay", str(folder), cwd=tmp_path)
    assert nothing.returncode == 2 and "no response to replay" in nothing.stderr
    broken.unlink()
    none = jackpot("replay", str(folder), cwd=tmp_path)
    assert none.returncode == 2 and "has saved no rollouts yet" in none.stderr


def test_a_model_scores_what_a_dump_lacks_as_training_would(trained, tmp_path):
    """The saved rollouts of iteration 1 as bare JSONL without the policy: the policy that the run began with reads
    them."""
    rows = pq.read_table(trained / "rollouts" / "iteration-000001.parquet").to_pylist()
    columns = ("prompt_ids", "token_ids", "rollout_log_probs", "rollout_top_ids", "rollout_top_log_probs", "uid")
    path = tmp_path / "bare.jsonl"
    path.write_text("".join(json.dumps({name: row[name] for name in columns}) + "\n" for row in rows))
    refused = jackpot("replay", str(path), cwd=tmp_path)
    assert refused.returncode == 2 and "give --model PATH" in refused.stderr
    found = replay(path, model="starter:policy", names=["tis"])
    assert "starter:policy" in found.policy
    old = torch.tensor([value for row in rows for value in row["old_log_probs"]], dtype=torch.float64)
    written = torch.tensor([value for row in rows for value in row["rollout_log_probs"]], dtype=torch.float64)
    assert float(found.run["ratio"].value) == pytest.approx(float((old - written).exp().mean()), rel=1e-4)
    assert known_states(found.corrections[0].sums) > 0  # the model gives its half of the lists too
    every = saved(trained, "rollout_top_ids")["rollout_top_ids"]
    assert every.shape[1] == 32 and float(found.run["z"].count) == len(old)


def test_the_folder_of_a_run_stands_for_its_best_policy(trained):
    """A checkpoint of the run that wrote iteration 2: its policy after one step is the old policy there."""
    found = replay(trained, model=str(trained), names=["none"])
    assert found.policy.endswith("at temperature 1") and "/checkpoints/" in found.policy
    step = replay(trained, model=str(trained / "checkpoints" / "step-1" / "policy"), names=["none"])
    first, second = dict(step.ends).values()
    assert first > 0.0 and second == pytest.approx(dict(replay(trained, names=["none"]).ends)["iteration 2"], rel=1e-4)


def test_of_a_mixed_run_the_rollout_models_rollouts_are_judged(finished_run: FinishedRuns):
    found = replay(finished_run("rollout_model.share=0.5", "iterations=1", "rollouts.every=1"), names=["none"])
    own = [text for text in found.left_out if "the policy sampled them itself" in text]
    count = int(own[0].split()[0])
    assert count == int(found.run["responses"].value) > 0 and float(found.run["total_variation"].value) > 0.01


@pytest.mark.parametrize(
    "prices, overrides",
    [
        (True, ()),
        (False, ("rollout_model.share=0.0", "engine.draft={tokens: 2}")),
    ],
)
def test_shares_are_priced_by_rollouts_of_the_rollout_model(prices, overrides, finished_run):
    enough = ("iterations=1", "batch.prompts=60", "evaluation.problems=1", SHORT)  # for an answer
    found = replay(finished_run(*overrides, *enough), names=["none", "tis"])
    assert found.answer.verdict != "cannot tell" and bool(found.answer.generation) == prices
    assert any("the policy generated all of this run" in why for why in found.left_out) != prices


def test_imported_jsonl_is_replayed(tmp_path):
    write(tmp_path / "dump.jsonl", records(noise(0.8)))
    done = jackpot("replay", "dump.jsonl", "--format", "jsonl", "--corrections", "tis,obrs", "--all", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    assert "dump.jsonl: jsonl, 1 files" in printed and "as the file has it" in printed
    assert "Use: tis; a rollout is then worth" in printed
    assert "jackpot train RECIPE objective.correction=tis" in printed
    wrong = jackpot("replay", "dump.jsonl", "--format", "verl", cwd=tmp_path)
    assert wrong.returncode == 2 and "lacks responses" in wrong.stderr and "_log_rollout_data" in wrong.stderr
