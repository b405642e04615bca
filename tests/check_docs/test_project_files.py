"""The files about the project agree: one version, a lock file of what is tested, workflows that only call make."""

import re
import tomllib

import yaml

from helpers.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
LOCK = (ROOT / "requirements-dev.lock").read_text()


def pins(text: str) -> dict[str, set[str]]:
    """Return the versions of each package that a list of pins allows, which may differ by Python."""
    versions: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE):
        versions.setdefault(name.lower().replace("_", "-"), set()).add(version)
    return versions


def test_one_version_stands_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and citation["version"] == newest[1] == PROJECT["version"]


def test_the_lock_file_has_the_tested_versions() -> None:
    locked, tested = pins(LOCK), pins((ROOT / "constraints.txt").read_text())
    apart = {
        name: (tested[name], locked[name]) for name in tested.keys() & locked.keys() if tested[name] != locked[name]
    }
    assert apart == {} and len(tested.keys() & locked.keys()) > 15

    asked = [
        *PROJECT["dependencies"],
        *PROJECT["optional-dependencies"]["train"],
        *PROJECT["optional-dependencies"]["dev"],
    ]
    names = {re.split(r"[\[<>=]", requirement)[0] for requirement in asked} - {PROJECT["name"]}
    assert names - locked.keys() == set()


def test_the_lock_file_names_no_host() -> None:
    assert "://" not in LOCK and "--index" not in LOCK and "--find-links" not in LOCK


def test_workflows_call_make_and_nothing_else() -> None:
    targets = set(re.findall(r"^([\w-]+):(?! =)", MAKEFILE, re.MULTILINE))
    called = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        [job] = yaml.safe_load(path.read_text())["jobs"].values()
        lines = [step["run"] for step in job["steps"] if "run" in step]
        matrix = job.get("strategy", {}).get("matrix", {}).get("target", ())
        called |= {line for line in lines if "matrix" not in line} | {f"make {target}" for target in matrix}

    assert called and called <= {f"make {target}" for target in targets}


def test_every_target_of_the_makefile_is_no_file() -> None:
    [phony] = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert set(re.findall(r"^([a-z][\w-]*):(?! =)", MAKEFILE, re.MULTILINE)) == set(phony.split())
