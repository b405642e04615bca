"""Saved rollouts: parquet, one row a response, with everything known of every token. Layer 5.

List columns have one entry for each response token; `*_top_ids` and `*_top_log_probs` have K entries for each. Columns
from the learner are those of the first update on the rollout. `SCHEMA_VERSION` stands in the file's metadata.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jackpot.config import Config
from jackpot.files import whole_file
from jackpot.tasks.base import decode
from jackpot.types import ScoredRollout

SCHEMA_VERSION = 1


def write_rollouts(
    folder: Path,
    iteration: int,
    scored: Sequence[ScoredRollout],
    traces: Mapping[str, Mapping[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
) -> Path:
    """Write iteration-N.parquet and remove the files beyond the newest `rollouts.keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([_row(iteration, item, traces[item.rollout.uid], tokenizer) for item in scored])
    metadata = {"schema_version": str(SCHEMA_VERSION), "config": config.model_dump_json()}
    path = folder / f"iteration-{iteration:06d}.parquet"
    with whole_file(path) as partial:
        pq.write_table(table.replace_schema_metadata(metadata), partial, compression="zstd")
    for old in sorted(folder.glob("iteration-*.parquet"))[: -config.rollouts.keep]:
        old.unlink()
    return path


def _row(
    iteration: int, item: ScoredRollout, trace: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    rollout = item.rollout
    ids = rollout.token_ids.tolist()
    return {
        "iteration": iteration,
        "uid": rollout.uid,
        "prompt_uid": rollout.prompt.uid,
        "prompt": rollout.prompt.text,
        "answer": rollout.prompt.answer,
        "response": decode(tokenizer, rollout.token_ids),
        "finish": rollout.finish,
        "reward": item.score.reward,
        "correct": item.score.correct,
        "prompt_ids": list(rollout.prompt.token_ids),
        "token_ids": ids,
        "tokens": tokenizer.convert_ids_to_tokens(ids),
        "sampled_mask": rollout.sampled_mask.tolist(),
        "advantages": item.advantages.tolist(),
        "rollout_log_probs": rollout.rollout_log_probs.tolist(),
        "rollout_top_ids": rollout.top_ids.tolist(),
        "rollout_top_log_probs": rollout.top_log_probs.tolist(),
        "versions": rollout.versions.tolist(),
    } | {name: column.tolist() for name, column in trace.items()}
