"""What a first run on a GPU would trip over, on a GPU that the CPU plays."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from virtual_gpu.build import build, obstacle
from virtual_gpu.process import HERE, VirtualGpu

RUNS = yaml.safe_load((HERE / "runs.yaml").read_text())
GAP = 1e-3  # of metrics in fp32
pytestmark = pytest.mark.virtual_gpu


@pytest.fixture(scope="session")
def gpu() -> Iterator[VirtualGpu]:
    if reason := obstacle():
        pytest.skip(reason)
    process = VirtualGpu(build())
    yield process
    process.close()


def test_what_cuda_refuses_raises(gpu: VirtualGpu) -> None:
    assert gpu("mixes.not_refused") == []


def test_what_cuda_takes_waits_as_often_as_there(gpu: VirtualGpu) -> None:
    assert gpu("mixes.other_waits") == {}


def test_a_graph_replays_and_its_capture_computes_nothing(gpu: VirtualGpu) -> None:
    assert gpu("mixes.graph_values") == [[0.0, 0.0], [0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]


def test_copies_from_and_to_pinned_memory_end_at_a_wait(gpu: VirtualGpu) -> None:
    hazards, early, late = gpu("mixes.pinned_values")
    assert hazards == 1 and all(value != value for value in early) and late == [1.0, 1.0]


def cases() -> Iterator[Any]:
    for group in ("equal", "resumed", "two_ranks", "rounded"):
        for name in RUNS[group]:
            yield pytest.param(group, name, id=name, marks=[pytest.mark.slow] * (name in RUNS["in_test_all"]))


def flat(items: list) -> Iterator[str]:
    for item in items:
        yield from flat(item) if isinstance(item, list) else [item]


@pytest.mark.parametrize(("group", "name"), list(cases()))
def test_a_run_takes_the_steps_that_it_takes_on_a_cpu(gpu: VirtualGpu, tmp_path: Path, group: str, name: str) -> None:
    recipe, *overrides = flat(RUNS[group][name])
    outcome = gpu("runs.compare", group, [recipe, *RUNS["common"], *overrides], tmp_path)
    assert outcome.hazards == [] and outcome.waits > 0
    assert group == "rounded" or outcome.gap <= GAP, outcome.metric
