"""The types of src, as `make types` checks them."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.paths import ROOT

PYRIGHT = Path(sys.executable).with_name("basedpyright")
STRICT = ("--project", "tools/pyright_strict.json", "--pythonpath", sys.executable)


@pytest.mark.slow
@pytest.mark.skipif(not PYRIGHT.exists(), reason="basedpyright is not installed in this environment")
@pytest.mark.skipif(not find_spec("triton"), reason="without Triton nothing is known of its kernels")
@pytest.mark.parametrize("arguments", [(), STRICT], ids=["basic", "strict"])
def test_pyright_has_no_complaint(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([PYRIGHT, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
