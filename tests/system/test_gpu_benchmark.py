"""benchmarks/gpu.py on a CPU: every part runs with tiny shapes, a run goes on where it ended, wrong results show."""

import json
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from helpers.paths import ROOT


@pytest.fixture
def gpu(monkeypatch, tmp_path) -> Iterator[ModuleType]:
    """Yield benchmarks/gpu.py, without carried wheels; where there is a GPU, these tests leave it alone."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    import gpu

    monkeypatch.setattr(gpu.wheels, "FOLDER", tmp_path / "wheels")
    yield gpu
    for name in [name for name in sys.modules if name == "gpu" or name.startswith("gpu_parts")]:
        del sys.modules[name]


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_check_says_whether_the_numbers_of_the_device_are_right(gpu, tmp_path, monkeypatch, capsys):
    """One row of it; that all are right on a CPU is what its exit code says below."""
    from gpu_parts import check

    path = tmp_path / "gpu.jsonl"
    row = ("--only", "lists of the head in fp32")
    assert gpu.main(["check", "--tiny", "--results", str(path), "--commit", "abc", *row]) == 0
    [result_line] = [line for line in json_lines(path) if line["result"]]
    assert result_line["result"]["right"]
    assert result_line["commit"] == "abc"

    monkeypatch.setattr(check, "LOG_PROB_GAP", 1e-12)
    assert gpu.main(["check", "--tiny", *row]) == 1
    assert "**no**" in capsys.readouterr().out


def test_gradients_that_differ_are_noticed(gpu, monkeypatch):
    from gpu_parts import check

    device = torch.device("cpu")

    gradients = check.gradients(device, "fp32", 2, check.SEVERAL)
    gradients[3] = 1.001 * gradients[3]
    monkeypatch.setattr(check, "_of_the_cpu", lambda *_: gradients)

    assert not check.compare_gradients(device, "fp32", 2, check.SEVERAL, check.FP32_GAP)["right"]


def test_a_row_fails_where_another_kernel_attends(gpu):
    from gpu_parts import attention, check

    device, readers = torch.device("cpu"), attention.READERS
    packed_reader, padded_reader = readers["as trained"], readers["padded rows, every prompt once"]

    with pytest.raises(RuntimeError, match="blocks attended to packed rows in place of None"):
        check.compare_states(device, "fp32", packed_reader._replace(in_fp32=None), check.FP32_GAP)

    with pytest.raises(RuntimeError, match="no kernel attended to packed rows in place of blocks"):
        check.compare_states(device, "fp32", padded_reader._replace(in_fp32="flex"), check.FP32_GAP)


def test_a_kernel_that_fails_ends_its_own_row_alone(gpu, monkeypatch):
    from gpu_parts import head
    from gpu_parts.machine import Machine

    def fail_to_compile(config):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(head, "head_options", fail_to_compile)
    monkeypatch.setattr(head, "head_kernels", lambda machine: [{"head_kernel": "triton"}])

    rows = [row for row in head.rows(Machine(tiny=True)) if "single" in row.name and ": ours" in row.name]
    with pytest.raises(RuntimeError, match="no compiler"):
        next(row for row in rows if "triton" in row.name).measure()

    assert rows[0].measure()["ms"] > 0


def test_a_learner_sharded_over_one_rank_takes_the_same_steps(gpu, tmp_path, monkeypatch):
    from gpu_parts import fsdp

    monkeypatch.setattr(fsdp, "STEPS", 1)
    path = tmp_path / "gpu.jsonl"
    assert gpu.main(["fsdp", "--tiny", "--results", str(path), "--only", "in fp32, several", "--commit", "abc"]) == 0
    [result] = [line["result"] for line in json_lines(path) if line["result"]]
    assert result["right"]
    assert result["equal"]


def test_sharded_steps_that_differ_are_noticed(gpu, monkeypatch):
    from gpu_parts import fsdp

    # gradients and weights of the sharded learner are 1% larger
    monkeypatch.setattr(fsdp, "outcome", lambda *arguments: [torch.ones(3) * (1.0 + bool(arguments[-1]) / 100)])

    comparison = fsdp.compare_steps(torch.device("cpu"), "fp32", fsdp.SEVERAL, fsdp.GAP, {})
    assert not comparison["right"]
    assert not comparison["equal"]


SWEPT = pytest.param("fp8", marks=pytest.mark.sweep)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["check", "runs", "head", "step", "attention", "decode", "sync", "fsdp", SWEPT])
def test_every_part_runs_with_tiny_shapes(gpu, part, tmp_path):
    path = tmp_path / "gpu.jsonl"

    assert gpu.main([part, "--tiny", "--results", str(path), "--commit", "abc"]) == 0

    results = {line["row"]: line["result"] for line in json_lines(path) if line["result"]}
    errors = {row: result["error"] for row, result in results.items() if "error" in result}
    assert len(errors) < len(results)
    assert all(error.startswith("NotInstalled: ") for error in errors.values()), errors
    assert all(re.search("TRL|Liger|varlen flash|vLLM|vllm", row) for row in errors), errors


def test_the_rows_of_every_part_have_names_of_their_own(gpu):
    """Also with shapes of a GPU, whose rows nothing runs here."""
    import importlib

    from gpu_parts.machine import Machine

    for part in gpu.PARTS:
        for tiny in (True, False):
            names = [row.name for row in importlib.import_module(f"gpu_parts.{part}").rows(Machine(tiny))]
            assert names, part
            assert len(names) == len(set(names)), part
            if part == "fp8":
                assert any(name.startswith("norm and quantizing") for name in names)


class TestRuns:
    """Rows that take no time, to see in which order they are run and what is kept."""

    def run_rows(self, gpu, path: Path, measures: dict, commit: str = "abc", seconds: float = 100.0) -> list[str]:
        rows = [gpu.Row(name, measure, 5.0) for name, measure in measures.items()]
        results = gpu.Results(path, commit, {"device": "none"})
        return gpu.run_part("part", rows, results, lambda: None, seconds)

    def test_a_row_is_measured_once_and_failed_ones_again_last(self, gpu, tmp_path):
        path, calls = tmp_path / "gpu.jsonl", []

        def measure(name: str):
            calls.append(name)
            if name == "bad" and calls.count("bad") == 1:
                raise RuntimeError("out of memory\nand a long trace")
            return {"s": 1.0}

        measures = {name: lambda name=name: measure(name) for name in ("bad", "good")}

        self.run_rows(gpu, path, measures)
        assert calls == ["bad", "good"]
        assert [line["result"] for line in json_lines(path)] == [
            {},
            {"error": "RuntimeError: out of memory"},
            {},
            {"s": 1.0},
        ]

        self.run_rows(gpu, path, measures | {"new": lambda: measure("new")})
        assert calls == ["bad", "good", "new", "bad"]

        self.run_rows(gpu, path, measures, commit="def")
        assert calls[4:] == ["bad", "good"]

    def test_a_row_that_ended_the_process_is_tried_after_all_others(self, gpu, tmp_path):
        path, calls = tmp_path / "gpu.jsonl", []
        gpu.Results(path, "abc", {}).begin("part", "first")
        with path.open("a") as file:
            file.write('{"part": "part", "row": "sec')  # the process ended while it wrote
        with path.open("a") as file:
            file.write("\n")

        self.run_rows(
            gpu, path, {name: lambda name=name: calls.append(name) or {"s": 1.0} for name in ("first", "second")}
        )

        assert calls == ["second", "first"]

    def test_a_row_begins_in_time_and_ends_at_its_limit(self, gpu, tmp_path):
        path = tmp_path / "gpu.jsonl"
        assert self.run_rows(gpu, path, {"a": dict, "b": dict}, seconds=gpu.LEAST_SECONDS - 1.0) == ["a", "b"]

        results = gpu.Results(path, "abc", {})
        row = gpu.Row("slow", lambda: time.sleep(60.0), 0.05)
        assert gpu.run_part("part", [row], results, lambda: None, 100.0) == []
        assert results.of("part")[0].result["error"].startswith("OutOfTime")

    def test_the_table_has_every_name_and_errors_last(self, gpu, tmp_path):
        path = tmp_path / "gpu.jsonl"
        measures = {"a": lambda: {"ms": 1234.5, "right": False}, "b": lambda: {"waits": 3, "of peak": 0.4567}}
        self.run_rows(gpu, path, measures | {"c": lambda: 1 / 0})

        assert gpu.table(gpu.Results(path, "abc", {}).of("part")).splitlines() == [
            "|  | ms | right | waits | of peak | not measured |",
            "| --- | --- | --- | --- | --- | --- |",
            "| a | 1,234 | **no** |  |  |  |",
            "| b |  |  | 3 | 0.457 |  |",
            "| c |  |  |  |  | ZeroDivisionError: division by zero |",
        ]


def test_without_a_gpu_only_tiny_shapes_are_run(gpu, capsys):
    assert gpu.main(["step"]) == 2
    assert "--tiny" in capsys.readouterr().err


def test_busy_time_and_gaps_of_overlapping_kernels(gpu):
    from gpu_parts.machine import timeline

    kernels = [(0, 4, "a"), (1, 2, "b"), (6, 8, "c"), (8, 10, "d")]  # ms
    summary = timeline([(1_000_000 * start, 1_000_000 * end, name) for start, end, name in kernels])
    assert summary == {"busy": 0.8, "longest gaps, ms": "2.00 before c, 0.00 before d, 0.00 before b"}


def test_the_floor_of_an_update_is_that_of_its_sequences(gpu):
    from gpu_parts.models import make_model, random_samples, training_flops

    from jackpot.models.cost import forward_cost, head_cost

    model = make_model("Qwen3 0.6B", torch.device("cpu"), tiny=True)
    samples = random_samples(512, prompts=3, group=1, prompt_length=9, longest=24, shortest=5)

    cost = forward_cost(model)
    flops = sum(cost.sequence(9 + len(sample.rollout.token_ids)) - 9 * head_cost(model) for sample in samples)
    assert training_flops([model], samples) == 3 * flops  # forward once, and backward twice as much


OTHERS = ("aiohttp", "datasets", "math_verify", "matplotlib", "peft", "ray", "rich", "trl", "typer", "wandb")


@pytest.mark.slow  # it imports all
def test_no_part_needs_packages_that_the_page_does_not_name():
    """A package of which sys.modules holds None cannot be imported."""
    block_code = f"import sys; sys.modules |= dict.fromkeys({OTHERS!r})"
    import_code = "import gpu; [gpu.importlib.import_module(f'gpu_parts.{part}') for part in gpu.PARTS]"
    command = [sys.executable, "-c", f"{block_code}; {import_code}"]
    result = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr


class TestWheels:
    def test_a_carried_wheel_is_used_where_its_package_is_missing(self, gpu, monkeypatch):
        folder = gpu.wheels.FOLDER
        folder.mkdir()
        for name, tag in (("carried_one", "py3-none-any"), ("other_python", "cp37-cp37m-manylinux2014_x86_64")):
            with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as wheel:
                wheel.writestr(f"{name}/__init__.py", "VALUE = 7")

        needed_packages = {"carried_one": "carried-one", "other_python": "other-python", "torch": "torch"}
        monkeypatch.setattr(gpu.wheels, "NEEDED", needed_packages)
        monkeypatch.setattr(gpu.wheels, "PACKAGES", needed_packages)

        assert gpu.wheels.use() == ["other-python"]
        import carried_one

        assert carried_one.VALUE == 7

    def test_what_is_missing_is_named_with_its_command(self, gpu, monkeypatch, capsys):
        monkeypatch.setattr(gpu.wheels, "NEEDED", {"not_there_at_all": "not-there"})
        assert gpu.main(["check", "--tiny"]) == 2
        error = capsys.readouterr().err
        assert "not-there" in error
        assert "make gpu-wheels" in error
