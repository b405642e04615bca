"""The batch script that `jackpot launch --slurm` prints: valid bash, quoted, and run on a pretended cluster it starts
the training that it names; what a job cannot do is refused before.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from helpers.commands import jackpot
from helpers.runs import SMALL, read_lines

# What SLURM has, on one machine: a step runs here, and the names of nodes are those of the list.
SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
tr , '\\n' <<< "$3"
"""
RECORDER = """#!{python}
import json, os, sys
folder = {folder!r}
with open(f"{{folder}}/{{os.path.basename(sys.argv[0])}}-{{os.getpid()}}.json.partial", "w") as file:
    json.dump({{"arguments": sys.argv[1:], "environment": dict(os.environ)}}, file)
os.rename(file.name, file.name.removesuffix(".partial"))
"""


def printed_script(*arguments: str, cwd: Path) -> str:
    """Return the batch script that `jackpot launch` prints for these arguments."""
    result = jackpot("launch", *arguments, "--slurm", cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def write_command(path: Path, text: str) -> None:
    """Write an executable file."""
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@contextmanager
def submitted_job(script: str, folder: Path, programs: dict[str, str], nodes: str) -> Iterator[subprocess.Popen]:
    """Run a batch script in `folder` as SLURM would on these nodes; what still runs at the end is killed."""
    bin = folder / "bin"
    bin.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, **programs}.items():
        write_command(bin / name, text)
    (folder / "job.sh").write_text(script)
    path = os.pathsep.join([str(bin), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"PATH": path, "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": nodes}

    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            ["bash", "job.sh"],
            cwd=folder,
            env=os.environ | job,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("options", [(), ("--gpus", "0", "--ranks", "2"), ("--nodes", "16")])
def test_the_script_is_valid_bash_and_asks_for_all_nodes(options: tuple[str, ...], tmp_path: Path) -> None:
    script = printed_script("quickstart", *options, cwd=tmp_path)
    bash_check = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)

    assert (bash_check.returncode, bash_check.stderr) == (0, "")

    nodes = {(): 1, "--gpus": 1, "--nodes": 16}[options[0] if options else ()]
    directives = script.splitlines()[1:10]  # below the line `#!`

    assert f"#SBATCH --nodes={nodes}" in directives
    assert ("#SBATCH --gpus-per-node=8" in directives) == ("--gpus" not in options)


def test_every_node_gets_its_ranks(tmp_path: Path) -> None:
    """Paths and settings have what a shell would take apart."""
    run = str(tmp_path / "a run's $HOME")
    description = "description=it's `one` $(date) word *"
    script = printed_script("joint_8b", description, "--nodes", "2", "--gpus", "2", "--run", run, cwd=tmp_path)
    recorder = RECORDER.format(python=sys.executable, folder=str(tmp_path))

    with submitted_job(script, tmp_path, {"torchrun": recorder}, "one,two") as job:
        assert job.wait(60) == 0, (tmp_path / "output").read_text()

    [training] = [json.loads(path.read_text()) for path in tmp_path.glob("torchrun-*.json")]
    words = training["arguments"]

    assert words[: words.index("--")] == [
        "--nnodes=2",
        "--nproc-per-node=2",
        "--max-restarts=3",
        "--shutdown-timeout=270",
        "--rdzv-backend=c10d",
        f"--rdzv-id={os.getpid()}",
        f"--rdzv-endpoint=one:{20000 + os.getpid() % 10000}",  # the first node, a port of the job's id
        "-m",
    ]
    assert words[words.index("--") + 1 :] == ["jackpot", "train", "joint_8b", description, "--run", run]


SERVERS = (
    "engine={name: vllm_server, urls: [http://one:8000], weights_folder: /shared}",
    "evaluation.engine=transformers",
)
REFUSED_JOBS = {
    "no scheduler": (["quickstart"], "--slurm"),
    "vLLM within rank 0": (["joint_8b", "--slurm", "placement.engines=0"], "leave placement.engines out"),
    "engines that generate while they sleep": (["joint_8b", "--slurm", "batch.ahead=1"], "enable_sleep_mode=false"),
    "servers of a longer output layer": (
        ["jet_rl", "--slurm", *SERVERS, "objective.reference.path=Qwen/Qwen3-8B-Base"],
        "vllm_server samples from all 152064 rows",
    ),
}


@pytest.mark.parametrize("case", REFUSED_JOBS)
def test_what_a_job_cannot_do_is_refused_before_it_is_submitted(case: str, tmp_path: Path) -> None:
    arguments, expected_message = REFUSED_JOBS[case]

    result = jackpot("launch", *arguments, cwd=tmp_path)

    assert (result.returncode, result.stdout) == (2, "")
    assert expected_message in result.stderr


@pytest.mark.slow
def test_sigterm_ends_a_job_with_a_checkpoint(tmp_path: Path) -> None:
    """With the real torchrun, on CPUs. SLURM sends SIGTERM to the script before the job's time is over."""
    options = ["--gpus", "0", "--ranks", "2", "--run", str(tmp_path / "run")]
    script = printed_script("quickstart", *SMALL, "iterations=500", *options, cwd=tmp_path)
    log_path = tmp_path / "run" / "metrics.jsonl"
    with submitted_job(script, tmp_path, {}, "localhost") as job:
        deadline = time.monotonic() + 240.0
        while not log_path.exists() or '"iteration": 1,' not in log_path.read_text():
            assert job.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.1)
        job.terminate()

        assert job.wait(120) == 0, (tmp_path / "output").read_text()

    newest_iteration = read_lines(tmp_path / "run")[-1]["iteration"]

    assert 1 <= newest_iteration < 500
    assert (tmp_path / "run" / "checkpoints" / "last").readlink() == Path(f"step-{newest_iteration}")
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["starts"][0]["ranks"] == 2
