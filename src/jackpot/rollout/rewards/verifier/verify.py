"""Verifies an answer with algebra, in a reward worker: importing this file imports math-verify."""

from jackpot.rollout.rewards.verifier.compare import compare
from jackpot.rollout.rewards.verifier.expressions import equal_expressions


def verify(*, answer: str, reference: str) -> float:
    """Return 1.0 where an answer, as extracted from a response, equals the reference, else 0.0."""
    return float(bool(compare(answer, reference, equal_expressions)))
