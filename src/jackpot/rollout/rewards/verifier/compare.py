r"""Comparison of an answer with a reference. Standard library only; algebra is left to a function that is passed in.

Both sides are normalized (`latex.py`) and then compared by the form of the *reference*:

| the reference is | the answer must be |
|---|---|
| spelled like the answer | (this is always right) |
| a number (`numbers.py`) | an equal number, exactly, and no other unit; or an expression of that value |
| a number in a base, `12_5` (2 to 36, with a digit) | the same digits, in that base if it names one |
| words, a letter, `\text{Evelyn}`, `C` | the same; case counts in letters and where all are capitals |
| a choice, `\text{(C)}`, `(C) 3x+1` (`choices.py`) | the letter, alone or with the option's text, or that text alone |
| a tuple, interval, ratio, matrix, list of words (`structure.py`) | the same brackets and members, in order |
| a union, set, other list | as many members, each right, in any order |
| `x = ...`, `x \in ...` | the same after the same letter, or without any |
| any other expression | an equal expression, by algebra |
"""

import re
from collections.abc import Callable
from functools import partial

from jackpot.rollout.rewards.verifier.choices import is_choice, parse_choice
from jackpot.rollout.rewards.verifier.extract import MAX_ANSWER_LENGTH
from jackpot.rollout.rewards.verifier.latex import has_prose, normalize, without_text_marks
from jackpot.rollout.rewards.verifier.numbers import parse_quantity, split_unit
from jackpot.rollout.rewards.verifier.structure import Structure, parse_structure, split_outside_brackets
from jackpot.rollout.rewards.verifier.units import units_agree

Algebra = Callable[[str, str], bool]  # compares an answer and a reference, both normalized single expressions

_BASE = re.compile(r"(-?)(?:\\text\{)?(?=[A-Za-z]*[0-9])([0-9A-Za-z]+)\}?_\{?([1-9][0-9]?)\}?")  # 12_5, but not x_2
_BASE_WITHIN = re.compile(r"(?<!\^)(?<!\^\{)(?<![0-9A-Za-z])[0-9]+\}?_\{?([0-9A-Za-z]+)")  # 1_2, but not \int^1_0
_SUM_WITH_E = re.compile(r"\de ?[-+] ?\d")  # 2e-3: a power of ten, or a sum with Euler's number
_OPTION = re.compile(r"\\text\{\([A-Z]\)[.: ]?\}(?=.)")  # the letter in \text{(B) }142
_OPEN = re.compile(r"\\(?:[lc]?dots|[bp]?mod)(?![A-Za-z])")  # dots or mod: the text stands for several values
_WRAPPED = re.compile(r"\(?\\text\{ ?([^{}]*?) ?\}\)?")  # \text{...}, perhaps in parentheses
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ '-][A-Za-z]+)*|[A-Z]{2,}")
_LETTER = re.compile(r"\(?([A-Za-z])\)?\.?")
_NAME = re.compile(r"(?:[A-Za-z]|\\[a-z]+|[A-Z]{2}|[A-Za-z]\([A-Za-z]\))(?:_\{?\w\}?)? ?(?:=|\\in(?![A-Za-z]))")
_TWO_NUMBERS = re.compile(r"(?<![_^\d.,])\d[\d.,]* \d")
_WRAPPER_REMAINS = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])|####|^\s*[\[({]\s*['\"]|</?[a-z]{2,}>", re.IGNORECASE)
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|neq|lt|gt|approx|in|equiv|sim)(?![A-Za-z])")


class _Undecided(Exception):
    """The signal that only algebra can decide a comparison."""


def compare_without_algebra(answer: str, reference: str) -> bool | None:
    """Return whether an answer equals the reference, as `compare` does, or None where only algebra can decide."""
    try:
        return compare(answer, reference, _undecided)
    except _Undecided:
        return None


def _undecided(answer: str, reference: str) -> bool:
    """Raise `_Undecided`, in place of comparing two expressions by algebra."""
    raise _Undecided


def compare(answer: str, reference: str, algebra: Algebra) -> bool:
    """Return whether an answer, as extracted from a response, equals the reference.

    If either has more than `MAX_ANSWER_LENGTH` characters, only identical texts are equal.

    Args:
        algebra: decides whether two expressions are equal.
    """

    if max(len(answer), len(reference)) > MAX_ANSWER_LENGTH:
        return answer == reference

    try:
        if (reference_choice := parse_choice(reference)) is not None:
            return is_choice(normalize(answer), reference_choice, partial(_compare, algebra=algebra))
        if _SUM_WITH_E.search(reference) and "".join(answer.split()) == "".join(reference.split()):
            # The texts differ by spaces only. `normalize` reads 2e-3 as 0.002 and leaves 2e - 3, a difference with
            # Euler's number, as it is; but 2e-3 may be meant as that difference too.
            return True
        # The reference is no choice, so a letter before the answer is dropped: `\text{(B) }142` is 142.
        return _compare(_OPTION.sub("", normalize(answer), count=1), normalize(reference), algebra)
    except RecursionError:  # brackets nested some hundred times
        return False


def is_readable(reference: str) -> bool:
    r"""Return whether the verifier understands a reference, so that an answer in another spelling can equal it.

    It does not understand remains of a wrapping (`\boxed{5}`, `['5']`, `#### 5`), unbalanced braces, `5 apples` and
    sentences.
    """
    text = normalize(reference)
    if text == "" or _WRAPPER_REMAINS.search(reference) or text.count("{") != text.count("}"):
        return False
    is_value = parse_choice(reference) or parse_quantity(text, is_reference=True) or _words(text)
    if is_value or _WRAPPED.fullmatch(text):  # `_WRAPPED`: the whole text is words in `\text{...}`
        return True

    try:
        if structure := parse_structure(text):
            return all(map(is_readable, structure.members))
    except RecursionError:
        return False

    # Prose, and a number with plain words (which only an answer may have), would be read as products of letters.
    return parse_quantity(text, is_reference=False) is None and not has_prose(text)


def _compare(answer: str, reference: str, algebra: Algebra) -> bool:
    """Return whether a normalized answer equals a normalized reference, by rules for what the reference is.

    It may be a relation, a number in another base, words, a structure (a tuple, a set, ...), or else a single
    expression. The members of a structure are compared by this same function.
    """
    answer_name, reference_name = _name(answer), _name(reference)
    if answer_name != reference_name and _RELATION.search(answer) and _RELATION.search(reference):
        return _by_algebra(answer, reference, algebra)

    # Compare without names: `x = 5` equals 5.
    answer, reference = (
        text.removeprefix(name).strip().removeprefix(r"\approx").strip()
        for text, name in ((answer, answer_name), (reference, reference_name))
    )

    # Texts that differ in nothing but `\text` and spaces behind braces are equal, unless they are empty.
    if len({without_text_marks(text).replace("} ", "}") for text in (answer, reference)}) == 1:
        return reference != ""

    # Unless the reference is a number, find out whether it has one of the forms below; else it is an expression.
    if parse_quantity(reference, is_reference=True) is None:
        if (value_and_base := _in_base(reference)) is not None:
            # An answer without a base is read in the base of the reference.
            is_equal = value_and_base in (_in_base(answer), _in_base(f"{answer}_{value_and_base[1]}"))
            # In an answer without a base `normalize` has read digits such as 1E5 as a power of ten; read the
            # reference's digits in the same way.
            return is_equal or answer == normalize(reference.partition("_")[0])
        if (words := _words(reference)) is not None:
            return _same_words(_words(answer), words)
        if (structure := parse_structure(_unwrapped(reference))) is not None:
            return _as_structure(parse_structure(_unwrapped(answer)), structure, algebra)

    return _as_expression(answer, reference, algebra)


def _name(text: str) -> str:
    r"""Return the beginning `x =` or `x \in` of a text, or an empty text where there is none."""
    match = _NAME.match(text)
    return match.group() if match and not _RELATION.search(text[match.end() :]) else ""


def _in_base(text: str) -> tuple[int, int] | None:
    """Return value and base of a number such as `12_5` or `1F_{16}`; None for `x_2`, `19_8` and other texts."""
    match = _BASE.fullmatch(text)  # groups: sign, digits, base
    try:
        return (int(match[1] + match[2], int(match[3])), int(match[3])) if match else None
    except ValueError:  # the base is not from 2 to 36, or lacks a digit
        return None


def _unwrapped(text: str) -> str:
    r"""Return the content of `\text{...}` where that is the whole text, else the text itself."""
    match = _WRAPPED.fullmatch(text)
    return match[1] if match else text


def _words(text: str) -> str | None:
    r"""Return the words of a text that consists of words; None if it is mathematics, a list or a number with a unit."""
    inside = _unwrapped(text)
    if letter := _LETTER.fullmatch(inside):
        return letter[1]
    # A text outside `\text{...}` must begin with a word of three letters, or be capitals; one inside needs a letter.
    is_words = _WORDS.fullmatch(inside) if inside == text else re.search("[A-Za-z]", inside)
    return inside if is_words and parse_structure(inside) is None else None


def _same_words(answer: str | None, reference: str) -> bool:
    """Tell whether the words are equal; case counts only where the reference is a single letter or all in capitals."""
    mine, theirs = (" ".join(text.replace("-", " ").rstrip(".").split()) for text in (answer or "", reference))
    return mine == theirs if reference.isupper() or len(reference) == 1 else mine.lower() == theirs.lower()


def _as_structure(answer: Structure | None, reference: Structure, algebra: Algebra) -> bool:
    """Compare structures by kind, number of members and each member; None is an answer without structure."""
    # The kinds must be equal; only a list and a set may stand for each other.
    if answer is None or (answer.kind != reference.kind and not {answer.kind, reference.kind} <= {"list", "set"}):
        return False

    members, expected = _without_shared_name(answer.members), _without_shared_name(reference.members)
    # Both or neither must have members with names, such as `x = 1`.
    if len(members) != len(expected) or any(map(_name, members)) != any(map(_name, expected)):
        return False
    # Compare in order if the reference is ordered, or if all of its members are words longer than one letter
    # (`_words` is None for a member that is not words).
    if reference.ordered or all(len(_words(member) or "") > 1 for member in expected):
        return all(map(partial(_compare, algebra=algebra), members, expected))

    # Give each member of the reference a different member of the answer: the same text, else the first equal one, which
    # will do because equality is transitive.
    unmatched = [*members]
    for member in expected:
        equal = (candidate for candidate in unmatched if _compare(candidate, member, algebra))
        match = member if member in unmatched else next(equal, None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


def _without_shared_name(members: tuple[str, ...]) -> tuple[str, ...]:
    """Strip the name that all members share, if any: `x = 1, x = 2` becomes 1, 2; `x = 1, y = 2` stays."""
    names = {_name(member) for member in members}
    return tuple(member.removeprefix(_name(member)).strip() for member in members) if len(names) == 1 else members


def _as_expression(answer: str, reference: str, algebra: Algebra) -> bool:
    """Tell whether expressions, or numbers with units, are equal; a relation such as `x < 2` equals only a relation."""
    quantity, expected = parse_quantity(answer, is_reference=False), parse_quantity(reference, is_reference=True)
    if quantity and expected:
        return quantity.value == expected.value and units_agree(quantity.unit, expected.unit)

    # In a chain such as x = 9/4 = 2.25 each side must be right, except a name such as `x` at its start.
    sides = split_outside_brackets(answer, "=")
    if expected and len(sides) > 1:
        # Whether the first side is a name, which is skipped. (`_compare` has removed the name of a mere `x = 5`.)
        is_named = len(sides) > 2 and _NAME.fullmatch(f"{sides[0]}=") is not None
        return all(_as_expression(side, reference, algebra) for side in sides[int(is_named) :])

    # An answer is wrong if it has a relation or infinity and the reference has not, or the reverse; if it is a
    # structure; and if it has two numbers in place of one.
    is_relation = _RELATION.search(reference) is not None
    if (_RELATION.search(answer) is not None) != is_relation or parse_structure(answer) is not None:
        return False
    if (r"\infty" in answer) != (r"\infty" in reference) or (expected and _TWO_NUMBERS.search(answer)):
        return False

    # Compare the units by `units_agree`, and below by algebra what stands before them. An answer is wrong if nothing or
    # words stand before its unit, or if `split_unit` returns None, in place of which stand empty texts.
    if not is_relation:
        answer, unit = split_unit(answer, is_reference=False) or ("", "")
        reference, reference_unit = split_unit(reference, is_reference=True) or (reference, "")
        if expected:  # the reference is a number, which is compared by its exact value
            reference, reference_unit = str(expected.value), expected.unit
        if not answer or _words(answer) is not None or not units_agree(unit, reference_unit):
            return False

    return _by_algebra(answer, reference, algebra)


def _by_algebra(answer: str, reference: str, algebra: Algebra) -> bool:
    r"""Compare by algebra, but return False if bases differ or one text alone has dots or mod: algebra drops these."""
    bases_differ = _BASE_WITHIN.findall(answer) != _BASE_WITHIN.findall(reference)
    if bases_differ or bool(_OPEN.search(answer)) != bool(_OPEN.search(reference)):
        return False
    return algebra(answer, reference)
