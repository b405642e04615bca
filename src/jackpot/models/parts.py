"""Files of tensors in parts: each rank writes a part, and any number of ranks reads all parts."""

# Why not torch.distributed.checkpoint: its `HuggingFaceStorageWriter(save_distributed=True)` would spare the gathering,
# but writes a file of rows for every rank, with the same names of tensors in all files. Only torch can read such files
# before another pass over all of them joins the rows. The writer also has neither checksums nor a way to report a full
# disk. The other writer of torch.distributed.checkpoint needs pickle.

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


class Part(NamedTuple):
    """One of the parts of a model or checkpoint.

    A part has whole tensors, dealt out such that all parts have about the same size. So a model folder in parts is like
    the folder that `save_pretrained` writes of a large model, and transformers, vLLM and others can read it. Only the
    rank that writes a tensor gathers the tensor (`models.gathered.gather`). A single process writes a single part,
    without a number in its name.
    """

    number: int  # from 0; the rank that writes the part
    size: int  # number of parts

    def path(self, folder: Path, name: str) -> Path:
        """Return the path of this part's file, whose name has the part's number as transformers writes it."""
        suffix = f"-{self.number + 1:05d}-of-{self.size:05d}" if self.size > 1 else ""
        return folder / f"{name}{suffix}.safetensors"


class Dealer:
    """A rule that deals tensors out to parts: each to the smallest part so far, but tensors of one name to one part."""

    def __init__(self, size: int) -> None:
        """Begin with `size` empty parts."""
        self._sizes, self._part_of = [0] * size, {}  # bytes of each part; number of the part by tensor name

    def __call__(self, name: str, size: int) -> int:
        """Return the number of the part for a tensor of `size` bytes; all ranks have to ask in the same order."""
        index = self._part_of.setdefault(name, self._sizes.index(min(self._sizes)))
        self._sizes[index] += size
        return index


WHOLE = Part(0, 1)


def write_part(path: Path, tensors: Mapping[str, Tensor]) -> list[Path]:
    """Write the tensors of a part, and return the written files: none for a part without tensors."""
    if not tensors:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return [path]


@contextmanager
def read_parts(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Open the files that `write_part` wrote under a name, in any number of parts, and yield all tensors by name.

    The tensors are those of safetensors' `get_slice`: no tensor is read before it is sliced.
    """
    with ExitStack() as opened:
        paths = sorted(folder.glob(f"{name}*.safetensors"))
        files = [opened.enter_context(safe_open(path, framework="pt")) for path in paths]
        yield {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118 (it is no dict)


def write_index(folder: Path, paths: Sequence[Path]) -> None:
    """Write a model folder's index, which says for each weight in which of the files `paths`, the parts, it is."""
    files: dict[str, str] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path.name)
    total = sum(path.stat().st_size for path in paths)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
