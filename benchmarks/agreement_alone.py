"""math-verify as its README calls it, for benchmarks/agreement.py, in processes whose time we limit."""

from math_verify import parse, verify


def verdict(answer: str, reference: str) -> bool:
    """Both between dollar signs, as answers in LaTeX."""
    gold, given = (parse(f"${text}$", parsing_timeout=None) for text in (reference, answer))
    return verify(gold, given, timeout_seconds=None)
