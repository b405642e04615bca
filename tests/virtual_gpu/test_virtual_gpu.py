"""What a first run on a GPU would trip over, on a GPU that the CPU plays: refusals, waits, numbers and whole runs."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from virtual_gpu import build
from virtual_gpu.process import HERE, VirtualGpu

RUNS = yaml.safe_load((HERE.parents[1] / "benchmarks" / "gpu_parts" / "runs.yaml").read_text())
pytestmark = pytest.mark.virtual_gpu


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualGpu]:
    if reason := build.obstacle():
        pytest.skip(reason)
    process = VirtualGpu(build.build(), tmp_path_factory.mktemp("virtual-gpu"))
    yield process
    process.close()


def test_a_machine_that_cannot_have_it_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.torch.version, "cuda", None)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build, "TRIED", {build.torch.__version__.partition("+")[0]})

    assert build.obstacle() == "there is no g++"

    monkeypatch.setattr(build, "TRIED", {"0.1"})
    assert "was tried with torch 0.1, not with" in build.obstacle()

    monkeypatch.setattr(build.torch.version, "cuda", "13.0")
    assert "is built for CUDA 13.0" in build.obstacle()


def test_what_cuda_refuses_raises(gpu: VirtualGpu) -> None:
    assert gpu("mixes.not_refused") == []


def test_what_cuda_takes_waits_as_often_as_there(gpu: VirtualGpu) -> None:
    assert gpu("mixes.other_waits") == {}


def test_a_graph_replays_and_its_capture_computes_nothing(gpu: VirtualGpu) -> None:
    assert gpu("mixes.graph_values") == [[0.0, 0.0], [0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]


def test_copies_from_and_to_pinned_memory_end_at_a_wait(gpu: VirtualGpu) -> None:
    early_values, late_values = gpu("mixes.pinned_values")

    assert all(map(math.isnan, early_values))
    assert late_values == [1.0, 1.0]
    assert len(gpu.hazards()) == 1


def test_the_numbers_of_check_are_those_of_the_cpu(gpu: VirtualGpu) -> None:
    assert gpu("checks.wrong_rows") == {}


def test_inductor_builds_the_kernels_that_runs_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if reason := build.obstacle():
        pytest.skip(reason)
    monkeypatch.delenv("TRITON_INTERPRET")

    process = VirtualGpu(build.build(), tmp_path)
    try:
        assert process("inductor.not_built") == {}
    finally:
        process.close()


def test_the_host_waits_no_more_often_than_the_table_says(gpu: VirtualGpu) -> None:
    limits = yaml.safe_load((HERE / "waits.yaml").read_text())
    counts = gpu("measures.counts")

    assert counts.keys() == limits.keys()
    assert {name: count for name, count in counts.items() if count > limits[name]} == {}
    assert gpu.hazards() == []


def test_correct_reports_a_shift_one_call_later_and_never_waits(gpu: VirtualGpu) -> None:
    (first_waits, first_error), (later_waits, later_error), (last_waits, last_error) = gpu("signs.waits_and_errors")

    assert [first_waits, later_waits, last_waits] == [[], [], []]
    assert first_error == ""
    assert "shifted by a token" in later_error
    assert "(an earlier call)" in later_error
    assert "(an earlier call)" in last_error  # of the second call, whose tensors were shifted too


def cases() -> Iterator[Any]:
    """Each run of runs.yaml with its group; slow where `make test-all` has it."""
    for group in ("equal", "flex", "resumed", "two_ranks", "rounded"):
        for name in RUNS[group]:
            yield pytest.param(group, name, id=name, marks=[pytest.mark.slow] * (name in RUNS["in_test_all"]))


@pytest.mark.parametrize(("group", "name"), list(cases()))
def test_a_run_takes_the_steps_that_it_takes_on_a_cpu(gpu: VirtualGpu, tmp_path: Path, group: str, name: str) -> None:
    if "head_kernel=triton" in RUNS[group][name]:
        pytest.importorskip("triton")

    differing_metrics, waits = gpu("runs.compare", group, name, tmp_path)

    assert gpu.hazards() == []
    assert waits > 0 or group == "two_ranks"
    assert group == "rounded" or differing_metrics == []
