"""What both sides of step.py answer: a model's worth of made-up words, prompts of them, and a reward. Any Python."""

import random
import resource

WORDS = 4096
LEARNING_RATE = 1e-5
GROUP, MICRO_BATCH = 8, 64  # sequences


def prompt_text(index: int) -> str:
    """36 to 53 words."""
    draw = random.Random(index)
    return " ".join(f"w{draw.randrange(8, WORDS)}" for _ in range(draw.randint(36, 53)))


def reward(response: str) -> float:
    """The share of words with an even number."""
    words = response.split()
    return sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
