"""What vLLM is asked, in process and over HTTP, and how its answers read. Needs no vLLM.

vLLM is asked for every sampling setting by name, so that no default of a server or of a generation_config.json applies.
Its log-probs must be processed ones: after temperature, top-p and top-k.

Shapes: `T` response tokens, `K` top log-probs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jackpot.core.errors import EngineError
from jackpot.core.prng import stream_key
from jackpot.core.types import Finish, Rollout, Version
from jackpot.rollout.engines.base import Request

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


_PREFIX = "token_id:"
_MINUS_INFINITY = -9999.0  # as JSON has it
_COMMON = {"return_token_ids": True, "return_tokens_as_token_ids": True, "stream": False}


def completion_body(prompt: Sequence[int], words: dict[str, Any]) -> dict[str, Any]:
    """What to send, but for the model's name."""
    return _COMMON | words | {"prompt": list(prompt)}


def score_body(question: ScoreQuestion) -> dict[str, Any]:
    return completion_body(question.prompt, question.words | {"logprobs": 0})


def rollout_reader(
    request: Request, words: dict[str, Any], vocab_size: int, version: Version
) -> Callable[[Any], Rollout]:
    """Reads the answer to `completion_body(request.prompt.token_ids, words)`."""
    wanted = request.sampling.num_top_log_probs

    def read(answer: Any) -> Rollout:
        choice = _choice(answer, request.prompt.token_ids, request.uid)
        token_ids = [int(token) for token in choice["token_ids"]]
        _check_end(choice["finish_reason"], token_ids, words, request.uid)
        tops = choice["logprobs"]["top_logprobs"]
        rows = [
            _row(token, sampled, top, wanted, request.uid)
            for token, sampled, top in zip(token_ids, choice["logprobs"]["token_logprobs"], tops, strict=True)
        ]
        shape = (len(rows), 1 + wanted)
        ids = np.array([[token for token, _ in row] for row in rows], dtype=np.int64).reshape(shape)
        log_probs = np.array([[value for _, value in row] for row in rows], dtype=np.float64).reshape(shape)
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise EngineError(
                f"{request.uid} came back with token ids from {ids.min()} to {ids.max()}, and the model knows 0 to "
                f"{vocab_size - 1}: the server has another vocabulary. Start it with the run's model"
            )
        if not (log_probs <= 1e-3).all() or not np.isfinite(log_probs[:, 0]).all():
            raise EngineError(f"{request.uid} came back with log-probs that are none, the largest {log_probs.max()}")
        return read_rollout(request, token_ids, ids, log_probs, choice["finish_reason"], version)

    return read


def score_reader(question: ScoreQuestion, uid: str) -> Callable[[Any], list[float]]:
    """Reads the log-probs of the last tokens of the prompt and of the token after it."""

    def read(answer: Any) -> list[float]:
        choice = _choice(answer, question.prompt, uid)
        values = []
        if count := question.prompt_tokens:
            entries = choice["prompt_logprobs"][-count:]
            tokens = question.prompt[-count:]
            values = [_value(entry[str(token)]["logprob"]) for token, entry in zip(tokens, entries, strict=True)]
        return [*values, _value(choice["logprobs"]["top_logprobs"][0][f"{_PREFIX}{question.token}"])]

    return read


def _choice(answer: Any, prompt: Sequence[int], uid: str) -> Any:
    [choice] = answer["choices"]
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"cut short, its finish_reason is {choice['finish_reason']!r}")
    if (read := choice["prompt_token_ids"]) != list(prompt):
        raise EngineError(
            f"the server read another prompt for {uid} than it was sent: {len(read)} tokens in place of {len(prompt)}. "
            f"Is there something between it and the trainer that changes requests?"
        )
    return choice


def _check_end(finish: str, token_ids: Sequence[int], words: dict[str, Any], uid: str) -> None:
    """Raises EngineError for a response that ended where nobody asked it to."""
    advice = "a setting of its own. Start it with --generation-config vllm and without other overrides"
    if (finish == "length" and len(token_ids) != words["max_tokens"]) or not token_ids:
        raise EngineError(f"the server ended {uid} after {len(token_ids)} tokens of {words['max_tokens']}: {advice}")
    if finish == "stop" and token_ids[-1] not in words["stop_token_ids"]:
        raise EngineError(f"the server ended {uid} at token {token_ids[-1]}, which is not a stop token: {advice}")


def _row(token: int, sampled: Any, top: dict[str, Any], wanted: int, uid: str) -> list[tuple[int, float]]:
    """The sampled token and the `wanted` most probable ones, most probable first.

    vLLM gives the sampled one a place of its own beside the top ones only where it is not among them.
    """
    entries = [(int(name.removeprefix(_PREFIX)), _value(value)) for name, value in top.items()]
    if len(entries) > wanted:
        entries = [entry for entry in entries if entry[0] != token]
    if len(entries) != wanted:
        raise EngineError(
            f"{uid} came back with {len(entries)} top log-probs of a token in place of {wanted}; start the server with "
            f"--max-logprobs -1, or ask for fewer with sampling.num_top_log_probs"
        )
    return [(token, _value(sampled)), *sorted(entries, key=lambda entry: -entry[1])]


def _value(given: Any) -> float:
    value = float(given)
    return value if value > _MINUS_INFINITY else -np.inf
