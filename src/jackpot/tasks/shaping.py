"""Rewards beside the task's own. Layer 3: pure."""


def overlong_penalty(length: int, limit: int, buffer: int, penalty: float) -> float:
    """DAPO's soft overlong punishment, arXiv 2503.14476 eq. 13, to be added to a reward; between -penalty and 0.

    0 up to limit - buffer response tokens, then falling evenly, and -penalty at `limit`, where a response is cut.
    """
    return -penalty * max(0, length - (limit - buffer)) / buffer
