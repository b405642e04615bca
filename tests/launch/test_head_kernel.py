"""What a run makes of the settings of its output layers."""

import json

import torch

from helpers.runs import run, small_config
from jackpot.objectives.kernels.reader import TorchReader


def test_a_run_names_its_head_kernel_and_sets_tf32(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "jackpot.launch.head_kernel.tile_reader", lambda kernel, device: TorchReader(f"{kernel} on {device}")
    )
    small = ("iterations=1", "evaluation.problems=8")
    try:
        run(small_config(*small, "head_kernel=compile", "tf32=true"), tmp_path)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    (found,) = [event for event in events if event["event"] == "head_kernel"]
    assert found["kernel"] == "compile on cpu" and found["iteration"] == 0
