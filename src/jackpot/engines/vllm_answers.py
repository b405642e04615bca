"""How the answers of a vLLM server read, and when they are not to be trusted. Layer 3; needs no vLLM.

A wrong shape raises ValueError, TypeError or LookupError: the server may do better the next time. A right one with
wrong content raises EngineError: the server has other settings or another model than it should, and training on what
it wrote would be wrong.

Shapes: `T` response tokens, `K` top log-probs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jackpot.engines.vllm_words import ScoreQuestion, read_rollout
from jackpot.errors import EngineError
from jackpot.types import Request, Rollout, Version

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
