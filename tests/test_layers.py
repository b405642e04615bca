"""Who may import whom: `ORDER`, read from the source; and what may be imported at all without the heavy packages."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import jackpot
from helpers.paths import TESTS
from helpers.programs import run, without

PACKAGE = Path(jackpot.__file__).parent
# each folder, and `corrections.py`, imports only what stands before it
ORDER = ["core", "objectives", "config", "corrections", "models", "rollout", "training", "launch", "analysis", "ui"]
ADAPTERS = "adapters"  # may import everything up to training, and is imported by nobody
HEAVY = {"vllm", "aiohttp", "ray", "trl", "verl", "matplotlib", "peft", "datasets", "wandb"}
HEAVY |= {"math_verify", "sympy", "latex2sympy2_extended", "triton"}
TRAIN = {"transformers", "tokenizers", "safetensors", "yaml", "rich", "typer", "pyarrow", "tensorboard"}
# need torch and pydantic only, as `import jackpot` does; a kernel in Triton needs it
LIGHT = {"core", "objectives", "corrections"}


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name and syntax tree of every module but the package's own __init__, which imports names when asked."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        trees[name or "__init__"] = ast.parse(path.read_text(), filename=str(path))
    return trees


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """All nodes of every module of `modules`."""
    return {name: list(ast.walk(tree)) for name, tree in modules().items()}


@cache
def imported() -> dict[str, set[str]]:
    """What every module of `modules` imports."""
    return {name: imports(found) for name, found in nodes().items()}


def imports(nodes: list[ast.AST]) -> set[str]:
    """Absolute names of what nodes import, also in programs that they start with `-c`."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides which layer it comes from"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"(?:from|import) (jackpot(?:\.\w+)+)", node.value))
    return found


def folders(names: set[str]) -> set[str]:
    """The entries directly in the package that are among imported names."""
    return {name.split(".")[1] for name in names if name.startswith("jackpot.")}


def test_the_package_has_the_folders_of_the_order():
    there = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert there <= {*ORDER, ADAPTERS, "corrections.py", "__init__.py", "__main__.py", "py.typed"}


def test_each_folder_imports_only_those_before_it():
    wrong = {}
    for name, names in imported().items():
        own = name.split(".")[0]
        if own in ("__init__", "__main__"):
            continue
        allowed = ORDER[: ORDER.index("launch")] if own == ADAPTERS else ORDER[: ORDER.index(own)]
        if above := folders(names) - {own, *allowed}:
            wrong[name] = above
    assert wrong == {}


def test_no_two_files_import_each_other_in_a_circle():
    files = imported().keys() - {"__init__", "__main__"}
    arrows = {
        name: {other for other in files - {name} if f"jackpot.{other}" in names}
        for name, names in imported().items()
        if name in files
    }
    while leaves := [name for name, others in arrows.items() if not others & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    assert arrows == {}


def test_objectives_are_pure():
    """Torch and the standard library; no files, no clocks, no random generators; no settings."""
    for name, names in imported().items():
        if name.split(".")[0] == "objectives":
            roots = {module.split(".")[0] for module in names}
            kernels = {"triton"} if name == "objectives.kernels.triton_reader" else set()
            assert roots <= {"torch", "jackpot", *kernels, *sys.stdlib_module_names}, name
            assert not roots & {"random", "os", "io", "pathlib", "time", "logging"}, name
            assert folders(names) <= {"core", "objectives"}, name


def test_no_module_imports_the_package_inside_a_function():
    found = []
    for name, tree in modules().items():
        blocks = [node for node in tree.body if isinstance(node, ast.If | ast.With)]  # TYPE_CHECKING and lazy()
        outside = {node for block in (tree, *blocks) for node in block.body}
        found += [
            f"{name}:{node.lineno}"
            for node in nodes()[name]
            if isinstance(node, ast.Import | ast.ImportFrom) and node not in outside and folders(imports([node]))
        ]
    assert found == []


def test_only_what_is_seen_postpones_imports_and_only_of_modules():
    """`with lazy():` imports when a command uses it, so that `--help` starts without torch (`ui/lazy.py`)."""
    blocks = [
        (name, node)
        for name, found in nodes().items()
        for node in found
        if isinstance(node, ast.With) and ast.unparse(node.items[0].context_expr) == "lazy()"
    ]
    assert {name.split(".")[0] for name, _ in blocks} == {"ui"}
    for name, block in blocks:
        for node in block.body:
            assert isinstance(node, ast.ImportFrom), name
            assert {f"{node.module}.{alias.name}".removeprefix("jackpot.") for alias in node.names} <= modules().keys()


def test_heavy_packages_are_imported_in_one_file_each():
    roots = {name: {module.split(".")[0] for module in names} for name, names in imported().items()}
    for package in sorted(HEAVY):
        users = [name for name, found in roots.items() if package in found]
        assert len(users) <= 1, f"{package} is imported by {users}"


def test_test_files_import_no_optional_package_at_the_top():
    """vLLM's environment collects all of them, but for scripts, which a test starts."""
    some = "matplotlib|playwright|vllm|ray|trl|verl|wandb"
    for path in TESTS.rglob("*.py"):
        text = path.read_text()
        if text.endswith('\n\nif __name__ == "__main__":\n    main()\n'):
            continue
        if re.search(rf"^(from|import) ({some})\b", text, re.MULTILINE):  # also in a text that is no import
            top = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
            assert not {name.split(".")[0] for name in imports(top)} & {*some.split("|")}, path.name


def test_no_name_of_a_test_outgrows_sixty_characters():
    """So that a line of pytest's report, and `-k`, hold it."""
    names = [name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())]
    assert [name for name in names if len(name) > 60] == []


def test_no_file_outgrows_six_hundred_lines():
    long = {path.name: lines for path in PACKAGE.rglob("*.py") if (lines := len(path.read_text().splitlines())) > 600}
    assert long == {}


LIGHT_PROGRAM = """
import importlib
import jackpot

assert jackpot.make_correction("obrs").apply
assert "jackpot.config.corrections" in sys.modules and "jackpot.config.config" not in sys.modules
for name in sys.argv[1:]:
    importlib.import_module(f"jackpot.{name}")

try:
    import rich
except ModuleNotFoundError as error:
    print(error)
jackpot.train
"""


def test_the_mathematics_needs_only_torch_and_pydantic():
    """Nor do they load the settings of the trainer; what needs more says how it is installed."""
    light = [name for name, names in imported().items() if name.split(".")[0] in LIGHT and "triton" not in names]
    assert "objectives.obrs" in light and "objectives.joint" in light

    done = run(without(TRAIN | HEAVY) + LIGHT_PROGRAM, *light)

    assert done.stdout == "rich is blocked in this test\n", done.stderr
    assert "ImportError: jackpot.train needs the extra `train`: pip install -c constraints.txt" in done.stderr
    assert "'.[train]' in a clone" in done.stderr


def test_settings_are_read_without_torch():
    done = run(without({"torch"}) + "import jackpot.config.recipes, jackpot.config.reference, jackpot.config.arms")
    assert done.returncode == 0, done.stderr


def test_answers_are_judged_without_torch():
    program = "import sys, jackpot, jackpot.rollout.rewards.worker\nassert 'torch' not in sys.modules\njackpot.nothing"
    done = run(program)
    assert "AttributeError: module 'jackpot' has no attribute 'nothing'" in done.stderr, done.stderr
