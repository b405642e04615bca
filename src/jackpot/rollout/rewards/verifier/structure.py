"""Parsing of structured answers: tuples, intervals, sets, unions, lists, ratios, matrices. Standard library only."""

import re
from collections.abc import Iterator
from typing import NamedTuple

# For each opening bracket, the brackets that may close it: `[0,1)` is an interval.
_CLOSING = {"(": (")", "]"), "[": ("]", ")"), r"\{": (r"\}",), r"\langle": (r"\rangle",)}
_OPENS, _CLOSES = re.compile(r"[(\[{]|\\\{|\\langle|\\begin.*"), re.compile(r"[)\]}]|\\\}|\\rangle|\\end.*")
_TOKEN = re.compile(
    r"\\text\{[,; ]*(?:and|or)[,; ]*\}|\\(?:begin|end)\{\w+\*?\}|\\[A-Za-z]+|\\.|"
    r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])|.",
    re.DOTALL,
)
_SEPARATOR = r"[,;]|(?:\\text\{[,; ]*)?(?:and|or)(?:[,; ]*\})?"  # between members of a list
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[clr|]*\})?((?:(?!\\begin).)*)\\end\{\1\}", re.DOTALL)
_RATIO = re.compile(r"( ?[\w.\\{}]+ ?)(:( ?[\w.\\{}]+ ?))+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SURE_SEPARATOR = re.compile(r"[,;] |(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z]) ?")


class Structure(NamedTuple):
    """The kind and the members of a structured answer, such as a tuple, set or matrix.

    Brackets, order and number of the members are kept, so that only members are compared as mathematics. Hence `(2,1)`
    is not an empty interval and `4:51` not a quotient.
    """

    kind: str  # "list", "set", "union" or "ratio"; "matrix" and the lengths of its rows; else both brackets, as "[)"
    members: tuple[str, ...]  # text of each member, such as the entries of a tuple or matrix
    ordered: bool  # False where two structures are equal whatever the order of their members, as for sets


def parse_structure(text: str) -> Structure | None:
    r"""Return the structure of a normalized answer, or None where it is a single expression.

    A comma between digits without a space separates thousands, if the answer also has an unambiguous separator: a comma
    followed by a space, or `and` or `or`. `a \pm b` counts as two members. A determinant (`vmatrix`) is a number.
    """
    if _SURE_SEPARATOR.search(text):
        text = _THOUSANDS.sub("", text)
    if matrix := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in matrix[2].removesuffix("\\\\").split("\\\\")]
        # The kind of a matrix has the length of each row: `matrix 3x3` has two rows of three cells.
        shape = "x".join(str(len(row)) for row in rows)
        return Structure(f"matrix {shape}", tuple(cell.strip() for row in rows for cell in row), ordered=True)

    if len(union := split_outside_brackets(text, r"\\cup")) > 1:
        return Structure("union", tuple(union), ordered=False)
    if len(members := _members(text, _SEPARATOR)) > 1:
        return Structure("list", members, ordered=False)

    sides = tuple(map(str.strip, text.split(":")))
    return _bracketed(text) or (Structure("ratio", sides, ordered=True) if _RATIO.fullmatch(text) else None)


def _bracketed(text: str) -> Structure | None:
    """Parse a tuple, interval, vector or set, such as `[0,1)`; None unless brackets enclose the whole text."""
    # `closing` is the first token after which no bracket is open. It must be the last token of the text, and one that
    # may close the bracket `opening`.
    opening = next((bracket for bracket in _CLOSING if text.startswith(bracket)), None)
    end, closing = next(((end, token) for token, end, depth in _tokens(text) if depth == 0), (0, ""))
    if opening is None or end != len(text) or closing not in _CLOSING[opening]:
        return None
    inside = text[len(opening) : -len(closing)]
    if opening == r"\{":
        return Structure("set", _members(inside, "[,;]"), ordered=False)
    # A tuple, interval or vector has two members or more, and none of them is empty.
    members = split_outside_brackets(inside, "[,;]")
    return Structure(opening + closing, tuple(members), ordered=True) if len(members) > 1 and all(members) else None


def _members(text: str, separator: str) -> tuple[str, ...]:
    r"""Return the members of a list or set, cut at `separator`; `1 \pm x` is two members, `1 + x` and `1 - x`."""
    members: list[str] = []
    for member in filter(None, split_outside_brackets(text, separator)):
        # A pair has a single plus-minus, for which each sign is put in; a plus at the start of a member is dropped.
        is_pair = len(_PLUS_MINUS.findall(member)) == 1 and _bracketed(member) is None
        members += [_PLUS_MINUS.sub(sign, member).removeprefix("+") for sign in "+-"] if is_pair else [member]
    return tuple(members)


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """Split a text at the tokens of `_tokens` that match `separator` and are in no brackets; strip each piece."""
    cuts = [0]  # start of the first piece, end of the first piece, start of the second, ..., start of the last
    for token, end, depth in _tokens(text):
        if depth == 0 and re.fullmatch(separator, token):
            cuts += [end - len(token), end]
    return [text[start:end].strip() for start, end in zip(cuts[::2], [*cuts[1::2], len(text)], strict=True)]


def _tokens(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield each token of a text, the position of its end, and how many brackets are open after it."""
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        depth += (_OPENS.fullmatch(token) is not None) - (_CLOSES.fullmatch(token) is not None)
        yield token, match.end(), depth
