"""The sums of `arithmetic` with a calculator: the smallest task in which a tool writes part of the response. Layer 3.

Every `=` in a response is a call. To the prompt `12+34+5=` the model writes `46+5=`, the calculator `51`, the model
`#51`. It adds two numbers of at most nine digits and answers `?` to anything else.
"""

import re

from transformers import PreTrainedTokenizerBase

from jackpot.config_tasks import ToolArithmeticConfig
from jackpot.tasks.arithmetic import Arithmetic
from jackpot.types import Prompt

_ADDITION = re.compile(r"(?:.*[=#])?([0-9]{1,9})\+([0-9]{1,9})=", re.DOTALL)  # after the last separator


class ToolArithmetic(Arithmetic):
    """The problems and the reward of `Arithmetic`; a turn ends with any token whose text ends with `=`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: ToolArithmeticConfig) -> None:
        super().__init__(tokenizer, settings)
        ids = sorted(tokenizer.get_vocab().values())
        self.turn_ends = tuple(index for index in ids if tokenizer.decode([index]).endswith("="))

    def reply(self, prompt: Prompt, response: str) -> str:
        """The sum of the two numbers since the last `=` or `#`, or `?`."""
        addition = _ADDITION.fullmatch(response)
        return str(int(addition[1]) + int(addition[2])) if addition else "?"
