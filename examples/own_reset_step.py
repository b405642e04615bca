"""An environment of your own with `reset` and `step`, in the form of Gymnasium, with text in and text out.

    jackpot train examples/own_reset_step.yaml

It needs no class of ours. docs/own-problem.md says how environments of other packages get this form.
"""

import random
import re


class Shopping:
    """Asks how many pens somebody has, and asks again after a wrong answer, at most `tries` times in all."""

    def __init__(self, tries: int) -> None:
        self._tries = tries

    def reset(self, *, seed: int) -> tuple[str, dict]:
        """Begin the episode of a seed. The same seed must give the same episode, since it is played more than once."""
        draw = random.Random(seed)
        first, bought, found = (draw.randint(2, 12) for _ in range(3))
        self._question = f"Ann has {first} pens, buys {bought} and finds {found}. How many has Ann now?"
        self._answer, self._said = str(first + bought + found), 0
        return self._question, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Return observation, reward, whether the episode has ended, whether it was cut off, and details.

        The last number of a turn is the answer. The reward is 1 for a right one, 1/2 at the second try, and so on.
        """
        self._said += 1
        is_right = re.findall(r"-?\d+", action)[-1:] == [self._answer]
        return self._question, is_right / self._said, is_right, self._said == self._tries, {}
