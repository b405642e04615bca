"""Who may import whom (ARCHITECTURE.md, "Layers"), read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import jackpot

PACKAGE = Path(jackpot.__file__).parent
CONFIGS = ("base", "build", "corrections", "engines", "evaluation", "mismatch", "published", "tasks")
SETTINGS = {"config", *(f"config_{part}" for part in CONFIGS)}
LAYERS = [
    {"types", "errors"} | SETTINGS,
    {"ops", "answers"},
    {"objectives"},
    {"tasks", "models", "engines", "precision"},
    {
        "batching",
        "conversation",
        "critic",
        "gradient_parts",
        "joint_learner",
        "learner",
        "optimizer",
        "reference",
        "rows",
    },
    {
        "answer_files",
        "trainer",
        "control",
        "checkpoint",
        "telemetry",
        "evaluate",
        "files",
        "guards",
        "parts",
        "passing",
        "rollout_files",
        "sampler",
    },
    {"launch", "adapters", "lab", "report"},
    {
        "recipes",
        "cli",
        "cli_lab",
        "console",
        "console_compare",
        "console_evaluation",
        "console_plan",
        "console_mismatch",
        "console_recipes",
        "console_replay",
        "console_tables",
        "console_tiny",
    },
]
LAYER = {unit: number for number, units in enumerate(LAYERS) for unit in units}
HEAVY = {"vllm", "aiohttp", "ray", "trl", "verl", "plotly", "matplotlib", "peft", "datasets"}
HEAVY |= {"math_verify", "sympy", "latex2sympy2_extended"}
TRAIN = {"transformers", "tokenizers", "safetensors", "yaml", "rich", "typer", "pyarrow", "tensorboard"}
LIGHT = LAYERS[0] | {"ops", "objectives", "batching"}  # need torch and pydantic only


def modules() -> dict[str, ast.Module]:
    """Dotted name and syntax tree of every module but the package's own empty __init__."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        trees[name or "__init__"] = ast.parse(path.read_text(), filename=str(path))
    return trees


MODULES = modules()


def imports(tree: ast.AST) -> set[str]:
    """Absolute names of what a tree imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides which layer it comes from"
            found.add(node.module)
            if node.module == "jackpot":
                found |= {f"jackpot.{alias.name}" for alias in node.names}
    return found


def units(tree: ast.AST) -> set[str]:
    """The files and folders directly in the package that a tree imports."""
    return {name.split(".")[1] for name in imports(tree) if name.startswith("jackpot.")}


def test_every_module_has_a_layer():
    assert {name.split(".")[0] for name in MODULES} - {"__init__"} <= LAYER.keys()


def test_each_layer_imports_only_those_above_it_and_its_own():
    wrong = {
        name: below
        for name, tree in MODULES.items()
        if name != "__init__"
        and (below := {unit for unit in units(tree) if LAYER.get(unit, 99) > LAYER[name.split(".")[0]]})
    }
    assert wrong == {}


def test_only_the_command_line_imports_launch_and_adapters():
    users = {
        name.split(".")[0]
        for name, tree in MODULES.items()
        for unit in units(tree) & {"launch", "adapters"}
        if name.split(".")[0] != unit
    }
    assert users <= {"cli", "console", "console_compare", "console_evaluation", "console_plan", "console_tiny", "lab"}


def test_ops_and_objectives_are_pure():
    """Torch and the standard library only; no files, no clocks, no random generators; settings in one place."""
    for name, tree in MODULES.items():
        if name.split(".")[0] in {"ops", "objectives"}:
            roots = {module.split(".")[0] for module in imports(tree)}
            assert roots <= {"torch", "jackpot", *sys.stdlib_module_names}, name
            assert not roots & {"random", "os", "io", "pathlib", "time", "logging"}, name
            assert "config" not in units(tree) or name == "objectives.build", name


def test_no_module_imports_the_package_inside_a_function():
    found = [
        f"{name}:{node.lineno}"
        for name, tree in MODULES.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom) and any(n.split(".")[0] == "jackpot" for n in imports(node))
    ]
    assert found == []


def test_heavy_packages_are_imported_in_one_file_each():
    for package in sorted(HEAVY):
        users = [
            name for name, tree in MODULES.items() if any(module.split(".")[0] == package for module in imports(tree))
        ]
        assert len(users) <= 1, f"{package} is imported by {users}"


def test_every_test_file_is_collected_without_the_packages_that_only_some_environments_have():
    """vLLM's environment collects all of them."""
    some = {"plotly", "matplotlib", "playwright", "vllm", "ray", "trl", "verl"}
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        outside = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        roots = {module.split(".")[0] for node in outside for module in imports(node)}
        assert not roots & some, path.name


def test_no_file_outgrows_four_hundred_lines():
    long = {path.name: lines for path in PACKAGE.rglob("*.py") if (lines := len(path.read_text().splitlines())) > 400}
    assert long == {}


BLOCKED = f"""
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    blocked = set({sorted(TRAIN | HEAVY)!r})
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"{{name}} is blocked in this test", name=name)
sys.meta_path.insert(0, Blocker())
"""


def test_the_package_and_its_mathematics_need_only_torch_and_pydantic():
    light = [name for name in MODULES if name.split(".")[0] in LIGHT]
    assert "ops.obrs" in light and "objectives.joint" in light
    done = run(BLOCKED + "import jackpot\n" + "\n".join(f"import jackpot.{name}" for name in light))
    assert done.returncode == 0, done.stderr
    assert "rich is blocked in this test" in run(BLOCKED + "import rich").stderr


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


def test_answers_are_judged_without_torch_and_the_package_has_its_names_all_the_same():
    program = "import sys, jackpot, jackpot.answers.worker\nassert 'torch' not in sys.modules\n"
    program += "for name in jackpot.__all__:\n    assert getattr(jackpot, name) is not None\n"
    program += "assert 'torch' in sys.modules\njackpot.nothing"
    done = run(program)
    assert "AttributeError: module 'jackpot' has no attribute 'nothing'" in done.stderr, done.stderr
