r"""Normalizes LaTeX answers to one spelling. Standard library only.

It changes sizes, spaces, fonts, delimiters and names of the same sign, and never the meaning of an answer.
"""

import re
import unicodedata

_FRACTIONS = {  # ½ becomes \frac{1}{2}
    sign: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign).split("\N{FRACTION SLASH}"))
    for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SIGNS = _FRACTIONS | {
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
_SIGN = re.compile("|".join(re.escape(sign) for sign in _SIGNS))
_REWRITES = [
    (re.compile(r"(?<!\\)" + pattern), replacement)  # a doubled backslash ends a row of a matrix
    for pattern, replacement in (
        (r"\\!\s*", ""),  # a negative space joins: 1,\! 000
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
    )
]
_BOLD = re.compile(r"\s*\*\*((?:[^*]|\*(?!\*))+)\*\*[\s.,;:]*")  # bold text in Markdown
_POWER = re.compile(r" ?\*\* ?(-?\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z]))(?! ?\*\*)")  # of program code; not 2**3**2
_ROOT = re.compile(r"√ ?(?:\(([^()]*)\)|(\d+(?:\.\d+)?(?![\d.]*[\^!])|[A-Za-z](?![A-Za-z_^]))|(?=[\\{]))")  # not √2^3
_SUPERSCRIPT = re.compile("⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_E_NOTATION = re.compile(r"(?<![\w.\\^])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d+)(?!\d|\.\d|\}?_)")  # but 1E5_{16} has a base
# What a number that stands alone is between:
_BEGINS = re.compile(r"(?:^|[,;=:(\[]|\\\{|\\(?:approx|sim|pm))[\s$]*[-+]?$")
_ENDS = re.compile(r"[\s$]*(?:$|[,;=:)\]%~.]|\\(?:text|mathrm|[%},;: ]))|\s[A-Za-z]")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,},? [A-Za-z]{2,}")
_SPACES = re.compile(r"\s+")
_NEEDLESS = re.compile(r"(?<=[^A-Za-z0-9,;}]) |(?<=\}) (?![A-Za-z])| (?![A-Za-z0-9])(?<=[A-Za-z0-9] )")
_COMMAND = re.compile(  # followed by an argument without braces
    r"\\(frac(?![A-Za-z])|sqrt(?:\[[^][{}]*\]|(?![A-Za-z])))\s*(?=[^\s{\[])"
)
_LOOSE = re.compile(r"(\\(?:frac|sqrt)) +(?=[{\[])|(?<=\}) +(?=\{)")
_HALF_DONE = re.compile(r"(\\frac\{(?:[^{}]|\{[^{}]*\})*\})\s*(?=[^\s{])")
_TOKEN = r"\\[A-Za-z]+|[^{}]"


def normalize(text: str) -> str:
    r"""Return the answer without decoration: `\left( 3, \dfrac{\pi}2 \right)` becomes `(3, \frac{\pi}{2})`.

    A space stays between letters and digits and before words, where it may carry meaning, and after a comma that had
    one: `1, 200` is two numbers, and `1,200` and `1,\! 200` are one. `**` is a power, unless it encloses the whole
    answer (bold in Markdown). `4.5e33` becomes `4.5\times 10^{33}`, whereas the e of `2e - 3` and `2e^3` is the number.
    """
    if text.isascii() and text.isdecimal():
        return text
    if bold := _BOLD.fullmatch(text):
        text = bold[1]
    text = _POWER.sub(r"^{\1}", text)
    text = _SIGN.sub(lambda match: _SIGNS[match.group()], text.replace("\0", ""))
    text = _E_NOTATION.sub(_power_of_ten, _SUPERSCRIPT.sub(_superscript, text))
    text = _ROOT.sub(lambda match: rf"\sqrt{{{root}}}" if (root := match[1] or match[2]) else r"\sqrt ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _strip_dollars(text.strip())
    text = _SPACES.sub(" ", _add_braces(text)).strip().rstrip(".,;: ")
    return _NEEDLESS.sub("", text)


def without_text_marks(text: str) -> str:
    r"""Return a normalized text with the content of each `\text{...}` in its place."""
    return " ".join(_TEXT.sub(r" \1 ", text).split())


def has_prose(text: str) -> bool:
    r"""Return whether a normalized text has two words in a row outside of `\text{...}`."""
    return _PROSE.search(_TEXT.sub(" ", text)) is not None


def _superscript(match: re.Match[str]) -> str:
    """Return a power in Unicode, such as ² or ⁻³, in LaTeX."""
    digits = match.group().translate(_SUPERSCRIPTS)
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"


def _power_of_ten(match: re.Match[str]) -> str:
    r"""Return e-notation as `4.5\times 10^{33}`, in parentheses below a slash.

    An exponent with a sign must belong to a number that stands alone: `e^2-2e-3` and `(3e-1)/2` are sums.
    """
    before, after = match.string[: match.start()], match.string[match.end() :]
    if not match[2].isdecimal():
        in_brackets = before.rstrip("+- ").endswith(("(", "[")) and after.lstrip().startswith((")", "]"))
        if in_brackets or not _BEGINS.search(before) or not _ENDS.match(after):
            return match.group()
    number = rf"{match[1]}\times 10^{{{match[2].removeprefix('+')}}}"
    return f"({number})" if before.endswith("/") else number


def _strip_dollars(text: str) -> str:
    r"""Remove dollar signs that delimit formulas; those of amounts, `\$5` and `$5`, stay as `\$`."""
    bare = re.findall(r"(?<!\\)\$", text)
    if len(bare) % 2 == 0:
        return re.sub(r"(?<!\\)\$", " ", text).strip()
    return re.sub(r"(?<!\\)\$", r"\\$", text)


def _add_braces(text: str) -> str:
    r"""Add the braces that `\frac12`, `\frac{1}b` and `\sqrt3` leave out."""
    text = _COMMAND.sub(r"\\\1\0", _LOOSE.sub(r"\1", text))  # NUL marks where the next token is an argument
    text = re.sub(rf"\0({_TOKEN})", r"{\1}", text)
    text = _HALF_DONE.sub(r"\1\0", text)
    return re.sub(rf"\0({_TOKEN})", r"{\1}", text).replace("\0", "")
