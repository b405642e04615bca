"""Compare the two engines: agreement, tokens per second, start-up, weight updates, the digest of weights.

    OMP_NUM_THREADS=1 python benchmarks/engines.py --repetitions 3 --json engines.json > engines.md
    OMP_NUM_THREADS=1 python benchmarks/engines.py --only speed --models tiny --device cuda

Needs the package with vLLM. Every measurement is a process of its own, the engines take turns, and the models have
random weights, large enough that their distributions are far from uniform. A cell is the median and, in brackets, the
smallest and the largest. CPU seconds are those of all threads; on a shared machine they are reliable and wall-clock
times are not.
"""

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import interleaved
from interleaved import Job, Result, cell, table

ENGINES = ("transformers", "vllm")
SECTIONS = ("agreement", "speed", "update", "digest")
LARGEST_GAP = 1e-5  # of a probability, in float32
WORKER = Path(__file__).with_name("engine_measurements.py")


def measure(job: Job) -> Result:
    return interleaved.measure(WORKER, job)


def repeated(jobs: Sequence[Job], repetitions: int) -> list[tuple[Job, list[Result]]]:
    """Every job as often, taking turns, so that what else the machine does meets all alike."""
    results: list[list[Result]] = [[] for _ in jobs]
    for _ in range(repetitions):
        for job, of_job in zip(jobs, results, strict=True):
            of_job.append(measure(job))
    return list(zip(jobs, results, strict=True))


def agreement(options: argparse.Namespace, folder: str) -> list[Job]:
    """Compare each engine's log-probs of its own rollouts with the other's of the same tokens, and with float64."""
    print("## Agreement\n\nDifferences of probabilities, on the same tokens.\n")
    rows, records = [], []
    for model in options.models:
        for dtype in ("fp32", "bf16"):
            shared = {"what": "agreement", "model": model, "dtype": dtype, "folder": folder, "device": options.device}
            for stage in ("vllm_writes", "transformers_reads_and_writes", "vllm_reads", "exact"):
                result = measure(shared | {"stage": stage})
                records.append(shared | {"stage": stage, "results": [result]})
                for name, value in result.items():
                    what, _, measured = name.rpartition("/")
                    if measured == "max":
                        mean, count = result[f"{what}/mean"], result[f"{what}/count"]
                        rows.append([model, dtype, what, f"{value:.1e}", f"{mean:.1e}", f"{count:.0f}"])
    table(["model", "dtype", "what", "largest", "mean", "numbers compared"], rows)
    for record in records:
        for name, gap in record["results"][0].items():
            if record["dtype"] == "fp32" and name.endswith("/max") and gap > LARGEST_GAP:
                print(f"Above the limit of {LARGEST_GAP:.0e} in float32: {record['model']}, {name} {gap:.1e}\n")
    return records


def speed(options: argparse.Namespace, folder: str) -> list[Job]:
    shared = {"what": "speed", "folder": folder, "device": options.device, "responses": 64, "tokens": 64}
    jobs = [shared | {"model": model, "engine": engine} for model in options.models for engine in ENGINES]
    measured = repeated(jobs, options.repetitions)
    print("## Start-up\n")
    columns = ["model", "engine", "import, wall s", "import, CPU s", "construction, wall s", "construction, CPU s"]
    parts = ("import/wall", "import/cpu", "construction/wall", "construction/cpu", "peak_gib")
    rows = [
        [job["model"], job["engine"], *(cell(r[part] for r in results) for part in parts)] for job, results in measured
    ]
    table([*columns, "peak memory, GiB"], rows)
    print("## Tokens per second\n\n64 responses of 64 tokens to prompts of 16, at temperature 1.\n")
    rows = []
    for job, results in measured:
        for name in ("top 0", "top 20", "top 0, no seeds"):
            if f"{name}/cpu" in results[0]:
                share = (1.0 - r["top 0/cpu"] / r[f"{name}/cpu"] for r in results)
                rates = [cell((r["tokens"] / r[f"{name}/{clock}"] for r in results), 0) for clock in ("wall", "cpu")]
                rows.append([job["model"], job["engine"], name, *rates, cell(share)])
    table(["model", "engine", "log-probs", "tokens / wall s", "tokens / CPU s", "share of CPU s above top 0"], rows)
    return [job | {"results": results} for job, results in measured]


def update(options: argparse.Namespace, folder: str) -> list[Job]:
    shared = {"what": "update", "folder": folder, "device": options.device}
    jobs = [shared | {"model": model, "engine": engine} for model in options.sizes for engine in ENGINES]
    measured = repeated(jobs, options.repetitions)
    print("## Weight updates, float32\n")
    columns = ["model", "parameters", "engine", "whole update, CPU s", "its digest, CPU s", "the rest, CPU s", "wall s"]
    rows = []
    for job, results in measured:
        parameters = f"{results[0]['parameters'] / 1e6:.1f}M"
        cells = [cell((r[part] for r in results), 3) for part in ("update/cpu", "digest/cpu")]
        rest = cell((r["update/cpu"] - r["digest/cpu"] for r in results), 3)
        rows.append(
            [job["model"], parameters, job["engine"], *cells, rest, cell((r["update/wall"] for r in results), 3)]
        )
    table(columns, rows)
    return [job | {"results": results} for job, results in measured]


def digest(options: argparse.Namespace, folder: str) -> list[Job]:
    sizes = [25_000_000, 100_000_000, 600_000_000]
    shared = {"what": "digest", "device": options.device}
    jobs = [shared | {"parameters": size, "dtype": dtype} for size in sizes for dtype in ("fp32", "bf16")]
    measured = repeated(jobs, options.repetitions)
    print("## The digest of weights against SHA-256 over all bytes\n")
    rows = []
    for job, results in measured:
        times = [cell((r[f"{name}/cpu"] for r in results), 3) for name in ("sha256", "digest")]
        ratio = cell(r["sha256/cpu"] / r["digest/cpu"] for r in results)
        rows.append([f"{job['parameters'] / 1e6:.0f}M", job["dtype"], *times, ratio])
    table(["parameters", "dtype", "SHA-256, CPU s", "digest, CPU s", "times faster"], rows)
    return [job | {"results": results} for job, results in measured]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--models", nargs="+", default=["tiny", "25M"], help="for agreement and speed")
    parser.add_argument("--sizes", nargs="+", default=["1M", "25M", "100M", "400M"], help="for weight updates")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--json", type=Path, help="file for every single measurement")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sections: dict[str, Callable[[argparse.Namespace, str], list[Job]]] = {
        "agreement": agreement,
        "speed": speed,
        "update": update,
        "digest": digest,
    }
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()}\n")
    with tempfile.TemporaryDirectory() as folder:
        records = [record for name in options.only for record in sections[name](options, folder)]
    print(f"load at the end {os.getloadavg()}")
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
