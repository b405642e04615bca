"""Downloads packages that a GPU machine without a network may lack, and uses them there from a folder.

The machine is expected to hold torch, transformers, pyarrow, tensorboard and what these need. A wheel is a zip file:
`use` unpacks those of packages that cannot be imported there, puts them on the path of this process, and installs
nothing.
"""

import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".gpu-wheels"  # ignored by git
MOST_BYTES = 64 * 2**20
EXPECTED = ("torch", "transformers", "pyarrow", "tensorboard")
NEEDED = {"pydantic": "pydantic", "pydantic_core": "pydantic-core", "annotated_types": "annotated-types"}
NEEDED |= {"typing_inspection": "typing-inspection", "typing_extensions": "typing-extensions"}
COMPARED = {"trl": "trl", "datasets": "datasets", "dill": "dill", "multiprocess": "multiprocess"}
COMPARED |= {"liger_kernel": "liger-kernel"}  # other trainers' code; without it their rows say so
PACKAGES = NEEDED | COMPARED  # project by the name under which it is imported
PINS = {"trl": "1.16.0", "liger-kernel": "0.8.5"}  # versions; those of the others stand in constraints.txt


def download(python: str) -> int:
    """Fill the folder with wheels for a Python on Linux x86-64; return pip's exit status.

    Args:
        python: version of the GPU machine's Python, such as 3.12.
    """
    FOLDER.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", f"--python-version={python}"]
    command += ["--platform=manylinux2014_x86_64", f"--constraint={ROOT / 'constraints.txt'}", f"--dest={FOLDER}"]
    others = [f"{project}=={PINS[project]}" if project in PINS else project for project in COMPARED.values()]
    calls = (["pydantic"], ["--no-deps", *others])  # with what pydantic needs; the machine has what the others need
    status = max(subprocess.run([*command, *more], check=False).returncode for more in calls)
    wheels = sorted(FOLDER.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{FOLDER}: {len(wheels)} wheels, {size / 2**20:.1f} MiB: {', '.join(wheel.name for wheel in wheels)}")
    if size > MOST_BYTES:
        print(f"that is more than {MOST_BYTES >> 20} MiB; delete what the machine has")
    return status


def use() -> list[str]:
    """Put carried packages that this Python lacks onto its path; return the needed ones that it still lacks."""
    for wheel, names in _carried():
        if any(name in PACKAGES and not _is_there(name) for name in names):
            target = wheel.with_suffix("")
            if not target.exists():
                with zipfile.ZipFile(wheel) as packed:
                    packed.extractall(target)
            sys.path.append(str(target))
            importlib.invalidate_caches()
    projects = {name: name for name in EXPECTED} | NEEDED
    return [project for name, project in projects.items() if not _is_there(name)]


def _carried() -> Iterator[tuple[Path, set[str]]]:
    """Yield the wheels that are for this Python, with the names that they can be imported under."""
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in sorted(FOLDER.glob("*.whl")):
        tags = wheel.stem.split("-")[-3]
        if own in tags or "py3" in tags:
            with zipfile.ZipFile(wheel) as packed:
                yield wheel, {name.split("/")[0].removesuffix(".py") for name in packed.namelist()}


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
