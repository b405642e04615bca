"""What the benchmarks share: measurements in processes of their own that take turns, and their results as lines of
JSON.

`python benchmarks/NAME.py` measures what docs/benchmarks/NAME.jsonl lacks and prints its table: a run that was
interrupted continues. The file's first line says on which machine, with what and of which commit it was measured;
with another commit or machine the file is begun anew. `benchmarks/all.py` runs every benchmark and writes
docs/benchmarks.md.

    --repetitions 3             rounds; in each every measurement has its turn once
    --only shape=fixed          the jobs that have this value; several times
    --set tokens=256            other values in every job; the results are printed and not kept
    --quick                     the smallest sizes, once; the results are printed and not kept
    --peers .venv-peers/bin/python
"""

import argparse
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

Job = dict[str, Any]
Result = dict[str, Any]
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FOLDER = ROOT / "docs" / "benchmarks"
MARK = "RESULT "


class Benchmark(NamedTuple):
    """One script and its file of results."""

    name: str  # of the script and of the file
    jobs: Callable[[bool], list[Job]]  # in the order of their turns; True: the smallest sizes
    report: Callable[["Results"], str]  # Markdown
    prepare: Job | None = None  # run once before the others, in the folder that they share
    repetitions: int = 3


class Results:
    """The measurements of one benchmark."""

    def __init__(self, about: dict[str, str], lines: Sequence[dict[str, Any]] = (), path: Path | None = None) -> None:
        self.about, self._lines, self._path = about, list(lines), path

    @classmethod
    def read(cls, path: Path) -> "Results":
        """Return what a file holds, nothing where there is none."""
        if not path.exists():
            return cls({})
        about, *lines = map(json.loads, path.read_text().splitlines())
        return cls(about, lines, path)

    @classmethod
    def begin(cls, path: Path, about: dict[str, str]) -> "Results":
        """Continue a file of the same commit and machine; begin any other anew."""
        found = cls.read(path)
        keys = [key for key in about if key != "command"]
        if found.about and [found.about.get(key) for key in keys] == [about[key] for key in keys]:
            return found
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(about) + "\n")
        return cls(about, path=path)

    def has(self, job: Job, repetition: int) -> bool:
        return any(line["job"] == job and line["repetition"] == repetition for line in self._lines)

    def add(self, job: Job, repetition: int, result: Result) -> None:
        line = json.loads(json.dumps({"job": job, "repetition": repetition, "result": result}))
        self._lines.append(line)
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def jobs(self, **fields: Any) -> list[Job]:
        """Return the jobs with these values, each once, in the order of their turns."""
        found = [line["job"] for line in self._lines if self._matches(line, fields)]
        return [job for number, job in enumerate(found) if job not in found[:number]]

    def of(self, **fields: Any) -> list[Result]:
        """Return the results of the jobs with these values, repetition by repetition; not those that failed."""
        found = sorted((line for line in self._lines if self._matches(line, fields)), key=lambda one: one["repetition"])
        return [line["result"] for line in found if "failed" not in line["result"]]

    def of_job(self, job: Job) -> list[Result]:
        """Return the results of this job and no other."""
        return [one["result"] for one in self._lines if one["job"] == job and "failed" not in one["result"]]

    def values(self, key: str, **fields: Any) -> list[float]:
        return [result[key] for result in self.of(**fields)]

    def failure(self, **fields: Any) -> str:
        """Return why a job has no result; empty where it has one or was not run."""
        return next((line["result"].get("failed", "") for line in self._lines if self._matches(line, fields)), "")

    def versions(self) -> dict[str, str]:
        """Return what was measured with: ours and every version that a peer names."""
        named = {
            key: value
            for line in self._lines
            for key, value in line["result"].items()
            if isinstance(value, str) and key != "failed"
        }
        return {key: self.about[key] for key in ("python", "torch", "transformers") if key in self.about} | named

    @staticmethod
    def _matches(line: dict[str, Any], fields: dict[str, Any]) -> bool:
        return all(line["job"].get(key) == value for key, value in fields.items())


def measure(worker: Path, job: Job, python: str = sys.executable, limit: int | None = None) -> Result:
    """Run one job in a process of its own, one thread: `worker` gets it as JSON and prints `RESULT ` and its numbers.

    `limit`: CPU seconds after which it is ended; the result then says so.
    """
    bound = (lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))) if limit else None
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [python, worker, json.dumps(job)],
        capture_output=True,
        text=True,
        env=environment,
        preexec_fn=bound,
        check=False,
    )
    if limit and done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return {"failed": f"not done after {limit} CPU s"}
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not answers:
        raise RuntimeError(f"{job} failed with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result = json.loads(answers[-1]) | {"load": round(os.getloadavg()[0], 1)}
    print(job, result, file=sys.stderr, flush=True)
    return result


def run(benchmark: Benchmark, options: argparse.Namespace) -> Results:
    """Measure what is not yet there."""
    wanted = [job | options.set for job in benchmark.jobs(options.quick)]
    wanted = [job for job in wanted if options.only.items() <= job.items()]
    repetitions = 1 if options.quick else options.repetitions or benchmark.repetitions
    with tempfile.TemporaryDirectory() as folder:
        kept = not (options.quick or options.set)
        path = (options.results if kept else Path(folder)) / f"{benchmark.name}.jsonl"
        results = Results.begin(path, about(f"python benchmarks/{benchmark.name}.py --repetitions {repetitions}"))
        missing = [(n, job) for n in range(repetitions) for job in wanted if not results.has(job, n)]
        if benchmark.prepare and missing:
            attempt(benchmark, benchmark.prepare, folder, options.peers)
        for repetition, job in missing:
            results.add(job, repetition, attempt(benchmark, job, folder, options.peers))
    return results


def attempt(benchmark: Benchmark, job: Job, folder: str, peers: str) -> Result:
    """Measure a job with the Python that it asks for; a peer that cannot be run is a result that says why."""
    worker = HERE / job.get("worker", f"{benchmark.name}.py")
    if not job.get("peer"):
        return measure(worker, job | {"folder": folder}, limit=job.get("limit"))
    if not Path(peers).exists():
        return {"failed": f"no {peers}"}
    try:
        return measure(worker, job | {"folder": folder}, peers, job.get("limit"))
    except RuntimeError as error:
        return {"failed": str(error).strip().splitlines()[-1]}


def about(command: str) -> dict[str, str]:
    """Return the commit, the machine, the versions and the command of a measurement made here and now."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {
        "commit": commit(),
        "machine": machine(),
        "python": platform.python_version(),
        **versions,
        "command": command,
    }


def commit() -> str:
    """Return the last commit that changed the code, with a + where uncommitted lines came on top."""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()  # noqa: E731
    return git("log", "-1", "--format=%h", "--", "src") + "+" * bool(git("status", "--porcelain", "src"))


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    units = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in facts.get("flags", "").split()]
    return f"{facts.get('model name', platform.machine())}, {os.cpu_count()} cores, {', '.join(units[-2:])}"


def options(description: str | None, repetitions: int | None = None) -> argparse.Namespace:
    def pair(text: str) -> tuple[str, Any]:
        key, _, value = text.partition("=")
        try:
            return key, json.loads(value)
        except ValueError:
            return key, value

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--only", type=pair, action="append", default=[], help="KEY=VALUE of the jobs that are wanted")
    parser.add_argument("--set", type=pair, action="append", default=[], help="KEY=VALUE for every job; not kept")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, once; not kept")
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers/bin/python"), help="the Python with TRL and Liger")
    parser.add_argument("--results", type=Path, default=FOLDER, help="the folder of the results")
    chosen = parser.parse_args()
    chosen.only, chosen.set = dict(chosen.only), dict(chosen.set)
    return chosen


def main(benchmark: Benchmark, description: str | None, work: Callable[[Job], Result] | None = None) -> None:
    """Do one job where the command has one; else measure and print the table."""
    if work and sys.argv[1:] and sys.argv[1].startswith("{"):
        answer(work)
    else:
        print(benchmark.report(run(benchmark, options(description, benchmark.repetitions))))


def answer(work: Callable[[Job], Result | None]) -> None:
    """Do the job of the command, in this process."""
    print(MARK + json.dumps(work(json.loads(sys.argv[1])) or {}), flush=True)


def cell(values: Iterable[float], digits: int = 2) -> str:
    """The median and, where these digits show that values differ, the smallest and the largest."""
    values = list(values)
    if not values:
        return "to be measured"

    least, middle, most = (f"{edge(values):,.{digits}f}" for edge in (min, statistics.median, max))
    return middle if least == most else f"{middle} ({least}-{most})"


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return each turn's ratio."""
    return [one / other for one, other in zip(above, below, strict=False)]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(markdown(columns, rows) + "\n")
