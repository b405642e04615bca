"""The tokens of saved rollouts in the page: each number rounded alike, what has no room left out evenly and counted."""

import base64
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from helpers import folders
from helpers.folders import run_folder, save_tokens
from helpers.pages import page_data
from jackpot.training.run_folder.saved_rollouts import RolloutFile, list_rollout_files
from jackpot.ui.html import InspectorData, packed
from jackpot.ui.report.inspector import TOP, inspector_data, significant, spread_rows, with_best
from jackpot.ui.report.report import write_report
from jackpot.ui.report.runs import Run, find_runs, read_runs
from jackpot.ui.report.token_text import readable

WORDS = ["the", "sum", "of", "1", "+", "is"]


def unpacked(text: str) -> Any:
    """The data that a page carries as text."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


def saved_runs(folder: Path) -> list[tuple[Run, list[RolloutFile]]]:
    """Each run in a folder with the files of its rollouts."""
    return [(run, list_rollout_files(run.folder)[0]) for run in read_runs(find_runs([folder])[0])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with three responses at iterations 1 and 4, with a tool's token each."""
    run_folder(tmp_path / "run", [{"a/b": 1.0}])
    for iteration in (1, 4):
        save_tokens(tmp_path / "run", iteration, [WORDS, WORDS[:4], WORDS[::-1]], tool=2, seed=iteration)
    return tmp_path / "run"


def test_the_rollouts_of_the_best_policy_are_carried_and_named(folder: Path) -> None:
    for iteration in (2, 3):
        save_tokens(folder, iteration, [WORDS], seed=iteration)
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "best").symlink_to("step-3")
    iterations = inspector_data(saved_runs(folder))[0].index["runs"][0]["iterations"]

    assert [(entry["iteration"], entry["best"]) for entry in iterations] == [
        (1, False),
        (2, False),
        (3, True),
        (4, False),
    ]

    files = saved_runs(folder)[0][1]
    assert with_best([files[0], files[1], files[3]], files, 3) == [files[0], files[2], files[3]]
    assert with_best([files[0], files[3]], files, 3) == [files[0], files[3]]


def test_the_page_carries_the_numbers_of_the_file_to_four_digits(folder: Path) -> None:
    tokens, unreadable = inspector_data(saved_runs(folder))
    [run] = tokens.index["runs"]

    assert unreadable == []
    assert [entry["iteration"] for entry in run["iterations"]] == [1, 4]

    words = unpacked(tokens.packs[run["words"]])
    for entry in run["iterations"]:
        data = unpacked(tokens.packs[entry["pack"]])
        rows = pq.read_table(folder / "rollouts" / f"iteration-{entry['iteration']:06d}.parquet").to_pylist()
        list_names = [name for name in rows[0] if isinstance(rows[0][name], list)]
        columns = {name: [value for row in rows for value in row[name]] for name in list_names}

        for field, column in (
            ("rollout", "rollout_log_probs"),
            ("old", "old_log_probs"),
            ("current", "log_probs"),
            ("rescored", "rollout_model_log_probs"),
            ("acceptance", "acceptance"),
            ("accepted", "accept_mask"),
            ("weight", "weights"),
            ("z", "z"),
            ("kl", "kl_rollout_policy"),
            ("advantage", "advantages"),
        ):
            assert data[field] == [float(f"{value:.4g}") for value in columns[column]], field

        ratios = np.exp(np.array(columns["old_log_probs"]) - np.array(columns["rollout_log_probs"]))
        assert data["ratio"] == [float(f"{value:.4g}") for value in ratios]
        assert [words[str(token_id)] for token_id in data["id"]] == columns["tokens"]
        assert data["sampled"] == [int(value) for value in columns["sampled_mask"]]
        assert 0 in data["sampled"]
        version_pairs = zip(data["policy_version"], data["rollout_model_version"], strict=True)
        assert [list(pair) for pair in version_pairs] == columns["versions"]

        assert [row["answer"] for row in rows] == ["42"] * 3
        assert data["answer"] == ["42"] * 3
        assert data["lengths"] == [6, 4, 6]
        assert data["reward"] == [0.0, 1.0, 0.0]
        assert data["prompt"][1] == "prompt 1"

        for model in ("rollout", "policy"):
            assert (data[f"{model}_top_count"], data[f"{model}_top_of"]) == (TOP, folders.TOP)
            assert data[f"{model}_top_ids"] == [
                token_id for row in columns[f"{model}_top_ids"] for token_id in row[:TOP]
            ]
            probabilities = [np.exp(value) for row in columns[f"{model}_top_log_probs"] for value in row[:TOP]]
            assert data[f"{model}_top"] == [float(f"{value:.3g}") for value in probabilities]
            assert all(words[str(token_id)] != f"#{token_id}" for token_id in data[f"{model}_top_ids"])


def test_without_a_tokenizer_unseen_tokens_are_numbers(folder: Path) -> None:
    (folder / "checkpoints" / "last" / "policy" / "tokenizer.json").unlink()
    settings = (folder / "config.yaml").read_text().replace("starter:policy", "somebody/somewhere")
    (folder / "config.yaml").write_text(settings)

    tokens, _ = inspector_data(saved_runs(folder))
    words = unpacked(tokens.packs["words-0"])

    assert set(WORDS) < set(words.values())
    assert {word for word in words.values() if word.startswith("#")}


def test_what_has_no_room_is_left_out_evenly_and_counted(tmp_path: Path) -> None:
    run_folder(tmp_path / "run", [{"a/b": 1.0}])
    for iteration, count in ((1, 5), (2, 60), (3, 60)):
        save_tokens(tmp_path / "run", iteration, [WORDS] * count)

    tokens, _ = inspector_data(saved_runs(tmp_path / "run"), max_tokens=300)

    counts = [
        (entry["responses"], entry["of_responses"], entry["tokens"], entry["of_tokens"])
        for entry in tokens.index["runs"][0]["iterations"]
    ]
    assert counts == [(5, 5, 30, 30), (23, 60, 138, 360), (22, 60, 132, 360)]  # all 300
    assert tokens.left_out.rows == ()

    no_tokens, _ = inspector_data(saved_runs(tmp_path / "run"), max_tokens=0)
    assert no_tokens.index["runs"] == []
    assert no_tokens.packs == {}
    assert no_tokens.left_out.rows == (("run", "0 of 3", "0 of 125"),)


def response_counts(tokens: InspectorData) -> dict[str, dict[int, int]]:
    """Of each run: iteration to the number of its responses that are there."""
    return {
        run["name"]: {entry["iteration"]: entry["responses"] for entry in run["iterations"]}
        for run in tokens.index["runs"]
    }


def test_long_responses_leave_fewer_iterations(tmp_path: Path) -> None:
    for run in ("a", "b", "c"):
        run_folder(tmp_path / run, [{"a/b": 1.0}])
        for iteration in range(10, 80, 10):
            save_tokens(tmp_path / run, iteration, [["x"] * 10] * 5)
    # 40 tokens a run: no room for 4 responses at two iterations, so both ends have what fits
    tokens, _ = inspector_data(saved_runs(tmp_path), max_tokens=120)

    assert response_counts(tokens) == {run: {10: 2, 70: 2} for run in "abc"}
    assert tokens.left_out.rows[0] == ("a", "2 of 7", "4 of 35")

    tokens, _ = inspector_data(saved_runs(tmp_path), max_tokens=360)  # 12 responses a run
    assert response_counts(tokens) == {run: {10: 4, 40: 4, 70: 4} for run in "abc"}
    assert tokens.left_out.rows[2] == ("c", "3 of 7", "12 of 35")

    tokens, _ = inspector_data(saved_runs(tmp_path), max_tokens=25)  # less than one response a run
    assert response_counts(tokens) == {"a": {70: 1}, "b": {70: 1}}
    assert [row[0] for row in tokens.left_out.rows] == ["a", "b", "c"]
    assert "longer" not in tokens.left_out.note


def test_a_response_longer_than_all_the_room_is_there_once(tmp_path: Path) -> None:
    for run in ("a", "b"):
        run_folder(tmp_path / run, [{"a/b": 1.0}])
        save_tokens(tmp_path / run, 1, [["x"] * 100] * 2)

    tokens, _ = inspector_data(saved_runs(tmp_path), max_tokens=60)

    assert response_counts(tokens) == {"a": {1: 1}}
    assert tokens.left_out.rows == (("a", "1 of 1", "1 of 2"), ("b", "0 of 1", "0 of 2"))
    assert "100 tokens" in tokens.left_out.note
    assert "100 tokens" in page_data(write_report([tmp_path], max_tokens=60).path)

    tokens_of_a, _ = inspector_data(saved_runs(tmp_path / "a"), max_tokens=60)
    assert tokens_of_a.left_out.rows == (("a", "1 of 1", "1 of 2"),)


def test_lengths_are_shown_as_they_are_mixed(tmp_path: Path) -> None:
    run_folder(tmp_path, [{"a/b": 1.0}])
    for iteration in (1, 2, 3):
        save_tokens(tmp_path, iteration, [["x"] * (40 if row % 2 else 2) for row in range(32)])

    tokens, _ = inspector_data(saved_runs(tmp_path), max_tokens=720)
    lengths_by_iteration = [
        unpacked(tokens.packs[entry["pack"]])["lengths"] for entry in tokens.index["runs"][0]["iterations"]
    ]

    assert len(lengths_by_iteration) == 3
    assert sum(map(sum, lengths_by_iteration)) <= 720
    for lengths in lengths_by_iteration:
        assert 0.35 <= sum(length == 40 for length in lengths) / len(lengths) <= 0.65


@given(st.lists(st.integers(0, 50), max_size=200), st.integers(0, 2000))
def test_chosen_rows_fit_and_come_in_order(lengths: list[int], budget: int) -> None:
    rows = spread_rows(lengths, budget)
    assert rows == sorted(set(rows))
    assert sum(lengths[row] for row in rows) <= budget

    budget_left = budget - sum(lengths[row] for row in rows)
    other_lengths = [lengths[row] for row in range(len(lengths)) if row not in rows]

    assert not other_lengths or max(other_lengths) > budget_left  # one that does not fit ended it
    assert spread_rows(lengths, 0, max(lengths, default=0)) or not lengths


def test_chosen_rows_come_from_all_over_the_file() -> None:
    rows = spread_rows([10] * 1000, 1000)
    assert len(rows) == 100
    assert max(np.diff([0, *rows, 999])) <= 20

    counts = Counter(row // 100 for row in rows)  # in each tenth of the file
    assert len(counts) == 10
    assert set(counts.values()) <= {9, 10, 11}


@given(st.lists(st.floats(-1e30, 1e30) | st.sampled_from([np.inf, -np.inf, np.nan]), max_size=20), st.integers(2, 6))
@settings(max_examples=40)
def test_rounding_keeps_significant_digits(values: list[float], digits: int) -> None:
    rounded_values = significant(np.array(values), digits)
    for rounded, value in zip(rounded_values, values, strict=True):
        if not np.isfinite(value):
            assert rounded is None
        elif abs(value) > 1e-300:
            assert rounded == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))
            assert len(f"{rounded:e}".split("e")[0].rstrip("0").replace("-", "").replace(".", "")) <= digits


def test_byte_level_tokens_read_as_the_text_that_they_stand_for() -> None:
    text = "".join(map(chr, (*range(1, 0xD800), 0x1F600, 0x10FFFF)))
    words = [word for word, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]
    assert "".join(readable(word, in_bytes=True) for word in words) == text


def test_other_tokenizers_and_half_characters_are_readable() -> None:
    assert readable("▁the", in_bytes=False) == " the"
    assert readable("<0x0A>", in_bytes=False) == "\n"

    half_character = next(word for word, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str("é"))[:1]
    assert readable(half_character, in_bytes=True) == "⟨C3⟩"


def test_equal_data_is_packed_equally() -> None:
    assert packed({"a": [1, None]}) == packed({"a": [1, None]})
    assert unpacked(packed({"a": [1, None]})) == {"a": [1, None]}


def test_damaged_files_are_named_and_the_others_are_shown(folder: Path) -> None:
    rollouts = folder / "rollouts"
    content = (rollouts / "iteration-000001.parquet").read_bytes()
    (rollouts / "iteration-000002.parquet").write_bytes(content[:-100])  # cut short

    spoilt_content = bytearray(content)
    spoilt_content[4:2000] = bytes(1996)  # the footer is whole, the data are not
    (rollouts / "iteration-000003.parquet").write_bytes(spoilt_content)

    table = pq.read_table(rollouts / "iteration-000001.parquet")
    pq.write_table(table.replace_schema_metadata({"schema_version": "99"}), rollouts / "iteration-000005.parquet")
    pq.write_table(table.drop_columns(["weights", "z"]), rollouts / "iteration-000006.parquet")

    readable_files, unreadable = list_rollout_files(folder)

    assert [file.iteration for file in readable_files] == [1, 3, 4, 6]
    assert [(file.responses, file.tokens) for file in readable_files] == [(3, 16)] * 4
    assert len(unreadable) == 2
    assert "iteration-000002.parquet" in unreadable[0]
    assert "99" in unreadable[1]

    tokens, complaints = inspector_data(saved_runs(folder))
    assert [entry["iteration"] for entry in tokens.index["runs"][0]["iterations"]] == [1, 4]
    assert len(complaints) == 2
    assert "iteration-000003" in complaints[0]
    assert "weights, z" in complaints[1]
