"""Runs tests with broken copies of the package: imports what is slow to import once, then forks for every job.

    python copies.py COPY < jobs.json > results.jsonl

COPY is a folder with a copy of the package, which the tests' own processes import as well. A job is {"file", "source",
"arguments", "seconds"}: while the file has this source, pytest runs with these arguments. Each line of the answer is
the name of the first test that failed, or why the tests did not end; "" where all passed.
"""

import importlib
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

SLOW = (  # to import, and none of them imports the package
    *("torch", "transformers", "pyarrow.parquet", "pydantic", "yaml", "hypothesis", "numpy", "safetensors.torch"),
    *("math_verify", "transformers.models.qwen3.modeling_qwen3", "torch.distributed.tensor"),
)
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--tb=no", "--no-header", "-W", "ignore")


class FirstFailure:
    """A plugin that keeps the name of the first test that failed, or of the file that cannot be read."""

    name = ""
    has_passed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_passed |= report.passed and report.when == "call"
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.name = self.name or report.nodeid


def answer_of_child(arguments: list[str], seconds: int) -> str:
    """Run pytest in a process of its own, end all that it starts, and return the answer that the module describes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.alarm(seconds)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(1, 2)
        failure = FirstFailure()
        try:
            status = pytest.main([*OPTIONS, *arguments], plugins=[failure])
            ran_nothing = status == pytest.ExitCode.NO_TESTS_COLLECTED or not failure.has_passed
            if failure.name:
                answer = failure.name
            elif ran_nothing:
                answer = "no tests were run"
            else:
                answer = "" if status == 0 else f"ended with {status}"
        except BaseException as error:
            answer = repr(error)
        os.write(writer, answer.encode() or b"\n")
        os._exit(0)

    os.close(writer)
    answer = os.read(reader, 4096).decode()  # what the child has started may hold the other end for longer
    os.close(reader)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answer.strip() if answer else f"ended, or took more than {seconds} seconds"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    copy = Path(sys.argv[1])
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    for name in SLOW:
        with suppress(ImportError):
            importlib.import_module(name)
    assert "jackpot" not in sys.modules

    for job in json.load(sys.stdin):
        file = copy / job["file"]
        original_bytes = file.read_bytes()
        file.write_text(job["source"])
        answer = answer_of_child(job["arguments"], job["seconds"])
        file.write_bytes(original_bytes)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
