"""Translation between this project's requests and rollouts and SGLang's /generate, as SGLang 0.5.23 has it.

What SGLang's source says, and what follows here:

- Log-probs of a response are after temperature and before top-p and top-k, so filters are refused.
- Log-probs of a prompt are at temperature 1. The token ids beside them are wrong for the vocabulary's last token, which
  is reported as 0, so the prompt is compared with the token ids that the answer repeats, and not with these.
- `ignore_eos` switches `stop_token_ids` off as well, so it is not sent as true.
- A log-prob of minus infinity comes as the smallest float32.

Status: experimental. Run with SGLang 0.5.23 on a CPU, in tests; not yet run on a GPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jackpot.core.errors import EngineError
from jackpot.core.prng import fold_in
from jackpot.core.types import Rollout, Version
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.servers.protocol import (
    NEUTRAL,
    LogProbRequest,
    Remedies,
    check_answer,
    check_log_probs,
    checked_log_prob,
    checked_rollout,
    checked_token_id,
    log_prob_row,
)

MIN_TEMPERATURE = 1e-6  # at smaller temperatures SGLang takes the most probable token
_MINUS_INFINITY = -1e30  # this log-prob and smaller ones stand for minus infinity
_SETTINGS = "Start it without --preferred-sampling-params, and from the folder of the run's rollout model"
_REMEDIES = Remedies(
    wrong_end=f"a setting of its own, or an end-of-sequence token that the run does not have. {_SETTINGS}",
    few_log_probs="is there something between the server and the trainer that changes answers?",
    wrong_log_probs="start the server without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment",
)


def check_sampling(request: Request) -> None:
    """Raise EngineError for a request with top-p or top-k, because SGLang's log-probs ignore such filters."""
    sampling = request.sampling
    if sampling.truncated:
        raise EngineError(
            f"{request.uid} has top_p {sampling.top_p:g} and top_k {sampling.top_k}, and SGLang's log-probs are those "
            f"before these filters, which are not those of what it samples from. Use top_p 1 and top_k 0, or "
            f"engine=vllm_server"
        )


def check_temperature(temperature: float, subject: str) -> None:
    """Raise EngineError for a temperature at which SGLang does not sample.

    Args:
        subject: subject of the error, such as a request's uid.
    """
    if temperature < MIN_TEMPERATURE:
        raise EngineError(
            f"{subject} has temperature {temperature:g}; SGLang samples with {MIN_TEMPERATURE:g} and more. Use such a "
            f"temperature, or engine=transformers"
        )


def generate_body(request: Request, eos_token_ids: Sequence[int], max_model_len: int) -> dict[str, Any]:
    """Return the body of the call that generates the response to a request."""
    sampling, prompt = request.sampling, request.prompt.token_ids
    body = _body(
        prompt,
        temperature=sampling.temperature,
        max_new_tokens=min(sampling.max_new_tokens, max_model_len - len(prompt)),
        stop_token_ids=sorted({*eos_token_ids, *sampling.stop_token_ids}),
        sampling_seed=fold_in("sglang", request.seed) >> 1,  # SGLang takes a signed number of 64 bits
    )
    body["top_logprobs_num"] = sampling.num_top_log_probs
    return body


def log_prob_body(request: LogProbRequest) -> dict[str, Any]:
    """Return the body of the call for a `LogProbRequest`.

    The call asks for the log-prob of one more prompt token, because the first in SGLang's list has no log-prob.
    """
    body = _body(request.prompt, temperature=request.temperature, max_new_tokens=1, stop_token_ids=[], sampling_seed=0)
    body["token_ids_logprob"] = [request.token]
    if count := request.num_prompt_log_probs:
        body["logprob_start_len"] = len(request.prompt) - count - 1
    return body


def _body(prompt: Sequence[int], **sampling: Any) -> dict[str, Any]:
    """Return the body of a call with the given sampling parameters, and with all others at values without effect."""
    return {
        "input_ids": list(prompt),
        "sampling_params": {
            **NEUTRAL,
            "top_p": 1.0,
            "top_k": -1,  # all tokens
            "min_new_tokens": 0,
            "n": 1,
            "ignore_eos": False,
            "no_stop_trim": True,
            **sampling,
        },
        "return_logprob": True,
        "logprob_start_len": -1,  # no log-probs of the prompt
        "top_logprobs_num": 0,
        "return_text_in_logprobs": False,
        "return_prompt_token_ids": True,
        "stream": False,
    }


def parse_answer(
    answer: Any, *, request: Request, body: Mapping[str, Any], vocab_size: int, version: Version
) -> Rollout:
    """Return the rollout in a server's answer.

    Args:
        answer: JSON of the response to `body`.
        body: body of the call, from `generate_body`.

    Raises:
        EngineError: the server's setup changes responses, such as by other stop tokens or log-probs.
        LookupError, TypeError, ValueError: the answer has another form, or was cut short.
    """
    num_top, uid = request.sampling.num_top_log_probs, request.uid
    meta = _checked_meta(answer, request.prompt.token_ids, uid)

    sampled = _entries(meta["output_token_logprobs"])
    # The top tokens at the position of each sampled token; none if none were asked for.
    tops = meta["output_top_logprobs"] if num_top else [[]] * len(sampled)
    rows = [
        log_prob_row(token, log_prob, dict(_entries(top)), num_top=num_top, uid=uid, advice=_REMEDIES.few_log_probs)
        for (token, log_prob), top in zip(sampled, tops, strict=True)
    ]

    return checked_rollout(
        request,
        rows,
        meta["finish_reason"]["type"],
        max_tokens=body["sampling_params"]["max_new_tokens"],
        stop_token_ids=body["sampling_params"]["stop_token_ids"],
        vocab_size=vocab_size,
        version=version,
        remedies=_REMEDIES,
    )


def parse_log_probs(answer: Any, *, request: LogProbRequest, uid: str) -> list[float]:
    """Return the log-probs that a `LogProbRequest` asked for: first of the last prompt tokens, then of `token`.

    Errors are raised as by `parse_answer`; numbers that are not log-probs are an EngineError.

    Args:
        answer: JSON of the response to `log_prob_body(request)`.
        uid: name of the rollout, for errors.
    """
    meta, count = _checked_meta(answer, request.prompt, uid), request.num_prompt_log_probs
    values = []

    if count:
        _, *entries = meta["input_token_logprobs"]  # the first token has no log-prob
        if len(entries) != count:
            raise ValueError(f"{len(entries)} log-probs of the prompt in place of {count}")
        values = [log_prob for _, log_prob in _entries(entries)]

    [requested] = meta["output_token_ids_logprobs"]  # one list, since one token was generated
    values.append(dict(_entries(requested))[request.token])
    check_log_probs(values, uid)
    return values


def _checked_meta(answer: Any, prompt: Sequence[int], uid: str) -> Any:
    """Return `meta_info` of an answer, which holds its log-probs and tokens, once `check_answer` accepts the answer."""
    meta = answer["meta_info"]
    check_answer(meta["finish_reason"]["type"], answer["prompt_token_ids"], prompt, uid)
    return meta


def _entries(entries: Sequence[Any]) -> list[tuple[int, float]]:
    """Return (token id, log-prob) for every entry of one of SGLang's lists; an entry is [log-prob, token id, text]."""
    return [(checked_token_id(entry[1]), checked_log_prob(entry[0], _MINUS_INFINITY)) for entry in entries]
