"""The front of the command line: what it imports, and what it says."""

import inspect
from pathlib import Path

import pytest

from helpers.commands import jackpot
from helpers.programs import run, without
from jackpot.analysis.compare.comparison import UNITS
from jackpot.analysis.replay.formats import AUTO, FORMATS
from jackpot.analysis.simulate.candidates import PROMPTS
from jackpot.core.errors import DataError
from jackpot.ui import cli, commands
from jackpot.ui.commands.train import train
from jackpot.ui.report.inspector import MAX_TOKENS

COMMANDS = sorted(path.stem for path in Path(commands.__file__).parent.glob("[a-z]*.py"))
HEAVY = ("torch", "transformers", "matplotlib", "numpy", "pyarrow", "datasets")
SETTINGS = ("jackpot.config.config",)  # the longest import of what reads a recipe
HELP = (["--help"], ["--version"], ["trian"], ["train", "--help"])
LIGHT_COMMANDS = (
    ["train", "quickstart", "lam=2"],
    ["train", "missing.yaml"],
    ["recipes"],
    ["recipes", "joint_8b"],
    ["config"],
)


def test_an_unknown_benchmark_is_refused_before_a_plan_is_made() -> None:
    with pytest.raises(DataError, match="unknown benchmark 'gsm9k'; did you mean 'gsm8k'"):
        train("quickstart", ["evaluation.benchmarks=[gsm9k]"], None, None, dry_run=True, gpus=None, tiny=False)


def text_of(*arguments: str, cwd: Path) -> str:
    result = jackpot(*arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return " ".join(result.stdout.replace("│", " ").split())


def test_only_commands_that_need_heavy_packages_import_them() -> None:
    """compare leaves training to its processes, and so imports torch in them alone."""
    program = f"""
import contextlib, io, sys
from jackpot.__main__ import main
for arguments in {HELP + LIGHT_COMMANDS!r}:
    sys.argv = ["jackpot", *arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    print(arguments, [name for name in {HEAVY + SETTINGS!r} if name in sys.modules])
from jackpot.ui.commands import compare, diagnose
from jackpot.ui.lazy import load
load(compare), load(diagnose)
print("torch" in sys.modules)
"""
    done = run(program)
    expected = [f"{arguments} []\n" for arguments in HELP]
    expected += [f"{arguments} {list(SETTINGS)}\n" for arguments in LIGHT_COMMANDS]

    assert done.stdout == "".join([*expected, "False\n"]), done.stderr


@pytest.mark.parametrize("package", ["typer", "pyarrow"])  # of all commands, and of this one
def test_without_the_extra_the_command_says_what_to_install(package: str) -> None:
    done = run(without([package]) + "from jackpot.__main__ import main; main()", "report", ".")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"{package} is blocked" in done.stderr
    assert "pip install -c constraints.txt '.[train]'" in done.stderr


def test_an_error_of_our_own_package_keeps_its_traceback() -> None:
    done = run(without(["nothing"]) + "sys.modules['jackpot.ui.cli'] = None\nfrom jackpot.__main__ import main; main()")
    assert "Traceback" in done.stderr
    assert "pip install" not in done.stderr


def test_an_unknown_command_gets_the_nearest_name_and_the_list(tmp_path: Path) -> None:
    result = jackpot("trian", cwd=tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "unknown command 'trian'; did you mean 'train'?" in result.stderr
    assert "compare, " in result.stderr
    assert "simulate" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        (
            ("train", "quickstart", "--iterations", "20"),
            "no option --iterations; settings are written key=value: ",
        ),
        (("train", "quickstart", "--lr=1e-4"), "key=value: policy.optimizer.learning_rate=1e-4"),
        (("train", "quickstart", "--seed"), "seed=VALUE"),
        (("compare", "quickstart", "--seed", "3"), "no option --seed; did you mean --seeds"),
        (("report", "--ou", "runs"), "no option --ou; did you mean --out? jackpot report --help lists all"),
        (("train", "quickstart", "--arm", "tis", "--arm", "none"), "--arm was given twice"),
        (("train", "quickstart", "seed=1", "seed=2", "lam=1"), "seed was given twice; the last one counts"),
    ],
)
def test_a_mistake_in_options_says_the_right_form(arguments: tuple[str, ...], form: str, tmp_path: Path) -> None:
    result = jackpot(*arguments, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert form in result.stderr, result.stderr


def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    assert text_of("--version", cwd=tmp_path).startswith("jackpot 0.")


def test_every_command_has_a_help_text_and_every_option_one(tmp_path: Path) -> None:
    listed = text_of("--help", cwd=tmp_path)
    assert sorted(command.__name__.rpartition(".")[2] for command in cli.COMMANDS) == COMMANDS
    for name in COMMANDS:
        typed = "eval" if name == "evaluate" else name
        assert typed in listed
        for parameter in inspect.signature(getattr(getattr(cli, name), name)).parameters.values():
            assert parameter.annotation.__metadata__[0].help, f"{name} {parameter.name}"


def test_the_help_names_units_formats_and_defaults_of_the_code(tmp_path: Path) -> None:
    compare, replay = text_of("compare", "--help", cwd=tmp_path), text_of("replay", "--help", cwd=tmp_path)
    assert all(unit in compare for unit in UNITS)
    assert all(name in replay for name in [AUTO, *FORMATS])
    assert f"default {MAX_TOKENS:,}" in text_of("report", "--help", cwd=tmp_path)
    assert f"default {PROMPTS}" in text_of("simulate", "--help", cwd=tmp_path)
