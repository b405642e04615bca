"""The format of SkyRL's `trainer.dump_data_batch`: dumped_data/global_step_N_training_input.pkl.

A file is a pickled `TrainingInputBatch` (skyrl/backends/skyrl_train/training_batch.py, read at a956457): `sequences`
[B, S] and its `attention_mask`, padded on the left, and columns [B, R] that end where the sequences end. SkyRL is not
needed to read the file, and nothing that the pickle names is imported or called.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jackpot.analysis.replay.formats.base import DumpFormat
from jackpot.analysis.replay.formats.columns import Columns
from jackpot.analysis.replay.formats.records import DumpRecord, Warn, batch_rows, matching
from jackpot.analysis.replay.responses import DamagedRecord
from jackpot.core.errors import first_line
from jackpot.core.foreign import open_foreign

HOW = """Run SkyRL with trainer.dump_data_batch=true and generator.sampling_params.logprobs not null, so that the engine
returns log-probs: EXPORT_PATH/dumped_data has what a step trains on. Without action_log_probs, give --model and it is
scored (at --temperature)."""


class _Inert:
    """A stand-in for any class or function that a pickle names; a call keeps its arguments and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        """Ignore the state that the pickle would set."""


class _Unpickler(pickle.Unpickler):
    """A reader of pickles that imports and calls nothing."""

    def find_class(self, module: str, name: str) -> type[_Inert]:
        """Return the stand-in for whichever class or function the pickle names."""
        return _Inert


def records(path: Path, warn: Warn) -> Iterator[tuple[int, DumpRecord]]:
    """Yield (index, record) of every response in a file, without the copies that pad the batch; warn of damage."""
    try:
        batch = _batch(path)
    except Exception as error:  # a damaged pickle may raise anything
        warn(f"{path.name} cannot be read and is left out: {first_line(error)}")
        return
    yield from enumerate(batch_rows(batch))


def _batch(path: Path) -> dict[str, Tensor]:
    """Return the columns of a file's batch by name. Raises DamagedRecord, and whatever a damaged pickle raises."""
    with open_foreign(path) as file:
        content = _Unpickler(file).load()

    # The pickle makes the batch by a call with two arguments, which `_Inert` keeps; the second one is the state.
    state = content.arguments[1] if isinstance(content, _Inert) and len(content.arguments) == 2 else None
    if not isinstance(state, Mapping) or not isinstance(state.get("batch_dict"), Mapping):
        raise DamagedRecord("it holds no batch of SkyRL")

    padding = int((state.get("metadata") or {}).get("pad_size") or 0)  # responses that fill up the end of the batch
    columns = {
        name: _tensor(value)
        for name, value in state["batch_dict"].items()
        if isinstance(value, Mapping) and "data" in value
    }
    return {name: column[: len(column) - padding] for name, column in columns.items()}


def _tensor(value: DumpRecord) -> Tensor:
    """Make a tensor from a column as SkyRL stores it: the bytes of a numpy array, or those that torch.save wrote."""
    if value.get("format") == "torch":
        return torch.load(io.BytesIO(value["data"]), map_location="cpu", weights_only=True)
    return torch.from_numpy(np.frombuffer(value["data"], dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy())


FORMAT = DumpFormat(
    name="skyrl",
    files=lambda path: matching(path, "*_training_input.pkl"),
    records=records,
    marks=(frozenset({"sequences"}),),
    needed=("sequences", "attention_mask", "response_mask", "rollout_logprobs"),
    how=HOW,
    columns=Columns(
        ids="sequences",
        present=("attention_mask",),
        masks=("response_mask", "loss_mask"),
        rollout_log_probs="rollout_logprobs",
        old_log_probs="action_log_probs",
        at_end=True,
        begins_sampled=True,
    ),
)
