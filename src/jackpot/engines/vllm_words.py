"""What vLLM is asked, in process and over HTTP, and how its answers read. Layer 3; needs no vLLM.

vLLM is asked for every sampling setting by name, so that no default of a server or of a generation_config.json applies.
Its log-probs must be processed ones: after temperature, top-p and top-k.

Shapes: `T` response tokens, `K` top log-probs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jackpot.errors import EngineError
from jackpot.ops.uniforms import stream_key
from jackpot.types import Finish, Request, Rollout, Version

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0  # below, vLLM would sample with 0.01; above, it refuses
_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}  # anything else is a response cut short
_NEUTRAL = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


def check_temperature(temperature: float, what: str) -> None:
    """Raises EngineError for a temperature at which vLLM would sample with another one."""
    if not LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE:
        raise EngineError(
            f"{what} has temperature {temperature:g}; vLLM samples with temperatures from {LOWEST_TEMPERATURE:g} to "
            f"{HIGHEST_TEMPERATURE:g}. Use one of those, or engine=transformers"
        )


def check_length(rollout: Rollout, context_length: int) -> None:
    """Raises EngineError for a rollout that is too long to be scored."""
    if (length := len(rollout.prompt.token_ids) + len(rollout.token_ids)) > context_length:
        raise EngineError(
            f"{rollout.uid} has {length} tokens with its prompt, more than the context of {context_length}; shorten "
            f"it, or score with the model that wrote it"
        )


def sampling_words(request: Request, eos_token_ids: Sequence[int], context_length: int) -> dict[str, Any]:
    """A request in the words that `SamplingParams` and the completions API share; the prompt aside.

    The seed is hashed once more: on a CPU vLLM's generators keep 32 bits of it.
    """
    sampling = request.sampling
    return _NEUTRAL | {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": min(sampling.max_new_tokens, context_length - len(request.prompt.token_ids)),
        "seed": stream_key("vllm", request.seed) >> 1,  # both take signed 64 bits, and -1 for no seed
        "stop_token_ids": sorted({*eos_token_ids, *sampling.stop_token_ids}),
        "ignore_eos": True,  # beyond the stop tokens just named
        "logprobs": sampling.num_top_log_probs,
    }


def read_rollout(
    request: Request, token_ids: Sequence[int], ids: np.ndarray, log_probs: np.ndarray, finish: str, version: Version
) -> Rollout:
    """An answer of vLLM.

    Args:
        ids, log_probs: [T, 1 + K], the sampled token and then the most probable ones, most probable first.
        finish: vLLM's word for why it ended.
    """
    length = len(token_ids)
    values = torch.from_numpy(log_probs.astype(np.float32))
    return Rollout(
        uid=request.uid,
        prompt=request.prompt,
        finish=_FINISHES.get(finish, "aborted"),
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        rollout_log_probs=values[:, 0].clone(),
        sampled_mask=torch.ones(length, dtype=torch.bool),
        top_ids=torch.from_numpy(ids[:, 1:].astype(np.int64)),
        top_log_probs=values[:, 1:].clone(),
        versions=torch.tensor([version] * length, dtype=torch.int64).reshape(length, 2),
    )


# Scores. vLLM has log-probs of a prompt's tokens at temperature 1 only; at others each token is asked for by itself.


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreQuestion:
    """The log-prob of `token` after `prompt`, and those of the last `prompt_tokens` tokens of the prompt."""

    prompt: tuple[int, ...]
    token: int
    prompt_tokens: int
    temperature: float

    @property
    def words(self) -> dict[str, Any]:
        asks_prompt = {"prompt_logprobs": 0} if self.prompt_tokens else {}
        return (
            _NEUTRAL
            | asks_prompt
            | {
                "temperature": self.temperature,
                "top_p": 1.0,
                "top_k": 0,
                "max_tokens": 1,
                "seed": 0,
                "ignore_eos": True,
                "logprob_token_ids": [self.token],
            }
        )


def score_questions(rollout: Rollout, temperature: float) -> Iterator[ScoreQuestion]:
    """What to ask for the log-probs of a rollout's tokens, in their order."""
    check_temperature(temperature, f"the score of {rollout.uid}")
    tokens = rollout.token_ids.tolist()
    written = (*rollout.prompt.token_ids, *tokens)
    before = len(rollout.prompt.token_ids)
    asked = [len(tokens) - 1] if temperature == 1.0 else range(len(tokens))
    for last in asked:
        yield ScoreQuestion(
            prompt=written[: before + last],
            token=tokens[last],
            prompt_tokens=last if temperature == 1.0 else 0,
            temperature=temperature,
        )


def read_score(answers: Sequence[Sequence[float]]) -> Tensor:
    """The answers to `score_questions`, each with the prompt's tokens before its own: [T] float32."""
    return torch.tensor([value for answer in answers for value in answer], dtype=torch.float32)
