"""A run records in its events which kernel computes its output layers, and turns TF32 on where the settings say so."""

import json

import torch

from helpers.runs import run, small_config
from jackpot.objectives.kernels.reader import TorchReader


def test_a_run_names_its_head_kernel_and_sets_tf32(tmp_path, monkeypatch):
    class NamedReader(TorchReader):
        name = "of this test"

    monkeypatch.setattr("jackpot.launch.head_kernel.tile_reader", lambda kernel, device: NamedReader())
    config = small_config("iterations=1", "evaluation.problems=8", "tf32=true")

    try:
        run(config, tmp_path)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False

    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    [kernel_event] = [event for event in events if event["event"] == "head_kernel"]
    assert kernel_event["kernel"] == "of this test"
    assert kernel_event["iteration"] == 0
