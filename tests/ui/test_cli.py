"""The front of the command line: light commands import nothing heavy, and help and mistakes say the right form."""

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
        train("quickstart", ["evaluation.benchmarks=[gsm9k]"], arm=None, run=None, dry_run=True, gpus=None, tiny=False)


def output_of(*arguments: str, cwd: Path) -> str:
    """What a command prints, with single blanks and no frames."""
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

    process = run(program)

    expected_lines = [f"{arguments} []\n" for arguments in HELP]
    expected_lines += [f"{arguments} {list(SETTINGS)}\n" for arguments in LIGHT_COMMANDS]

    assert process.stdout == "".join([*expected_lines, "False\n"]), process.stderr


@pytest.mark.parametrize("package", ["typer", "pyarrow"])  # of all commands, and of this one
def test_without_the_extra_the_command_says_what_to_install(package: str) -> None:
    process = run(without([package]) + "from jackpot.__main__ import main; main()", "report", ".")

    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    assert f"{package} is blocked" in process.stderr
    assert "pip install -c constraints.txt '.[train]'" in process.stderr


def test_an_error_of_our_own_package_keeps_its_traceback() -> None:
    process = run(
        without(["nothing"]) + "sys.modules['jackpot.ui.cli'] = None\nfrom jackpot.__main__ import main; main()"
    )
    assert "Traceback" in process.stderr
    assert "pip install" not in process.stderr


def test_an_unknown_command_gets_the_nearest_name_and_the_list(tmp_path: Path) -> None:
    result = jackpot("trian", cwd=tmp_path)

    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "unknown command 'trian'; did you mean 'train'?" in result.stderr
    assert "compare, " in result.stderr
    assert "simulate" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_a_mistake_in_options_says_the_right_form(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = jackpot(*arguments, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr, result.stderr


def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    assert output_of("--version", cwd=tmp_path).startswith("jackpot 0.")


def test_every_command_has_a_help_text_and_every_option_one(tmp_path: Path) -> None:
    overview = output_of("--help", cwd=tmp_path)
    assert sorted(command.__name__.rpartition(".")[2] for command in cli.COMMANDS) == COMMANDS

    for name in COMMANDS:
        typed_name = "eval" if name == "evaluate" else name
        assert typed_name in overview
        for parameter in inspect.signature(getattr(getattr(cli, name), name)).parameters.values():
            assert parameter.annotation.__metadata__[0].help, f"{name} {parameter.name}"


def test_the_help_names_units_formats_and_defaults_of_the_code(tmp_path: Path) -> None:
    compare, replay = output_of("compare", "--help", cwd=tmp_path), output_of("replay", "--help", cwd=tmp_path)
    assert all(unit in compare for unit in UNITS)
    assert all(name in replay for name in [AUTO, *FORMATS])
    assert f"default {MAX_TOKENS:,}" in output_of("report", "--help", cwd=tmp_path)
    assert f"default {PROMPTS}" in output_of("simulate", "--help", cwd=tmp_path)
