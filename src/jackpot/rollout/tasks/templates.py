r"""Turns a problem into the prompt text that the model continues.

`chat`: the chat template that comes with the tokenizer, with the problem and the instruction as the user's message:

    [system prompt]
    [user] What is 1+1?
           Please reason step by step, and put your final answer within \boxed{}.
    [assistant]

`base`: plain text for a model that never saw a chat; the system prompt, if any, stands above it:

    Question:
    What is 1+1?
    Please reason step by step, and put your final answer within \boxed{}.

    Answer:

`plain`: problem and instruction without any frame, below the system prompt if there is one.
"""

from collections.abc import Callable

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from jackpot.core.errors import DataError


class Template:
    """Formats and tokenizes prompts with one tokenizer.

    Raises:
        DataError: the tokenizer cannot encode plain text; or for `chat` it has no chat template or one without a system
            prompt.
    """

    def __init__(
        self, name: str, tokenizer: PreTrainedTokenizerBase, *, instruction: str, system_prompt: str | None
    ) -> None:
        self._tokenizer, self._format = tokenizer, TEMPLATES[name]
        self._instruction, self._system_prompt = instruction, system_prompt
        self._bos = [] if name == "chat" else _bos_token_ids(tokenizer)
        example = "1+1" if name == "plain" else "What is 1+1?"
        text = self.text(example)
        if tokenizer.unk_token_id in tokenizer.encode(instruction or example, add_special_tokens=False):
            raise DataError(
                f"the tokenizer has no tokens for plain text such as {text!r}; it cannot be used with this task, but "
                f"perhaps with arithmetic"
            )

    def text(self, problem: str) -> str:
        """Return the prompt of a problem as text."""
        question = f"{problem}\n{self._instruction}" if self._instruction else problem
        return self._format(self._tokenizer, question, self._system_prompt)

    def token_ids(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the beginning-of-sequence token where the tokenizer adds one."""
        return [*self._bos, *self._tokenizer.encode(text, add_special_tokens=False)]

    def lengths(self, texts: list[str]) -> list[int]:
        """Return the number of tokens of each prompt; one call for many is several times faster."""
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [len(self._bos) + len(ids) for ids in encoded]


def chat(tokenizer: PreTrainedTokenizerBase, question: str, system_prompt: str | None) -> str:
    """Format a question with the tokenizer's chat template.

    Raises:
        DataError: there is no chat template, or it refuses these messages.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            "the tokenizer has no chat template; use `template: base`, or the tokenizer of a model that was trained to "
            "chat"
        )
    messages = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    messages.append({"role": "user", "content": question})
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        with_system = " and with `system_prompt`" if system_prompt is not None else ""
        raise DataError(
            f"the tokenizer's chat template cannot be used with a user's message{with_system}: {error}; leave "
            f"`system_prompt` out if there is one, or use `template: base`"
        ) from error


def base(tokenizer: PreTrainedTokenizerBase, question: str, system_prompt: str | None) -> str:
    """Format a question as plain text for a base model."""
    above = f"{system_prompt}\n\n" if system_prompt else ""
    return f"{above}Question:\n{question}\n\nAnswer:\n"


def plain(tokenizer: PreTrainedTokenizerBase, question: str, system_prompt: str | None) -> str:
    """Leave a question as it is, below the system prompt if there is one."""
    return f"{system_prompt}\n\n{question}" if system_prompt else question


def _bos_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the beginning-of-sequence token that the tokenizer puts before a text, or an empty list."""
    special = tokenizer.encode("", add_special_tokens=True)
    return [tokenizer.bos_token_id] if tokenizer.bos_token_id in special else []


TEMPLATES: dict[str, Callable[[PreTrainedTokenizerBase, str, str | None], str]] = {
    "chat": chat,
    "base": base,
    "plain": plain,
}
