"""The parts of requests and answers that vLLM and SGLang share: checks of answers, and rollouts and scores from them.

Shapes: `T` response tokens, `K` top log-probs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jackpot.core.errors import EngineError
from jackpot.core.types import Finish, Rollout, Version
from jackpot.rollout.engines.base import Request

# Sampling parameters that are not used, with values that have no effect. They are sent so that no default of a server
# applies.
NEUTRAL: Mapping[str, float] = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}  # any other finish_reason: the response was aborted
_LARGEST_MASS = 1.0 + 1e-3  # largest sum of the top tokens' probabilities at one position, with room for rounding
_LARGEST_LOG_PROB = 1e-3  # largest log-prob, with room for rounding
_SAME = 1e-4  # largest difference between a sampled token's own log-prob and that among the top log-probs


class Remedies(NamedTuple):
    """The advice in errors about a server's answers: with which arguments to start the server."""

    wrong_end: str  # advice where a response ends at another token or length than was asked for
    few_log_probs: str  # advice where a server returns too few top log-probs
    wrong_log_probs: str  # advice where log-probs are not those of a distribution


def make_rollout(
    request: Request,
    token_ids: Sequence[int],
    ids: np.ndarray,
    log_probs: np.ndarray,
    finish_reason: str,
    version: Version,
) -> Rollout:
    """Return the rollout of a response that a server, or vLLM in this process, has generated.

    Args:
        ids, log_probs: [T, 1 + K]; in each row the sampled token, then the top tokens, most probable first.
        finish_reason: vLLM's or SGLang's word for why the response ended.
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
        versions=torch.tensor([version] * length, dtype=torch.int64).reshape(length, 2),  # [0, 2] without tokens
    )


def checked_rollout(
    request: Request,
    rows: Sequence[Sequence[tuple[int, float]]],
    finish_reason: str,
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int],
    vocab_size: int,
    version: Version,
    remedies: Remedies,
) -> Rollout:
    """Check that a server's response fits the request, and return the response as a rollout.

    Args:
        rows: for each token of the response, (token, log-prob) of the token and then of the top tokens, as
            `log_prob_row` returns them.
        max_tokens, stop_token_ids: the length limit and the stop tokens that the server was sent.
        remedies: advice for errors.

    Raises:
        EngineError: the server's setup changes responses, such as by other stop tokens, token ids or log-probs.
    """
    token_ids = [token for (token, _), *_ in rows]  # the first pair of a row is that of the sampled token
    length = len(token_ids)

    # A response must end at a stop token, or at its largest length.
    if (finish_reason == "length" and length != max_tokens) or not 0 < length <= max_tokens:
        raise EngineError(f"the server ended {request.uid} after {length} tokens of {max_tokens}: {remedies.wrong_end}")
    if finish_reason == "stop" and token_ids[-1] not in stop_token_ids:
        raise EngineError(
            f"the server ended {request.uid} at token {token_ids[-1]}, which is not a stop token: {remedies.wrong_end}"
        )

    # Token ids and log-probs [T, 1 + K], from the (token, log-prob) pairs of all positions.
    shape = (len(rows), 1 + request.sampling.num_top_log_probs)
    pairs = list(chain.from_iterable(rows))
    ids = np.array([token for token, _ in pairs], dtype=np.int64).reshape(shape)
    log_probs = np.array([log_prob for _, log_prob in pairs], dtype=np.float64).reshape(shape)

    if ids.min() < 0 or ids.max() >= vocab_size:
        raise EngineError(
            f"{request.uid} came back with token ids from {ids.min()} to {ids.max()}, and the model knows 0 to "
            f"{vocab_size - 1}: the server has another vocabulary. Start it with the run's model"
        )

    # NaN fails the first comparison. A top token may have the log-prob -inf, a sampled token not.
    if not (log_probs <= _LARGEST_LOG_PROB).all() or not np.isfinite(log_probs[:, 0]).all():
        raise EngineError(f"{request.uid} came back with numbers that are not log-probs, the largest {log_probs.max()}")

    if (mass := float(np.exp(log_probs[:, 1:]).sum(axis=1).max())) > _LARGEST_MASS:
        raise EngineError(
            f"{request.uid} came back with top log-probs of a token whose probabilities sum to {mass:.6g}; "
            f"{remedies.wrong_log_probs}"
        )
    return make_rollout(request, token_ids, ids, log_probs, finish_reason, version)


def check_log_probs(values: Sequence[float], uid: str) -> None:
    """Raise EngineError if a server scored the rollout `uid` with NaN or a log-prob above 0, but for rounding."""
    if not all(value <= _LARGEST_LOG_PROB for value in values):
        raise EngineError(f"the score of {uid} came back with numbers that are not log-probs, such as {max(values)}")


def check_answer(finish_reason: str, received: Sequence[int], prompt: Sequence[int], uid: str) -> None:
    """Check that the server read the prompt that it was sent, and that the response was not cut short.

    Args:
        received: token ids of the prompt, as the answer repeats them.

    Raises:
        ValueError: the response was cut short.
        EngineError: the server read another prompt.
    """
    if received != list(prompt):
        raise EngineError(
            f"the server read another prompt for {uid} than it was sent: {len(received)} tokens in place of "
            f"{len(prompt)}. Is there something between it and the trainer that changes requests?"
        )
    if finish_reason not in _FINISHES:
        raise ValueError(f"cut short, its finish_reason is {finish_reason!r}")


def log_prob_row(
    token: int, log_prob: float, top: Mapping[int, float], num_top: int, uid: str, advice: str
) -> list[tuple[int, float]]:
    """Return (token, log-prob) of the sampled token and then of the `num_top` top tokens, most probable first.

    Args:
        top: log-probs by token id: those of the top tokens, to which a server may have added the sampled token.
        advice: end of the error about too few top log-probs: how to start the server.

    Raises:
        EngineError: not `num_top` top tokens, or a log-prob of the sampled token in `top` that is not `log_prob`.
    """
    listed = top.get(token, log_prob)  # the sampled token's log-prob in `top`, if it is there
    if len(top) > num_top:  # the server has added the sampled token
        top = {top_token: value for top_token, value in top.items() if top_token != token}
    if len(top) != num_top:
        raise EngineError(f"{uid} came back with {len(top)} top log-probs of a token in place of {num_top}; {advice}")
    if abs(log_prob - listed) > _SAME:
        raise EngineError(
            f"{uid} came back with two log-probs of the sampled token {token}: {log_prob:.6g}, and {listed:.6g} among "
            f"the top ones. Is there something between the server and the trainer that changes answers?"
        )
    return [(token, log_prob), *sorted(top.items(), key=lambda item: -item[1])]


def answer_bytes(num_prompt: int, num_response: int, num_top: int) -> int:
    """Return the most bytes that the JSON of a response may have, with room for the JSON of other server versions.

    Args:
        num_prompt, num_response: numbers of tokens.
        num_top: number of top log-probs of each token of the response.
    """
    return (1 << 20) + 1024 * num_prompt + (512 + 64 * (num_top + 2)) * num_response


def checked_token_id(value: Any) -> int:
    """Return `value`, from a server's JSON, if it is a token id; raise TypeError for anything but an int."""
    if type(value) is not int:
        raise TypeError(f"the token id {value!r} is no integer")
    return value


def checked_log_prob(value: Any, minus_infinity: float) -> float:
    """Return `value`, from a server's JSON, as a log-prob, perhaps NaN or -inf; raise TypeError for all but numbers.

    Args:
        minus_infinity: this log-prob and smaller ones stand for minus infinity, which JSON has not.
    """
    if type(value) not in (int, float):  # a bool is no number here
        raise TypeError(f"the log-prob {value!r} is no number")
    return -np.inf if value <= minus_infinity else float(value)


# Scoring. Servers report the log-probs of a prompt's tokens at temperature 1 only; at another temperature the log-prob
# of each token takes a request.


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbRequest:
    """A request for the log-prob of `token` after `prompt`, and for the log-probs of the prompt's last tokens."""

    prompt: tuple[int, ...]  # token ids before `token`, of the rollout's prompt and response
    token: int  # token id
    num_prompt_log_probs: int  # number of tokens at the end of `prompt` whose log-probs are asked for
    temperature: float  # temperature at which the log-probs are computed


def log_prob_requests(rollout: Rollout, temperature: float) -> list[LogProbRequest]:
    """Return the requests for the log-probs of a rollout's response tokens.

    At temperature 1 one request is for all tokens, at other temperatures there is one for each token.
    """
    tokens = rollout.token_ids.tolist()
    # Positions in the response for which requests are made. At temperature 1 the request for the last token, if any,
    # returns the log-probs of all response tokens before it too.
    positions = range(len(tokens))
    positions = positions[-1:] if temperature == 1.0 else positions

    return [
        LogProbRequest(
            prompt=(*rollout.prompt.token_ids, *tokens[:position]),
            token=tokens[position],
            num_prompt_log_probs=position if temperature == 1.0 else 0,
            temperature=temperature,
        )
        for position in positions
    ]


def score_by_requests(
    rollouts: Sequence[Rollout],
    temperature: float,
    answers: Callable[[list[tuple[str, LogProbRequest]]], Iterable[Sequence[float]]],
) -> list[Tensor]:
    """Return the log-probs of response tokens, [T] float32 for each rollout.

    Args:
        answers: sends the requests of all rollouts, each given with the uid of its rollout. It returns a list of
            log-probs for each request, in order: those of the last tokens of the request's `prompt`, then that of its
            `token`.
    """
    by_rollout = [log_prob_requests(rollout, temperature) for rollout in rollouts]
    results = iter(
        answers(
            [
                (rollout.uid, request)
                for rollout, requests in zip(rollouts, by_rollout, strict=True)
                for request in requests
            ]
        )
    )

    # The answers to a rollout's requests, one after the other, are the log-probs of its response tokens.
    return [
        torch.tensor([*chain.from_iterable(islice(results, len(requests)))], dtype=torch.float32)
        for requests in by_rollout
    ]
