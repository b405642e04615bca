"""Measures which data sets of reasoning-gym a model is sometimes right on, so that a group of its answers differs.

    python -m research.gym_table MODEL FILE.jsonl [--problems 16] [--samples 8]

A line of the file is a data set: the mean score, the share of answers that are right, and the share of problems with a
right and a wrong answer among the samples, which are those that group-relative advantages learn from.
"""

import argparse
import json
from contextlib import closing
from pathlib import Path

from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.recipes import resolve
from jackpot.core.types import Version
from jackpot.launch.engines import make_engine
from jackpot.models.device import pick_device
from jackpot.models.load import load_tokenizer
from jackpot.rollout.evaluate import evaluate
from jackpot.rollout.tasks.base import PromptStream
from jackpot.rollout.tasks.registry import make_task

NUMBER = {"instruction": "Answer with the number.", "answer_regex": r"-?\d+"}
WORD = {"instruction": "Answer with one word.", "answer_regex": "[A-Za-z]+"}
CHOICE = {"instruction": "Answer with one word.", "answer_regex": "Yes|No|True|False"}
DATA_SETS: dict[str, tuple[dict[str, int], dict[str, str]]] = {  # at the easy end of their settings, and how they ask
    "chain_sum": ({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, NUMBER),
    "products": ({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, NUMBER),
    "simple_equations": ({"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9}, NUMBER),
    "gcd": ({"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 20}, NUMBER),
    "letter_counting": ({"min_words": 1, "max_words": 3}, NUMBER),
    "leg_counting": ({"min_animals": 1, "max_animals": 2, "max_instances": 3}, NUMBER),
    "spell_backward": ({"min_word_len": 3, "max_word_len": 4}, WORD),
    "family_relationships": ({}, WORD),
    "syllogism": ({}, CHOICE),
    "isomorphic_strings": ({"max_string_length": 4}, CHOICE),
}


def main() -> None:
    """Measure every data set, and print a line for each."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("model", help="a folder, or a name of the hub")
    arguments.add_argument("lines", type=Path, help="file that gets a line for each data set")
    arguments.add_argument("--problems", type=int, default=16)
    arguments.add_argument("--samples", type=int, default=8)
    options = arguments.parse_args()

    tokenizer = load_tokenizer(options.model)
    with closing(make_engine(TransformersEngineConfig(), options.model, pick_device("auto"), Version(0, 0))) as engine:
        for name, (settings, asked) in DATA_SETS.items():
            task = json.dumps({"name": "reasoning_gym", "dataset": [{"name": name, "kwargs": settings}]} | asked)
            config = resolve("smollm", None, [f"policy.path={options.model}", f"task={task}"])
            with closing(make_task(config.task, tokenizer)) as problems:
                prompts = PromptStream(problems, "test", seed=0).next(options.problems)
                result = evaluate(engine, problems, tokenizer, prompts, config.sampling, seed=0, k=options.samples)

            correct = [bool(score.correct) for score in result.scores]
            groups = [correct[first : first + result.k] for first in range(0, len(correct), result.k)]
            line = {
                "data_set": name,
                "settings": settings,
                **asked,
                "problems": options.problems,
                "samples": options.samples,
                "score": result.reward,
                "right": result.accuracy,
                "mixed": sum(any(group) and not all(group) for group in groups) / len(groups),
                "example": [prompts[0].text, result.responses[0], prompts[0].answer],
            }
            with options.lines.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(
                f"{name:24s} score {line['score']:.2f}  right {line['right']:.1%}  mixed {line['mixed']:.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
