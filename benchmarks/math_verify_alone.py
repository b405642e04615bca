"""math-verify as its README calls it, and what it cannot parse: for benchmarks/agreement.py, in judge processes."""

from math_verify import parse, verify

from jackpot.rollout.rewards.verifier import expressions


def verdict(answer: str, reference: str) -> bool:
    """Both between dollar signs, as answers in LaTeX."""
    gold, given = (parse(f"${text}$", parsing_timeout=None) for text in (reference, answer))
    return verify(gold, given, timeout_seconds=None)


def parses(text: str) -> bool:
    """A cleaned expression, as our judge hands it over."""
    return expressions.parse(text) is not None
