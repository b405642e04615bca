"""A reward of your own: a function of the response, named in the recipe as package.module:function.

    jackpot train examples/own_reward.yaml

It runs in worker processes with a time limit; docs/rewards.md says what happens when it fails or takes too long.
"""


def after_hash(*, problem: str, response: str, answer: str, finished: bool) -> float:
    """Return 1 where the number after the first `#` is the answer, 0.2 where at least its last digit is right, else 0.

    Args:
        problem: the prompt as the model read it.
        response: what the model generated, decoded.
        answer: the reference answer of the problem.
        finished: False where the response was cut at `sampling.max_new_tokens`.
    """
    _, _, given = response.partition("#")
    if not finished or not given:
        return 0.0
    return 1.0 if given == answer else 0.2 * (given[-1] == answer[-1])


def brevity(*, response: str, **others: object) -> float:
    """Return a number that rises to 1 as the response gets shorter; the recipe adds it with a small weight."""
    return 1.0 / (1.0 + len(response) / 10.0)
