r"""Parses numbers and their units exactly. Standard library only.

A number is an integer, a decimal, a fraction (`a/b`, `\frac{a}{b}`) or a mixed number (`2\frac{1}{3}`, `2 1/3`), with a
sign and with commas or thin spaces between thousands. Its value is a `fractions.Fraction`: 0.1 + 0.2 is 0.3, and 0.333
is not 1/3. A number may be followed by

- a unit that is known (`_UNITS`): it must be the same on both sides where both have one, so 5 cm is 5, and not 5 m;
- a percent or degree sign, or preceded by a dollar sign: these are known units too;
- a label, `\text{right triangles}`, or in an answer plain words after a space such as `18 eggs`: it is ignored, but it
  does not match a reference with a unit: 5 nanometers is not 5 m. A word that changes the number or joins two
  (`dozen`, `eighths`, `or`; `_MEANINGFUL`) is no label, and the text is then no number.

Nothing is converted: 50 % is 50 with a unit and not 0.5, 1 m is not 100 cm.
"""

import re
from fractions import Fraction
from typing import NamedTuple

_UNITS = {
    "percent": "% percent percentage pct",
    "degree": r"^\circ degree deg",
    "dollar": r"\$ dollar usd buck",
    "cent": "cent ¢",
    "euro": "euro € eur",
    "pound": "lb lbs pound £",
    "ounce": "ounce oz",
    "millimeter": "mm millimeter millimetre",
    "centimeter": "cm centimeter centimetre",
    "meter": "m meter metre",
    "kilometer": "km kilometer kilometre",
    "inch": "inch inche in",
    "foot": "foot feet ft",
    "yard": "yard yd",
    "mile": "mile mi",
    "acre": "acre",
    "gram": "g gram",
    "kilogram": "kg kilogram",
    "liter": "liter litre l",
    "milliliter": "ml milliliter millilitre",
    "gallon": "gallon gal",
    "second": "second sec s",
    "minute": "minute min",
    "hour": "hour hr h",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "year yr",
    "mph": "mph",
    "radian": "radian rad",
}
_CANONICAL = {word: unit for unit, words in _UNITS.items() for word in words.split()}
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_MEANINGFUL = frozenset(
    word
    for line in (
        "hundred thousand million billion trillion quadrillion dozen score gross lakh crore half halves third quarter",
        "fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth",
        "seventeenth eighteenth nineteenth twentieth thirtieth fortieth fiftieth sixtieth seventieth eightieth",
        "ninetieth hundredth thousandth millionth billionth",
        "ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety",
        "factorial negative inverse reciprocal repeating recurring choose power exp log ln lg sin cos tan cot sec csc",
        "arcsin arccos arctan sinh cosh tanh",
        "k or and to by pi plus minus times over divided squared cubed mod base sqrt infinity",
        "if with remainder r not between than without except",
    )
    for word in line.split()
)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d*|\.\d+|(?<=\d))"
_FRACTION = rf"\\frac\{{(?P<{{0}}top>-?{_DIGITS})\}}\{{(?P<{{0}}bottom>-?{_DIGITS})\}}"
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?P<dollar>\\\$)? ?(?P<sign2>-?)(?:"
    + r"(?P<whole>\d+) ?" + _FRACTION.replace("{0}", "mixed_")
    + r"|(?P<whole2>\d+) (?P<top2>\d+)/(?P<bottom2>\d+)"
    + "|" + _FRACTION.replace("{0}", "")
    + rf"|(?P<top3>{_DIGITS})/(?P<bottom3>{_DIGITS})"
    + rf"|(?P<plain>{_DIGITS}))"
)  # fmt: skip
_MAX_NUMBER_LENGTH = 1_000  # characters
LABEL = "label"  # the unit of a number that is followed by other words


class Quantity(NamedTuple):
    """Holds a number and its unit."""

    value: Fraction  # exact
    unit: str  # a key of `_UNITS`, with `^2` or `^3` for a power; LABEL; empty where there is none


class MeasuredExpression(NamedTuple):
    """Holds an expression and the unit behind it."""

    text: str
    unit: str  # as in `Quantity`


def parse_quantity(text: str, is_reference: bool) -> Quantity | None:
    """Return the number that a normalized text denotes; None where it is no number or has over a thousand characters.

    Args:
        is_reference: whether the text is the reference. Plain words after its number must be known units, for `5 abc`
            may be a product.
    """
    body = split_unit(text, is_reference)
    if body is None or not body.text or len(body.text) > _MAX_NUMBER_LENGTH:
        return None
    match = _NUMBER.fullmatch(body.text)
    if match is None or (match["sign"] and match["sign2"]) or (match["dollar"] and body.unit):
        return None
    value = _value(match.groupdict())
    if value is None:
        return None
    negative = "-" in (match["sign"], match["sign2"])
    return Quantity(-value if negative else value, "dollar" if match["dollar"] else body.unit)


def units_agree(given: str, wanted: str) -> bool:
    """Return whether an answer's unit fits the reference's: a known unit accepts only itself or no unit."""
    return wanted in ("", LABEL) or given in ("", wanted)


_TEXT_UNIT = re.compile(r" ?\\text\{([^{}]*)\}(?:\^\{?(\d)\}?)?$")
_SIGN_UNIT = re.compile(r" ?(%|\^\\circ|¢|€|£)$")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")  # a trailing degree sign belongs to its argument
_PLAIN_UNIT = re.compile(r"(?<=[\d}.])( ?)([A-Za-z]+(?:[. ]{1,2}[A-Za-z]+){0,4}[. ]{0,2})(?:\^\{?(\d)\}?)?$")


def split_unit(text: str, is_reference: bool) -> MeasuredExpression | None:
    r"""Split an expression from the unit or label after it, as in `480\sqrt{3}\text{ feet}`.

    Return None where other words follow, so that they are not taken for a product of letters.
    """
    if (match := _SIGN_UNIT.search(text)) and not _FUNCTION.search(text):
        return MeasuredExpression(text[: match.start()], _CANONICAL[match[1]])
    if match := _TEXT_UNIT.search(text):
        unit = _unit(match[1], match[2])
        return None if unit is None else MeasuredExpression(text[: match.start()], unit)
    match = _PLAIN_UNIT.search(text)
    if match is None:
        return MeasuredExpression(text, "")
    unit, letters = _unit(match[2], match[3]), match[2].strip()
    if unit is None or (unit != LABEL and len(letters) < 2):
        return MeasuredExpression(text, "")
    if unit == LABEL and (is_reference or not match[1] or max(map(len, letters.split())) < 3):
        return MeasuredExpression(text, "")
    return MeasuredExpression(text[: match.start()], unit)


def _unit(words: str, power: str | None) -> str | None:
    """Return the known unit, `LABEL` for other words, "" for no words, or None for words of `_MEANINGFUL`."""
    parts = [part for part in re.split(r"[\s.]+", words.lower()) if part]
    parts = [part if part in _MEANINGFUL else _singular(part) for part in parts]
    unit_words = parts
    if parts and parts[0] in _POWERS:
        power, unit_words = _POWERS[parts[0]], parts[1:]
    if known := _CANONICAL.get(" ".join(unit_words)):
        return f"{known}^{power}" if power else known
    if any(part in _MEANINGFUL or re.search(r"\d|[=<>+*/^_]", part) for part in parts) or len(parts) > 5:
        return None
    return LABEL if parts else ""


def _singular(word: str) -> str:
    """Return a word without its plural s; `ms` and `ls` are not plurals of one letter."""
    return word if word in _CANONICAL or not word.endswith("s") or len(word) < 3 else word[:-1]


def _value(groups: dict[str, str | None]) -> Fraction | None:
    """Return the number of a match of `_NUMBER` without its sign; None for a denominator of zero."""

    def number(name: str) -> Fraction:
        """Return the number of a group, 0 where the group did not match."""
        return Fraction((groups[name] or "0").replace(",", "").replace(" ", ""))

    if groups["plain"] is not None:
        return number("plain")
    top = next(name for name in ("mixed_top", "top", "top2", "top3") if groups[name] is not None)
    bottom = number(top.replace("top", "bottom"))
    if bottom == 0:
        return None
    whole = number("whole") + number("whole2")
    return whole + number(top) / bottom
