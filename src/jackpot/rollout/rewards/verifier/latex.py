r"""Normalizes LaTeX answers to one spelling. Standard library only.

It changes sizes, spaces, fonts, delimiters and names of the same sign, and never the meaning of an answer.
"""

import re

_SIGNS = {
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
        (r"\\(?:mathbf|boldsymbol|bm|pmb)\s*\{([^{}]*)\}", r"\1"),
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
    )
]
_BOLD = re.compile(r"\s*\*\*((?:[^*]|\*(?!\*))+)\*\*[\s.,;:]*")  # bold text in Markdown
_POWER = re.compile(r" ?\*\* ?(-?\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z]))(?! ?\*\*)")  # of program code; not 2**3**2
_SPACES = re.compile(r"\s+")
_NEEDLESS = re.compile(r"(?<=[^A-Za-z0-9,;}]) |(?<=\}) (?![A-Za-z])| (?![A-Za-z0-9])(?<=[A-Za-z0-9] )")
_COMMAND = re.compile(r"\\(frac|sqrt)(?![A-Za-z])\s*(?=[^\s{\[])")  # followed by an argument without braces
_LOOSE = re.compile(r"(\\(?:frac|sqrt)) +(?=[{\[])|(?<=\}) +(?=\{)")
_HALF_DONE = re.compile(r"(\\frac\{(?:[^{}]|\{[^{}]*\})*\})\s*(?=[^\s{])")
_TOKEN = r"\\[A-Za-z]+|[^{}]"


def normalize(text: str) -> str:
    r"""Return the answer without decoration: `\left( 3, \dfrac{\pi}2 \right)` becomes `(3, \frac{\pi}{2})`.

    A space stays between letters and digits and before words, where it may carry meaning, and after a comma that had
    one: `1, 200` is two numbers, and `1,200` and `1,\! 200` are one. `**` is a power, unless it encloses the whole
    answer (bold in Markdown).
    """
    if bold := _BOLD.fullmatch(text):
        text = bold[1]
    text = _POWER.sub(r"^{\1}", text)
    text = _SIGN.sub(lambda match: _SIGNS[match.group()], text.replace("\0", ""))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _strip_dollars(text.strip())
    text = _SPACES.sub(" ", _add_braces(text)).strip().rstrip(".,;: ")
    return _NEEDLESS.sub("", text)


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
