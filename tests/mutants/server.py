"""Runs tests against many broken copies of formulas: collects them once, then forks for every mutant.

    python server.py < jobs.json > results.json

A job is {"file", "function", "number", "tests"}: mutant `number` of `function` (`operators.mutants`) in `file`; its
`tests`, each "file" or "file::function", run until one fails. The answer has one entry for each job, {"failed",
"text"}, and one more for all tests that failed, on the code as it is. `failed` names the test, or is "" where all
passed and None where they could not be run; `text` is the end of what they said.

A function is broken by giving it the code object compiled from the broken module: whoever imported it has it at once.
"""

import gc
import inspect
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType

import hypothesis
import pytest
import torch
from _pytest.runner import runtestprotocol

from mutants.operators import mutants

TESTS = Path(__file__).resolve().parents[1]  # where pytest, run from here, finds mutants and helpers

CPU_SECONDS = 60  # for one test: a mutation may loop for ever
SECONDS = 600  # or wait for ever; a busy machine is slow


class Server:
    """A pytest plugin that takes the place of the loop over the tests."""

    def __init__(self, jobs: list[dict]) -> None:
        self._jobs, self.results = jobs, []
        self._sources = {job["file"]: Path(job["file"]).read_text() for job in jobs}  # before they are imported

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors while collecting")
        self._functions = imported_functions(self._sources)
        self._items = session.items
        gc.freeze()  # a child's collector would write to all pages and so copy them
        self.results = [result_of_child(lambda job=job: self._failed(job)) for job in self._jobs]
        names = {result["failed"] for result in self.results}
        noticing_items = [item for item in self._items if item.nodeid in names]
        self.results.append(result_of_child(lambda: run(noticing_items), test_count=len(noticing_items)))
        return True

    def _failed(self, job: dict) -> tuple[str, str]:
        """Break the code and run the job's tests."""
        job_items = [item for item in self._items if not names_of(item).isdisjoint(job["tests"])]
        if not job_items:
            raise LookupError(f"{job['tests']} have no tests")
        self._swap(job["file"], job["function"], job["number"])
        return run(job_items)

    def _swap(self, file: str, function: str, number: int) -> None:
        """Give every function that differs its broken code."""
        source = self._sources[file]
        broken = next(itertools.islice(mutants(source, function), number, None)).module
        codes = (code_of_functions(compile(code, "module", "exec")) for code in (source, broken))
        changed = {old: new for old, new in zip(*codes, strict=True) if old != new}
        swapped = [function for function in self._functions[file] if function.__code__ in changed]
        if not swapped:
            raise LookupError("no function that was imported has this code")
        for function in swapped:
            function.__code__ = changed[function.__code__]


def names_of(item: pytest.Item) -> set[str]:
    """Return the names by which a job can ask for a test."""
    file = str(item.path.relative_to(TESTS))
    return {file, f"{file}::{item.originalname}"}


def run(items: list[pytest.Item]) -> tuple[str, str]:
    """Run until a test fails; return its name, or "" if all passed, and the text of pytest."""
    for item, next_item in zip(items, [*items[1:], None], strict=True):
        for report in runtestprotocol(item, log=False, nextitem=next_item):
            if report.failed and report.when != "call":
                raise RuntimeError(report.longreprtext)
            if report.failed:
                return item.nodeid, report.longreprtext
    return "", f"{len(items)} passed"


def imported_functions(files: Iterable[str]) -> dict[str, list[FunctionType]]:
    """Return the functions that were imported from each file.

    A child that looked through all objects would copy their memory.
    """
    functions: dict[str, list[FunctionType]] = {file: [] for file in files}
    for candidate in gc.get_objects():
        if isinstance(candidate, FunctionType) and candidate.__code__.co_filename in functions:
            functions[candidate.__code__.co_filename].append(candidate)
    return functions


def code_of_functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of all functions of a module, and of the classes in it, from top to bottom."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            is_function = inner.co_flags & inspect.CO_OPTIMIZED
            yield from [inner] if is_function else code_of_functions(inner)


def result_of_child(job: Callable[[], tuple[str, str]], test_count: int = 1) -> dict:
    """Return what the job returns in a process of its own, which may run so many tests."""
    cpu_seconds = CPU_SECONDS * max(1, test_count)
    seconds = SECONDS * max(1, test_count)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.alarm(seconds)
        try:
            failed, text = job()
        except BaseException as error:
            failed, text = None, repr(error)
        with os.fdopen(writer, "w") as pipe:
            json.dump({"failed": failed, "text": text[-2000:]}, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    silence_text = f"died, or took more than {cpu_seconds} seconds of CPU or {seconds} in all"
    return json.loads(answer) if answer else {"failed": None, "text": silence_text}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # pytest talks on standard output
    os.chdir(TESTS.parent)
    torch.set_num_threads(1)
    first_counterexample = {
        "phases": (hypothesis.Phase.explicit, hypothesis.Phase.generate),  # without shrinking
        "report_multiple_bugs": False,
    }
    hypothesis.settings.register_profile("mutation", **first_counterexample)
    hypothesis.settings.load_profile("mutation")
    server = Server(json.load(sys.stdin))
    names = sorted({f"{TESTS}/{test}" for job in server._jobs for test in job["tests"]})
    plain = ["--assert=plain", "--tb=native"]  # nobody reads what a broken formula says
    status = pytest.main(["-q", "-p", "no:cacheprovider", *plain, *names], plugins=[server])
    if not server.results:
        sys.exit(f"pytest ended with {status}")
    json.dump(server.results, answers)
    answers.close()


if __name__ == "__main__":
    main()
