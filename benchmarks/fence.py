"""Shows that a rebuilt package computes what an older one computed: the same short runs on two checkouts, compared.

    python benchmarks/fence.py record CHECKOUT FOLDER [--wide]
    python benchmarks/fence.py compare OLD_FOLDER NEW_FOLDER

`record` runs every arm of the quickstart for two iterations (with --wide also those of `regimes`, `objectives` and
`corrections`), then `replay`, `simulate`, `mismatch`, `compare` and `eval`, with the package of CHECKOUT and the
interpreter of this script, one thread each. FOLDER/fence.json gets digests of weights, optimizer states and saved
rollouts, all metrics, and the JSON results.

`compare` translates the older names by the tables in docs/renamed.md. Training must agree bit for bit; a number in a
JSON result must agree within 1e-6 where it still exists. Names that went and names that came are listed. Exit code 1
where anything differs.
"""

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RENAMED = Path(__file__).parents[1] / "docs" / "renamed.md"
TOLERANCE = 1e-6  # absolute and relative, of a number in a JSON result
MEASURED = ("seconds/", "speed/")  # metrics that no two runs share
RESAMPLED = ("eval/policy_engine_gap", "eval/rollout_model_engine_gap")  # over a few rollouts, were over all
ITS_OWN = ("time", "path")  # of every run or result
SPLIT = re.compile(r"_(positive|negative|stderr|max|at_[0-9]+(-[0-9]+|-up)?)$")
SHORT = ("iterations=2", "threads=1", "evaluation.every=2", "evaluation.problems=32", "checkpoint.every=2")
SMALL = ("batch.prompts=8",)  # for the other recipes
ARMS = {  # of small recipes
    "quickstart": "obrs obrs_expected tis none annealed only_kl tool on_policy lora",
    "regimes": "joint_each_step joint_once ahead frozen int8_rollouts fp8_rollouts fp8_kv "
    "stale_64_epochs joint_stale_64",
    "objectives": "grpo dr_grpo rloo reinforce_pp reinforce_pp_baseline dapo ppo reference reference_k3 entropy",
    "corrections": "ppo_is is tis_adjusted icepop drop seq_tis seq_mask geo_mask prefix min_prefix f_tis "
    "dppo dppo_topk mask_only reweight_only z_only target_only coin_only",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("checkout", type=Path)
    recording.add_argument("folder", type=Path)
    recording.add_argument("--wide", action="store_true", help="the arms of all small recipes")
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        record(given.checkout.resolve(), given.folder.resolve(), given.wide)
    else:
        sys.exit(1 if compare(given.old, given.new) else 0)


def record(checkout: Path, folder: Path, wide: bool) -> None:
    """Run everything and write FOLDER/fence.json."""
    folder.mkdir(parents=True)
    jackpot = Command(checkout, folder)
    found: dict[str, Any] = {"runs": {}, "results": {}}
    for recipe in ARMS if wide else ["quickstart"]:
        for arm in ARMS[recipe].split():
            run = folder / f"{recipe}-{arm}"
            small = SMALL if recipe != "quickstart" else ()
            jackpot("train", recipe, "--arm", arm, "--run", str(run), *SHORT, *small)
            found["runs"][run.name] = run_digest(run)
    quickstart = folder / "quickstart-obrs"
    results = found["results"]
    results["replay"] = json.loads(jackpot("replay", str(quickstart), "--json"))
    simulated = folder / "simulate-quickstart"
    jackpot("simulate", "quickstart", "threads=1", "--prompts", "8", "--out", str(simulated))
    results[simulated.name] = json.loads((simulated / "simulate.json").read_text())
    sides = ("--sampler", "quantization=int8_w8a8", "--responses", "16")
    text = jackpot("mismatch", "starter:policy", *sides, "--json", "--out", str(folder / "mismatch"), "threads=1")
    results["mismatch"] = json.loads(text)
    several = ("--arms", "obrs,none", "--seeds", "2", "--jobs", "1", "--folder", str(folder / "compare"))
    jackpot("compare", "quickstart", *several, *SHORT)
    results["compare"] = json.loads((folder / "compare" / "comparison.json").read_text())
    for run in sorted((folder / "compare").glob("*-seed*")):
        found["runs"][f"compare-{run.name}"] = run_digest(run)
    asked = ("--benchmarks", "arithmetic", "--k", "2", "problems=16", "threads=1", "--out", str(folder / "eval"))
    jackpot("eval", str(quickstart), *asked)
    found["runs"]["eval"] = {"answers": table_digests(folder / "eval", "*.parquet")}
    (folder / "fence.json").write_text(json.dumps(found, indent=1))
    print(f"{len(found['runs'])} runs and {len(results)} results in {folder / 'fence.json'}")


class Command:
    """Runs `jackpot` of one checkout and returns what it prints."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        is_module = (checkout / "src" / "jackpot" / "__main__.py").exists()
        self._start = ["-m", "jackpot"] if is_module else ["-c", "from jackpot.cli import main; main()"]
        self._folder = folder
        self._environment = os.environ | {
            "PYTHONPATH": str(checkout / "src"),
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def __call__(self, *arguments: str) -> str:
        print("jackpot", *arguments, flush=True)
        done = subprocess.run(
            [sys.executable, *self._start, *arguments],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"jackpot {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout


def run_digest(run: Path) -> dict[str, Any]:
    """Digests of weights, optimizer states and saved rollouts, and the metrics."""
    newest = sorted((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.split("-")[1]))[-1]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": {
            str(path.relative_to(newest)): weights_digest(path) for path in sorted(newest.rglob("*.safetensors"))
        },
        "optimizers": {
            str(path.relative_to(newest)): state_digest(path)
            for path in sorted(newest.rglob("*"))
            if path.suffix in (".pt", ".pth", ".bin")
        },
        "rollouts": table_digests(run / "rollouts", "*.parquet"),
        "metrics": lines,
    }


def is_measured(name: str) -> bool:
    """Whether a value depends on the machine's speed, or on where and when the run was."""
    return name in ITS_OWN or any(part in name for part in (*MEASURED, *RESAMPLED))


def weights_digest(path: Path) -> str:
    """A digest of names and tensors, in the order of the names; the order of a file's header is left to chance."""
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(name.encode())
        digest.update(raw(tensor))
    return digest.hexdigest()


def raw(tensor: Any) -> bytes:
    """The bytes of a tensor."""
    import torch

    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def state_digest(path: Path) -> str:
    """A digest of every tensor of a saved state, in the order in which it is nested, without the names."""
    import torch

    digest = hashlib.sha256()
    for tensor in tensors(torch.load(path, map_location="cpu", weights_only=True)):
        digest.update(raw(tensor))
    return digest.hexdigest()


def tensors(state: Any) -> Iterator[Any]:
    """All tensors of nested containers."""
    import torch

    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for entry in state.values():
            yield from tensors(entry)
    elif isinstance(state, list | tuple):
        for entry in state:
            yield from tensors(entry)


def table_digests(folder: Path, pattern: str) -> dict[str, dict[str, str]]:
    """A digest of every column of every parquet file of a folder."""
    import pyarrow.parquet as parquet

    return {
        path.name: {
            name: hashlib.sha256(repr(column.to_pylist()).encode()).hexdigest()
            for table in [parquet.read_table(path)]
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
        for path in sorted(folder.rglob(pattern))
    }


def compare(old: Path, new: Path) -> int:
    """Print every difference; the number of them."""
    names = renamed()
    was, now = (json.loads((folder / "fence.json").read_text()) for folder in (old, new))
    different = 0
    print(f"only in {old}: {', '.join(was['runs'].keys() - now['runs'].keys()) or 'no run'}")
    for run in was["runs"].keys() & now["runs"].keys():
        for part, wanted in was["runs"][run].items():
            wanted_flat, found_flat = dict(flat(translated(wanted, names))), dict(flat(now["runs"][run][part]))
            different += report(f"{run} {part}", wanted_flat, found_flat, exact=True)
    for command, wanted in was["results"].items():
        if command not in now["results"]:
            print(f"{command}: went")
            continue
        wanted_flat, found_flat = (dict(flat(value)) for value in (translated(wanted, names), now["results"][command]))
        different += report(command, wanted_flat, found_flat, exact=False)
    print(f"{different} differences")
    return different


def report(what: str, wanted: dict[str, Any], found: dict[str, Any], *, exact: bool) -> int:
    """Print how two flat results differ; the number of changed values, and of those that are gone from a run."""
    same = [key for key in wanted if key in found]
    changed = [key for key in same if not agree(wanted[key], found[key], exact)]
    for key in changed[:20]:
        print(f"{what}: {key}: {wanted[key]!r} was, {found[key]!r} is")
    if not exact:  # a result's sentences may be reworded, its numbers may not change
        changed = [key for key in changed if not isinstance(found[key], str)]
    gone, new = (sorted({pattern(key) for key in a.keys() - b.keys()}) for a, b in ((wanted, found), (found, wanted)))
    for word, keys in (("gone", gone), ("new", new)):
        if keys:
            print(f"{what}: {word}: {', '.join(keys)}")
    return len(changed) + (len(gone) if exact else 0)


def agree(was: Any, now: Any, exact: bool) -> bool:
    """Whether two values are the same, or the same within TOLERANCE."""
    if exact or not all(isinstance(value, int | float) and not isinstance(value, bool) for value in (was, now)):
        return was == now
    return math.isclose(was, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def pattern(key: str) -> str:
    """A path without its positions in lists."""
    return re.sub(r"\[\d+\]", "[]", key)


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested dicts and lists with its path."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not is_measured(str(key)):
                yield from flat(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from flat(entry, f"{path}[{index}]")
    else:
        yield path, value


def translated(value: Any, names: Mapping[str, str]) -> Any:
    """The same with today's names as keys and as strings."""
    if isinstance(value, Mapping):
        return {today(key, names): translated(entry, names) for key, entry in value.items()}
    if isinstance(value, list):
        return [translated(entry, names) for entry in value]
    return today(value, names) if isinstance(value, str) else value


def today(name: str, names: Mapping[str, str]) -> str:
    """Today's name, also of a metric that is split by sign or position."""
    base = SPLIT.sub("", name)
    return names.get(name) or names.get(base, base) + name[len(base) :]


def renamed() -> dict[str, str]:
    """The rows `| old | new |` of docs/renamed.md whose cells are code."""
    text = RENAMED.read_text() if RENAMED.exists() else ""
    return dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", text, re.MULTILINE))


if __name__ == "__main__":
    main()
