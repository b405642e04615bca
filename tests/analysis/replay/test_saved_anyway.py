"""Dumps as prime-rl, AReaL and verl save them are read; damaged ones are named, and no code in them runs."""

import json
import pickle
from pathlib import Path

import pytest

from jackpot.analysis.replay.formats import FORMATS, find_format
from jackpot.analysis.replay.formats.base import read_files
from jackpot.analysis.replay.replay import replay
from jackpot.analysis.replay.responses import SavedResponse
from jackpot.core.errors import DataError


def read(path: Path) -> tuple[str, list[SavedResponse], list[str]]:
    """Name the format of a dump; read its responses, and what was told about it."""
    told: list[str] = []
    saved_format, files = find_format(path, "auto")
    return saved_format.name, list(read_files(saved_format, files, told.append)), told


def lines(path: Path, *records: object) -> Path:
    """Write records as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_prime_rls_other_losses_and_infinite_numbers_are_told(tmp_path):
    good = {"micro_step": 0, "token_ids": [7, 1, 2], "loss_mask": [False, True, True], "advantages": [0.0, 1.0, 1.0]}
    good |= {"inference_logprobs": [None, -1.0, -1.0], "trainer_logprobs": [0.0, -1.5, -1.5]}
    echo = good | {"rl_weights": [0.0, 1.0, 0.0], "inference_logprobs": [None, -1.0, None]}
    infinite = good | {"trainer_logprobs": [0.0, None, -1.0]}
    lines(tmp_path / "step_1" / "rank_0.jsonl", good, echo, infinite)

    _, responses, told = read(tmp_path)
    assert [response.sampled_mask.tolist() for response in responses] == [[True, True], [True, False]]
    assert len(told) == 1 and "log_probs has nan at a sampled token" in told[0] and "step_1/rank_0.jsonl" in told[0]


AREAL = {
    **{"task_id": 4, "sample_idx": 1, "seqlen": 5, "prompt_len": 2, "head_version": 0, "tail_version": 1},
    **{"reward": 1.0, "prompt": "a", "completion": "b"},
}


def test_areals_text_is_read_with_the_line_to_add_alone(tmp_path):
    path = lines(tmp_path / "rollout" / "1" / "4.jsonl", AREAL)
    with pytest.raises(DataError, match="lacks input_ids, loss_mask, logprobs; it has") as error:
        replay(tmp_path)
    assert str(error.value).endswith(FORMATS["areal"].how)

    added = {"input_ids": [7, 8, 1, 6, 2], "loss_mask": [0, 0, 1, 0, 1], "logprobs": [0.0, 0.0, -0.5, 0.0, -1.0]}
    lines(path, AREAL | added)
    lines(tmp_path / "eval-rollout" / "1" / "4.jsonl", AREAL | added)

    name, [response], told = read(tmp_path)

    assert (name, told) == ("areal", []) and response.uid == "4/1"
    assert response.prompt_ids.tolist() == [7, 8] and response.token_ids.tolist() == [1, 6, 2]
    assert response.rollout_log_probs[response.sampled_mask].tolist() == [-0.5, -1.0]


def test_verls_default_trainer_logs_rows_without_padding(tmp_path):
    row = {"input": "a", "output": "b", "gts": None, "score": 1.0, "step": 3, "uid": "u_0_0"}
    row |= {"prompts": [7, 8], "responses": [1, 6, 2], "response_mask": [1, 0, 1]}
    row |= {"rollout_log_probs": [-0.5, 0.0, -1.0], "old_log_probs": [-0.6, 0.0, -1.1], "advantages": [1.0, 0.0, 1.0]}
    lines(tmp_path / "3.jsonl", row)

    name, [response], told = read(tmp_path)

    assert (name, told, response.uid) == ("verl", [], "u_0_0")
    assert response.prompt_ids.tolist() == [7, 8] and response.token_ids.tolist() == [1, 6, 2]
    assert response.old_log_probs[response.sampled_mask].tolist() == [-0.6, -1.1]


class Named:
    """A pickle of it names a function and its arguments, which Python would call."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.named = function, arguments

    def __reduce__(self):
        return self.named


ARRAY = {"format": "numpy", "data": bytes(8), "shape": (1, 1), "dtype": "int64"}


def batch(sequences: dict) -> bytes:
    """The place of SkyRL's function is taken by one of two arguments that can be imported."""
    return pickle.dumps(Named(divmod, 1, {"batch_dict": {"sequences": sequences}}))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (pickle.dumps([1, 2]), "it holds no batch of SkyRL"),
        (pickle.dumps([1, 2])[:3], "cannot be read"),
        (batch(ARRAY | {"shape": (10**9, 9)}), "cannot be read"),
        (batch(ARRAY | {"dtype": "object"}), "cannot be read"),
        (batch(ARRAY), "lacks attention_mask, response_mask"),
    ],
    ids=range(5),
)
def test_a_damaged_pickle_is_named(content, why, tmp_path):
    path = tmp_path / "global_step_1_training_input.pkl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=why):
        replay(path)


def test_a_pickle_runs_no_code(tmp_path):
    path = tmp_path / "global_step_1_training_input.pkl"
    path.write_bytes(pickle.dumps(Named(Path.touch, tmp_path / "ran")))
    with pytest.raises(DataError, match="it holds no batch of SkyRL"):
        read(path)
    assert not (tmp_path / "ran").exists()

    pickle.loads(path.read_bytes())
    assert (tmp_path / "ran").exists()
