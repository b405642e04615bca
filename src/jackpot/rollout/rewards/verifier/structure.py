r"""Parses structured answers: tuples, intervals, sets, unions, lists, ratios, matrices. Standard library only.

A structure keeps brackets, order and count of its members, so that only the members are compared as mathematics. Hence
`(2,1)` is not an empty interval and `4:51` not a quotient.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

_CLOSING = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle"}
_OPENERS, _CLOSERS = frozenset("([{"), frozenset(")]}")
_TOKEN = re.compile(
    r"\\text\{[,; ]*(?:and|or)[,; ]*\}|\\(?:begin|end)\{\w+\*?\}|\\[A-Za-z]+|\\.|"
    r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])|.",
    re.DOTALL,
)
_AND = re.compile(r"(?:\\text\{[,; ]*)?(?:and|or)(?:[,; ]*\})?")
_MATRIX = re.compile(r"\\begin\{([pbBvV]?matrix|array)\}(.*)\\end\{\1\}", re.DOTALL)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SURE_SEPARATOR = re.compile(r"[,;] |(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z]) ?")


class Structure(NamedTuple):
    """Describes a structured answer by its kind and its members."""

    kind: str  # the brackets, or list, set, union, ratio, matrix with its shape
    members: tuple[str, ...]  # as text
    ordered: bool  # False where the members may come in any order


def parse_structure(text: str) -> Structure | None:
    """Return the structure of a normalized answer, or None where it is a single expression.

    A comma between digits without a space separates thousands, if the answer also has an unambiguous separator: a comma
    followed by a space, or a word.
    """
    if _SURE_SEPARATOR.search(text):
        text = _THOUSANDS.sub("", text)
    return _matrix(text) or _separated(text) or _bracketed(text) or _ratio(text)


def _matrix(text: str) -> Structure | None:
    r"""Parse a matrix row by row. A determinant (`vmatrix`) is a number and so no matrix."""
    match = _MATRIX.fullmatch(text)
    if match is None or match[1].lower() == "vmatrix" or "\\begin" in match[2]:
        return None
    rows = [row.split("&") for row in re.sub(r"^\{[clr|]*\}", "", match[2]).removesuffix("\\\\").split("\\\\")]
    shape = "x".join(str(len(row)) for row in rows)
    return Structure(f"matrix {shape}", tuple(cell.strip() for row in rows for cell in row), True)


def _separated(text: str) -> Structure | None:
    r"""Parse members between `\cup`, or between commas, semicolons, `and`, `or`; `a \pm b` counts as two members."""
    union = split_outside_brackets(text, lambda token: token == r"\cup")
    if len(union) > 1:
        return Structure("union", tuple(union), False)
    parts = split_outside_brackets(text, _is_separator)
    members = [sign for part in parts if part for sign in _both_signs(part)]
    return Structure("list", tuple(members), False) if len(members) > 1 else None


def _bracketed(text: str) -> Structure | None:
    """Parse a tuple, interval, vector or set, all of whose text stands in brackets."""
    opening = next((one for one in _CLOSING if text.startswith(one)), None)
    if opening is None:
        return None
    inside = _inside(text, opening)
    if inside is None:
        return None
    parts = split_outside_brackets(inside, lambda token: token in ",;")
    if opening == r"\{":
        members = tuple(sign for part in parts if part for sign in _both_signs(part))
        return Structure("set", members, False)
    closing = next(one for one in ("]", ")", r"\rangle") if text.endswith(one))
    return Structure(opening + closing, tuple(parts), True) if len(parts) > 1 and all(parts) else None


def _inside(text: str, opening: str) -> str | None:
    """Return the text between the first bracket and its closing one, if that ends the text; `[0,1)` is closed."""
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        depth += (token in _OPENERS or token in (r"\{", r"\langle")) - (
            token in _CLOSERS or token in (r"\}", r"\rangle")
        )
        if depth == 0:
            is_pair = token == _CLOSING[opening] or (opening in "([" and token in ")]")
            return text[len(opening) : match.start()] if is_pair and match.end() == len(text) else None
    return None


def _ratio(text: str) -> Structure | None:
    """Parse a ratio or time, such as `3:5` and `9:24`."""
    parts = text.split(":")
    is_ratio = len(parts) > 1 and all(re.fullmatch(r" ?[\w.\\{}]+ ?", part) for part in parts)
    return Structure("ratio", tuple(part.strip() for part in parts), True) if is_ratio else None


def _is_separator(token: str) -> bool:
    """Return whether a token separates the members of a list."""
    return token in (",", ";") or _AND.fullmatch(token) is not None


def _both_signs(part: str) -> list[str]:
    r"""Return `1 \pm x` as `1 + x` and `1 - x`, and any other text alone."""
    if len(_PLUS_MINUS.findall(part)) != 1 or _bracketed(part) is not None:
        return [part]
    return [_PLUS_MINUS.sub("+", part).removeprefix("+"), _PLUS_MINUS.sub("-", part)]


def split_outside_brackets(text: str, is_separator: Callable[[str], bool]) -> list[str]:
    """Split a text at separators that stand in no brackets, and strip the spaces around each part."""
    parts, depth, start = [], 0, 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in _OPENERS or token in (r"\{", r"\langle") or token.startswith(r"\begin"):
            depth += 1
        elif token in _CLOSERS or token in (r"\}", r"\rangle") or token.startswith(r"\end"):
            depth -= 1
        elif depth == 0 and is_separator(token):
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]
