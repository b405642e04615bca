r"""Small models with random weights, in the place of large ones of the same family.

The tokenizer has the family's special tokens behind 512 tokens for plain text, and then the answers of some problems,
each as one token `\boxed{72}`. So random text is right now and then, rewards differ, and every part of training has
something to do. As in the real models, the output layer has some rows more than there are tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as tokenizer_models
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from jackpot.config.tasks import INSTRUCTION
from jackpot.models.families import Family, Known
from jackpot.rollout.tasks.synthetic import synthetic_problem

PLAIN_TOKENS = 512  # of the vocabulary, before the special ones
CONTEXT = 4096  # tokens
_ROUNDED_TO = 64  # rows of the output layer
_LONGEST_ANSWER = 100  # characters of an answer that becomes a token
# Each answer in several tokens: of 32 random tokens one or two are answers, and a quarter of the responses is right.
_AROUND = ("{}", " {}", ": {}", "{}.", " {}.", "{}\n", "({})", "${}$", " ${}$", "${}$.", "\\[{}\\]", "**{}**")
_TEXTS = 200  # problems that the tokens for plain text are made of


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The size of a model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int


LARGE = Shape(hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2)
SMALL = Shape(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1)


def tiny_token(family: Family, token_id: int) -> int | None:
    """The id in a small model of a special token with this id in the family's models; None of any other token."""
    place = token_id - family.first_id
    return PLAIN_TOKENS + place if 0 <= place < len(family.tokens) else None


def tiny_tokenizer(known: Known, answers: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the family's special tokens, and tokens that answer with each of `answers`.

    The special tokens have the same ids whatever the answers are.
    """
    family, backend = known.family, Tokenizer.from_str(_plain_text())
    backend.add_tokens([AddedToken(token, special=token not in family.kept) for token in family.tokens])
    boxed = [f"\\boxed{{{answer}}}" for answer in dict.fromkeys(answers) if len(answer) <= _LONGEST_ANSWER]
    backend.add_tokens([AddedToken(around.format(one), normalized=False) for one in boxed for around in _AROUND])
    if family.begin:
        first = (family.begin, backend.token_to_id(family.begin))
        backend.post_processor = processors.TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=family.template if known.chats or family.base_has_template else None,
        bos_token=family.begin,
        eos_token=family.message_end if known.chats else family.end,
        pad_token=family.pad,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def tiny_model(known: Known, shape: Shape, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A model of the family's architecture with random weights, without touching the caller's random state."""
    family, end = known.family, tokenizer.eos_token_id
    config = family.config(
        vocab_size=-(-(len(tokenizer) + 1) // _ROUNDED_TO) * _ROUNDED_TO,
        hidden_size=shape.hidden_size,
        intermediate_size=3 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=known.tied,
        initializer_range=0.05,  # far enough from uniform that two models differ, near enough that all tokens occur
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **family.shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family.model(config)
    ends = sorted({end, tokenizer.convert_tokens_to_ids(family.end)})
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends if len(ends) > 1 else end,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
    )
    return model.eval()


def save_tiny(folder: Path, known: Known, shape: Shape, answers: Sequence[str], seed: int) -> PreTrainedModel:
    """Write a small model and its tokenizer as `save_pretrained` does; the model."""
    tokenizer = tiny_tokenizer(known, answers)
    model = tiny_model(known, shape, tokenizer, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@lru_cache(maxsize=1)
def _plain_text() -> str:
    """A tokenizer for any text, as JSON: the 256 bytes and the pairs that are most frequent in some text."""
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
