"""Builds the virtual GPU for the torch of this Python: `python tests/virtual_gpu/build.py`, about a minute."""

import hashlib
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).parent
TRIED = {"2.13.0"}  # versions of torch, whose internals device.cpp names


def obstacle() -> str:
    """Return why this machine cannot have the virtual GPU; "" if it can."""
    version = torch.__version__.partition("+")[0]
    if torch.version.cuda:
        return f"torch is built for CUDA {torch.version.cuda}; the virtual GPU needs its CPU build"
    if version not in TRIED:
        return f"the virtual GPU was tried with torch {', '.join(sorted(TRIED))}, not with {version}"
    if not shutil.which("g++"):
        return "there is no g++"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "there are no headers of Python"
    return ""


def library() -> Path:
    """Return where the built device of this source, torch and Python is or goes."""
    digest = hashlib.sha256((HERE / "device.cpp").read_bytes()).hexdigest()[:12]
    name = f"{torch.__version__}-{platform.python_version()}-{digest}"
    return HERE.parents[1] / "build" / "virtual-gpu" / name / "virtual_device.so"


def build() -> Path:
    """Build the device where it is not there yet, and return its path.

    Raises:
        CalledProcessError: g++ failed.
    """
    path, folder = library(), Path(torch.__file__).parent
    if path.exists():
        return path

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    includes = (folder / "include", folder / "include/torch/csrc/api/include", sysconfig.get_path("include"))
    command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", "-w", *(f"-I{include}" for include in includes)]
    command += [str(HERE / "device.cpp"), "-o", str(unfinished), f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib"]
    command += ["-ltorch_cpu", "-ltorch", "-ltorch_python", "-lc10"]
    subprocess.run(command, check=True)
    return unfinished.rename(path)


if __name__ == "__main__":
    if reason := obstacle():
        sys.exit(f"no virtual GPU here: {reason}")
    print(build())
