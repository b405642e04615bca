"""Makes everything of a release but the upload, which it names: `make release`.

    python -m tools.release

Quick tests, both distributions and their page on an index, the wheel in a fresh environment, and the digests of what is
to be uploaded. What keeps the release back is said first and last, and stops nothing: so it can be rehearsed any day.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def output(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a program, and return what it prints; its failure is an error here."""
    return subprocess.run(list(map(str, command)), cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def obstacles(root: Path) -> list[str]:
    """Return why a checkout is not the release of its version yet, each with what to do."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    version, tag = project["version"], f"v{project['version']}"
    head = next((line for line in (root / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")), "")
    is_dated = re.fullmatch(rf"## {re.escape(version)}, \d{{4}}-\d\d-\d\d", head)
    is_clean = not output("git", "status", "--porcelain", cwd=root)
    is_free = not output("git", "tag", "--list", tag, "--no-contains", "HEAD", cwd=root)

    checks = (
        (is_dated, f"CHANGELOG.md begins with `{head}`: write `## {version}, YEAR-MONTH-DAY`"),
        (is_clean, "files are changed or new: commit them"),
        (is_free, f"{tag} is the tag of an earlier commit: raise the version"),
        (
            "Source" in project["urls"],
            "[project.urls] of pyproject.toml has no `Source`: the index shows no links to files",
        ),
    )
    return [text for is_fine, text in checks if not is_fine]


def try_wheel(wheel: Path) -> str:
    """Install a wheel and its extra `train` in a fresh environment, and return what `jackpot --help` prints there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder)
        pip = [sys.executable, "-m", "pip", "--python", folder, "install", "--quiet", "--no-compile"]
        output(*pip, "-c", ROOT / "constraints.txt", f"{wheel}[train]")
        return output(f"{folder}/bin/jackpot", "--help", cwd=Path(folder))


def main() -> None:
    """Make a release, say what keeps it back, and name the commands that publish it."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    lacking = [f"not yet a release: {text}" for text in obstacles(ROOT)]
    print(*lacking, sep="\n", flush=True)
    subprocess.run(["make", "--no-print-directory", "quick", "dist"], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-m", "pytest", "tests/check_docs/test_project_files.py"], cwd=ROOT, check=True)

    [wheel], files = ROOT.glob("dist/*.whl"), sorted(ROOT.glob("dist/*"))
    print(
        try_wheel(wheel),
        f"installed and started: {wheel.name}",
        f"commit {output('git', 'rev-parse', 'HEAD')}",
        sep="\n",
    )
    for path in files:
        print(f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")

    print("", *lacking, "NOT uploaded. What publishes it, by hand:", sep="\n")
    print(f"  git tag --sign v{version} && git push origin v{version}    # the page on the index links to this tag")
    print("  .venv/bin/twine upload " + " ".join(f"dist/{path.name}" for path in files))
    sys.exit(bool(lacking))


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"no release: `{' '.join(map(str, error.cmd))}` failed")
