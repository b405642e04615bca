"""A task of your own: prompts by index, and a score for each response.

    jackpot train examples/own_task.yaml

The class is constructed from the tokenizer of the models and the block `task` of the recipe.
"""

import random

from transformers import PreTrainedTokenizerBase

from jackpot.config.tasks import CustomTaskConfig
from jackpot.core.types import Prompt, Score
from jackpot.rollout.tasks.base import Split, Task


class NearSums(Task):
    """Asks for sums of `terms` numbers and gives part of the reward to a response that is nearly right."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: CustomTaskConfig) -> None:
        self._tokenizer = tokenizer
        self._terms = settings.kwargs["terms"]

    def size(self, split: Split) -> int | None:
        """Return 500 for held-out problems and None, which is endless, for training."""
        return 500 if split == "test" else None

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return a problem that depends on split and index alone, so that a run can be resumed."""
        draw = random.Random(f"{split}/{index}")
        numbers = [draw.randint(1, 40) for _ in range(self._terms)]
        text = "+".join(map(str, numbers)) + "="
        return Prompt(
            uid=f"near_sums/{split}/{index}",
            text=text,
            answer=str(sum(numbers)),
            token_ids=tuple(self._tokenizer.encode(text, add_special_tokens=False)),
        )

    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        """Score the number after `#`: 1 where it is right, 0.5 where it is off by at most 10, else 0."""
        _, _, given = response.partition("#")
        if not finished or not given.isdigit():
            return Score(reward=0.0, correct=False)
        error = abs(int(given) - int(prompt.answer))
        return Score(reward=1.0 if error == 0 else 0.5 * (error <= 10), correct=error == 0)
