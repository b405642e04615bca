"""An environment of your own with several turns: the model and the environment write a response by turns.

    jackpot train examples/own_environment.yaml

It is a task that names the tokens at which the model's turn ends, and that replies in `step`. Both models read the
replies, and neither is trained on them.
"""

from transformers import PreTrainedTokenizerBase

from examples.own_task import NearSums
from jackpot.config.tasks import CustomTaskConfig
from jackpot.core.types import Prompt, Score


class SecondTry(NearSums):
    """Asks again after a wrong answer, at most `tries` times in all; a later right answer is worth less.

    A response to `46+5=` is, for instance, `50#50` and end of sequence from the model, `?46+5=` from the environment,
    then `51#51` and end of sequence from the model, for a reward of 1/2.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: CustomTaskConfig) -> None:
        super().__init__(tokenizer, settings)
        self._tries = settings.kwargs["tries"]
        self.turn_end_token_ids = (tokenizer.eos_token_id,)

    def step(self, prompt: Prompt, response: str) -> str | None:
        """Return the question again, or None, which ends the response, after a right answer or the last try."""
        answers = response.split("?")
        is_over = len(answers) == self._tries or self._is_right(prompt, answers[-1])
        return None if is_over else f"?{prompt.text}"

    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        """Score the last answer: 1 / number of tries where it is right, else 0."""
        answers = response.split("?")
        correct = finished and self._is_right(prompt, answers[-1])
        return Score(reward=correct / len(answers), correct=correct)

    def _is_right(self, prompt: Prompt, answer: str) -> bool:
        return answer.partition("#")[2] == prompt.answer
