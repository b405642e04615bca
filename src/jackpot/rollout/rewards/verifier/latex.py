r"""Normalization of LaTeX answers to one spelling. Standard library only.

Normalization changes sizes, spaces, fonts, delimiters and synonyms of signs, and never the meaning of an answer.
"""

import re
import unicodedata

_FRACTIONS = {  # ½ becomes \frac{1}{2}
    sign: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign).split("\N{FRACTION SLASH}"))
    for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SIGNS = _FRACTIONS | {  # replacements of single signs and commands
    "\N{MINUS SIGN}": "-",
    "∞": r"\infty ",
    "π": r"\pi ",
    "°": r"^\circ ",
    "\N{MULTIPLICATION SIGN}": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "\N{UNION}": r"\cup ",
    "∈": r"\in ",
    "\N{NO-BREAK SPACE}": " ",
    "\N{THIN SPACE}": " ",
    "~": " ",
    "{,}": ",",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"^{\circ}": r"^\circ ",
    r"^{\prime}": "'",
    r"\varnothing": r"\emptyset ",
    "...": r"\ldots ",
    "…": r"\ldots ",
}
_E_NOTATION = r"(?<![\w.\\^])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d+)(?!\d|\.\d|\}?_)"  # 1E5, but not 1E5_{16} in base 16
# A number in e-notation stands alone if `_BEGINS` matches the text before it, and `_ENDS` the text after it.
_BEGINS = re.compile(r"(?:^|[,;=:(\[]|\\\{|\\(?:approx|sim|pm))(?:\s|\\?\$)*[-+]?$")
_ENDS = re.compile(r"(?:\s|\\?\$)*(?:$|[,;=:)\]%~.]|\\(?:text|mathrm|[%},;: ]))|\s[A-Za-z]")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,},? [A-Za-z]{2,}")
_TOKEN = r"(\\[A-Za-z]+|[^{}])"  # noqa: S105


def normalize(text: str) -> str:
    r"""Return the answer without decoration: `\left( 3, \dfrac{\pi}2 \right)` becomes `(3, \frac{\pi}{2})`.

    A space stays between letters and digits and before words, where it may carry meaning, and after a comma that had
    one: `1, 200` is two numbers, and `1,200` and `1,\! 200` are one. `**` is a power, unless it encloses the whole
    answer (bold in Markdown). `4.5e33` becomes `4.5\times 10^{33}`, whereas the e of `2e - 3` and `2e^3` is Euler's
    number. Dollar signs around formulas are removed; a dollar sign of an amount, `\$5` or `$5`, becomes `\$`.
    """
    if text.isascii() and text.isdecimal():
        return text
    # An odd number of dollar signs cannot enclose formulas, so that they belong to amounts.
    text = _DOLLAR.sub(r"\\$" if len(_DOLLAR.findall(text)) % 2 else " ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def without_text_marks(text: str) -> str:
    r"""Return a normalized text in which each `\text{...}` is replaced by its content."""
    return " ".join(_TEXT.sub(r" \1 ", text).split())


def has_prose(text: str) -> bool:
    r"""Return whether a normalized text has two words in a row outside of `\text{...}`."""
    return _PROSE.search(_TEXT.sub(" ", text)) is not None


def _power_of_ten(match: re.Match[str]) -> str:
    r"""Return a number in e-notation, such as `4.5e33`, as `4.5\times 10^{33}`; after a slash it gets parentheses.

    If the exponent has a sign, the number must stand alone: `e^2-2e-3` and `(3e-1)/2` are sums with Euler's number, and
    are returned unchanged. Group 1 of `match` (`_E_NOTATION`) is the number before the `e`, group 2 the exponent.
    """
    before, after = match.string[: match.start()], match.string[match.end() :]
    if not match[2].isdecimal():  # the exponent has a sign
        # Whether brackets hold nothing but the number, as in `(3e-1)/2`: then it may be a sum inside a product.
        in_brackets = before.rstrip("+- ").endswith(("(", "[")) and after.lstrip().startswith((")", "]"))
        # Outside brackets it stands alone between what `_BEGINS` and `_ENDS` match, such as the ends of the text.
        if in_brackets or not _BEGINS.search(before) or not _ENDS.match(after):
            return match.group()

    power = rf"{match[1]}\times 10^{{{match[2].removeprefix('+')}}}"
    return f"({power})" if before.endswith("/") else power


_DOLLAR = re.compile(r"(?<!\\)\$")
_COMMANDS = [  # not applied to a backslash that follows another, since the two together end a row of a matrix
    (r"\\!\s*", ""),  # a negative space joins the digits around it: 1,\! 000
    (r"\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr)(?![A-Za-z])\s*\.?", ""),
    (r"\\(?:displaystyle|textstyle|limits|nolimits)(?![A-Za-z])", ""),
    (r"\\phantom\s*(?:\{[^{}]*\}|[^\\{}])", ""),
    (r"\\(?:mathbf|boldsymbol|bm|pmb|underline)\s*\{([^{}]*)\}", r"\1"),
    (r"\\(?:text)?color\s*\{[^{}]*\}(?:\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\})?", r"\1"),
    (r"\\(?:mbox|hbox|textrm|textbf|textit|textnormal|textsf|mathrm|mathit)\s*\{", r"\\text{"),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\(?:leqslant|leq)(?![A-Za-z])", r"\\le "),
    (r"\\(?:geqslant|geq)(?![A-Za-z])", r"\\ge "),
    (r"\\degrees?(?![A-Za-z])", r"^\\circ "),
    (r"\\%", "%"),
    (r"\\(?:[ ,;:]|quad(?![A-Za-z])|qquad(?![A-Za-z]))", " "),
    (r"\\[()\[\]]", " "),  # delimiters of formulas
    (r"(?<![A-Za-z])pi(?![A-Za-z])", r"\\pi "),
    (r"(?<![A-Za-z])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![A-Za-z])(?:infinity|inf)(?![A-Za-z])", r"\\infty "),
    (r"\+ ?\\infty", r"\\infty"),
    (r"\\text\{\s*(\\(?:pi|infty)) ?\}", r"\1 "),
    (r"\\text\{([A-Za-z])\}(?=\s*=)", r"\1"),
    (r"\\rightarrow(?![A-Za-z])", r"\\to "),
]
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("\0", ""),
        (r"^\s*\*\*((?:[^*]|\*(?!\*))+)\*\*[\s.,;:]*$", r"\1"),  # bold text in Markdown
        (r" ?\*\* ?(-?\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z]))(?! ?\*\*)", r"^{\1}"),  # the power 2**3, not 2**3**2
        ("|".join(map(re.escape, _SIGNS)), lambda match: _SIGNS[match.group()]),
        ("(?<![⁻⁰¹²³⁴⁵⁶⁷⁸⁹])[⁰¹²³⁴⁵⁶⁷⁸⁹](?![⁰¹²³⁴⁵⁶⁷⁸⁹])", lambda match: "^" + match[0].translate(_SUPERSCRIPTS)),
        ("⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}"),
        (_E_NOTATION, _power_of_ten),
        # Replace √ and what follows it: parentheses, a number (but not in √2^3) or a letter. Before a brace or a
        # command, which may be long, replace the sign alone.
        (
            r"√ ?(?:\(([^()]*)\)|(\d+(?:\.\d+)?(?![\d.]*[\^!])|[A-Za-z](?![A-Za-z_^]))|(?=[\\{]))",
            lambda match: rf"\sqrt{{{match[1] or match[2]}}}" if match.lastindex else r"\sqrt ",
        ),
        *((r"(?<!\\)" + pattern, replacement) for pattern, replacement in _COMMANDS),
        # Add the braces that \frac12, \frac{1}b and \sqrt3 leave out; NUL marks where the next token is an argument.
        (r"(\\(?:frac|sqrt)) +(?=[{\[])|(?<=\}) +(?=\{)", r"\1"),
        (r"\\(frac(?![A-Za-z])|sqrt(?:\[[^][{}]*\]|(?![A-Za-z])))\s*(?=[^\s{\[])", "\\\\\\1\0"),
        ("\0" + _TOKEN, r"{\1}"),
        (r"(\\frac\{(?:[^{}]|\{[^{}]*\})*\})\s*(?=[^\s{])", "\\1\0"),
        ("\0" + _TOKEN, r"{\1}"),
        ("\0", ""),
        # Remove spaces that mean nothing, and the punctuation at the end.
        (r"\s+", " "),
        (r"^ |[ .,;:]+$", ""),
        (r"(?<=[^A-Za-z0-9,;}]) |(?<=\}) (?![A-Za-z])| (?![A-Za-z0-9])(?<=[A-Za-z0-9] )", ""),
    )
]
