"""Weights as files that servers read, on a disk or in shared memory, and the check that a server has loaded them.

The check compares checksums that a server reports with checksums of the file.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from jackpot.core.digest import weights_digest
from jackpot.core.errors import EngineError
from jackpot.rollout.engines.shared_weights import SharedWeights, read_weights

# Checksum of an empty tensor. On a CPU vLLM packs matrices into memory of its own, and leaves the parameters empty.
_PACKED = hashlib.sha256().hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """The form of the weights in files: here plain, in the subclass `WeightFormat` for vLLM perhaps quantized."""

    quantized_names: frozenset[str] = frozenset()  # names of the weights that are written as codes
    events: tuple[dict[str, Any], ...] = ()  # events that report how weights are quantized

    def convert(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Convert weights in the engine's dtype to the tensors that are written to the file; here nothing changes."""
        return named_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedWeights:
    """A file that holds the weights of a model, for servers to read."""

    version: str  # name of the weights, as servers report it (`HTTPClient.weight_version`)
    folder: Path  # folder of the file
    digest: str  # `weights_digest` of the weights before quantization, under the names that were sent
    checksums: Mapping[str, str]  # SHA-256 of the bytes of every tensor of the file, by name


class WeightsFolder:
    """The folder into which an engine writes weights for its servers, below a folder that all servers see."""

    def __init__(
        self, root: str | None, name: str, dtype: torch.dtype, aliases: Mapping[str, str], weight_format: Format
    ) -> None:
        """Name the folder, which the first `save` makes.

        Args:
            root: folder that all servers see; None: a folder for temporary files, with links to shared memory.
            name: name of the engine, unique among all engines that share `root`.
            dtype: dtype of the weights in the files.
            aliases: further names of tied parameters, with the name under which each is sent. The files have the
                weights under these names too, because a server whose model is not tied needs them.
            weight_format: form of the weights in the files.
        """
        self._is_in_memory = root is None
        self._memory: dict[Path, SharedWeights] = {}  # the weights in shared memory, by the folder that links to them
        self._folder = Path(tempfile.gettempdir() if root is None else root).expanduser().resolve() / name
        self._dtype, self._format = dtype, weight_format
        self._aliases = aliases

    def save(self, named_tensors: Sequence[tuple[str, Tensor]], version: str) -> SavedWeights:
        """Write weights to a folder named `version`, completely or not at all; return what was written.

        Raises:
            EngineError: the folder cannot be written.
        """
        folder, partial_folder = self._folder / version, self._folder / f"{version}.part"
        weights = {name: tensor.detach().to("cpu", self._dtype).contiguous() for name, tensor in named_tensors}
        tensors = dict(self._format.convert(weights.items()))
        # Copies, since `save_file` refuses tensors that share memory.
        tensors |= {alias: tensors[name].clone() for alias, name in self._aliases.items()}

        try:
            partial_folder.mkdir(parents=True)
            path = partial_folder / "model.safetensors"
            if self._is_in_memory:
                self._memory[folder] = SharedWeights(tensors.items())
                path.symlink_to(self._memory[folder].path)
            else:
                save_file(tensors, path, metadata={"format": "pt"})
                with path.open("rb") as file:
                    os.fsync(file.fileno())

            os.rename(partial_folder, folder)  # so `folder` never exists without its whole file
            return self._read_back(folder, version, weights)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial_folder, ignore_errors=True)
            raise EngineError(
                f"cannot write weights to {folder}: {error}. engine.weights_folder, or this machine's memory where it "
                f"is null, needs room for the model twice, and both the trainer and every server must reach the folder "
                f"under the same path"
            ) from error

    def _read_back(self, folder: Path, version: str, weights: Mapping[str, Tensor]) -> SavedWeights:
        """Read the file back from the disk, and return its digest and checksums.

        For the digest, quantized weights are taken from memory as they were before, since the file has only codes.
        """
        quantized = self._format.quantized_names
        tensors = dict(read_weights(folder / "model.safetensors"))

        plain = ((name, weights[name] if name in quantized else tensors[name]) for name in weights)
        digest = weights_digest(plain, self._dtype)
        checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
        return SavedWeights(version=version, folder=folder, digest=digest, checksums=checksums)

    def remove_except(self, needed: Sequence[SavedWeights]) -> None:
        """Remove the files of all weights but those of `needed`."""
        folders = {saved.folder for saved in needed}
        for folder in self._folder.iterdir():
            if folder not in folders:
                shutil.rmtree(folder, ignore_errors=True)
                self._memory.pop(folder, None)

    def remove(self) -> None:
        """Remove all files of the engine."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._memory.clear()


def _checksum(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, as the servers compute it."""
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def without_rank(key: str) -> str:
    """Return the parameter's name in a key of a server's checksums, such as NAME in RANK:NAME."""
    return key.rpartition(":")[2]


def unknown_norms(reported: Iterable[str], parameters: Set[str]) -> list[str]:
    """Return up to 3 names of norm layers' weights that a server reports and the model lacks.

    Such a name shows that the server serves another model, because norms, unlike fused and packed weights, keep the
    model's names in a server.
    """
    return sorted(name for name in reported if "norm" in name and name not in parameters)[:3]


def check_loaded(
    url: str,
    new: SavedWeights,
    after: Mapping[str, str],
    verified: tuple[SavedWeights, Mapping[str, str]] | None,
    comparable: bool = True,
) -> None:
    """Raise EngineError for a server that reports a successful update and still holds old weights.

    A server may hold parameters fused, padded or split. Parameters that keep the model's name must have changed where
    the file has changed, and at least one, such as a norm, must equal that of the file byte for byte. Packed parameters
    have no checksum and are not compared.

    Args:
        new: the weights that the server was given last.
        after: the server's checksums after the update, by rank and name.
        verified: the newest weights that this function accepted since the server's start, and the server's checksums
            then; None before there are any.
        comparable: False where the server computes checksums in another way than this program does, so that only a
            change of a checksum can be seen.
    """
    # The file's checksums of the parameters that keep the model's name, by the keys of `after`.
    expected = {
        key: new.checksums[without_rank(key)]
        for key, checksum in after.items()
        if without_rank(key) in new.checksums and checksum != _PACKED  # packed: no bytes to compare
    }
    equal: set[str] = set()  # keys of parameters that are byte for byte those of the file
    if comparable:  # servers may cut a checksum to its first 8 bytes, which are 16 hex digits
        equal = {key for key, checksum in expected.items() if len(after[key]) >= 16 and checksum.startswith(after[key])}

    stale = []  # parameters that have not changed on the server, and have changed in the file
    if verified is not None:
        old, before = verified  # the weights that were accepted last, and the server's checksums of them
        unchanged = [key for key in expected if key not in equal and after[key] == before.get(key)]
        stale = [key for key in unchanged if expected[key] != old.checksums.get(without_rank(key))]

    # The server is refused if a parameter is old, if none has a name to compare, or if none equals the file's bytes.
    if stale or not expected or (comparable and not equal):
        differing = ", ".join(sorted(stale)[:3])
        if not differing:
            differing = "all of them" if expected else "none has a name of the model's, so all"
        raise EngineError(
            f"{url} was given the weights {new.version} and holds stale ones: {differing} differ from "
            f"the file {new.folder}. Restart the server; is the file the same on its side?"
        )
