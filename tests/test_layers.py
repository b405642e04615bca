"""Each folder of the package imports only those before it in `ORDER`, and light ones work without heavy packages.

Who imports what is read from the source.
"""

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
# what the extra `train` installs
TRAIN = {"transformers", "tokenizers", "safetensors", "yaml", "rich", "typer", "pyarrow", "tensorboard"}
# need torch and pydantic only, as `import jackpot` does; a kernel in Triton needs it
LIGHT = {"core", "objectives", "corrections"}


@cache
def modules() -> dict[str, ast.Module]:
    """Return name and syntax tree of every module but the package's own __init__, which imports names when asked."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(step for step in parts if step != "__init__")
        trees[name or "__init__"] = ast.parse(path.read_text(), filename=str(path))
    return trees


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Return all nodes of every module of `modules`."""
    return {name: list(ast.walk(tree)) for name, tree in modules().items()}


@cache
def imports_by_module() -> dict[str, set[str]]:
    """Return what every module of `modules` imports."""
    return {name: imports(module_nodes) for name, module_nodes in nodes().items()}


def imports(nodes: list[ast.AST]) -> set[str]:
    """Return absolute names of what nodes import, also in programs that they start with `-c`."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides which layer it comes from"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"(?:from|import) (jackpot(?:\.\w+)+)", node.value))
    return names


def folders(names: set[str]) -> set[str]:
    """Return the entries directly in the package that are among imported names."""
    return {name.split(".")[1] for name in names if name.startswith("jackpot.")}


def test_the_package_has_the_folders_of_the_order():
    entries = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert entries <= {*ORDER, ADAPTERS, "corrections.py", "__init__.py", "__main__.py", "py.typed"}


def test_each_folder_imports_only_those_before_it():
    violations = {}

    for name, names in imports_by_module().items():
        layer = name.split(".")[0]
        if layer in ("__init__", "__main__"):
            continue
        allowed = ORDER[: ORDER.index("launch")] if layer == ADAPTERS else ORDER[: ORDER.index(layer)]
        if folders_above := folders(names) - {layer, *allowed}:
            violations[name] = folders_above

    assert violations == {}


def test_no_two_files_import_each_other_in_a_circle():
    files = imports_by_module().keys() - {"__init__", "__main__"}
    dependencies = {
        name: {other for other in files - {name} if f"jackpot.{other}" in names}
        for name, names in imports_by_module().items()
        if name in files
    }

    while independent_files := [name for name, others in dependencies.items() if not others & dependencies.keys()]:
        for name in independent_files:
            del dependencies[name]

    assert dependencies == {}


def test_objectives_import_only_torch_and_pure_modules():
    """Torch and the standard library; no files, no clocks, no random generators; no settings."""
    for name, names in imports_by_module().items():
        if name.split(".")[0] == "objectives":
            roots = {module.split(".")[0] for module in names}
            kernels = {"triton"} if name == "objectives.kernels.triton_reader" else set()

            assert roots <= {"torch", "jackpot", *kernels, *sys.stdlib_module_names}, name
            assert not roots & {"random", "os", "io", "pathlib", "time", "logging"}, name
            assert folders(names) <= {"core", "objectives"}, name


def test_no_module_imports_the_package_inside_a_function():
    imports_inside = []

    for name, tree in modules().items():
        blocks = [node for node in tree.body if isinstance(node, ast.If | ast.With)]  # TYPE_CHECKING and lazy()
        outer_nodes = {node for block in (tree, *blocks) for node in block.body}
        imports_inside += [
            f"{name}:{node.lineno}"
            for node in nodes()[name]
            if isinstance(node, ast.Import | ast.ImportFrom) and node not in outer_nodes and folders(imports([node]))
        ]

    assert imports_inside == []


def test_only_ui_postpones_imports_and_only_of_modules():
    """`with lazy():` imports when a command uses it, so that `--help` starts without torch (`ui/lazy.py`)."""
    blocks = [
        (name, node)
        for name, module_nodes in nodes().items()
        for node in module_nodes
        if isinstance(node, ast.With) and ast.unparse(node.items[0].context_expr) == "lazy()"
    ]

    assert {name.split(".")[0] for name, _ in blocks} == {"ui"}

    for name, block in blocks:
        for node in block.body:
            assert isinstance(node, ast.ImportFrom), name
            assert {f"{node.module}.{alias.name}".removeprefix("jackpot.") for alias in node.names} <= modules().keys()


def test_heavy_packages_are_imported_in_one_file_each():
    roots = {name: {module.split(".")[0] for module in names} for name, names in imports_by_module().items()}
    for package in sorted(HEAVY):
        users = [name for name, module_roots in roots.items() if package in module_roots]
        expected_count = 0 if package == "matplotlib" else 1  # benchmarks alone draw with it
        assert len(users) == expected_count, f"{package} is imported by {users}"


def test_test_files_import_no_optional_package_at_the_top():
    """vLLM's environment collects all of them, but for scripts, which a test starts."""
    optional_packages = "matplotlib|playwright|vllm|ray|trl|verl|wandb"

    for path in TESTS.rglob("*.py"):
        text = path.read_text()
        if text.endswith('\n\nif __name__ == "__main__":\n    main()\n'):
            continue
        # also found in a text that is no import
        if re.search(rf"^(from|import) ({optional_packages})\b", text, re.MULTILINE):
            top_imports = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
            roots = {name.split(".")[0] for name in imports(top_imports)}
            assert not roots & {*optional_packages.split("|")}, path.name


def test_no_name_of_a_test_outgrows_sixty_characters():
    """So that a line of pytest's report, and `-k`, hold it."""
    names = [name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())]
    assert [name for name in names if len(name) > 60] == []


def test_no_module_outgrows_six_hundred_lines():
    long_files = {
        path.name: lines for path in PACKAGE.rglob("*.py") if (lines := len(path.read_text().splitlines())) > 600
    }
    assert long_files == {}


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
    light_modules = [
        name for name, names in imports_by_module().items() if name.split(".")[0] in LIGHT and "triton" not in names
    ]
    assert "objectives.obrs" in light_modules
    assert "objectives.joint" in light_modules

    process = run(without(TRAIN | HEAVY) + LIGHT_PROGRAM, *light_modules)

    assert process.stdout == "rich is blocked in this test\n", process.stderr
    assert "ImportError: jackpot.train needs the extra `train`: pip install -c constraints.txt" in process.stderr
    assert "'.[train]' in a clone" in process.stderr


def test_settings_are_read_without_torch():
    process = run(without({"torch"}) + "import jackpot.config.recipes, jackpot.config.reference, jackpot.config.arms")
    assert process.returncode == 0, process.stderr


def test_the_reward_worker_starts_without_torch():
    program = "import sys, jackpot, jackpot.rollout.rewards.worker\nassert 'torch' not in sys.modules\njackpot.nothing"
    process = run(program)
    assert "AttributeError: module 'jackpot' has no attribute 'nothing'" in process.stderr, process.stderr
