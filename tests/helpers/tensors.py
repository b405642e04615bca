"""Checkpoints of a learner that has one tensor."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from jackpot.core.files import flushed_checksum
from jackpot.models.load import load_tokenizer
from jackpot.training.run_folder.checkpoint import Checkpoints

TOKENIZER = load_tokenizer("starter:policy")


class OneTensor:
    """Has as much of a learner as a checkpoint saves."""

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration

    def save(self, folder: Path, roles: list[str]) -> dict:
        for role in roles:
            (folder / role).mkdir(parents=True)
            save_file({"weight": torch.full((1000,), float(self._iteration))}, folder / role / "model.safetensors")
            (folder / role / "config.json").write_text("{}")
        return {name: flushed_checksum(folder / name) for name in (f"{role}/model.safetensors" for role in roles)}

    def state_dict(self) -> dict:
        return {"moment": torch.ones(2000)}


def save(folder: Path, iteration: int, keep: int = 2, is_best: bool = False, best: int | None = None) -> None:
    """Save the checkpoint of an iteration and remove old ones; `best` is the best iteration, this one if `is_best`."""
    best = iteration if is_best else best
    state = {"iteration": iteration, "best": None if best is None else {"iteration": best, "accuracy": 0.5}}
    checkpoints = Checkpoints(folder, keep)
    checkpoints.save(iteration, OneTensor(iteration), ["policy", "rollout_model"], TOKENIZER, state, is_best)
    checkpoints.prune()
