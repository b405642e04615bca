"""Translation between this project's requests and rollouts and vLLM's, in process and over HTTP. Needs no vLLM.

Every sampling parameter is sent, so that no default of a server or of a generation_config.json applies. Log-probs must
be vLLM's processed ones: after temperature, top-p and top-k.

Shapes: `T` response tokens, `K` top log-probs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jackpot.core.errors import EngineError
from jackpot.core.prng import fold_in
from jackpot.core.types import Finish, Rollout, Version
from jackpot.rollout.engines.base import Request

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0  # below, vLLM samples with 0.01; above, it refuses
_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}  # any other finish_reason: the response was aborted
_NEUTRAL = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


def check_temperature(temperature: float, what: str) -> None:
    """Raise EngineError for a temperature that vLLM replaces or refuses.

    Args:
        what: subject of the error, such as a request's uid.
    """
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise EngineError(
            f"{what} has temperature {temperature:g}; vLLM samples with temperatures from {MIN_TEMPERATURE:g} to "
            f"{MAX_TEMPERATURE:g}. Use one of those, or engine=transformers"
        )


def to_sampling_params(request: Request, eos_token_ids: Sequence[int], max_model_len: int) -> dict[str, Any]:
    """Return a request's sampling as keywords that vLLM's `SamplingParams` and its completions API share.

    The seed is hashed once more, because on a CPU vLLM's generators keep only 32 bits of it.
    """
    sampling = request.sampling
    return _NEUTRAL | {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": min(sampling.max_new_tokens, max_model_len - len(request.prompt.token_ids)),
        "seed": fold_in("vllm", request.seed) >> 1,  # both take signed 64 bits, and -1 for no seed
        "stop_token_ids": sorted({*eos_token_ids, *sampling.stop_token_ids}),
        "ignore_eos": True,  # only `stop_token_ids` end a response
        "logprobs": sampling.num_top_log_probs,
    }


def make_rollout(
    request: Request,
    token_ids: Sequence[int],
    ids: np.ndarray,
    log_probs: np.ndarray,
    finish_reason: str,
    version: Version,
) -> Rollout:
    """Return the rollout of a response of vLLM.

    Args:
        ids, log_probs: [T, 1 + K], the sampled token and then the top tokens, most probable first.
        finish_reason: vLLM's word for why the response ended.
    """
    length = len(token_ids)
    values = torch.from_numpy(log_probs.astype(np.float32))
    return Rollout(
        uid=request.uid,
        prompt=request.prompt,
        finish=_FINISHES.get(finish_reason, "aborted"),
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        rollout_log_probs=values[:, 0].clone(),
        sampled_mask=torch.ones(length, dtype=torch.bool),
        top_ids=torch.from_numpy(ids[:, 1:].astype(np.int64)),
        top_log_probs=values[:, 1:].clone(),
        versions=torch.tensor([version] * length, dtype=torch.int64).reshape(length, 2),
    )


# Scoring. vLLM has log-probs of a prompt's tokens at temperature 1 only; at others each token takes one request.


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbRequest:
    """Asks for the log-prob of `token` after `prompt`, and for those of the last tokens of the prompt."""

    prompt: tuple[int, ...]  # token ids before `token`
    token: int  # token id
    num_prompt_log_probs: int  # number of last prompt tokens whose log-probs are asked for
    temperature: float  # temperature of the distributions

    @property
    def sampling_params(self) -> dict[str, Any]:
        """Return the keywords that `SamplingParams` and the completions API share."""
        of_prompt = {"prompt_logprobs": 0} if self.num_prompt_log_probs else {}
        return (
            _NEUTRAL
            | of_prompt
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


def logprob_requests(rollout: Rollout, temperature: float) -> Iterator[LogProbRequest]:
    """Yield the requests that give the log-probs of a rollout's response tokens, in the order of the tokens."""
    check_temperature(temperature, f"the score of {rollout.uid}")
    tokens = rollout.token_ids.tolist()
    text = (*rollout.prompt.token_ids, *tokens)
    prompt_length = len(rollout.prompt.token_ids)
    positions = [len(tokens) - 1] if temperature == 1.0 else range(len(tokens))
    for position in positions:
        yield LogProbRequest(
            prompt=text[: prompt_length + position],
            token=tokens[position],
            num_prompt_log_probs=position if temperature == 1.0 else 0,
            temperature=temperature,
        )


def join_log_probs(parts: Sequence[Sequence[float]]) -> Tensor:
    """Return the results of one rollout's `logprob_requests` as one tensor, [T] float32."""
    return torch.tensor([value for part in parts for value in part], dtype=torch.float32)


# The completions API

_PREFIX = "token_id:"
_MINUS_INFINITY = -9999.0  # as vLLM writes it in JSON
_LARGEST_MASS = 1.0 + 1e-3  # of the top log-probs of a token; more than rounding makes it
_SAME = 1e-4  # by which a sampled token's log-prob may differ from its entry among the top ones
_COMMON = {"return_token_ids": True, "return_tokens_as_token_ids": True, "stream": False}


def completion_body(prompt: Sequence[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a completions call, without the model's name."""
    return _COMMON | sampling_params | {"prompt": list(prompt)}


def completion_bytes(body: Mapping[str, Any]) -> int:
    """Return the most bytes that a server's JSON for a `completion_body` can have, with room for other versions."""
    num_prompt, num_response, num_top = len(body["prompt"]), body["max_tokens"], body.get("logprobs") or 0
    return (1 << 20) + 1024 * num_prompt + (512 + 64 * (num_top + 2)) * num_response


def log_prob_body(request: LogProbRequest) -> dict[str, Any]:
    """Return the body of the completions call of a `LogProbRequest`, without the model's name."""
    return completion_body(request.prompt, request.sampling_params | {"logprobs": 0})


def parse_completion(
    completion: Any, *, request: Request, sampling_params: dict[str, Any], vocab_size: int, version: Version
) -> Rollout:
    """Return the rollout in a server's completion.

    Args:
        completion: JSON of the response to `completion_body(request.prompt.token_ids, sampling_params)`.

    Raises:
        EngineError: the server is set up in a way that changes what was asked for.
        LookupError, TypeError, ValueError: the completion has another form, or was cut short.
    """
    num_top = request.sampling.num_top_log_probs
    choice = _only_choice(completion, request.prompt.token_ids, request.uid)
    token_ids = [_token_id(token) for token in choice["token_ids"]]
    _check_end(choice["finish_reason"], token_ids, sampling_params, request.uid)
    tops = choice["logprobs"]["top_logprobs"]
    rows = [
        _log_prob_row(token, sampled, top, num_top, request.uid)
        for token, sampled, top in zip(token_ids, choice["logprobs"]["token_logprobs"], tops, strict=True)
    ]
    shape = (len(rows), 1 + num_top)
    ids = np.array([[token for token, _ in row] for row in rows], dtype=np.int64).reshape(shape)
    log_probs = np.array([[value for _, value in row] for row in rows], dtype=np.float64).reshape(shape)
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise EngineError(
            f"{request.uid} came back with token ids from {ids.min()} to {ids.max()}, and the model knows 0 to "
            f"{vocab_size - 1}: the server has another vocabulary. Start it with the run's model"
        )
    if not (log_probs <= 1e-3).all() or not np.isfinite(log_probs[:, 0]).all():
        raise EngineError(f"{request.uid} came back with numbers that are not log-probs, the largest {log_probs.max()}")
    if (mass := float(np.exp(log_probs[:, 1:]).sum(axis=1).max())) > _LARGEST_MASS:
        raise EngineError(
            f"{request.uid} came back with top log-probs of a token whose probabilities sum to {mass:.6g}; start the "
            f"server with --logprobs-mode processed_logprobs"
        )
    return make_rollout(request, token_ids, ids, log_probs, choice["finish_reason"], version)


def parse_log_probs(completion: Any, *, request: LogProbRequest, uid: str) -> list[float]:
    """Return the log-probs that a `LogProbRequest` asked for: those of the last prompt tokens, then that of its token.

    Args:
        completion: JSON of the response to `log_prob_body(request)`.
        uid: name of the rollout, for errors.
    """
    choice = _only_choice(completion, request.prompt, uid)
    values = []
    if count := request.num_prompt_log_probs:
        entries = choice["prompt_logprobs"][-count:]
        tokens = request.prompt[-count:]
        values = [_log_prob(entry[str(token)]["logprob"]) for token, entry in zip(tokens, entries, strict=True)]
    values.append(_log_prob(choice["logprobs"]["top_logprobs"][0][f"{_PREFIX}{request.token}"]))
    if not all(value <= 1e-3 for value in values):
        raise EngineError(f"the score of {uid} came back with numbers that are not log-probs, such as {max(values)}")
    return values


def _only_choice(completion: Any, prompt: Sequence[int], uid: str) -> Any:
    [choice] = completion["choices"]
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"cut short, its finish_reason is {choice['finish_reason']!r}")
    if (received := choice["prompt_token_ids"]) != list(prompt):
        raise EngineError(
            f"the server read another prompt for {uid} than it was sent: {len(received)} tokens in place of "
            f"{len(prompt)}. Is there something between it and the trainer that changes requests?"
        )
    return choice


def _check_end(finish_reason: str, token_ids: Sequence[int], sampling_params: dict[str, Any], uid: str) -> None:
    """Raise EngineError for a response that ended at no stop token and before its limit."""
    advice = "a setting of its own. Start it with --generation-config vllm and without other overrides"
    max_tokens = sampling_params["max_tokens"]
    if (finish_reason == "length" and len(token_ids) != max_tokens) or not 0 < len(token_ids) <= max_tokens:
        raise EngineError(f"the server ended {uid} after {len(token_ids)} tokens of {max_tokens}: {advice}")
    if finish_reason == "stop" and token_ids[-1] not in sampling_params["stop_token_ids"]:
        raise EngineError(f"the server ended {uid} at token {token_ids[-1]}, which is not a stop token: {advice}")


def _log_prob_row(token: int, sampled: Any, top: dict[str, Any], num_top: int, uid: str) -> list[tuple[int, float]]:
    """Return (token, log-prob) of the sampled token and then of the `num_top` top tokens, most probable first.

    vLLM adds an entry for the sampled token to the top ones only where it is not among them.
    """
    entries = [(int(name.removeprefix(_PREFIX)), _log_prob(value)) for name, value in top.items()]
    if len(entries) > num_top:
        entries = [entry for entry in entries if entry[0] != token]
    if len(entries) != num_top:
        raise EngineError(
            f"{uid} came back with {len(entries)} top log-probs of a token in place of {num_top}; start the server "
            f"with --max-logprobs -1, or ask for fewer with sampling.num_top_log_probs"
        )
    log_prob, own = _log_prob(sampled), _log_prob(top.get(f"{_PREFIX}{token}", sampled))
    if abs(log_prob - own) > _SAME:
        raise EngineError(
            f"{uid} came back with two log-probs of the sampled token {token}: {log_prob:.6g}, and {own:.6g} among the "
            f"top ones. Is there something between the server and the trainer that changes answers?"
        )
    return [(token, log_prob), *sorted(entries, key=lambda entry: -entry[1])]


def _token_id(given: Any) -> int:
    if type(given) is not int:
        raise TypeError(f"the token id {given!r} is no integer")
    return given


def _log_prob(given: Any) -> float:
    """Return a log-prob of vLLM's JSON; NaN stays NaN."""
    if type(given) not in (int, float):
        raise TypeError(f"the log-prob {given!r} is no number")
    return -np.inf if given <= _MINUS_INFINITY else float(given)
