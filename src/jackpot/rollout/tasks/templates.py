r"""From a problem to the text that the model continues.

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
"""

from collections.abc import Callable

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from jackpot.core.errors import DataError


class Template:
    """Writes prompts for one tokenizer.

    Raises:
        DataError: a tokenizer that does not know plain text, or for `chat` one that has no chat template or one that
            cannot have a system prompt.
    """

    def __init__(
        self, name: str, tokenizer: PreTrainedTokenizerBase, *, instruction: str, system_prompt: str | None
    ) -> None:
        self._tokenizer, self._write = tokenizer, TEMPLATES[name]
        self._instruction, self._system_prompt = instruction, system_prompt
        self._begins = [] if name == "chat" else _beginning(tokenizer)
        text = self.text("What is 1+1?")
        if tokenizer.unk_token_id in tokenizer.encode(instruction or "What is 1+1?", add_special_tokens=False):
            raise DataError(
                f"the tokenizer has no tokens for plain text such as {text!r}; it cannot be used with this task, but "
                f"perhaps with arithmetic"
            )

    def text(self, problem: str) -> str:
        """What the model reads, as text."""
        question = f"{problem}\n{self._instruction}" if self._instruction else problem
        return self._write(self._tokenizer, question, self._system_prompt)

    def token_ids(self, text: str) -> list[int]:
        """What the model reads, with the token that begins a text where the tokenizer has one."""
        return [*self._begins, *self._tokenizer.encode(text, add_special_tokens=False)]

    def lengths(self, texts: list[str]) -> list[int]:
        """How many tokens each prompt has; all at once is several times faster."""
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [len(self._begins) + len(ids) for ids in encoded]


def chat(tokenizer: PreTrainedTokenizerBase, question: str, system_prompt: str | None) -> str:
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
    above = f"{system_prompt}\n\n" if system_prompt else ""
    return f"{above}Question:\n{question}\n\nAnswer:\n"


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special token that the tokenizer puts before a text, if it does."""
    special = tokenizer.encode("", add_special_tokens=True)
    return [tokenizer.bos_token_id] if tokenizer.bos_token_id in special else []


TEMPLATES: dict[str, Callable[[PreTrainedTokenizerBase, str, str | None], str]] = {"chat": chat, "base": base}
