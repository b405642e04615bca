"""How many responses the verifier scores in a CPU second, which does not depend on how busy the machine is.

    OMP_NUM_THREADS=1 python benchmarks/verifier_speed.py --data ../shared/data --repetitions 5

Every second answer is wrong. `plain` are GSM8K's own solutions, scored in this process; `plain, long` the same with the
answer in a box after 4,000 characters of text; `algebra` are MATH's gold answers e, written as e + 0, of those that are
neither numbers nor words: compared in one reward worker, whose CPU seconds count. `algebra, shuffled` are the same gold
answers, each against that of another problem, as wrong answers of a model are.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from jackpot.config.tasks import RewardConfig
from jackpot.core.types import DecodedResponse, Prompt
from jackpot.rollout.rewards.pool import CallLimits, RewardWorkerPool
from jackpot.rollout.rewards.rewards import VERIFY, RewardFn
from jackpot.rollout.rewards.verifier.compare import compare_without_algebra
from jackpot.rollout.rewards.verifier.extract import hashed_answer

GROUP = 8  # responses scored together, as the sampler does; equal pairs among them are compared once
FILLER = "We add 3 and 4 to get $3 + 4 = 7$, and then {carefully} go on. "


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plain_answers(folder: Path, long: bool) -> list[DecodedResponse]:
    """Solutions of GSM8K; every second one is compared with the answer of the problem after it."""
    solutions = [row["answer"] for name in ("gsm8k_test", "gsm8k_train") for row in rows(folder / f"{name}.jsonl")]
    golds = [hashed_answer(solution) or "" for solution in solutions]
    text = FILLER * (4_000 // len(FILLER))
    answers = []
    for number, (solution, gold) in enumerate(zip(solutions, golds, strict=True)):
        reference = gold if number % 2 else golds[(number + 1) % len(golds)]
        response = f"{text}\\boxed{{{gold}}}" if long else solution
        prompt = Prompt(uid=str(number), text="", answer=reference, token_ids=(0,))
        answers.append(DecodedResponse(prompt, response, True))
    return answers


def algebra_items(folder: Path, shuffled: bool) -> list[dict[str, str]]:
    """Pairs that only algebra decides: e + 0 or e + 1 with e, or one gold answer with another."""
    golds = [str(row["answer"]) for row in rows(folder / "math500.jsonl")]
    others = random.Random(0).sample(golds, len(golds))
    pairs = list(zip(others, golds, strict=True))
    if not shuffled:
        is_algebra = [compare_without_algebra(gold, f"{gold}0") is None for gold in golds]
        pairs = [(f"{gold}+{n % 2}", gold) for n, gold in enumerate(golds) if is_algebra[n]]
    undecided = [pair for pair in pairs if compare_without_algebra(*pair) is None]
    return [{"answer": answer, "reference": gold} for answer, gold in undecided]


def processor_seconds(process: int) -> float:
    """Of another process, all threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def told(name: str, count: int, repetitions: int, spend: Callable[[], float]) -> None:
    rates = [count / spend() for _ in range(repetitions)]
    low, middle, high = min(rates), statistics.median(rates), max(rates)
    print(f"| {name} | {count} | {middle:,.0f} ({low:,.0f} to {high:,.0f}) |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    reward_fn = RewardFn([RewardConfig(name="correct"), RewardConfig(name="format")], workers=1, timeout=5.0)
    print("| answers | how many | scored in a CPU second, median (smallest to largest) |\n|---|---|---|")
    for name, long in (("plain", False), ("plain, long", True)):
        answers = plain_answers(given.data, long)

        def spend(answers: list[DecodedResponse] = answers) -> float:
            start = time.process_time()
            scores = [
                score
                for first in range(0, len(answers), GROUP)
                for score in reward_fn.scores(answers[first : first + GROUP])
            ]
            spent = time.process_time() - start
            assert 0.5 <= sum(score.correct for score in scores) / len(scores) < 0.6
            return spent

        told(name, len(answers), given.repetitions, spend)
    reward_fn.close()
    for name, shuffled in (("algebra", False), ("algebra, shuffled", True)):
        items = algebra_items(given.data, shuffled)
        with closing(RewardWorkerPool(VERIFY, CallLimits(timeout=60.0), workers=1)) as pool:
            pool.wait_until_ready()

            def spend_there(pool: RewardWorkerPool = pool, items: list[dict[str, str]] = items) -> float:
                start = processor_seconds(pool.process_ids[0])
                assert not any(result.error for result in pool.run(items))
                return processor_seconds(pool.process_ids[0]) - start

            told(name, len(items), given.repetitions, spend_there)


if __name__ == "__main__":
    main()
