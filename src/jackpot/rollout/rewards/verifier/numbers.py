"""Exact parsing of numbers and their units. Standard library only.

Units are not converted: 50 % is 50 with a unit and not 0.5, and 1 m is not 100 cm.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from jackpot.rollout.rewards.verifier.units import LABEL, read_unit

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d*|\.\d+|(?<=\d))"
_FRACTION = re.compile(rf"(?<![\d.])(\d*) ?\\frac\{{(-?{_DIGITS})\}}\{{(-?{_DIGITS})\}}(?! ?[\d.])")
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?P<dollar>\\\$)? ?(?P<sign2>-?) ?(?:(?P<whole>\d+) (?=\d+/\d+(?!\d|[., ]\d)))?"
    rf"(?P<top>-?{_DIGITS})(?:/(?P<bottom>-?{_DIGITS})|\\(?:overline|bar)\{{(?P<period>\d+)\}})?"
    r"(?: ?(?:\\times|\\cdot|\*|x) ?10\^(?P<braces>\{)?(?P<power>[-+]?\d{1,4})(?(braces)\}))?"
)


class Quantity(NamedTuple):
    """A number and the unit that follows it."""

    value: Fraction  # exact
    unit: str  # name of the unit, or `LABEL`, as `read_unit` returns it; "" without a unit


def parse_quantity(text: str, is_reference: bool) -> Quantity | None:
    r"""Return the number that a normalized text denotes, or None where the text is no number.

    A number is an integer, a decimal, a fraction (`a/b`, `\frac{a}{b}`) or a mixed number (`2\frac{1}{3}`, `2 1/3`),
    with a sign and with commas or thin spaces between thousands; a decimal may repeat (`0.\overline{3}`) or have a
    power of ten (`4.5\times 10^{33}`, of which `4.5e33` is another spelling). The value of a number is a
    `fractions.Fraction`: 0.1 + 0.2 is 0.3, and 0.333 is not 1/3. A number may be followed by

    - a unit that is known (`units.py`): where both answer and reference have one it must be the same, so 5 cm is 5, and
      not 5 m;
    - a percent or degree sign: these are known units too, as is a dollar sign before the number;
    - a label, `\text{right triangles}`, or in an answer plain words after a space such as `18 eggs`: it is ignored, but
      it does not match a reference with a unit: 5 marbles is not 5 m. A word that changes the number or joins two
      (`dozen`, `eighths`, `or`) is no label, nor are mathematics and single letters, and the text is then no number.

    Args:
        is_reference: whether the text is the reference. Plain words after its number must be known units, for `5 abc`
            may be a product.
    """
    # Move the number out of the text command: `\text{4 cm}` becomes `4\text{ cm}`.
    if wrapped := _WRAPPED.fullmatch(text):
        number, words = wrapped.groups("")
        text = rf"{number}\text{{{words}}}"

    # Where `split_unit` returns None the body is empty, which is no number.
    body, unit = split_unit(text, is_reference) or ("", "")
    # `2\frac{1}{3}` is matched as `2 1/3`.
    match = _NUMBER.fullmatch(_FRACTION.sub(r"\1 \2/\3", body).strip())
    # An amount in dollars has no other unit, and `\text{4 marbles}` is a phrase.
    if match is None or (match["dollar"] and unit) or (wrapped and unit == LABEL):
        return None
    # Count the signs: before and after a dollar sign, and at the numerator. No number has two.
    if len(match["sign"] + match["sign2"]) + match["top"].startswith("-") > 1:
        return None

    try:
        return Quantity(_value(match.groupdict("")), "dollar" if match["dollar"] else unit)
    except (ValueError, ZeroDivisionError):  # repeating digits but no decimal point, thousands of digits, or n / 0
        return None


def _value(groups: dict[str, str]) -> Fraction:
    """Return the number that the named groups of a match of `_NUMBER` denote; a missing group is an empty text.

    In `2 1/3` the groups whole, top and bottom are 2, 1 and 3; in `4.5` top is all. `power` is the exponent of 10,
    `sign` and `sign2` are the signs before and after a dollar sign.
    """
    top, bottom = (re.sub("[, ]", "", groups[name]) for name in ("top", "bottom"))
    value = Fraction(top) / Fraction(bottom or 1)
    # Add the digits that repeat: the period 6 of 0.1\overline{6} is 6 / (10 * 9).
    if period := groups["period"]:
        decimals = len(top) - 1 - top.index(".")  # digits between the decimal point and the period
        value += Fraction(int(period), 10**decimals * (10 ** len(period) - 1))
    value = (int(groups["whole"] or 0) + value) * Fraction(10) ** int(groups["power"] or 0)
    return -value if "-" in (groups["sign"], groups["sign2"]) else value


_WRAPPED = re.compile(r"\\text\{ ?([^A-Za-z{}]*\d[.%]?)( ?[A-Za-z][^\d{}]*)?\}")  # \text{4 cm}
_INSIDE = r"[^{}]*(?:\{[^{}]*\}[^{}]*)*"
_FACTOR = re.compile(rf"\\text\{{({_INSIDE})\}}")
_POWERED = rf"\\text\{{{_INSIDE}\}}(?: ?\^(?:\{{-?\d\}}|-?\d))?"
_TEXT_UNIT = re.compile(rf" ?(?:\^\\circ|\\mu|/)? ?{_POWERED}(?: ?(?:(?:/|\\cdot) ?)?{_POWERED})*$")
_UNIT_FRACTION = re.compile(rf"\\frac\{{ ?({_POWERED}) ?\}}\{{ ?({_POWERED}) ?\}}$")
_SIGN_UNIT = re.compile(r" ?(%|\^\\circ|¢|€|£)$")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")  # in `\sin 30^\circ` the degree sign is no unit
_PLAIN_UNIT = re.compile(
    r"(?<=[\d}.])( ?)([A-Za-z]+(?:[. ]{1,2}[A-Za-z]+){0,4}[. ]{0,2}(?:\^\{?\d\}?)?(?: ?/ ?[A-Za-z]+(?:\^\{?\d\}?)?)?)$"
)


def split_unit(text: str, is_reference: bool) -> tuple[str, str] | None:
    r"""Split an expression from the unit or label after it, as in `480\sqrt{3}\text{ feet}`.

    The unit is "" where there is none. Return None where words in `\text{...}` follow that are neither a unit nor a
    label. Plain words that may be algebra, a product of letters, stay in the expression.
    """
    # The unit may be a sign, such as `%`. All signs that match are known units, so "" never stands in for one.
    if (match := _SIGN_UNIT.search(text)) and not _FUNCTION.search(text):
        return text[: match.start()], read_unit(match[1], symbols=True) or ""

    # The unit may be words in `\text{...}`, perhaps in a fraction or a product.
    if r"\text{" in text:
        text = _UNIT_FRACTION.sub(r"\1/\2", text)
        if match := _TEXT_UNIT.search(text):
            # Read the words without the command `\text{...}` around them.
            unit = read_unit(_FACTOR.sub(r" \1", match.group()), symbols=True)
            return None if unit is None else (text[: match.start()], unit)

    # The unit may be plain words. Group 1 is the space before them, group 2 the words.
    match = _PLAIN_UNIT.search(text)
    if match and (unit := _plain_unit(match[2], is_apart=bool(match[1]), is_reference=is_reference)):
        return text[: match.start()], unit
    return text, ""


def _plain_unit(words: str, is_apart: bool, is_reference: bool) -> str | None:
    """Return the unit that plain words after a number denote, `LABEL` for a label, or None where there is neither.

    There is neither where words may be algebra or change the number, or where a slash joins words that are no unit.
    `is_apart` is True where a space stands between the number and the words.
    """
    unit, word_list = read_unit(words, symbols=False), re.findall("[A-Za-z]+", words)
    longest = max(map(len, word_list))
    # Single letters are symbols of algebra, except in `5 m/s`.
    if unit != LABEL:
        return unit if longest > 1 or (is_apart and word_list == ["m", "s"] and "/" in words) else None
    # Only an answer has a label: words after a space, one of them of three letters or more.
    return None if is_reference or not is_apart or longest < 3 or "/" in words else unit
