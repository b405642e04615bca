"""Checkpoints of a learner that has one tensor."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from jackpot.models.load import load_tokenizer
from jackpot.training.run.checkpoint import Checkpoints

TOKENIZER = load_tokenizer("starter:policy")


class OneTensor:
    """Enough of a learner to be saved."""

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration

    def save_model(self, role: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        save_file({"weight": torch.full((1000,), float(self._iteration))}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")

    def state_dict(self) -> dict:
        return {"moment": torch.ones(2000)}


def save(folder: Path, iteration: int, keep: int = 2, is_best: bool = False, best: int | None = None) -> None:
    best = iteration if is_best else best
    state = {"iteration": iteration, "best": None if best is None else {"iteration": best, "accuracy": 0.5}}
    checkpoints = Checkpoints(folder, keep)
    checkpoints.save(iteration, OneTensor(iteration), ["policy", "rollout_model"], TOKENIZER, state, is_best)
    checkpoints.prune()
