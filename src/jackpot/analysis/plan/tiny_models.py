r"""Makes small models with random weights that replace large ones of the same architecture.

Their tokenizer is that of the large model or the built-in one: 512 byte-level tokens for plain text, five special
tokens and a plain chat template. To either, the answers of some problems are added, each as one token such as
`\boxed{72}`. So random responses are right now and then, rewards differ, and every part of training is used. As in
published models, the output layer has a few more rows than there are tokens.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from jackpot.config.tasks import INSTRUCTION
from jackpot.models.load import resolve_path
from jackpot.rollout.tasks.synthetic import synthetic_problem

PLAIN_TOKENS = 512  # of the built-in tokenizer, before its special ones
END, PAD = "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CONTEXT = 4096  # longest sequence, tokens
_ROUNDED_TO = 64  # the rows of the output layer are a multiple of it
_INITIALIZER_RANGE = 0.05  # far enough from uniform that two models differ, near enough that all tokens occur
_LONGEST_ANSWER = 100  # characters of an answer that becomes a token
# Each answer becomes several tokens: one or two of 32 random tokens are answers, and a quarter of responses right.
_AROUND = ("{}", " {}", ": {}", "{}.", " {}.", "{}\n", "({})", "${}$", " ${}$", "${}$.", "\\[{}\\]", "**{}**")
_TEXTS = 200  # made-up problems on which the built-in tokenizer is trained
_KEPT_SETTINGS = ("rope_parameters", "tie_word_embeddings", "attention_bias", "hidden_act", "rms_norm_eps")


@dataclass(frozen=True, kw_only=True, slots=True)
class TinySize:
    """Sets the size of a small model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int


LARGE = TinySize(hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2)
SMALL = TinySize(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1)


def own_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model from its folder or from the hub's cache; None where neither has it."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve_path(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError):  # raised for missing files; the class depends on the kind of tokenizer
        return None
    # From a lone config.json transformers makes a tokenizer of special tokens only.
    return tokenizer if tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens) else None


def built_in_tokenizer() -> PreTrainedTokenizerFast:
    """Make the built-in byte-level tokenizer."""
    backend = Tokenizer.from_str(_plain_text())
    backend.add_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=CHAT_TEMPLATE,
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,  # never produced; else the tokenizer class of some architectures adds a token of its own
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def with_answers(tokenizer: PreTrainedTokenizerBase, answers: Iterable[str]) -> PreTrainedTokenizerBase:
    """Append tokens that each hold one of `answers` in a box to the vocabulary; return the tokenizer."""
    boxed = [f"\\boxed{{{answer}}}" for answer in dict.fromkeys(answers) if len(answer) <= _LONGEST_ANSWER]
    added = [AddedToken(around.format(text), normalized=False) for text in boxed for around in _AROUND]
    tokenizer.add_tokens(added)  # pyright: ignore[reportArgumentType]  # AddedToken is a stand-in in its annotation
    return tokenizer


def tiny_config(like: PreTrainedConfig, size: TinySize, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Make the config of a small model with the architecture of `like`, for the vocabulary of `tokenizer`."""
    text = like.get_text_config()
    kept = {name: getattr(text, name) for name in _KEPT_SETTINGS if hasattr(text, name)}
    return AutoConfig.for_model(
        text.model_type,
        **kept,
        vocab_size=-(-(len(tokenizer) + 1) // _ROUNDED_TO) * _ROUNDED_TO,
        hidden_size=size.hidden_size,
        intermediate_size=3 * size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.hidden_size // size.num_heads,
        max_position_embeddings=CONTEXT,
        initializer_range=_INITIALIZER_RANGE,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def tiny_model(config: PreTrainedConfig, plain_tokens: int, num_tokens: int, seed: int) -> PreTrainedModel:
    """Make a model with random weights, without touching the caller's random state.

    Args:
        plain_tokens: number of tokens before those of answers.
        num_tokens: number of all tokens.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    answers = slice(plain_tokens, num_tokens)
    with torch.no_grad():
        model.get_output_embeddings().weight[answers] *= _answer_scale(config, plain_tokens, num_tokens)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=True,
    )
    return model.eval()


def _answer_scale(config: PreTrainedConfig, plain_tokens: int, num_tokens: int) -> float:
    """Return the factor for the output rows of answers that lets them occur in a large vocabulary too.

    A logit of a random model has standard deviation s = initializer_range * sqrt(hidden_size), so the mean of its
    exponential is exp(s^2 / 2). The factor makes the answers a tenth of the whole.
    """
    share = 0.1 * plain_tokens / max(1, num_tokens - plain_tokens)
    if share <= 1.0:
        return 1.0
    return math.sqrt(2.0 * math.log(share)) / (config.initializer_range * math.sqrt(config.hidden_size))


def save_tiny(
    folder: Path,
    like: PreTrainedConfig,
    size: TinySize,
    tokenizer: PreTrainedTokenizerBase,
    answers: Sequence[str],
    seed: int,
) -> None:
    """Save a small model with the architecture of `like`, and `tokenizer`, to which `answers` are added."""
    plain_tokens = len(tokenizer)
    with_answers(tokenizer, answers)
    config = tiny_config(like, size, tokenizer)
    tiny_model(config, plain_tokens, len(tokenizer), seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@lru_cache(maxsize=1)
def _plain_text() -> str:
    """Train the built-in tokenizer, 256 bytes and frequent pairs, on made-up problems; return its JSON."""
    backend = Tokenizer(tokenizer_models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=PLAIN_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(
        [INSTRUCTION, *(synthetic_problem(number).problem for number in range(_TEXTS))], trainer
    )
    return backend.to_str()
