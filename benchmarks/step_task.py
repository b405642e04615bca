"""What both sides of step.py answer: shapes of a step, prompts of made-up words, and a reward. Any Python."""

import random
import resource
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

LEARNING_RATE = 1e-5


class Shape(NamedTuple):
    prompts: int
    group: int  # responses of a prompt
    micro_batch: int  # sequences of the longest prompt and the longest response
    prompt: tuple[int, int]  # tokens, at least and at most
    new_tokens: int  # of a response, at most
    words: int  # vocabulary
    stops: int  # of it end a response: random weights draw every token with nearly the same chance


SHAPES = {
    "fixed": Shape(32, 8, 64, (36, 53), 64, 4_096, 0),
    "ragged": Shape(2, 8, 16, (30, 300), 256, 49_152, 492),  # a hundredth: 92 tokens on average
    "smollm2": Shape(8, 8, 64, (30, 45), 16, 49_152, 0),
}


def shape_of(job: dict) -> Shape:
    """Return the job's shape with what it has of its own, such as other `prompts`."""
    shape = SHAPES[job["shape"]]
    return shape._replace(**{name: job[name] for name in Shape._fields if name in job})


def prompt_text(shape: Shape, index: int) -> str:
    draw = random.Random(index)
    return " ".join(f"w{draw.randrange(8, shape.words - shape.stops)}" for _ in range(draw.randint(*shape.prompt)))


def reward(response: str) -> float:
    """The share of words with an even number."""
    words = response.split()
    return sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))


def tokens_and_pairs(prompts: Sequence[int], responses: Sequence[int]) -> dict[str, int]:
    """Count what a step cannot do without, from lengths in tokens of all prompts and of all responses, in that order:
    a prompt's tokens once, every response token, and pairs of a query and a key that it sees."""
    group = len(responses) // len(prompts)
    rows = [
        (prompt, response) for n, prompt in enumerate(prompts) for response in responses[n * group : (n + 1) * group]
    ]
    return {
        "prompt_tokens": sum(prompts),
        "tokens": sum(responses),
        "pairs": sum(p * (p + 1) // 2 for p in prompts) + sum(t * p + t * (t + 1) // 2 for p, t in rows),
    }


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def summary(ends: list[float], tokens: list[dict], flops: list[dict], before: float, last: int | None) -> dict:
    """CPU seconds, sizes and FLOPs of a mean step. `ends` has one more than `tokens`: the start of the first step."""
    counted = slice(2, last)
    seconds = [after - start for start, after in pairwise(ends)][counted]
    mean = {name: sum(one[name] for one in tokens[counted]) / len(tokens[counted]) for name in tokens[0]}
    peak = peak_mib()
    result = {"step": sum(seconds) / len(seconds), "peak_mib": peak, "own_mib": peak - before} | mean
    if flops[-1]:
        done = [{name: after[name] - start.get(name, 0) for name in after} for start, after in pairwise(flops)][counted]
        result |= {f"{name}_flops": sum(one[name] for one in done) / len(done) for name in done[0]}
    return result
