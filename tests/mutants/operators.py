"""Breaks code in every small way that a slip of the hand could: one operator or statement of one function at a time.

A mutant is found by its function and not by the text of a line, so it outlives reformatting and renamed variables. What
is broken of a formula: + and -, * and /, the direction of a comparison, a minus or a `not` that goes, `and` and `or`,
the order of `where`, the side of `clamp`, minimum and maximum, sum and mean, and an exp, log, square, sqrt, cumsum or
detach that goes. Of the flow of control, where that is asked for: a call, a raise, a continue, a break or a bare return
that goes, a value that is not returned, a condition that is turned around, and a whole number that is one too large.
Messages of errors, lines of logs and defaults of arguments stay as they are.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

BINARY = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
BINARY |= {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
COMPARED = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
RENAMED = {"minimum": "maximum", "maximum": "minimum", "sum": "mean", "mean": "sum", "clamp_min": "clamp_max"}
KEYWORDS = {"min": "max", "max": "min"}  # of clamp
REMOVED = {"exp", "log", "log1p", "expm1", "square", "sqrt", "cumsum", "detach", "abs", "flip"}  # x.exp() becomes x
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Change = Callable[[], None]


class Mutant(NamedTuple):
    """One broken function: the expression as it was and as it is, and the whole module with it."""

    function: str
    was: str
    now: str
    module: ast.Module

    @property
    def name(self) -> str:
        return f"{self.function}: {self.was} -> {self.now}"


def mutants(source: str, function: str, control: bool = False) -> Iterator[Mutant]:
    """Yield every mutant of a function or method ("function" or "Class.method") of a module's source.

    Args:
        control: whether the flow of control is broken too.

    Raises:
        LookupError: the module has no such function.
    """
    for number in range(count(source, function, control)):
        yield mutant(source, function, number, control)


def count(source: str, function: str, control: bool = False) -> int:
    """Return how many mutants a function has."""
    return sum(1 for _ in _changes(_find(ast.parse(source), function), control))


def mutant(source: str, function: str, number: int, control: bool = False) -> Mutant:
    """Return one of `mutants`."""
    module = ast.parse(source)
    node, change = list(_changes(_find(module, function), control))[number]
    was = ast.unparse(node)
    change()
    return Mutant(function, was, ast.unparse(node), ast.fix_missing_locations(module))


def functions(source: str) -> list[str]:
    """Name every function and method of a module, as `mutants` takes them."""
    module = ast.parse(source)
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    scopes = [("", module), *((f"{scope.name}.", scope) for scope in classes)]
    return [f"{prefix}{node.name}" for prefix, scope in scopes for node in scope.body if isinstance(node, FUNCTIONS)]


def _find(module: ast.Module, function: str) -> ast.FunctionDef:
    scope: ast.AST = module
    for name in function.split("."):
        matches = [node for node in scope.body if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name == name]
        if not matches:
            raise LookupError(f"there is no {function}; the list of mutants names functions and Class.method")
        scope = matches[-1]
    return scope


def _changes(function: ast.FunctionDef, control: bool) -> Iterator[tuple[ast.AST, Change]]:
    """Yield everything in a body that can be broken, with what breaks it in place."""
    for statement in function.body:
        for node in _formulas(statement):
            yield from _of_node(node)
            if control:
                yield from _of_control(node)


def _formulas(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below one, without those that make a message or name a type."""
    if isinstance(node, ast.JoinedStr | ast.Assert):
        return
    yield node
    if isinstance(node, ast.Raise):
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _formulas(child)


def _of_node(node: ast.AST) -> Iterator[tuple[ast.expr, Change]]:
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY and not _is_type(node) and not _is_path(node):
        yield node, lambda: setattr(node, "op", BINARY[type(node.op)]())
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        yield node, lambda: setattr(node, "ops", [COMPARED[type(node.ops[0])]()])
    elif isinstance(node, ast.BoolOp):
        yield node, lambda: setattr(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node, lambda: _become(node, node.operand)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from _of_call(node, node.func)


def _of_control(node: ast.AST) -> Iterator[tuple[ast.AST, Change]]:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await) and not _is_log(node)
    has_value = isinstance(node, ast.Return) and node.value is not None

    if is_call or isinstance(node, ast.Raise | ast.Continue | ast.Break) or _is_bare_return(node):
        yield node, lambda: _become(node, ast.Pass())
    elif has_value and not (isinstance(node.value, ast.Constant) and node.value.value is None):
        yield node, lambda: setattr(node, "value", ast.Constant(None))
    elif isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Constant | ast.UnaryOp):
        test = node.test  # whose `not` goes as one of a formula
        yield test, lambda: _become(test, ast.UnaryOp(ast.Not(), copy.deepcopy(test)))
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, lambda: setattr(node, "value", node.value + 1)


def _is_bare_return(node: ast.AST) -> bool:
    return isinstance(node, ast.Return) and node.value is None


def _is_log(node: ast.Expr) -> bool:
    return ast.unparse(node).startswith(("_log.", "logging.", "warnings."))


def _of_call(node: ast.Call, method: ast.Attribute) -> Iterator[tuple[ast.expr, Change]]:
    if method.attr in RENAMED:
        yield node, lambda: setattr(method, "attr", RENAMED[method.attr])
    elif method.attr in ("clamp", "clamp_") and len(node.keywords) == 1 and node.keywords[0].arg in KEYWORDS:
        yield node, lambda: setattr(node.keywords[0], "arg", KEYWORDS[node.keywords[0].arg])
    elif method.attr in REMOVED and not _is_module(method.value):
        yield node, lambda: _become(node, method.value)
    elif method.attr == "where" and len(node.args) == 3:
        yield node, lambda: node.args.__setitem__(slice(1, 3), [node.args[2], node.args[1]])


def _become(node: ast.expr, other: ast.expr) -> None:
    """Make a node of a tree a copy of another one."""
    other = copy.deepcopy(other)
    node.__class__ = type(other)
    node.__dict__.clear()
    node.__dict__.update(other.__dict__)


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "math")


def _is_path(node: ast.BinOp) -> bool:
    """Whether `/` joins a path and a name."""
    sides = (node.left, node.right)
    return isinstance(node.op, ast.Div) and any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in sides
    )


def _is_type(node: ast.BinOp) -> bool:
    """Whether `|` joins types, as in isinstance(x, A | B)."""
    sides = [side for side in (node.left, node.right) if isinstance(side, ast.Name | ast.Attribute | ast.Constant)]
    names = [side.id if isinstance(side, ast.Name) else getattr(side, "attr", "None") for side in sides]
    return isinstance(node.op, ast.BitOr) and any(name[:1].isupper() for name in names)
