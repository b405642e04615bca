"""Prompt templates, which turn a problem into the text that the model continues."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from jackpot.core.errors import DataError, first_line
from jackpot.core.limited import CPU_SECONDS, MEMORY, ends_in_limits
from jackpot.core.types import Prompt
from jackpot.rollout.tasks.data import PromptSize
from jackpot.rollout.tasks.rows import Message, Problem, append

_ENDED: dict[str, bool] = {}  # by chat template, whether rendering it ends within the limits of time and memory
_MARKER = "What the model said."  # an answer that can be found again in the text that a chat template makes


class Template:
    """A template with its tokenizer, which formats and tokenizes prompts.

    Where a problem is a list of chat messages, the prompt has these messages: the instruction is appended to the last
    one, and the system prompt of the settings, if there is one, replaces system messages.

    Args:
        name: key of `TEMPLATES`.

    Raises:
        DataError: for `chat`, the tokenizer has no chat template, or one that takes no system prompt.
    """

    def __init__(
        self, name: str, tokenizer: PreTrainedTokenizerBase, *, instruction: str, system_prompt: str | None
    ) -> None:
        """Try the template `name` on a question; `instruction` follows each problem ("": none)."""
        self._tokenizer = tokenizer
        self._format = TEMPLATES[name]
        self._instruction, self._system_prompt = instruction, system_prompt
        # The token that begins a sequence, if the tokenizer adds one; a chat template writes it into the text itself.
        has_bos = name != "chat" and tokenizer.bos_token_id in tokenizer.encode("")
        self._bos: list[Any] = [tokenizer.bos_token_id] if has_bos else []

        if self._format is chat and not _rendering_ends(str(tokenizer.chat_template), lambda: self.text("1+1")):
            raise DataError(
                f"the tokenizer's chat template takes more than {CPU_SECONDS} s or {MEMORY:,} bytes for a question of "
                f"three characters; look at it, take another tokenizer, or use `template: base`"
            )

        self.text("1+1")  # refuses a chat template that is missing or has no system prompt

    def text(self, problem: Problem) -> str:
        """Return the prompt of a problem as text: with the instruction at its end, and the settings' system prompt.

        A system prompt of the settings replaces that of a problem given as chat messages.
        """
        question = append(problem, f"\n{self._instruction}") if self._instruction else problem
        messages = [Message("user", question)] if isinstance(question, str) else list(question)
        if self._system_prompt is not None:
            system = Message("system", self._system_prompt)
            messages = [system, *(message for message in messages if message.role != "system")]
        return self._format(self._tokenizer, messages)

    def prompt(self, uid: str, problem: Problem, answers: Sequence[str]) -> Prompt:
        """Return the `Prompt` of a problem; the first right answer is its reference, and all `answers` are right."""
        text = self.text(problem)
        token_ids = tuple(self.token_ids(text))
        return Prompt(uid=uid, text=text, answer=answers[0], other_answers=tuple(answers[1:]), token_ids=token_ids)

    def reply(self, text: str) -> str:
        """Return the text between two turns of the model, in which the user says `text`.

        Raises:
            DataError: the chat template changes or leaves out what the model said before.
        """
        if self._format is not chat:
            return f"\n\n{self._format(self._tokenizer, [Message('user', text)])}"
        # The chat template writes the token that ends the model's turn, but the model has generated this token itself:
        # the reply begins after it.
        following = self._after_turn(text)
        return following.lstrip().removeprefix(self._turn_end) if self._turn_end else following

    def turn_end_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a turn of the model: the chat template's, if there is one, and end-of-sequence.

        Raises:
            DataError: no such token exists, or the chat template changes or leaves out what the model said before.
        """
        tokenizer = self._tokenizer
        names = [self._turn_end] if self._format is chat and self._turn_end else []
        names += [] if tokenizer.eos_token is None else [str(tokenizer.eos_token)]
        if not names:
            raise DataError(
                "nothing ends a turn: the tokenizer has no end-of-sequence token, and no chat template in use puts a "
                "special token behind what the model said; set the tokenizer's eos_token"
            )
        return tuple(dict.fromkeys(tokenizer.get_vocab()[name] for name in names))

    @cached_property
    def _turn_end(self) -> str:
        """Return the special token that the chat template puts after a turn of the model, or an empty text."""
        following = self._after_turn("1+1").lstrip()
        special = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        # Take the longest match, since one special token may begin with another.
        return max(filter(following.startswith, special), key=len, default="")

    def _after_turn(self, text: str) -> str:
        """Return what the chat template writes after a turn of the model when the user says `text` next.

        Raise DataError as `reply` does.
        """
        messages = [Message("user", "1+1"), Message("assistant", _MARKER), Message("user", text)]
        _, marker, following = chat(self._tokenizer, messages).partition(_MARKER)
        if not marker:
            raise DataError(
                "the tokenizer's chat template changes or leaves out what the model said in earlier turns, so no reply "
                "can be put behind it; use `task.template: base` or `plain`"
            )
        return following

    def token_ids(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the beginning-of-sequence token where the tokenizer adds one."""
        return [*self._bos, *self._tokenizer.encode(text, add_special_tokens=False)]

    def measure(self, texts: list[str]) -> list[PromptSize]:
        """Return the size of each prompt in tokens; one call for many prompts is much faster than a call for each."""
        tokenize: Any = self._tokenizer
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        encoded = tokenize(texts, **options)["input_ids"] if texts else []
        unknown = self._tokenizer.unk_token_id
        return [
            PromptSize(tokens=len(self._bos) + len(ids), has_unknown=unknown is not None and unknown in ids)
            for ids in encoded
        ]


def _rendering_ends(template: str, ask: Callable[[], object]) -> bool:
    """Tell whether a chat template can be rendered within the limits of time and memory of `ends_in_limits`.

    A child process tries each template once; the result is kept for later calls.

    Args:
        ask: a function that renders the template.
    """
    if template not in _ENDED:
        _ENDED[template] = ends_in_limits(ask)
    return _ENDED[template]


def chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    r"""Format messages with the chat template that comes with the tokenizer.

    The problem and the instruction are the user's message:

        [system prompt]
        [user] What is 1+1?
               Please reason step by step, and put your final answer within \boxed{}.
        [assistant]

    Raises:
        DataError: there is no chat template, or it refuses these messages.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            "the tokenizer has no chat template; use `template: base` (task.template in training, math.template in "
            "jackpot eval), or the tokenizer of a model that was trained to chat"
        )

    try:
        conversation = [message._asdict() for message in messages]
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        return str(text)  # already a str, since nothing is tokenized; the library's type also allows token ids
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, MemoryError) as error:
        roles = ", ".join(message.role for message in messages)
        raise DataError(
            f"the tokenizer's chat template cannot be used with messages of {roles}: {first_line(error)}; leave "
            f"`system_prompt` out if there is one, or use `template: base`"
        ) from error


def base(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    r"""Format messages as plain text for a model that never saw a chat, after the system prompt if there is one.

    Question:
    What is 1+1?
    Please reason step by step, and put your final answer within \boxed{}.

    Answer:
    """
    above = "".join(f"{message.content}\n\n" for message in messages if message.role == "system" and message.content)
    question = "\n\n".join(message.content for message in messages if message.role != "system")
    return f"{above}Question:\n{question}\n\nAnswer:\n"


def plain(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """Join the contents of messages, with an empty line between two of them and no other text."""
    return "\n\n".join(message.content for message in messages if message.content)


TEMPLATES: dict[str, Callable[[PreTrainedTokenizerBase, Sequence[Message]], str]] = {
    "chat": chat,
    "base": base,
    "plain": plain,
}
