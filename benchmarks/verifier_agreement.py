r"""How the verifier agrees with the gold answers of the published sets: the numbers of docs/rewards.md, printed.

    python benchmarks/verifier_agreement.py --data ../shared/data          what the verifier says
    python benchmarks/verifier_agreement.py --data ../shared/data --alone  what math-verify alone says of the same

Every gold answer that is not a number, and 300 that are, is compared with itself, with an equal answer in another
form and with near misses, as in training: without algebra or in workers. The same answers are compared in other
spellings, each with a wrong twin (powers of ten, units, Unicode, multiple choice), of which math-verify is not asked.
`tests/rollout/rewards/verifier/test_agreement.py` holds the page to what the first command prints, and compares all
gold answers with themselves.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from jackpot.rollout.rewards.pool import CallLimits, RewardResult, RewardWorkerPool
from jackpot.rollout.rewards.rewards import VERIFY
from jackpot.rollout.rewards.verifier.choices import choice, parse_choice
from jackpot.rollout.rewards.verifier.compare import compare, compare_without_algebra
from jackpot.rollout.rewards.verifier.extract import hashed_answer
from jackpot.rollout.rewards.verifier.latex import normalize
from jackpot.rollout.rewards.verifier.numbers import parse_quantity
from jackpot.rollout.rewards.verifier.structure import Structure, parse_structure

SETS = ("gsm8k_train", "gsm8k_test", "math_train", "math500", "amc22_23", "aime24")
ALONE, PARSES = "math_verify_alone:equal", "math_verify_alone:parses"
MOST_NUMBERS = 300
TIMEOUT = 20.0  # for one equal: MATH's longest matrices take a few
UNICODE = {r"\^2(?!\d)": "²", r"\^3(?!\d)": "³", r"\\sqrt\{(\d)\}": r"√\1"}
UNICODE |= {rf"(?<![\d)}}])\\frac\{{1\}}\{{{bottom}\}}": sign for bottom, sign in zip("2348", "½⅓¼⅛", strict=True)}
ANOTHER = dict(zip("²³½⅓¼⅛0123456789", "³²⅓¼⅛½1234567890", strict=True))
UNITS = {
    r"\text{cm}": r"\text{m}",
    "%": r"\text{ dollars}",
    r"^\circ": r"\text{ hours}",
    r"\text{feet}": r"\text{ inches}",
}
_RELATION = re.compile(r"[=<>:]|\\(?:le|ge|in|approx)(?![a-z])")
_NO_ALGEBRA = re.compile(r"\\(?:text|circ|triangle)(?![a-z])|%|_|(?<![\\A-Za-z])[A-Za-z]{3}")


class Case(NamedTuple):
    """An answer to compare with a gold answer."""

    kind: str
    answer: str
    gold: str
    is_right: bool = False


def golds(folder: Path, name: str) -> list[str]:
    """The answers of a set; rows without one are left out."""
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = [hashed_answer(row["answer"]) if name.startswith("gsm8k") else row["answer"] for row in rows]
    return [str(answer) for answer in answers if answer not in (None, "")]


def chosen(folder: Path) -> list[str]:
    """Each gold answer once, and of those that are numbers the first `MOST_NUMBERS`."""
    unique = list(dict.fromkeys(gold for name in SETS for gold in golds(folder, name)))
    numbers = {gold for gold in unique if parse_quantity(normalize(gold), is_reference=True) is not None}
    few = [gold for gold in unique if gold in numbers][:MOST_NUMBERS]
    return few + [gold for gold in unique if gold not in numbers]


def cases(gold: str) -> Iterator[Case]:
    """Itself, an equal answer if it has a form for that, and wrong ones."""
    text = normalize(gold)
    yield Case("itself", gold, gold, True)
    if (other := doubled(text)) is not None:
        yield Case("in another form", other, gold, True)
    for kind, answer in near_misses(text):
        yield Case(kind, answer, gold)


def spellings(gold: str) -> Iterator[Case]:
    """Other spellings of a gold answer, or references made of it, each followed by a wrong twin."""
    text = normalize(gold)
    if re.fullmatch(r"-?[1-9]\d*", text):
        yield from twins("in e-notation", rf"{text}0e-1", gold, rf"{text}0e1")
        yield from twins("with a power of ten", rf"{text}\times 10^{{3}}", f"{text}e3", rf"{text}\times 10^{{-3}}")
        yield from twins("with a power of ten", f"{text}000", rf"{text} \cdot 10^3", f"{text}00")
        yield from twins("in \\text", rf"\text{{{text}}}", gold, rf"\text{{{text}0}}")
        yield from twins(
            "with a unit in \\text", rf"\text{{{text} cm}}", rf"{text} \text{{ cm}}", rf"\text{{{text} m}}"
        )
        hourly = rf"{text} \text{{ km/h}}"
        yield from twins(
            "with a unit with a slash", rf"{text}\,\mathrm{{km}}/\mathrm{{h}}", hourly, rf"{text}\text{{ km/s}}"
        )
        yield from twins("with a unit with a slash", rf"{text} km per hour", hourly, f"{text} km")
    other = in_unicode(text)
    if other != text:
        wrong = re.sub(r"[²³½⅓¼⅛]|(?<=√)\d", lambda found: ANOTHER[found[0]], other, count=1)
        yield from twins("in Unicode", other, gold, wrong)
    if parse_choice(gold) is None and not re.search("[A-Z]", text):
        reference, miss = choice("B", gold), next((answer for _, answer in near_misses(text)), f"{gold}+1")
        yield from twins("as a letter", "(B)", reference, "(C)")
        yield from twins("as a letter with text", rf"\textbf{{(B) }}{gold}", reference, rf"\textbf{{(C) }}{gold}")
        yield from twins("as a letter with text", f"B. {gold}", reference, f"B. {miss}")
        yield from twins("as the text of the letter", gold, reference, miss)


def twins(kind: str, answer: str, gold: str, wrong: str) -> Iterator[Case]:
    yield Case(kind, answer, gold, True)
    yield Case(f"{kind}, but another", wrong, gold)


def in_unicode(text: str) -> str:
    """An answer with roots of one digit, squares, cubes and some fractions in Unicode."""
    for latex, sign in UNICODE.items():
        text = re.sub(latex, sign, text)
    return text


def doubled(text: str) -> str | None:
    r"""Every number or expression e of an answer as \frac{2(e)}{2}; None for words, relations and what has a unit."""
    number = parse_quantity(text, is_reference=True)
    if number is not None:
        return rf"\frac{{{2 * number.value.numerator}}}{{{2 * number.value.denominator}}}"
    structure = parse_structure(text)
    if structure is not None:
        members = [doubled(member) for member in structure.members]
        return None if None in members else joined(structure, members)
    if r"\infty" in text:
        return text
    if _RELATION.search(text) or _NO_ALGEBRA.search(text) or re.fullmatch("[A-Za-z]*", text):
        return None
    return rf"\frac{{2({text})}}{{2}}"


def near_misses(text: str) -> Iterator[tuple[str, str]]:
    """Wrong answers that look like the right one, with what was done to it."""
    yield from (("another unit", text.removesuffix(one) + other) for one, other in UNITS.items() if text.endswith(one))
    structure, number = parse_structure(text), parse_quantity(text, is_reference=True)
    if number is not None:
        value = number.value
        yield "one more", str(value + 1)
        yield "two answers", rf"{value} \text{{ or }} {value + 1}"
        if value:
            yield "another sign", str(-value)
            yield "ten times", str(value * 10)
        if abs(value) not in (0, 1):
            yield "upside down", str(1 / value)
        return
    if structure is not None:
        yield from near_structures(structure)
    elif not _RELATION.search(text) and not _NO_ALGEBRA.search(text) and re.search(r"\d|\\", text):
        yield "one more", f"{text}+1"
        yield "another sign", f"-({text})"
    if name := re.match(r"[a-z] ?=", text):
        yield "another name", chr((ord(text[0]) - 96) % 26 + 97) + text[1:]
    if based := re.fullmatch(r"(.*_\{?)(\d+)(\}?)", text):
        yield "another base", f"{based[1]}{int(based[2]) + 1}{based[3]}"
    if digit := re.search(r"\d", text):
        yield "another digit", text[: digit.start()] + str((int(digit[0]) + 1) % 10) + text[digit.end() :]
    elif name is None and (letters := re.search(r"(?<![\\A-Za-z])[A-Za-z]+(?!\{)", text.replace(r"\text{", "{"))):
        yield "another word", letters[0][:-1] + chr((ord(letters[0][-1].lower()) - 96) % 26 + 97)


def near_structures(structure: Structure) -> Iterator[tuple[str, str]]:
    members = list(structure.members)
    yield "one missing", joined(structure, members[:-1])
    if structure.ordered and members[0] != members[1]:
        yield "permuted", joined(structure, [members[1], members[0], *members[2:]])
    if structure.kind in ("()", "[]", "[)", "(]"):
        other = {"()": "[]", "[]": "()", "[)": "(]", "(]": "[)"}[structure.kind]
        yield "other brackets", joined(structure._replace(kind=other), members)
    if structure.kind in ("list", "set", "union"):
        yield "one twice", joined(structure, [*members, members[0]])


def joined(structure: Structure, members: Sequence[str]) -> str:
    """The structure with these members in place of its own."""
    kind = structure.kind
    if kind.startswith("matrix"):
        width = int(kind.rsplit(" ", 1)[-1].split("x")[0])
        rows = [" & ".join(members[start : start + width]) for start in range(0, len(members), width)]
        return r"\begin{pmatrix}" + r" \\ ".join(rows) + r"\end{pmatrix}"
    if kind in ("union", "list", "ratio"):
        return {"union": r" \cup ", "list": ", ", "ratio": ":"}[kind].join(members)
    opening, closing = (r"\{", r"\}") if kind == "set" else (kind[0], kind[-1])
    return opening + ", ".join(members) + closing


def compare_all(workers: int, wanted: Sequence[Case], alone: bool) -> list[bool | None]:
    """What the verifier, or math-verify alone, says of each case; None for a timeout or crash."""
    found = [None if alone else compare_without_algebra(case.answer, case.gold) for case in wanted]
    asked = [number for number, equal in enumerate(found) if equal is None]
    print(f"{len(wanted)} cases, {len(asked)} of them for the processes", file=sys.stderr)
    items = [{"answer": wanted[number].answer, "reference": wanted[number].gold} for number in asked]
    for number, outcome in zip(asked, run(ALONE if alone else VERIFY, items, workers), strict=True):
        found[number] = None if outcome.error else outcome.value == 1.0
    return found


def run(function: str, items: Sequence[dict[str, str]], workers: int) -> list[RewardResult]:
    """Call a function in reward workers for every item."""
    with closing(RewardWorkerPool(function, CallLimits(TIMEOUT), workers=workers)) as pool:
        return pool.run(items)


def table(wanted: Sequence[Case], found: Sequence[bool | None]) -> list[str]:
    """The number of cases of each kind decided as they should be, and each case that was not."""
    count, right, others = Counter(), Counter(), []
    for case, equal in zip(wanted, found, strict=True):
        kind = (case.kind, "right" if case.is_right else "wrong")
        count[kind] += 1
        right[kind] += equal is case.is_right
        if equal is not case.is_right:
            said = {True: "right", False: "wrong", None: "undecided"}[equal]
            others.append(f"| `{case.gold}` | {case.kind} | `{case.answer}` | {said} |")
    lines = ["| answer | should be | how many | are |", "|---|---|---|---|"]
    lines += [f"| {kind} | {wish} | {n} | {right[kind, wish]} |" for (kind, wish), n in count.items()]
    head = (
        ["", "| gold answer | case | answer | decided |", "|---|---|---|---|"]
        if others
        else ["", "Decided otherwise: none."]
    )
    return lines + head + [line.replace("||", r"\|\|") for line in others]


def unparsable(workers: int, unique: Sequence[str], wanted: Sequence[Case]) -> list[str]:
    """Gold answers with a part that is left to math-verify and that it cannot parse."""
    parts: dict[str, str] = {}
    for case in wanted:
        compare(
            case.answer, case.gold, lambda answer, reference, gold=case.gold: parts.setdefault(reference, gold) and None
        )
    outcomes = run(PARSES, [{"text": part} for part in parts], workers)
    bad = {gold for (_, gold), outcome in zip(parts.items(), outcomes, strict=True) if outcome.value != 1.0}
    return [gold for gold in unique if gold in bad]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--alone", action="store_true")
    given = parser.parse_args()
    print("\n".join(report(given.data, given.workers, given.alone)))


def report(folder: Path, workers: int, alone: bool = False) -> list[str]:
    """The lines of the page."""
    sys.path.append(str(Path(__file__).parent))  # where the processes find math-verify alone
    unique = chosen(folder)
    wanted = [case for gold in unique for case in cases(gold)]
    if not alone:
        wanted += [case for gold in unique for case in spellings(gold)]
    lines = table(wanted, compare_all(workers, wanted, alone))
    if not alone:
        listed = ", ".join(f"`{gold}`" for gold in unparsable(workers, unique, wanted))
        lines += ["", f"Left to math-verify, which cannot parse them: {listed or 'none'}."]
    return lines


if __name__ == "__main__":
    main()
