"""Dumps whose columns were mixed up on purpose, from runs of real models: each is named, and healthy ones are not."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.runs import FinishedRuns
from helpers.synthetic_rollouts import discovered, noise, records, write
from jackpot.analysis.replay.export import export_rollouts
from jackpot.analysis.replay.formats import find_format
from jackpot.analysis.replay.formats.base import read_files
from jackpot.analysis.replay.replay import replay
from jackpot.analysis.replay.responses import SavedResponse
from jackpot.analysis.replay.scoring import PolicyScorer
from jackpot.core.errors import DataError

ENGINE, POLICY = "rollout_log_probs", "old_log_probs"
# Enough tokens to tell columns apart.
ENOUGH = ("iterations=1", "batch.prompts=64", "rollouts.every=1", "evaluation.problems=1")
Line = dict[str, Any]  # one saved response


def lines_of(run: Path, folder: Path) -> list[Line]:
    """The run as bare JSONL, with the policy once: as it received the batch."""
    export_rollouts(run, "jsonl", folder)
    lines = [json.loads(text) for path in sorted(folder.iterdir()) for text in path.read_text().splitlines()]
    return [{name: line[name] for name in ("uid", "prompt_ids", "token_ids", ENGINE, POLICY)} for line in lines]


@pytest.fixture(scope="module")
def two_models(finished_run: FinishedRuns, tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    """A small model's responses, scored by the policy."""
    return lines_of(finished_run(*ENOUGH), tmp_path_factory.mktemp("two_models") / "jsonl")


@pytest.fixture(scope="module")
def cold(finished_run: FinishedRuns, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Line]]:
    """The policy's own responses at temperature 0.6, as they are, and with one column at temperature 1."""
    run = finished_run(*ENOUGH, "sampling.temperature=0.6", arm="on_policy")
    lines = lines_of(run, tmp_path_factory.mktemp("cold") / "jsonl")

    warm = [response.old_log_probs.tolist() for response in PolicyScorer("starter:policy", 1.0).score(saved(run))]
    warmed = {
        column: [line | {column: row} for line, row in zip(lines, warm, strict=True)] for column in (ENGINE, POLICY)
    }
    return {"": lines} | warmed


def saved(path: Path) -> list[SavedResponse]:
    """Read a run's saved responses."""
    saved_format, files = find_format(path, "auto")
    return list(read_files(saved_format, files, print))


def first_lines(lines: Iterable[Line], tmp_path: Path) -> dict[str, str]:
    """The lines with which `jackpot replay` begins."""
    return dict(replay(write(tmp_path / "dump.jsonl", iter(lines)), names=["none"]).answer.lines)


def early(row: list[float]) -> list[float]:
    """Shift a column so that each token has the log-prob of the next."""
    return [*row[1:], 0.0]


def late(row: list[float]) -> list[float]:
    """Shift a column so that each token has the log-prob of the token before."""
    return [0.0, *row[:-1]]


def changed(lines: Iterable[Line], column: str, change: Callable[[list[float]], list[float]]) -> list[Line]:
    """Lay a change over one column of every response."""
    return [line | {column: change(line[column])} for line in lines]


@pytest.mark.parametrize("column", [ENGINE, POLICY])
@pytest.mark.parametrize(("shift", "has"), [(early, "next token"), (late, "token before")])
def test_a_column_shifted_by_one_is_named(column, shift, has, two_models, tmp_path):
    why = first_lines(changed(two_models, column, shift), tmp_path)["Fix first"]
    assert why.startswith(f"a column is shifted by one: {column} (the ") and f"the log-prob of the {has} " in why


def test_without_padding_the_ids_tell_which_is_shifted(tmp_path):
    """Log-probs by the token and a little noise; both columns lose the token at the end that has no partner."""
    generator = torch.Generator().manual_seed(0)
    lines = []
    for index in range(40):
        ids = torch.randint(20, (30,), generator=generator)
        values = -(ids.double() + 1.0) / 5.0
        ours, theirs = (values - 0.1 * torch.rand(30, generator=generator, dtype=torch.float64) for _ in range(2))
        line = {"uid": str(index), "token_ids": ids[:-1].tolist()}
        lines.append(line | {ENGINE: ours[:-1].tolist(), POLICY: theirs[1:].tolist()})
    assert (
        f"{POLICY} (the policy's) has at each token the log-prob of the next token"
        in first_lines(lines, tmp_path)["Fix first"]
    )

    lines = [line | {"token_ids": [7] * 29} for line in lines]  # which say nothing
    assert f"{POLICY} (the policy's) is one token ahead of {ENGINE}" in first_lines(lines, tmp_path)["Fix first"]


def test_swapped_columns_are_named(two_models, tmp_path):
    swapped = [line | {ENGINE: line[POLICY], POLICY: line[ENGINE]} for line in two_models]
    assert first_lines(swapped, tmp_path)["Fix first"].startswith(
        f"the columns are swapped, or {ENGINE} (the engine's)"
    )


@pytest.mark.parametrize("column", [ENGINE, POLICY])
def test_the_column_at_another_temperature_is_named(column, cold, tmp_path):
    why = first_lines(cold[column], tmp_path)["Fix first"]
    assert why.startswith("the columns are at two temperatures") and f"{column} (the " in why.partition("wrong")[0]

    said_temperature = why.partition(" times its temperature")[0].rpartition(" ")[2]
    assert float(said_temperature) == pytest.approx(0.6, abs=0.1)


@pytest.mark.parametrize("column", [ENGINE, POLICY])
def test_a_column_of_other_tokens_is_named(column, two_models, tmp_path):
    values = [value for line in two_models for value in line[column]]
    rest = iter([*values[50:], *values[:50]])
    other = [line | {column: [next(rest) for _ in line[column]]} for line in two_models]
    assert "have nothing to do with each other" in first_lines(other, tmp_path)["Fix first"]


@pytest.mark.parametrize("column", [ENGINE, POLICY])
@pytest.mark.parametrize(
    ("wrong_scale", "why"),
    [(lambda x: 2.718281828**x, "probabilities; write their logarithm"), (lambda x: -x, "negative log-probs")],
)
def test_what_is_no_log_prob_is_named_with_its_column(column, wrong_scale, why, two_models, tmp_path):
    with pytest.raises(DataError, match=rf" {column} has .*these are {why}"):
        first_lines(changed(two_models, column, lambda row: [wrong_scale(value) for value in row]), tmp_path)


@pytest.mark.parametrize("column", [ENGINE, POLICY])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_named_and_advice_follows(column, dtype, two_models, tmp_path):
    grid = str(dtype).removeprefix("torch.")
    lines = first_lines(changed(two_models, column, lambda row: torch.tensor(row).to(dtype).tolist()), tmp_path)
    assert lines["Precision"].startswith(f"{column} (the ") and f"is rounded to {grid}" in lines["Precision"]
    assert list(lines)[:2] == ["Precision", "Use"] and "worth" in lines["Use"]


def test_healthy_dumps_are_not_accused(two_models, cold, tmp_path):
    healthy = {"two models": two_models, "temperature 0.6": cold[""]}
    healthy |= {f"logits off by {size}": list(records(noise(size), lists=False)) for size in (0.02, 0.3, 0.8, 5.0)}
    healthy |= {"stale": list(records(noise(0.4), stale=True)), "a tail": list(records(discovered(0.1, 8.0)))}
    words = ("shifted", "swapped", "temperatures", "nothing to do")

    for name, lines in healthy.items():
        text = first_lines(lines, tmp_path)
        assert "Precision" not in text, name
        assert not any(word in text.get("Fix first", "") for word in words), (name, text)
