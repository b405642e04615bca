r"""Is an answer right? Standard library only; what needs algebra is handed to `ask`.

Both sides are cleaned (`latex.py`) and then compared by what the *reference* is:

| the reference is | the answer must be |
|---|---|
| spelt like the answer | |
| a number (`quantities.py`) | an equal number, exactly, and no other unit; or an expression of that value |
| a number in a base, `12_5` (2 to 36, with a digit) | the same digits, in that base if it names one |
| words, a letter, `\text{Evelyn}`, `\text{(C)}` | the same; case counts in letters and where all are capitals |
| a tuple, interval, ratio, matrix, list of words (`structure.py`) | the same brackets and members, in order |
| a union, set, other list | as many members, each right, in any order |
| `x = ...`, `x \in ...` | the same after the same letter, or without any |
| any other expression | an equal expression: `ask` |

A verdict is True, False or None: not known without algebra.
"""

import re
from collections.abc import Callable, Iterable
from fractions import Fraction

from jackpot.rollout.rewards.verifier.extract import LONGEST
from jackpot.rollout.rewards.verifier.latex import clean
from jackpot.rollout.rewards.verifier.numbers import Body, Quantity, read_quantity, split_unit, units_agree
from jackpot.rollout.rewards.verifier.structure import Structure, read_structure

VERIFY = "verify"  # the job of a reward worker that compares an answer with a reference
Verdict = bool | None
Ask = Callable[[str, str], Verdict]  # an answer and a reference, both cleaned, one expression each

_BASE = re.compile(r"(-?)(?:\\text\{)?(?=[A-Za-z]*[0-9])([0-9A-Za-z]+)\}?_\{?([0-9]{1,2})\}?")  # no digit: a variable
_BASE_WITHIN = re.compile(r"(?<!\^)(?<!\^\{)(?<![0-9A-Za-z])[0-9]+\}?_\{?([0-9A-Za-z]+)")  # and no limit: \int^1_0
_SMALLEST_BASE, _GREATEST_BASE = 2, 36
_OPEN = re.compile(r"\\(?:[lc]?dots|[bp]?mod)(?![A-Za-z])")  # what stands for more than one value
_WRAPPED = re.compile(r"\(?\\text\{ ?([^{}]*?) ?\}\)?")
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ '-][A-Za-z]+)*|[A-Z]{2,}")
_LETTER = re.compile(r"\(?([A-Za-z])\)?\.?")
_NAME = re.compile(r"(?:[A-Za-z]|\\[a-z]+|[A-Z]{2}|[A-Za-z]\([A-Za-z]\))(?:_\{?\w\}?)? ?(?:=|\\in(?![A-Za-z]))")
_TWO_NUMBERS = re.compile(r"(?<![_^\d.,])\d[\d.,]* \d")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|neq|lt|gt|approx|in|equiv|sim)(?![A-Za-z])")


def compare_without_algebra(answer: str, reference: str) -> Verdict:
    """What can be said without algebra; None for the rest."""
    return compare(answer, reference, lambda one, other: None)


def compare(answer: str, reference: str, ask: Ask) -> Verdict:
    """The verdict on an answer as it stands in its box. Where one side has more than `LONGEST` characters, only
    the same text is right.

    Args:
        ask: whether two expressions are equal.
    """
    if max(len(answer), len(reference)) > LONGEST:
        return answer == reference
    return _compare(clean(answer), clean(reference), lambda one, other: _asked(one, other, ask))


def _asked(answer: str, reference: str, ask: Ask) -> Verdict:
    r"""Algebra drops bases, `\ldots` and `\mod 7`: where they differ it is not asked."""
    bases_differ = _BASE_WITHIN.findall(answer) != _BASE_WITHIN.findall(reference)
    if bases_differ or bool(_OPEN.search(answer)) != bool(_OPEN.search(reference)):
        return False
    return ask(answer, reference)


def _compare(answer: str, reference: str, ask: Ask) -> Verdict:
    if answer == reference:
        return reference != ""
    mine, theirs = _name(answer), _name(reference)
    if mine != theirs and _RELATION.search(answer) and _RELATION.search(reference):
        return ask(answer, reference)
    answer, reference = _value_of(answer, mine), _value_of(reference, theirs)
    if (number := read_quantity(reference, is_reference=True)) is not None:
        return _as_number(answer, number, ask)
    if (based := _in_base(reference)) is not None:
        given = _in_base(answer)
        return answer == based[0] + based[1] if given is None else given == based
    if (words := _words(reference)) is not None:
        return _same_words(words, answer)
    structure = read_structure(_unwrapped(reference))
    if structure is not None:
        return _as_structure(answer, structure, ask)
    return _as_expression(answer, reference, ask)


def _as_number(answer: str, number: Quantity, ask: Ask) -> Verdict:
    given = read_quantity(answer, is_reference=False)
    if given is not None:
        return given.value == number.value and units_agree(given.unit, number.unit)
    if not _is_one_expression(answer):
        return False
    body = split_unit(answer, is_reference=False)
    if body is None or not units_agree(body.unit, number.unit) or r"\infty" in answer:
        return False
    return ask(body.text, _written(number.value))


def _in_base(text: str) -> tuple[str, str, int] | None:
    """Sign, digits and base of a number such as `12_5` or `1F_{16}`; None for others, such as `x_2` and `19_8`."""
    match = _BASE.fullmatch(text)
    if match is None or not _SMALLEST_BASE <= int(match[3]) <= _GREATEST_BASE:
        return None
    digits, base = match[2].upper(), int(match[3])
    return (match[1], digits, base) if all(int(digit, _GREATEST_BASE) < base for digit in digits) else None


def _written(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _is_one_expression(text: str) -> bool:
    """Not empty, not words, no relation, not several: `5 6` is no product."""
    if not text or _words(text) is not None or _RELATION.search(text) or _TWO_NUMBERS.search(text):
        return False
    return read_structure(text) is None


def _as_structure(answer: str, reference: Structure, ask: Ask) -> Verdict:
    given = read_structure(_unwrapped(answer))
    loose = {"list", "set"}
    if given is None or (given.kind != reference.kind and not {given.kind, reference.kind} <= loose):
        return False
    mine, theirs = _bare(given.members), _bare(reference.members)
    if len(mine) != len(theirs) or any(map(_name, mine)) != any(map(_name, theirs)):
        return False
    if reference.ordered or all(len(words or "") > 1 for words in map(_words, theirs)):
        return _all(_compare(one, other, ask) for one, other in zip(mine, theirs, strict=True))
    return _matched(list(mine), theirs, ask)


def _bare(members: tuple[str, ...]) -> tuple[str, ...]:
    """`x = 1, x = 2` is 1, 2; `x = 1, y = 2` stays as it is."""
    names = {_name(member) for member in members}
    return tuple(member.removeprefix(_name(member)).strip() for member in members) if len(names) == 1 else members


def _all(verdicts: Iterable[Verdict]) -> Verdict:
    seen = set(verdicts)
    return False if False in seen else None if None in seen else True


def _matched(answers: list[str], references: tuple[str, ...], ask: Ask) -> Verdict:
    """Each reference with an answer of its own. Greedy is enough: what equals the same is equal."""
    verdict: Verdict = True
    for reference in references:
        possible = [_compare(answer, reference, ask) for answer in answers]
        if True in possible:
            answers.pop(possible.index(True))
        elif None in possible:
            verdict = None
        else:
            return False
    return verdict


def _as_expression(answer: str, reference: str, ask: Ask) -> Verdict:
    """A relation only with a relation; units as with numbers."""
    if answer.replace("} ", "}") == reference.replace("} ", "}"):
        return True
    if bool(_RELATION.search(answer)) != bool(_RELATION.search(reference)) or read_structure(answer) is not None:
        return False
    if (r"\infty" in answer) != (r"\infty" in reference):
        return False
    if _RELATION.search(reference):
        return ask(answer, reference)
    mine = split_unit(answer, is_reference=False)
    theirs = split_unit(reference, is_reference=True) or Body(reference, "")
    if mine is None or not mine.text or _words(mine.text) is not None or not units_agree(mine.unit, theirs.unit):
        return False
    return ask(mine.text, theirs.text)


def _name(text: str) -> str:
    r"""The `x =` or `x \in` that a text begins with, or nothing."""
    match = _NAME.match(text)
    return match.group() if match and not _RELATION.search(text[match.end() :]) else ""


def _value_of(text: str, name: str) -> str:
    r"""Without the name, and without `\approx` before it."""
    return text.removeprefix(name).strip().removeprefix(r"\approx").strip()


def _unwrapped(text: str) -> str:
    match = _WRAPPED.fullmatch(text)
    return match[1] if match else text


def _words(text: str) -> str | None:
    r"""The words of a text answer; None where it is mathematics, several, or a number with a unit."""
    wrapped = _WRAPPED.fullmatch(text)
    inside = wrapped[1] if wrapped else text
    if letter := _LETTER.fullmatch(inside):
        return letter[1]
    if wrapped:
        several = read_structure(inside) is not None
        return inside if re.search("[A-Za-z]", inside) and not several else None
    return inside if _WORDS.fullmatch(inside) and read_structure(inside) is None else None


def _same_words(words: str, answer: str) -> bool:
    given = _words(answer)
    if given is None:
        return False
    one, other = (" ".join(text.replace("-", " ").rstrip(".").split()) for text in (given, words))
    return one == other if words.isupper() or len(words) == 1 else one.lower() == other.lower()
