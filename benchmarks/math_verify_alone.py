"""math-verify as its README calls it, and what it cannot parse. Run by benchmarks/verifier_agreement.py in workers."""

from math_verify import parse, verify

from jackpot.rollout.rewards.verifier import expressions


def equal(answer: str, reference: str) -> bool:
    """Compare both sides between dollar signs, as answers in LaTeX."""
    gold, given = (parse(f"${text}$", parsing_timeout=None) for text in (reference, answer))
    return verify(gold, given, timeout_seconds=None)


def parses(text: str) -> bool:
    """Whether math-verify parses a normalized expression, as our verifier passes it on."""
    try:
        expressions.parse(text)
    except Exception:
        return False
    return True
