r"""How the judge agrees with the gold answers of the published sets: the tables of docs/rewards.md, printed.

    python benchmarks/agreement.py --data ../shared/data > agreement.md

Every gold answer is judged against itself as the file has it, against an equal answer in another form, and against near
misses. `tests/answers/test_agreement.py` holds the page to what this prints. The judge works as in training, in
processes. Beside it math-verify alone, as its README calls it, with the answer between dollar signs.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jackpot.answers.compare import compare_plainly
from jackpot.answers.extract import hashed_answer
from jackpot.answers.latex import clean
from jackpot.answers.quantities import read_quantity
from jackpot.answers.structure import Structure, read_structure
from jackpot.tasks.judge_pool import Job, JudgePool
from jackpot.tasks.judging import VERDICT

SETS = ("gsm8k_train", "gsm8k_test", "math_train", "math500", "amc22_23", "aime24")
MOST_NUMBERS = 300  # gold answers that are numbers; of all others each is taken
ALONE = "agreement_alone:verdict"
UNITS = {r"\text{ cm}": r"\text{ m}", "%": r"\text{ dollars}", r"^\circ": r"\text{ hours}"}


class Case(NamedTuple):
    """An answer to judge against a gold answer."""

    kind: str  # itself, rewritten, or the near miss
    answer: str
    gold: str


def golds(folder: Path, name: str) -> list[str]:
    """The answers of a set; rows without one are left out."""
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = [hashed_answer(row["answer"]) if name.startswith("gsm8k") else row["answer"] for row in rows]
    return [str(answer) for answer in answers if answer not in (None, "")]


def cases(gold: str) -> Iterator[Case]:
    """Itself, an equal answer and wrong ones."""
    yield Case("itself", gold, gold)
    if rewritten := doubled(clean(gold)):
        yield Case("rewritten", rewritten, gold)
    for kind, answer in near_misses(clean(gold)):
        yield Case(kind, answer, gold)


def doubled(text: str) -> str | None:
    r"""Every number or expression e of an answer as \frac{2(e)}{2}; None for words and what has no such form."""
    structure = read_structure(text)
    if structure is not None:
        members = [doubled(member) for member in structure.members]
        return None if None in members else joined(structure, members)
    number = read_quantity(text, is_reference=True)
    if number is not None:
        return rf"\frac{{{2 * number.value.numerator}}}{{{2 * number.value.denominator}}}"
    if r"\infty" in text:
        return text
    if r"\text" in text or re.search(
        "[=<>_:%]|\\\\(le|ge|in|circ|approx|triangle)|[A-Za-z]{3}", re.sub(r"\\[a-z]+", "", text)
    ):
        return None
    return rf"\frac{{2({text})}}{{2}}" if re.search(r"\d|\\", text) else None


def near_misses(text: str) -> Iterator[tuple[str, str]]:
    """Wrong answers that look like the right one."""
    structure, number = read_structure(text), read_quantity(text, is_reference=True)
    if number is not None:
        value = number.value
        yield "one more", str(value + 1)
        if value:
            yield "other sign", str(-value)
            yield "ten times", str(value * 10)
        if abs(value) not in (0, 1):
            yield "upside down", str(1 / value)
        yield "two answers", f"{value} \\text{{ or }} {value + 1}"
        yield from (("other unit", text.replace(unit, other)) for unit, other in UNITS.items() if text.endswith(unit))
        return
    if structure is not None:
        yield from near_structures(structure)
    elif re.search(r"[=<>_:]|\\(le|ge|in|circ|approx)(?![a-z])", text) is None and re.search(r"\d|\\(?!text)", text):
        yield "one more", f"{text}+1"
        yield "other sign", f"-({text})"
    if digit := re.search(r"\d", text):
        changed = str((int(digit.group()) + 1) % 10)
        yield "another digit", text[: digit.start()] + changed + text[digit.end() :]
    elif letters := re.search(r"(?<![\\A-Za-z])[A-Za-z]+(?!\{)", text.replace(r"\text{", "{")):
        yield "another word", letters.group()[:-1] + chr((ord(letters.group()[-1].lower()) - 96) % 26 + 97)


def near_structures(structure: Structure) -> Iterator[tuple[str, str]]:
    members = list(structure.members)
    yield "one missing", joined(structure, members[:-1])
    if structure.ordered and members[0] != members[1]:
        yield "permuted", joined(structure, [members[1], members[0], *members[2:]])
    if structure.kind in ("()", "[]", "[)", "(]"):
        other = {"()": "[]", "[]": "()", "[)": "(]", "(]": "[)"}[structure.kind]
        yield "other brackets", joined(structure._replace(kind=other), members)
    if structure.kind in ("list", "set", "union"):
        yield "one twice", joined(structure, [*members[:-1], members[0], members[0]])


def joined(structure: Structure, members: list[str]) -> str:
    """The structure with these members in place of its own."""
    kind = structure.kind
    if kind.startswith("matrix"):
        width = int(kind.rsplit(" ", 1)[-1].split("x")[0])
        rows = [" & ".join(members[start : start + width]) for start in range(0, len(members), width)]
        return r"\begin{pmatrix}" + r" \\ ".join(rows) + r"\end{pmatrix}"
    if kind in ("union", "list", "ratio"):
        return {"union": r" \cup ", "list": ", ", "ratio": ":"}[kind].join(members)
    opening, closing = {"set": (r"\{", r"\}")}.get(kind, (kind[0], kind[-1]))
    return opening + ", ".join(members) + closing


def verdicts(wanted: list[Case], workers: int) -> tuple[list[bool | None], list[bool | None]]:
    """Ours and math-verify's alone; None where the time was up or the process ended."""
    sys.path.append(str(Path(__file__).parent))
    pool = JudgePool([ALONE], workers=workers, seconds=20.0)
    ours = [compare_plainly(case.answer, case.gold) for case in wanted]
    asked = [number for number, verdict in enumerate(ours) if verdict is None]
    print(f"{len(wanted)} cases, {len(asked)} of them for the processes", file=sys.stderr)
    for function, numbers, results in (
        (VERDICT, asked, ours),
        (ALONE, range(len(wanted)), theirs := [None] * len(wanted)),
    ):
        jobs = [
            Job(function, {"answer": wanted[number].answer, "reference": wanted[number].gold}) for number in numbers
        ]
        start = time.perf_counter()
        for number, outcome in zip(numbers, pool.run(jobs), strict=True):
            results[number] = None if outcome.problem else outcome.value == 1.0
        print(f"{function}: {len(jobs)} in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    pool.close()
    return ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--dump", type=Path, default=Path("/tmp/agreement.json"))
    given = parser.parse_args()
    unique = {gold: None for name in SETS for gold in golds(given.data, name)}
    numbers = [gold for gold in unique if read_quantity(clean(gold), is_reference=True)]
    wanted = [case for gold in unique if gold not in numbers[MOST_NUMBERS:] for case in cases(gold)]
    ours, theirs = verdicts(wanted, given.workers)
    given.dump.write_text(json.dumps([[*case, a, b] for case, a, b in zip(wanted, ours, theirs, strict=True)]))


if __name__ == "__main__":
    main()
