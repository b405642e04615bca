"""Every refusal of recipes, of the command line, of kernels and of Ray: what it tells to do, typed, works.

A row is a command line that is refused, and the remedies: a pattern that reads one out of the message, and the line
that is then typed, as `re.Match.expand` makes it. What is left of a message may tell to do nothing else.
"""

import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from shutil import copytree
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple
from unittest import mock

import pytest
import torch

import jackpot as package
from helpers.commands import jackpot
from helpers.folders import run_folder
from helpers.refusals import is_provoked, remedies_of, texts_of
from jackpot.config.recipes import resolve
from jackpot.core.errors import ConfigError
from jackpot.launch.head_kernel import tile_reader
from jackpot.launch.ray import _cluster, _placement_group

PACKAGE = Path(package.__file__).parent
BRIEF = (
    "iterations=1 batch.prompts=4 batch.group_size=2 sampling.max_new_tokens=4 evaluation.problems=2 "
    "checkpoint.every=1 threads=1"
)
TRAIN = f"train quickstart {BRIEF} --run run"
SCRIPT = "--slurm --gpus 0"  # of `jackpot launch`, which checks what a start checks, and prints
EVALUATE = "eval starter:policy problems=2 sampling.max_new_tokens=4 math.template=plain \"math.instruction=''\""
COMPARE = f"{BRIEF} --seeds 1 --folder runs"
PUBLISHED = "base: quickstart\narms: {obrs: {}}\npublished: [{paper: Jackpot, table: one, columns: [a], rows: [ROW]}]"
LARGE = "train tis_gsm8k --dry-run"
TORCHRUN = "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2"
ON_RAY = "placement.launcher=ray"

FILES = {  # in the folder in which every line is typed
    "mine.yaml": "base: quickstart",
    "empty.yaml": "",
    "list.yaml": "[batch.prompts=16]",
    "torn.yaml": "batch: [",
    "circle.yaml": "base: other.yaml",
    "other.yaml": "base: circle.yaml",
    "mistyped.yaml": "base: quickstrat",
    "planned.yaml": PUBLISHED.replace("ROW", "{row: OBRS, arm: obrs, numbers: [1.0], not_runnable: it needs a pod}"),
    "missing.yaml": PUBLISHED.replace("ROW", "{row: OBRS, arm: other, numbers: [1.0]}"),
    "uneven.yaml": PUBLISHED.replace("ROW", "{row: OBRS, arm: obrs, numbers: [1.0, 2.0]}"),
    "future.yaml": PUBLISHED.replace("ROW", "{row: OBRS, arm: other, numbers: [1.0], not_runnable: it needs a pod}"),
    "problems.jsonl": '{"problem": "1+1=", "answer": "2"}',
    "evaluated/config.yaml": "model: starter:policy\nasked: {}\n",
    "taken/policy/config.json": "{}",
}


class Refused(NamedTuple):
    """A line that is refused. A remedy's line is typed after `jackpot`; `CONTENT > FILE` and `mv FROM TO` come before
    the refused line once more; `LINE | WORD` has to print the word. None: it cannot be typed here."""

    line: str
    remedies: Mapping[str, str | None]
    absent: str = ""  # a package that is as if it were not installed
    needs: str = ""  # a package without which the refusal cannot be seen
    slow: Literal["", "remedies", "refusal"] = ""  # what takes too long for the tests by default


UNEVEN = PUBLISHED.replace("\n", r"\n") + " > uneven.yaml"
LISTED = {r"(jackpot recipes) lists the recipes": r"\1 | quickstart"}
GUESS = r"did you mean '(\w+)'"
ALL = {r"(jackpot config.*) lists all of them": r"\1 | objective.clip_high"}
VALID = r"(?:Valid: |, )(\w+)"
OWN_FILE = r"or give the path of a .yaml file"
OPTIONS = r"(jackpot launch --help) lists all"

REFUSED = [
    Refused(
        f"launch quickstrat {SCRIPT}",
        {GUESS: rf"launch \1 {SCRIPT}", OWN_FILE: f"launch mine.yaml {SCRIPT}", VALID: r"recipes \1"},
    ),
    Refused(
        f"launch mistyped.yaml {SCRIPT}",
        {GUESS: r"base: \1 > mistyped.yaml", OWN_FILE: "base: mine.yaml > mistyped.yaml"},
    ),
    Refused(f"launch quickstart.yaml {SCRIPT}", {r"recipe is called (\w+)": rf"launch \1 {SCRIPT}", **LISTED}),
    Refused(f"launch nowhere.yaml {SCRIPT}", LISTED),
    *(
        Refused(f"launch {name} {SCRIPT}", {r"such as `(base: quickstart)`": rf"\1 > {name}"})
        for name in ("empty.yaml", "list.yaml")
    ),
    Refused(f"launch torn.yaml {SCRIPT}", {}),
    Refused(f"launch circle.yaml {SCRIPT}", {}),
    Refused(
        "recipes planned.yaml",
        {r"a row needs either its arm or not_runnable": FILES["future.yaml"].replace("\n", r"\n") + " > planned.yaml"},
    ),
    *(
        Refused("recipes missing.yaml", {"needs either its arm or not_runnable": f"{content} > missing.yaml"})
        for content in (
            FILES["missing.yaml"].replace("other", "obrs").replace("\n", r"\n"),
            FILES["future.yaml"].replace("\n", r"\n"),
        )
    ),
    Refused(
        "recipes uneven.yaml",
        {
            "give one for each": UNEVEN.replace("ROW", "{row: OBRS, arm: obrs, numbers: [1.0]}"),
            r"(null) where the paper has none": UNEVEN.replace("ROW", r"{row: OBRS, arm: obrs, numbers: [\1]}"),
            "or leave them all out": UNEVEN.replace("ROW", "{row: OBRS, arm: obrs}"),
        },
    ),
    Refused(f"launch future.yaml --arm other {SCRIPT}", {}),
    Refused(
        f"compare mine.yaml {COMPARE}",
        {
            r"add some \((arms: \{NAME: \{)settings(\}\})\)": (
                r"base: quickstart\n\1objective: {correction: tis}\2 > mine.yaml"
            )
        },
        slow="remedies",
    ),
    Refused(
        f"compare quickstart --arms tis,tis {COMPARE}",
        {"give each once": f"compare quickstart --arms tis {COMPARE}"},
        slow="remedies",
    ),
    Refused(
        f"compare quickstart --arms tis seed=3 {COMPARE}",
        {r"use (--first-seed) and (--seeds)": f"compare quickstart --arms tis {BRIEF} \\1 3 \\2 1 --folder runs"},
        slow="remedies",
    ),
    Refused(
        f"launch quickstart batch.prompts 16 {SCRIPT}",
        {r"write key=value, for example (batch.prompts=16)": rf"launch quickstart \1 {SCRIPT}"},
    ),
    Refused(f"launch quickstart batch.prompts=[ {SCRIPT}", {}),
    Refused(
        "config objective.clip_lo",
        {
            r"(?:did you mean |, | or )([\w.]+)(?=[,?]| or )": r"config \1 | used by",
            **ALL,
        },
    ),
    Refused("config qqqqq", ALL),
    # The command line
    Refused(
        EVALUATE,
        {
            r"give (--benchmarks) with one or more of [\w, ]*\b(arithmetic)\b[\w, ]*": rf"{EVALUATE} \1 \2",
            "or the path of a file with problems": f"{EVALUATE} --benchmarks problems.jsonl",
        },
        slow="remedies",
    ),
    Refused(f"launch quickstart {SCRIPT} --run a --run b", {"give it once": f"launch quickstart {SCRIPT} --run a"}),
    Refused("confg", {GUESS: r"\1", VALID: r"\1 --help"}),
    Refused(f"{TORCHRUN} config", {"without it": "config"}),
    Refused(
        f"launch quickstart {SCRIPT} --temperature 0.6",
        {r"(?:settings are written key=value: | or )(\S+=\S+)": rf"launch quickstart {SCRIPT} \1"},
    ),
    Refused(
        f"launch quickstart {SCRIPT} --learning-rate=0.1",
        {
            r"(?:settings are written key=value: | or )([pr]\S+=\S+)": rf"launch quickstart {SCRIPT} \1",
            r" or (critic\S+)": rf"launch quickstart {SCRIPT} objective.advantage=gae \1",  # as only gae has a critic
        },
    ),
    Refused(
        "launch quickstart --slrum --gpus 0",
        {
            r"did you mean (--slurm) or --run or --arm": r"launch quickstart \1 --gpus 0",
            OPTIONS: r"\1 | --slurm",
        },
    ),
    Refused(f"launch quickstart {SCRIPT} --qqqqq", {OPTIONS: r"\1 | --slurm"}),
    Refused("launch quickstart --gpus 0", {r"add (--slurm)": r"launch quickstart \1 --gpus 0"}),
    Refused("starter taken", {"give another folder": "starter free", "or move it away": "mv taken/policy moved"}),
    Refused(
        f"{TRAIN} --tiny --dry-run",
        {
            r"(--tiny) runs the recipe and --dry-run does not; give one of them": rf"{TRAIN} \1",
            r"(--dry-run) does not; give one of them": rf"{TRAIN} \1",
        },
        slow="remedies",
    ),
    Refused(
        f"{TRAIN} --gpus 4xH100",
        {"give both": f"{TRAIN} --gpus 4xH100 --dry-run", "or none": TRAIN},
        slow="remedies",
    ),
    Refused(
        f"{TRAIN} --dry-run --gpus 4",
        {r"give their number and kind as in (\w+), with a kind of [\w, ]+": rf"{TRAIN} --dry-run --gpus \1"},
    ),
    Refused(
        f"{LARGE} --gpus 3xH100 {ON_RAY} placement.ranks=2",
        {r"name (\w+)": rf"{LARGE} --gpus \1 {ON_RAY} placement.ranks=2", "or none": LARGE},
        slow="refusal",
    ),
    Refused(
        f"{LARGE} --gpus 1x4090",
        {
            r"(?:It fits on | or )(\w+)": rf"{LARGE} --gpus \1",
        },
        slow="refusal",
    ),
    # Kernels and Ray
    *(
        Refused(
            f"launch quickstart {SCRIPT} {ON_RAY}{ranks}",
            {
                r"leave placement.launcher and placement.ranks out \((--ranks) counts them here\)": (
                    rf"launch quickstart {SCRIPT} \1 2"
                ),
                "or have jackpot train start the run without a script": None,  # tests/launch/test_ray.py
            },
        )
        for ranks in ("", " placement.ranks=2")
    ),
    Refused(
        f"{TRAIN} head_kernel=triton",
        {"install it": None, r"use (head_kernel): (auto)": rf"{TRAIN} \1=\2"},
        absent="triton",
    ),
    Refused(
        f"TRITON_INTERPRET= {TRAIN} head_kernel=triton",
        {r"use (head_kernel): (auto)": rf"TRITON_INTERPRET= {TRAIN} \1=\2", "or a GPU": None},
        needs="triton",
    ),
    Refused(
        f"{TRAIN} {ON_RAY}",
        {
            r"pip install -c constraints.txt '.\[ray\]' in a clone of the repository": None,
            "or leave placement.launcher out": TRAIN,
            r"and start ranks with torchrun": None,  # tests/system/test_torchrun.py
        },
        absent="ray",
    ),
    Refused(
        f"{TORCHRUN} {TRAIN} {ON_RAY}",
        {"start the command without torchrun": f"{TRAIN} {ON_RAY}"},
        needs="ray",
        slow="remedies",
    ),
    Refused(
        f"RAY_ADDRESS=127.0.0.1:9 {TRAIN} {ON_RAY}",
        {
            r"Start it, and this command, with RAY_AUTH_MODE=token": None,  # a cluster of several machines
            r"unset RAY_ADDRESS to start Ray on this machine alone": f"{TRAIN} {ON_RAY}",
        },
        needs="ray",
        slow="remedies",
    ),
    Refused(
        f"compare quickstart --arms tis {COMPARE} {ON_RAY}",
        {
            "the same command tries them again": None,
            "leave it out here": f"compare quickstart --arms tis {COMPARE}",
        },
        needs="ray",
        slow="refusal",
    ),
    # Reports
    Refused("report begun", {"wait for it": r'{"iteration": 0, "eval/policy_accuracy": 0.5}\n > begun/metrics.jsonl'}),
    Refused("report evaluated", {"give the folder that train printed": "report trained"}),
    Refused(
        "report taken",
        {
            "give the folder that train printed": "report trained",
            "or a folder that contains several of them": "report several",
        },
    ),
]
NOT_HERE = {  # the start of a message: where it is provoked, or why nothing is typed
    "--gpus names": "slow, above",
    "this run does not fit": "slow, above",
    "placement.launcher is 'ray', and only jackpot train": "slow, above",
    "Ray has no room": "slow, below",
    "its actor ": "an engine is then replaced: tests/launch/test_ray.py",
    "Triton runs no kernel here": "below, on a device that is not there",
}

NEEDS = {  # what is refused only where a package is installed
    "triton": ["head_kernel is triton, but the device is"],
    "ray": ["placement.launcher is 'ray', and torchrun", "{} is {} and {} is {}: whoever reaches a Ray cluster"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as every line finds it."""
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    run_folder(folder / "begun", [])
    for trained in ("trained", "several/first", "several/second"):
        run_folder(folder / trained, [{"eval/policy_accuracy": 0.5}])
    return folder


def type_line(line: str, folder: Path, refused: Refused) -> CompletedProcess[str]:
    """Type a line in a folder, with the same packages as the line that was refused."""
    content, is_written, file = line.partition(" > ")
    if is_written:
        (folder / file).write_text(content)
        line = refused.line
    if line.startswith("mv "):
        _, source, target = line.split()
        (folder / source).rename(folder / target)
        line = refused.line

    line, _, expected_word = line.partition(" | ")
    words = shlex.split(line.removeprefix("jackpot "))
    environment = dict(word.split("=") for word in words if re.match("[A-Z_]+=", word))
    with pytest.MonkeyPatch.context() as patch:
        if refused.absent:
            patch.setitem(sys.modules, refused.absent, None)
        process = jackpot(*words[len(environment) :], cwd=folder, **environment)

    assert not process.returncode or not expected_word, process.stderr
    assert expected_word in process.stdout, (line, process.stdout)
    return process


def is_installed(package: str) -> bool:
    return not package or importlib.util.find_spec(package) is not None


def parameters_of(rows: list[Refused]) -> list:
    """The index of each row as a parameter, with the marks that it needs and its line as the name."""
    marks = (
        [
            *([pytest.mark.slow] if row.slow else []),
            pytest.mark.skipif(not is_installed(row.needs), reason=f"{row.needs} is not installed"),
        ]
        for row in rows
    )
    return [
        pytest.param(index, marks=row_marks, id=row.line)
        for index, (row, row_marks) in enumerate(zip(rows, marks, strict=True))
    ]


@cache
def message_of(index: int, files: Path) -> str:
    """The error of a refused line, which is typed once for all tests."""
    refused = REFUSED[index]
    with TemporaryDirectory() as folder:
        process = type_line(refused.line, copytree(files, Path(folder) / "files"), refused)
    assert process.returncode == 2, (process.returncode, process.stderr)
    assert process.stderr.startswith("error: "), (process.returncode, process.stderr)
    return process.stderr.strip()


@pytest.mark.parametrize("index", parameters_of(REFUSED))
def test_every_remedy_of_a_refused_line_works(index: int, files: Path, tmp_path: Path) -> None:
    refused, message = REFUSED[index], message_of(index, files)

    for remedy, line in remedies_of(message, refused.remedies):
        typed_line = remedy.expand(line)
        folder = copytree(files, tmp_path / str(len(list(tmp_path.iterdir()))))
        type_line(refused.line, folder, refused)  # the remedy works where the line was refused
        process = type_line(typed_line, folder, refused)
        assert process.returncode == 0, f"{message}\n{remedy[0]!r} was typed as {typed_line!r}:\n{process.stderr}"


def test_without_a_kernel_the_eager_head_reads() -> None:
    device = torch.device("cuda:99")
    pytest.importorskip("triton")

    with pytest.raises(ConfigError) as error:
        tile_reader("triton", device)

    remedy = re.search(r"use head_kernel: (\w+)$", str(error.value))
    assert remedy
    assert "Triton runs no kernel here" in str(error.value)
    assert tile_reader(remedy[1], device).name == "eager"


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("ray"), reason="ray is not installed")
def test_fewer_ranks_or_engines_have_room() -> None:
    overrides = [ON_RAY, "placement.timeout=9", "placement.engines=1"]
    small_config = resolve("quickstart", None, [*overrides, "placement.ranks=1"])
    large_config = resolve("quickstart", None, [*overrides, "placement.ranks=2"])

    with mock.patch.dict(os.environ), _cluster(small_config) as ray:
        with pytest.raises(ConfigError, match="Ray has no room for 2 ranks and 1 engines") as error:
            _placement_group(ray, large_config)

        remedy = re.search(r"lower placement\.(ranks) or placement\.(engines)$", str(error.value))
        assert remedy
        for name in remedy.groups():
            placement = large_config.placement.model_copy(update={name: getattr(large_config.placement, name) - 1})
            group = _placement_group(ray, large_config.model_copy(update={"placement": placement}))
            ray.util.remove_placement_group(group)


def test_every_refusal_stands_in_the_table(files: Path) -> None:
    indices = [index for index, row in enumerate(REFUSED) if row.slow != "refusal" and is_installed(row.needs)]
    messages = [message_of(index, files) for index in indices]
    config, launch = PACKAGE / "config", PACKAGE / "launch"
    sources = [
        *(config / name for name in ("recipes/__init__.py", "recipes/listing.py", "published.py", "reference.py")),
        *(launch / name for name in ("head_kernel.py", "ray.py")),
        *(PACKAGE / "ui").rglob("*.py"),
    ]

    texts = [text for text in sorted(texts_of(sources)) if " " in text]
    unprovoked_texts = [text for text in texts if not is_provoked(text, messages)]
    unseen_starts = [start for package, starts in NEEDS.items() if not is_installed(package) for start in starts]
    missing_texts = [text for text in unprovoked_texts if not text.startswith((*NOT_HERE, *unseen_starts))]

    assert not missing_texts, missing_texts
    assert all(any(text.startswith(start) for text in unprovoked_texts) for start in NOT_HERE)
