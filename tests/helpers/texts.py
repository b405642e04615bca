"""A tokenizer for real text, trained in a moment, and files of problems."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from helpers.paths import ROOT

CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def text_tokenizer(*, chat: str | None = CHAT, begins: bool = False) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of 512 tokens; `begins`: it puts <s> before a text, as Llama's does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special_tokens = ["<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    text = [(ROOT / "LICENSE").read_text()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(text, trainer)
    if begins:
        start_token = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start_token])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=chat, bos_token="<s>", eos_token="<|end|>", pad_token="<|end|>"
    )


def write_problems(path: Path, answers: Sequence[object], **more: Sequence[object]) -> Path:
    """Write one problem, `what is INDEX?`, for each answer, with further columns."""
    rows = [
        {"problem": f"what is {index}?", "answer": answer} | {name: values[index] for name, values in more.items()}
        for index, answer in enumerate(answers)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
