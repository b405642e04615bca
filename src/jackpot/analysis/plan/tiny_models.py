r"""Small models with random weights, which replace large ones of the same architecture.

Their tokenizer is that of the policy with added tokens: the answers of some problems, each as a token such as
`\boxed{72}`. So random responses are right now and then, rewards differ, and every part of training is used. As in
published models, the output layer has a few more rows than there are tokens.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from jackpot.core.errors import ModelError
from jackpot.models.hub import resolve_path

BYTES = "starter:text_policy"  # a model whose tokens are bytes, with a plain chat template
LARGE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
CONTEXT = 4096  # longest sequence, tokens
_ROUNDED_TO = 64  # the number of rows of the output layer is a multiple of this
_INITIALIZER_RANGE = 0.05  # makes distributions that differ between models, and in which all tokens still occur
_LONGEST_ANSWER = 100  # most characters of an answer that becomes a token
# Forms of an answer, each of which becomes a token. So some of the 32 random tokens of a response are answers, and
# about a quarter of the responses are right.
_ANSWER_FORMS = ("{}", " {}", ": {}", "{}.", " {}.", "{}\n", "({})", "${}$", " ${}$", "${}$.", "\\[{}\\]", "**{}**")
# Settings of the large model's config that the small one has too.
_SHARED_SETTINGS = ("rope_parameters", "tie_word_embeddings", "attention_bias", "hidden_act", "rms_norm_eps")


def own_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model from the model's folder or from the hub's cache; None where neither has one."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve_path(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError):  # raised for missing files; the class depends on the kind of tokenizer
        return None
    # From a lone config.json transformers makes a tokenizer of special tokens only.
    return tokenizer if tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens) else None


def save_tiny(
    folder: Path, like: PreTrainedConfig, size: Mapping[str, int], tokenizer: str, answers: Sequence[str], seed: int
) -> None:
    """Save a small random model and its tokenizer, without touching the caller's random state.

    Args:
        folder: folder that is written.
        like: config of the large model whose architecture the small one has.
        size: settings of the small model's size, LARGE or SMALL.
        tokenizer: path of the model whose tokenizer the small one gets.
        answers: answers of problems; each becomes several tokens, one for each of _ANSWER_FORMS.
        seed: seed of the random weights.

    Raises:
        ModelError: the tokenizer is not on this disk any more.
    """
    if (tokens := own_tokenizer(tokenizer)) is None:
        raise ModelError(f"the tokenizer of {tokenizer} is not on this disk any more; type the same command again")

    # Every answer that is not too long becomes a token in each form.
    plain_tokens = len(tokens)
    boxed = [f"\\boxed{{{answer}}}" for answer in dict.fromkeys(answers) if len(answer) <= _LONGEST_ANSWER]
    added = [AddedToken(form.format(text), normalized=False) for text in boxed for form in _ANSWER_FORMS]
    tokens.add_tokens(added)  # pyright: ignore[reportArgumentType]  # AddedToken is a stand-in in its annotation
    tokens.model_max_length = CONTEXT
    tokens.unk_token = tokens.unk_token or tokens.pad_token  # without one, some tokenizer classes add a token

    config = tiny_config(like, size, tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)

    # Without this factor, hardly any answer would be drawn from a large vocabulary.
    with torch.no_grad():
        scale = _answer_scale(config, plain_tokens, len(tokens))
        model.get_output_embeddings().weight[plain_tokens : len(tokens)] *= scale
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)


def tiny_config(
    like: PreTrainedConfig, size: Mapping[str, int], tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    """Make the config of a small model with the architecture of the config `like`.

    Args:
        like: config of the large model.
        size: settings of the small model's size, LARGE or SMALL.
        tokenizer: tokenizer whose vocabulary the model has.
    """
    text = like.get_text_config()
    rows = len(tokenizer) + 1  # at least one row more than there are tokens, as in published models
    shared = {name: getattr(text, name) for name in _SHARED_SETTINGS if hasattr(text, name)}

    return AutoConfig.for_model(
        text.model_type,
        **shared,
        **size,
        vocab_size=-(-rows // _ROUNDED_TO) * _ROUNDED_TO,  # rounded up
        intermediate_size=3 * size["hidden_size"],
        head_dim=size["hidden_size"] // size["num_attention_heads"],
        max_position_embeddings=CONTEXT,
        initializer_range=_INITIALIZER_RANGE,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def _answer_scale(config: PreTrainedConfig, plain_tokens: int, num_tokens: int) -> float:
    """Return the factor for the output layer's rows of answer tokens, so that random responses hold answers often.

    A logit of a random model has the standard deviation s = initializer_range * sqrt(hidden_size), so the mean of its
    exponential is exp(s^2 / 2). With the factor, all answers together have about a tenth of the probability. Of the
    `num_tokens` tokens, the first `plain_tokens` are the tokenizer's own, and the others are the answers.
    """
    # The exponential of an answer's logit must have the mean `gain` = exp((factor s)^2 / 2); for a plain token the
    # mean is about 1. So the answers' exponentials sum to a tenth of those of the plain tokens.
    gain = 0.1 * plain_tokens / max(1, num_tokens - plain_tokens)
    if gain <= 1.0:
        return 1.0  # there are so many answers that they need no factor
    return math.sqrt(2.0 * math.log(gain)) / (config.initializer_range * math.sqrt(config.hidden_size))
