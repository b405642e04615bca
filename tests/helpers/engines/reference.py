"""Expected log-probs of an engine: the model's own forward pass on one sequence at a time, then float64."""

import copy
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from jackpot.config.sampling import Sampling
from jackpot.core.types import Prompt, Rollout, Version
from jackpot.models.load import load_model, load_tokenizer
from jackpot.rollout.engines.base import Request

VOCAB_SIZE, EOS = 24, 1  # of the tiny models
CONTEXT = 64  # tokens


def tiny_model(seed: int, vocab_size: int = VOCAB_SIZE, **changes: int) -> Qwen3ForCausalLM:
    """Return a Qwen3 with random weights, large enough that its next-token distributions are far from uniform."""
    model, random_state = _make_model(seed, vocab_size, tuple(changes.items()))
    torch.set_rng_state(random_state)  # as if it had been made now
    return copy.deepcopy(model)


@cache
def _make_model(
    seed: int, vocab_size: int, changes: tuple[tuple[str, int], ...]
) -> tuple[Qwen3ForCausalLM, torch.Tensor]:
    """Make a model; return it with the state of torch's random numbers afterwards."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.15,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    return Qwen3ForCausalLM(Qwen3Config(**settings | dict(changes))), torch.get_rng_state()


def save_tiny_model(folder: Path, seed: int, vocab_size: int = VOCAB_SIZE) -> Path:
    """Save the model of `tiny_model` and return the folder."""
    tiny_model(seed, vocab_size).save_pretrained(folder)
    return folder


def save_longer(path: str, folder: Path) -> int:
    """Save a model with 7 rows more in its output layer, and return how many it had.

    They are those of frequent tokens: where one is read, every distribution is another.
    """
    model = load_model(path, torch.float32)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 7, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[size:] = model.lm_head.weight[:7]
    model.save_pretrained(folder)
    load_tokenizer(path).save_pretrained(folder)
    return size


def tiny_prompt(length: int, seed: int = 0) -> Prompt:
    """Return a prompt of random tokens other than padding and end-of-sequence."""
    draw = np.random.default_rng([length, seed])
    return Prompt(
        uid=f"{length}/{seed}", text="", answer="", token_ids=tuple(draw.integers(2, VOCAB_SIZE, length).tolist())
    )


def tiny_request(uid: str, length: int = 5, seed: int = 0, *, prompt: Prompt | None = None, **sampling) -> Request:
    """Return a request for a random prompt of some length, or for a given one."""
    settings = {"max_new_tokens": 12, "num_top_log_probs": 20} | sampling
    return Request(uid=uid, prompt=prompt or tiny_prompt(length), seed=seed, sampling=Sampling(**settings))


def rollout_of(prompt: Prompt, token_ids: Sequence[int]) -> Rollout:
    """Return a given response as a rollout, for `score`."""
    length = len(token_ids)
    return Rollout(
        uid=prompt.uid,
        prompt=prompt,
        finish="length",
        token_ids=torch.tensor(token_ids),
        rollout_log_probs=torch.zeros(length),
        sampled_mask=torch.ones(length, dtype=torch.bool),
        top_ids=torch.zeros(length, 0, dtype=torch.int64),
        top_log_probs=torch.zeros(length, 0),
        versions=torch.tensor([Version(0, 0)] * length),
    )


class Reference:
    """Holds an independent copy of a model, loaded with `AutoModelForCausalLM` and eager attention, without padding or
    cache."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()

    @torch.no_grad()
    def log_probs(self, prompt: Prompt, token_ids: Sequence[int], sampling: Sampling) -> np.ndarray:
        """Return log-probs before each response token and after the last, truncated: [T + 1, V] float64."""
        ids = torch.tensor([[*prompt.token_ids, *token_ids]])
        logits = self.model(ids).logits[0, len(prompt.token_ids) - 1 :].double().numpy()
        with np.errstate(divide="ignore"):
            return np.log(_truncated(logits / sampling.temperature, sampling))

    def joint_probs(self, prompt: Prompt, sampling: Sampling) -> dict[tuple[int, ...], float]:
        """Return the exact probability of every response of at most two tokens."""
        first = np.exp(self.log_probs(prompt, (), sampling)[0])
        joint = {(EOS,): first[EOS]}
        for token in range(VOCAB_SIZE):
            if token != EOS:
                second = np.exp(self.log_probs(prompt, (token,), sampling)[1])
                joint |= {
                    (token, second_token): first[token] * second[second_token] for second_token in range(VOCAB_SIZE)
                }
        assert math.isclose(sum(joint.values()), 1.0)
        return joint


def _truncated(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return probabilities after top-k and top-p as vLLM defines them: [T, V] float64."""
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    if sampling.top_k:
        rank = min(sampling.top_k, probs.shape[1])
        probs[probs < np.sort(probs)[:, [-rank]]] = 0.0
    probs /= probs.sum(axis=1, keepdims=True)

    if sampling.top_p < 1.0:
        order = np.argsort(-probs, kind="stable")
        sorted_probs = np.take_along_axis(probs, order, axis=1)
        mass_before = np.cumsum(sorted_probs, axis=1) - sorted_probs
        np.put_along_axis(probs, order, np.where(mass_before < sampling.top_p, sorted_probs, 0.0), axis=1)
    return probs / probs.sum(axis=1, keepdims=True)
