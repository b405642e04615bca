"""What a run makes of the settings of its output layers."""

import json

import torch

from helpers.runs import run, small_config
from jackpot.objectives.kernels.reader import TorchReader


def test_a_run_names_its_head_kernel_and_sets_tf32(tmp_path, monkeypatch):
    class Named(TorchReader):
        name = "of this test"

    monkeypatch.setattr("jackpot.launch.head_kernel.tile_reader", lambda kernel, device: Named())
    small = ("iterations=1", "evaluation.problems=8")
    try:
        run(small_config(*small, "tf32=true"), tmp_path)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    (found,) = [event for event in events if event["event"] == "head_kernel"]
    assert found["kernel"] == "of this test" and found["iteration"] == 0
