"""Writes tensors in parts, one for each rank, and reads them again on any number of ranks.

A part holds whole tensors, dealt out such that all parts are about as large. So a model folder in parts is what
`save_pretrained` makes of a large model: transformers, vLLM and everything else that reads a folder reads it. The rank
that writes a tensor is the only one that gathers it (`models.gathered.gather`). One process writes one part, which has
no number.

torch.distributed.checkpoint with `HuggingFaceStorageWriter(save_distributed=True)` would spare the gathering. It writes
the rows of every rank under the same names instead, which only torch can read before another pass over all of them
joins them, and has neither checksums nor a way to report a full disk. Its other writer needs pickle.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


class Part(NamedTuple):
    """Names one of the parts that something is written in."""

    number: int  # the rank that writes it
    size: int  # number of parts

    def path(self, folder: Path, name: str) -> Path:
        """Return the file of this part, as transformers numbers them."""
        of = f"-{self.number + 1:05d}-of-{self.size:05d}" if self.size > 1 else ""
        return folder / f"{name}{of}.safetensors"


class Dealer:
    """Chooses the part that a tensor goes to: the one that is smallest so far, and all of one name to the same."""

    def __init__(self, size: int) -> None:
        self._sizes, self._part_of = [0] * size, {}

    def __call__(self, name: str, size: int) -> int:
        """Return the number of the part, given the bytes of the tensor; all ranks have to ask in the same order."""
        part = self._part_of.setdefault(name, self._sizes.index(min(self._sizes)))
        self._sizes[part] += size
        return part


WHOLE = Part(0, 1)


def write_part(path: Path, tensors: Mapping[str, Tensor]) -> list[Path]:
    """Write the tensors of a part, and return the files: none where it has no tensor."""
    if not tensors:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return [path]


@contextmanager
def read_parts(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield what `write_part` wrote under a name, however many parts it has; no tensor is read before it is sliced."""
    with ExitStack() as opened:
        paths = sorted(folder.glob(f"{name}*.safetensors"))
        files = [opened.enter_context(safe_open(path, framework="pt")) for path in paths]
        yield {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118 (it is no dict)


def write_index(folder: Path, parts: Iterable[Path]) -> None:
    """Write the index of a model folder in parts, which says where each weight is."""
    files: dict[str, str] = {}
    for path in parts:
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path.name)
    total = sum(path.stat().st_size for path in parts)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
