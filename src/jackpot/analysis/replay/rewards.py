"""`jackpot replay --rewards`: the rewards of our saved rollouts, computed again by the task of the run's settings."""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

from jackpot.analysis.replay.formats import jackpot as ours
from jackpot.core.errors import DataError
from jackpot.core.types import Prompt
from jackpot.models.load import load_tokenizers
from jackpot.rollout.rewards.rewards import overlong_penalty
from jackpot.rollout.tasks.base import decoded_response
from jackpot.rollout.tasks.registry import make_task
from jackpot.training.run_folder.saved_rollouts import open_rollout_file, read_columns

_COLUMNS = ["uid", "prompt", "answer", "finish", "reward", "prompt_ids", "token_ids", "sampled_mask"]
_SAME = 1e-6  # largest difference of two rewards that are the same


class RewardAgain(NamedTuple):
    """The reward of a response, as it was saved and as it is computed now."""

    uid: str
    saved: float
    now: float

    @property
    def is_same(self) -> bool:
        """Whether both rewards are equal, up to rounding."""
        return abs(self.saved - self.now) <= _SAME


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
    tokenizer, overlong = load_tokenizers(config.model_paths()), config.objective.overlong_buffer

    found: list[RewardAgain] = []
    with closing(make_task(config.task, tokenizer)) as task:
        for file in files:
            rows = read_columns(open_rollout_file(file), _COLUMNS).to_pylist()
            responses = []
            for row in rows:
                answer, *others = row["answer"].split(" or ")
                prompt = Prompt(
                    uid=row["uid"].rpartition("#")[0],
                    text=row["prompt"],
                    answer=answer,
                    other_answers=tuple(others),
                    token_ids=tuple(row["prompt_ids"]),
                )
                ids, mask = torch.tensor(row["token_ids"]), torch.tensor(row["sampled_mask"])
                ended = (row["finish"] == "stop", task.turn_end_token_ids)
                responses.append(decoded_response(tokenizer, prompt, ids, mask, *ended))

            for row, score in zip(rows, task.scores(responses), strict=True):
                reward = score.reward
                if overlong:
                    limit = (config.sampling.max_new_tokens, overlong.len, overlong.penalty_factor)
                    reward += overlong_penalty(len(row["token_ids"]), *limit)
                found.append(RewardAgain(row["uid"], row["reward"], reward))
    return found
