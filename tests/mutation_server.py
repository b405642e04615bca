"""Runs one test against each of many broken copies of the package: imports the slow third parties once, then forks.

    python mutation_server.py < jobs.json > results.json

A job is {"file", "snippet", "broken", "test"}: in `file`, below the package, `snippet` stands exactly once and becomes
`broken`, in memory only. The job "all" with "tests" runs several tests on the package as it is. A result is pytest's exit
status and the end of what it printed: 1 says that the test ran and failed.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

TESTS = Path(__file__).resolve().parent
SECONDS = 60  # for one job; a mutation may loop for ever


class BrokenModule(importlib.machinery.SourceFileLoader):
    """Loads the given source in the place of the file's."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str):
        return compile(self._source, self.path, "exec")


class BreakOne(importlib.abc.MetaPathFinder):
    """Finds one module with a broken source; leaves all others to those behind it."""

    def __init__(self, name: str, source: str) -> None:
        self._name, self._source = name, source

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=BrokenModule(fullname, spec.origin, self._source)
        )


def warm_up() -> None:
    """Import and call what every test pays for and no mutation touches. Never the package itself."""
    import scipy.optimize
    import torch
    import torch.testing
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()  # imports much on the first call
    config = Qwen3Config(vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    Qwen3ForCausalLM(config)
    hypothesis.settings.register_profile(
        "mutation", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate), report_multiple_bugs=False
    )
    hypothesis.settings.load_profile("mutation")  # the first counterexample is enough: no shrinking
    del scipy
    assert not any(name.split(".")[0] == "jackpot" for name in sys.modules)


def work(job: dict) -> int:
    """In the child: break the module, run the tests, return pytest's exit status."""
    if "file" in job:
        package = Path(importlib.util.find_spec("jackpot").origin).parent  # finds without importing
        name = ".".join(("jackpot", *Path(job["file"]).with_suffix("").parts))
        source = (package / job["file"]).read_text().replace(job["snippet"], job["broken"])
        sys.meta_path.insert(0, BreakOne(name, source))
    tests = [str(TESTS / test) for test in job["tests"]]
    return int(pytest.main(["-q", "-x", "--no-header", "--tb=short", "-p", "no:cacheprovider", *tests]))


def run(job: dict) -> dict:
    """Fork, wait, and report."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            signal.alarm(SECONDS)
            status = 99
            try:
                status = work(job)
            finally:
                sys.stdout.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return {"status": status, "output": output.read().decode(errors="replace")[-1500:]}


if __name__ == "__main__":
    os.chdir(TESTS.parent)
    jobs = json.load(sys.stdin)
    warm_up()
    json.dump([run(job) for job in jobs], sys.stdout)
