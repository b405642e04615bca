"""Says whether two commits compute the same: by the digest of a short run with the code of each, on this machine.

A line of results names its commit and this digest. It stays valid while the digest holds, so that an edit of a message
does not throw hours of runs away; a machine whose products round otherwise runs the line's commit again.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
SHORT = ("iterations=2", "threads=1", "evaluation.problems=32", "checkpoint.every=2", "batch.prompts=8")


def git(*words: str, folder: Path = ROOT) -> str:
    """Run git in a checkout and return what it prints."""
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def digest_of(checkout: Path) -> str:
    """Return a digest of both models' weights after two iterations of the quickstart with the code of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "jackpot", "train", "quickstart", "--arm", "obrs", "--run", str(run), *SHORT]
        environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the reference run of {checkout} failed:\n{done.stdout}{done.stderr}")

        files = sorted((run / "checkpoints" / "step-2").rglob("model*.safetensors"))
        assert len(files) >= 2, files  # of both models
        total = hashlib.sha256()
        for path in files:
            with safe_open(path, "pt") as weights:
                for name in sorted(weights.keys()):
                    total.update(name.encode() + weights.get_tensor(name).float().numpy().tobytes())
    return total.hexdigest()[:16]


@cache
def digest_of_commit(commit: str) -> str:
    """Return the digest of a commit, from a worktree that goes again."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        git("worktree", "add", "--detach", str(checkout), commit)
        try:
            return digest_of(checkout)
        finally:
            git("worktree", "remove", "--force", str(checkout))


def still_holds(commit: str, digest: str, here: str) -> bool:
    """Return whether a line of a commit and a digest is of code that computes as the code with the digest `here`."""
    return digest == here or digest_of_commit(commit) == here
