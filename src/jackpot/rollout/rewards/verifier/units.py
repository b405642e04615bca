"""Reading of units of measure and labels. Standard library only."""

import re
from collections import Counter

_UNITS = {  # words and symbols of each unit
    "percent": "% percent percentage pct",
    "degree": "degree deg",
    "celsius": "celsius",
    "fahrenheit": "fahrenheit",
    "dollar": r"\$ dollar usd buck",
    "cent": "cent ¢",
    "euro": "euro € eur",
    "pound": "lb lbs pound £",
    "ounce": "ounce oz",
    "millimeter": "mm",
    "centimeter": "cm",
    "meter": "m",
    "kilometer": "km",
    "inch": "inch inche in",
    "foot": "foot feet ft",
    "yard": "yard yd",
    "mile": "mile mi",
    "acre": "acre",
    "gram": "g",
    "kilogram": "kg",
    "liter": "l",
    "milliliter": "ml",
    "gallon": "gallon gal",
    "second": "sec s",
    "minute": "minute min",
    "hour": "hour hr h",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "year yr",
    "a.m.": "am",
    "p.m.": "pm",
    "radian": "radian rad",
}
_SI = {  # by symbol, the names of a unit; symbols and names may have a prefix such as kilo
    "m": "meter metre",
    "g": "gram",
    "l": "liter litre",
    "L": "liter",
    "s": "second",
    "N": "newton",
    "J": "joule",
    "W": "watt",
    "V": "volt",
    "A": "ampere amp",
    "C": "coulomb",
    "F": "farad",
    "H": "henry",
    "K": "kelvin",
    "T": "tesla",
    "Pa": "pascal",
    "Hz": "hertz",
    "mol": "mole",
    "eV": "electronvolt",
    "cal": "calorie",
    "Ω": "ohm",
}
_PREFIXES = {
    "": "",
    "k": "kilo",
    "M": "mega",
    "G": "giga",
    "c": "centi",
    "d": "deci",
    "m": "milli",
    "\N{GREEK SMALL LETTER MU}": "micro",
    "\N{MICRO SIGN}": "micro",
    "n": "nano",
    "p": "pico",
}
_CANONICAL = {word: unit for unit, words in _UNITS.items() for word in words.split()} | {
    long + name: long + names.split()[0]
    for names in _SI.values()
    for name in names.split()
    for long in _PREFIXES.values()
}
_SYMBOLS = {  # known in \text{...} only: elsewhere `mg` may be a product of letters
    short + symbol: long + names.split()[0] for symbol, names in _SI.items() for short, long in _PREFIXES.items()
}
_SPELLINGS = [
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"\b([ap])\. ?m\b\.?", r"\1m"),
        (r"\^\\circ", "degree"),
        (r"\bdeg(?:ree)?s? ?c(?:elsius)?\b", "celsius"),
        (r"\bdeg(?:ree)?s? ?f(?:ahrenheit)?\b", "fahrenheit"),
        (r"\\mu(?![A-Za-z]) *", "\N{GREEK SMALL LETTER MU}"),
    )
]
_PRODUCTS = [
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"\bper\b", "/"),
        (r"\bmph\b", "mile hour^-1"),
        (r"\bk(?:p|m)h\b", "kilometer hour^-1"),
        (r"\b(?:square|sq)\b[. ]*([a-z]+)", r"\1^2"),
        (r"\b(?:cubic|cu)\b[. ]*([a-z]+)", r"\1^3"),
        (r"([a-z]) squared\b", r"\1^2"),
        (r"([a-z]) cubed\b", r"\1^3"),
        (r"\\cdot(?![a-z])|[.()*-](?!\d)", " "),
    )
]
_FACTOR = re.compile(r"([^\W\d_]+|[%¢€£]|\\\$)(?: ?\^\{?(-?\d)\}?)?")
_MEANINGFUL = frozenset(  # words that change the number before them or join it with another: they are no label
    word
    for line in (
        "hundred thousand dozen score gross lakh crore half halves third quarter",
        "fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth",
        "seventeenth eighteenth nineteenth twentieth thirtieth fortieth fiftieth sixtieth seventieth eightieth",
        "ninetieth hundredth thousandth millionth billionth",
        "ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety",
        "factorial negative inverse reciprocal repeating recurring choose power exp log ln lg sin cos tan cot sec csc",
        "arcsin arccos arctan sinh cosh tanh",
        "k or and to by pi plus minus times over divided squared cubed mod base sqrt infinity",
        "if with remainder r not between than without except double twice thrice triple quadruple below",
        "point comma halved doubled tripled quadrupled modulo",
        "kilo mega giga tera milli micro nano pico centi deci bn mn",
    )
    for word in line.split()
)
_MILLIONS = re.compile("[a-z]+illions?")
_NO_LABEL = re.compile(r"\d|[=<>+*^_\\{}]|(?<![a-z])/|/(?![a-z])")
_MOST_WORDS = 5  # largest number of words of a label
LABEL = "label"  # stands for a unit where other words follow a number, such as `apples`
_K = "K"  # stands for the unit of `5 K`, which may be 5 kelvin or 5 thousand (`units_agree`)


def read_unit(text: str, symbols: bool) -> str | None:
    r"""Return the unit that a text after a number denotes, `LABEL` for other words, or "" where there is no text.

    The unit of a mere `K` is `_K`, for it may mean kelvin or thousand. The result is None where the text changes the
    number, as `dozen` does, has mathematics or too many words, or is a single letter.

    A unit is a word or symbol of `_UNITS` or `_SI`, or a product or quotient of units in any usual spelling: `km/h`,
    `kilometers per hour`, `ft/s^2`, `m s^{-2}`, `cubic feet`. Units are not converted.

    Args:
        text: content of `\text{...}`, or the text after a number, such as ` km/h`; powers are in LaTeX.
        symbols: whether the symbols of `_SI`, such as `mg`, are units and not products of letters.
    """
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    if text.strip() == _K:
        return _K
    if unit := _product(text, symbols):
        return unit

    # The text is no unit. Refuse words that change the number; a slash separates words here, as in `half/day`.
    words = [word for word in re.split(r"[\s.]+", text.lower()) if word]
    words_without_slash = re.split(r"[\s./]+", text.lower())
    if any(_MEANINGFUL & {word, _singular(word)} or _MILLIONS.fullmatch(word) for word in words_without_slash):
        return None
    # A label is a few words, without mathematics, and no single letter.
    if len(words) > _MOST_WORDS or any(map(_NO_LABEL.search, words)) or (len(words) == 1 and len(words[0]) == 1):
        return None
    return LABEL if words else ""


def units_agree(answer: str, reference: str) -> bool:
    """Return whether the unit of an answer agrees with the unit of the reference.

    Where both have a unit, the units must be equal. Every unit agrees with a label of the reference, such as `apples`.
    A label of the answer agrees with no unit. An answer's `K` agrees with kelvin and `K` alone, not with a number
    without unit, because it may mean thousand.
    """
    if answer == _K:  # kelvin or thousand
        return reference in (_K, "kelvin")
    # Units agree if one side has none, if they are equal, if the reference has a label, or if the answer has kelvin
    # and the reference `K`.
    return answer in ("", reference) or reference in ("", LABEL) or (answer, reference) == ("kelvin", _K)


def _product(text: str, symbols: bool) -> str | None:
    """Return a product of units in alphabetical order, such as `hour^-1 kilometer`, or "" where all units cancel.

    Return None where a word is no unit, and where the text is no product. With `symbols`, those of `_SI` are units too.
    """
    # Spell products in one way: `per` is a slash, and `square meter` becomes `meter^2`.
    for pattern, replacement in _PRODUCTS:
        text = pattern.sub(replacement, text)
    numerator, *denominators = text.split("/")
    # Refuse a slash with nothing after it, and text that is neither a word, a power nor a slash.
    if not all(map(str.strip, denominators)) or _FACTOR.sub("", text.replace("/", "")).strip():
        return None

    powers = Counter[str]()  # exponent of each unit; "" stands for a word that is no unit
    # A factor is a word and its power; a denominator's powers count as negative.
    for factors, sign in ((numerator, 1), (" ".join(denominators), -1)):
        for word, power in _FACTOR.findall(factors):
            powers[_known(word, symbols) or ""] += sign * int(power or 1)

    if "" in powers:
        return None
    return " ".join(unit if power == 1 else f"{unit}^{power}" for unit, power in sorted(powers.items()) if power)


def _known(word: str, symbols: bool) -> str | None:
    """Return the unit that a word or symbol denotes, or None; with `symbols`, those of `_SI` are units too.

    The case of a single letter matters, unlike that of a word.
    """
    if unit := _CANONICAL.get(word) or (_SYMBOLS.get(word) if symbols else None):
        return unit
    return _CANONICAL.get(_singular(word.lower())) if len(word) > 1 else None


def _singular(word: str) -> str:
    """Return a word without its plural s; `ms` and `ls` are not plurals of one letter."""
    return word if word in _CANONICAL or not word.endswith("s") or len(word) < 3 else word[:-1]
