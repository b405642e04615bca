"""Weights as files that servers read, and the proof that they did."""

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jackpot.core.digest import weights_digest
from jackpot.core.errors import EngineError
from jackpot.rollout.engines.vllm.server_info import plain_name
from jackpot.rollout.engines.vllm.weight_format import SentForm

_PACKED = hashlib.sha256().hexdigest()  # of no bytes: on a CPU vLLM packs matrices into another place


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenWeights:
    """One set of weights on the disk."""

    tag: str  # names them everywhere
    folder: Path
    digest: str  # `weights_digest` of what the file holds, or its codes were made from, under the names that were sent
    checksums: Mapping[str, str]  # SHA-256 of the bytes of every tensor of the file


class WeightsFolder:
    """Where an engine puts weights for its servers: a folder of its own in one that all see."""

    def __init__(self, root: str, name: str, dtype: torch.dtype, aliases: Mapping[str, str], form: SentForm) -> None:
        """
        Args:
            name: of the engine, like no other's.
            form: in which the servers get weights.
            aliases: further names of tied parameters, and the names under which they are sent. A server whose model is
                not tied needs them.
        """
        self._folder = Path(root).expanduser().resolve() / name
        self._dtype, self._aliases, self._form = dtype, aliases, form

    def write(self, sent: Sequence[tuple[str, Tensor]], tag: str) -> WrittenWeights:
        """Complete under its name or not at all.

        Raises:
            EngineError: the folder cannot be written.
        """
        folder, aside = self._folder / tag, self._folder / f"{tag}.part"
        weights = {name: tensor.detach().to("cpu", self._dtype).contiguous() for name, tensor in sent}
        tensors = dict(self._form.tensors(weights.items()))
        tensors |= {alias: tensors[name].clone() for alias, name in self._aliases.items()}
        try:
            aside.mkdir(parents=True)
            file = aside / "model.safetensors"
            save_file(tensors, file, metadata={"format": "pt"})
            with file.open("rb") as written:
                os.fsync(written.fileno())
            os.rename(aside, folder)
            return self._read_back(folder, tag, weights)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise EngineError(
                f"cannot write weights to {folder}: {error}. engine.weights_folder needs room for the model twice, and "
                f"both the trainer and every server must reach it under the same path"
            ) from error

    def _read_back(self, folder: Path, tag: str, weights: Mapping[str, Tensor]) -> WrittenWeights:
        coded = self._form.names
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            held = ((name, weight if name in coded else file.get_tensor(name)) for name, weight in weights.items())
            digest = weights_digest(held, self._dtype)
            checksums = {name: _checksum(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  not a dict
        return WrittenWeights(tag=tag, folder=folder, digest=digest, checksums=checksums)

    def keep_only(self, kept: Sequence[WrittenWeights]) -> None:
        folders = {one.folder for one in kept}
        for folder in self._folder.iterdir():
            if folder not in folders:
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _checksum(tensor: Tensor) -> str:
    """As vLLM's /weight_checker computes it."""
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def check_loaded(
    url: str,
    new: WrittenWeights,
    after: Mapping[str, str],
    proven: tuple[WrittenWeights, Mapping[str, str]] | None,
) -> None:
    """Raises EngineError for a server that says it took new weights over and did not.

    A server may keep weights fused, padded or split. Those that have a name of ours must have changed with ours, and at
    least one must be just what was sent, as norms are. Packed ones it does not tell of.

    Args:
        after: its checksums now, by rank and name.
        proven: the last weights that it was found to hold since its start, and its checksums then.
    """
    known = {
        key: new.checksums[plain_name(key)]
        for key, checksum in after.items()
        if plain_name(key) in new.checksums and checksum != _PACKED
    }
    old, before = proven or (None, {})
    stale = [
        key
        for key, checksum in known.items()
        if old is not None
        and checksum != after[key] == before.get(key)
        and checksum != old.checksums.get(plain_name(key))
    ]
    if stale or not any(after[key] == checksum for key, checksum in known.items()):
        named = ", ".join(sorted(stale)[:3]) or ("all of them" if known else "none has a name of the model's, so all")
        raise EngineError(
            f"{url} was given the weights {new.tag} and holds stale ones: {named} differ from "
            f"the file {new.folder}. Restart the server; is the file the same on its side?"
        )
