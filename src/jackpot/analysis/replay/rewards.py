"""The command `jackpot replay --rewards`, which scores Jackpot's saved rollouts again with the task of the run."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from jackpot.analysis.replay.formats import jackpot as ours
from jackpot.core.errors import DataError
from jackpot.core.types import DecodedResponse, Prompt
from jackpot.models.load import load_tokenizers
from jackpot.rollout.sampler import shaped_score
from jackpot.rollout.tasks.base import decoded_response
from jackpot.rollout.tasks.registry import make_task
from jackpot.training.run_folder.saved_rollouts import open_rollout_file, read_columns

_COLUMNS = ["uid", "prompt", "answer", "finish", "reward", "prompt_ids", "token_ids", "sampled_mask"]
_ROUNDING = 1e-6  # largest difference between two rewards that count as equal


class RewardAgain(NamedTuple):
    """The reward of a response, as it was saved and as it is computed now."""

    uid: str
    saved: float
    now: float

    @property
    def is_same(self) -> bool:
        """Tell whether both rewards are equal, up to rounding."""
        return abs(self.saved - self.now) <= _ROUNDING


def score_again(path: Path) -> list[RewardAgain]:
    """Score every saved response of a run, or of one saved iteration, with the settings of the run.

    Args:
        path: the run folder, or the file of one iteration.

    Raises:
        DataError: no saved rollouts of Jackpot, or a damaged file.
        ConfigError, ModelError: the run's task or tokenizer is not on this machine.
    """
    if not (files := ours.files(path)):
        raise DataError(f"{path} has no rollouts of Jackpot, whose settings say how to score them; leave out --rewards")
    config = ours.config_of(path)
    tokenizer = load_tokenizers(config.model_paths())

    rewards: list[RewardAgain] = []
    with closing(make_task(config.task, tokenizer)) as task:
        for file in files:
            rows = read_columns(open_rollout_file(file), _COLUMNS).to_pylist()
            responses = [_response(row, tokenizer, task.turn_end_token_ids) for row in rows]
            for row, score in zip(rows, task.scores(responses), strict=True):
                shaped = shaped_score(config, len(row["token_ids"]), score)
                rewards.append(RewardAgain(uid=row["uid"], saved=row["reward"], now=shaped.reward))
    return rewards


def _response(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, turn_end_token_ids: Sequence[int]
) -> DecodedResponse:
    """Rebuild, from a row of saved rollouts, the response as text that a task scores."""
    answer, *other_answers = row["answer"].split(" or ")  # `Prompt.answers` has joined them
    prompt = Prompt(
        uid=row["uid"].rpartition("#")[0],  # a response's uid ends in # and its number in the group
        text=row["prompt"],
        answer=answer,
        other_answers=tuple(other_answers),
        token_ids=tuple(row["prompt_ids"]),
    )
    ids, mask = torch.tensor(row["token_ids"]), torch.tensor(row["sampled_mask"])
    finished = row["finish"] == "stop"
    return decoded_response(tokenizer, prompt, ids, mask, finished, turn_end_token_ids)
