"""Writing of saved rollouts, which are parquet files with one row for each response."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jackpot.config.config import Config
from jackpot.core.files import whole_file
from jackpot.core.types import TrainingSample
from jackpot.rollout.tasks.base import decode
from jackpot.training.run_folder.saved_rollouts import SCHEMA_VERSION, thin_rollouts


def write_rollouts(
    folder: Path,
    iteration: int,
    samples: Sequence[TrainingSample],
    traces: Mapping[str, Mapping[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
) -> Path:
    """Write iteration-N.parquet, and thin the files in the folder out to `rollouts.keep` (`thin_rollouts`).

    List columns have one entry for each response token; `*_top_ids` and `*_top_log_probs` have K entries for each.
    Columns from the learner are those of the first update on the rollout. `SCHEMA_VERSION` stands in the metadata.

    Args:
        folder: the folder `rollouts` of the run folder.
        traces: per-token columns of every rollout from the learner, by uid.

    Returns:
        The path of the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = _table(iteration, samples, traces, tokenizer)
    metadata = {"schema_version": str(SCHEMA_VERSION), "config": config.model_dump_json()}
    path = folder / f"iteration-{iteration:06d}.parquet"
    with whole_file(path) as partial:
        pq.write_table(table.replace_schema_metadata(metadata), partial, compression="zstd")
    thin_rollouts(folder, config.rollouts.keep)
    return path


def _table(
    iteration: int,
    samples: Sequence[TrainingSample],
    traces: Mapping[str, Mapping[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
) -> pa.Table:
    """Return saved rollouts as a table, with a row for each response."""
    rollouts = [item.rollout for item in samples]
    tokens = [tokenizer.convert_ids_to_tokens(rollout.token_ids.tolist()) for rollout in rollouts]
    verdicts = [item.score.correct for item in samples]
    trace_rows = [traces[rollout.uid] for rollout in rollouts]  # for each rollout, the learner's columns by name

    columns = {
        "iteration": _numbers(np.full(len(samples), iteration)),
        "uid": _strings([rollout.uid for rollout in rollouts]),
        "prompt_uid": _strings([rollout.prompt.uid for rollout in rollouts]),
        "prompt": _strings([rollout.prompt.text for rollout in rollouts]),
        "answer": _strings([rollout.prompt.answers for rollout in rollouts]),
        "response": _strings([decode(tokenizer, rollout.token_ids) for rollout in rollouts]),
        "finish": _strings([rollout.finish for rollout in rollouts]),
        "sampled_by": _strings([rollout.sampled_by or "" for rollout in rollouts]),
        "reward": _numbers(np.array([item.score.reward for item in samples], dtype=np.float64)),
        "correct": _numbers(np.array(verdicts, dtype=bool), [verdict is not None for verdict in verdicts]),
        "prompt_ids": _lists([torch.tensor(rollout.prompt.token_ids, dtype=torch.int64) for rollout in rollouts]),
        "token_ids": _lists([rollout.token_ids for rollout in rollouts]),
        "tokens": _split(_strings([*chain(*tokens)]), [*map(len, tokens)]),  # the tokenizer's strings, one a token
        "sampled_mask": _lists([rollout.sampled_mask for rollout in rollouts]),
        "advantages": _lists([item.advantages for item in samples]),
        "rollout_log_probs": _lists([rollout.rollout_log_probs for rollout in rollouts]),
        "rollout_top_ids": _lists([rollout.top_ids for rollout in rollouts]),
        "rollout_top_log_probs": _lists([rollout.top_log_probs for rollout in rollouts]),
        "versions": _lists([rollout.versions for rollout in rollouts]),
        **{name: _lists([row[name] for row in trace_rows]) for name in trace_rows[0]},
    }
    return pa.table(columns)


# Columns are made from the buffers of Arrow's format: `pa.array` would import pandas wherever it is installed, which
# takes 0.3 s.


def _lists(rows: Sequence[Tensor]) -> pa.Array:
    """Return the tensors of all rows, [tokens] or [tokens, K] each, as one column of lists; floats as float64."""
    joined = torch.cat(list(rows))
    values = _numbers((joined.double() if joined.is_floating_point() else joined).flatten().numpy())
    if joined.dim() > 1:
        values = _split(values, [joined.shape[1]] * len(joined))
    return _split(values, [*map(len, rows)])


def _split(values: pa.Array, lengths: Sequence[int]) -> pa.Array:
    """Cut a column of values into a column of lists: the first `lengths[0]` values, the next `lengths[1]`, ..."""
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    return pa.ListArray.from_arrays(_numbers(ends).cast(pa.int32()), values)


def _numbers(values: np.ndarray, exist: Sequence[bool] | None = None) -> pa.Array:
    """Return numbers or bools, [N], as a column with nulls where `exist` is False."""
    content = _bits(values) if values.dtype == bool else pa.py_buffer(values)
    buffers = [None if exist is None else _bits(exist), content]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def _strings(values: Sequence[str | None]) -> pa.Array:
    """Return texts as a column of strings, with null for None."""
    texts = [(value or "").encode() for value in values]
    ends = pa.py_buffer(np.cumsum([0, *map(len, texts)], dtype=np.int64))
    buffers = [_bits([value is not None for value in values]), ends, pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(pa.large_string(), len(texts), buffers).cast(pa.string())


def _bits(flags: Sequence[bool] | np.ndarray) -> pa.Buffer:
    """Pack bools into the bits of bytes, the lowest bit first, as Arrow stores them."""
    return pa.py_buffer(np.packbits(np.array(flags, dtype=bool), bitorder="little"))
