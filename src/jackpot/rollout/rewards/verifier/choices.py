"""Judging of answers to multiple-choice problems. Standard library only."""

import re
from collections.abc import Callable
from typing import NamedTuple

from jackpot.rollout.rewards.verifier.extract import MAX_ANSWER_LENGTH
from jackpot.rollout.rewards.verifier.latex import has_prose, normalize, without_text_marks
from jackpot.rollout.rewards.verifier.numbers import parse_quantity

_REFERENCE = re.compile(  # `(B)` or `\text{(B)}`, perhaps with the option's text behind it
    r"(\\(?:text|textbf|textrm|mathrm|mathbf)\{ ?)?\((?P<letter>[A-Z])\)"
    r"(?(1)\s*\}\s*(?P<option>.*)|(?:\s+(?P<bare_option>\S.*))?)",
    re.DOTALL,
)
# What follows `(A)` where it is no option but the start of a formula, such as `(A) \cup (B)`
_NO_OPTION = re.compile(r"[=^_*/<>]|[-+]\s|\\(?:cup|cap|times|cdot|in|subset|le|ge|to)")
_GIVEN = re.compile(  # the letter at the start of an answer, such as `B`, `(B)`, `B.` or `the answer is B`
    r"(?:(?:the )?(?:correct )?(?:answer|option|choice)(?: is)?:? ?)?"
    r"(?:\(([A-Z])\)|([A-Z])(?=[.:)]|$)) ?[.:)]? ?",
    re.IGNORECASE,
)
_LEADING_TEXT = re.compile(r"\\text\{ ?([^{}]*)\}")
# What follows a letter where the answer is not simply that option: a formula, a denial, or another option's letter.
_NOT_ITS_TEXT = re.compile(
    r"[+*/^_=<>]|[A-Z]$|(?:is|was) (?:wrong|incorrect|false|not)\b"
    r"|.*?(?:\([A-Z]\)|(?<![A-Za-z\\])[A-Z][.:)]|(?:\b(?:or|and)|[,;/&]) ?[A-Z](?![A-Za-z])"
    r"|(?:\b(?:or|and)|[,;/&]) ?\([a-z]\)|\b(?:option|choice|answer) \(?[a-z](?![a-z]))"
)


class Choice(NamedTuple):
    """The right option of a multiple-choice problem."""

    letter: str  # capital letter of the option
    option: str  # text of the option, normalized; empty where it is unknown


def choice(letter: str, option: str = "") -> str:
    """Return the reference of a multiple-choice problem: `(B)`, or `(B) 142` with the text of the option.

    The text is left out if it would make the reference too long to be compared.
    """
    # In dollar signs a text that would continue a formula counts as an option. 4 characters are the letter's: `(B) `.
    text = " ".join(option.split())
    text = f"${text}$" if _NO_OPTION.match(text) else text
    return f"({letter.upper()}) {text}" if 0 < len(text) < MAX_ANSWER_LENGTH - 4 else f"({letter.upper()})"


def parse_choice(reference: str) -> Choice | None:
    r"""Return the choice that a reference names, or None where there is no choice: `(A) \cup (B)` is an expression.

    The reference is a letter in parentheses, `(B)` or `\text{(B)}`, which the text of the option may follow: `(B) 142`.
    """
    # The option's text is in one of two groups, and is no option if it continues a formula (`_NO_OPTION`).
    match = _REFERENCE.fullmatch(reference.strip())
    if match is None or _NO_OPTION.match(option := match["option"] or match["bare_option"] or ""):
        return None
    return Choice(match["letter"], normalize(option))


def letter_choice(text: str) -> str | None:
    """Return a text that names a letter (`B`, `b`, `(B)`, `B. 142`) as a reference such as `(B)`; None for others."""
    letter, rest = _given(text.strip())
    # A text that is a reference already stays as it is.
    return text if parse_choice(text[:MAX_ANSWER_LENGTH]) else choice(letter, rest) if letter else None


def is_choice(answer: str, reference: Choice, compare: Callable[[str, str], bool]) -> bool:
    """Return whether a normalized answer names the choice `reference`.

    A right answer is the letter in any usual form (`B`, `(B)`, `B.`, `Option B`), alone or before the option's text, or
    that text alone. If an answer has a letter, the letter counts: another letter is wrong whatever follows, and the
    right letter before another text is wrong too. If the reference has no text, any text but another choice may follow
    the letter.

    Args:
        compare: compares two normalized texts that are no choices.
    """
    letter, rest = _given(answer)  # "" and the whole answer where it begins with no letter of an option
    # Without a capital letter at its start, the answer is another spelling of the letter, or the option's text.
    if not letter.isupper():
        return compare(answer, f"({reference.letter})") or _is_option(answer, reference.option, compare)
    if letter != reference.letter or not rest:  # another letter, or the right letter alone
        return letter == reference.letter
    # A text follows the right letter: it must be the option's text, if that is known, and else not another choice.
    return _is_option(rest, reference.option, compare) if reference.option else _NOT_ITS_TEXT.match(rest) is None


def _given(text: str) -> tuple[str, str]:
    """Split a text into the letter of an option at its start, empty if there is none, and the rest of the text."""
    bare = _LEADING_TEXT.sub(r"\1", text, count=1) if text.startswith(r"\text") else text
    match = _GIVEN.match(bare)  # group 1 is a letter in parentheses, group 2 a bare one
    return (match[1] or match[2], bare[match.end() :].strip()) if match else ("", text)


def _is_option(answer: str, option: str, compare: Callable[[str, str], bool]) -> bool:
    """Return whether an answer is the text of an option, as prose or mathematics; False if the option has no text."""
    mine, theirs = (without_text_marks(text).strip(" .").lower() for text in (answer, option))
    if not option or mine == theirs:
        return option != ""
    # Prose must be the same text; a number or formula may be written in another way.
    is_prose = has_prose(option) and parse_quantity(option, is_reference=True) is None
    return not is_prose and compare(answer, option)
