"""Translation of requests to vLLM's form, and of vLLM's answers to rollouts, in process and over HTTP. Needs no vLLM.

Every sampling parameter is sent, so that no default of a server or of a generation_config.json applies. Log-probs must
be vLLM's processed ones: after temperature, top-p and top-k.

Shapes: `T` response tokens, `K` top log-probs.
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

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0  # vLLM raises lower temperatures to 0.01, and refuses any above 2
_REMEDIES = Remedies(
    wrong_end="a setting of its own. Start it with --generation-config vllm and without other overrides",
    few_log_probs="start the server with --max-logprobs -1, or ask for fewer with sampling.num_top_log_probs",
    wrong_log_probs="start the server with --logprobs-mode processed_logprobs",
)


def check_temperature(temperature: float, subject: str) -> None:
    """Raise EngineError for a temperature that vLLM replaces or refuses.

    Args:
        subject: subject of the error, such as a request's uid.
    """
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise EngineError(
            f"{subject} has temperature {temperature:g}; vLLM samples with temperatures from {MIN_TEMPERATURE:g} to "
            f"{MAX_TEMPERATURE:g}. Use one of those, or engine=transformers"
        )


def to_sampling_params(request: Request, eos_token_ids: Sequence[int], max_model_len: int) -> dict[str, Any]:
    """Return a request's sampling settings as keywords that vLLM's `SamplingParams` and its completions API share.

    The seed is hashed once more, because vLLM's generators on a CPU keep only 32 bits of a seed.
    """
    sampling = request.sampling
    return {
        **NEUTRAL,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": min(sampling.max_new_tokens, max_model_len - len(request.prompt.token_ids)),
        "seed": fold_in("vllm", request.seed) >> 1,  # vLLM takes signed 64 bits, where -1 is no seed
        "stop_token_ids": sorted({*eos_token_ids, *sampling.stop_token_ids}),
        "ignore_eos": True,  # only `stop_token_ids` end a response
        "logprobs": sampling.num_top_log_probs,
    }


def log_prob_params(request: LogProbRequest) -> dict[str, Any]:
    """Return the keywords of vLLM's sampling parameters for a request for log-probs, which samples one token."""
    return {
        **NEUTRAL,
        # 0 top tokens: the log-probs of the prompt's own tokens alone
        **({"prompt_logprobs": 0} if request.num_prompt_log_probs else {}),
        "temperature": request.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 1,
        "seed": 0,
        "ignore_eos": True,
        "logprob_token_ids": [request.token],
    }


# The completions API

_PREFIX = "token_id:"  # stands before a token id where vLLM names a token
MINUS_INFINITY = -9999.0  # log-prob that stands for minus infinity in vLLM's JSON
# Parameters of every call: tokens come back as ids, and a completion in one piece.
_COMMON = {"return_token_ids": True, "return_tokens_as_token_ids": True, "stream": False}


def generate_body(request: Request, eos_token_ids: Sequence[int], max_model_len: int) -> dict[str, Any]:
    """Return the body of the completions call that generates the response to a request, without the model's name."""
    return {
        **_COMMON,
        **to_sampling_params(request, eos_token_ids, max_model_len),
        "prompt": list(request.prompt.token_ids),
    }


def log_prob_body(request: LogProbRequest) -> dict[str, Any]:
    """Return the body of the completions call of a `LogProbRequest`, without the model's name."""
    return {**_COMMON, **log_prob_params(request), "logprobs": 0, "prompt": list(request.prompt)}


def parse_answer(
    answer: Any, *, request: Request, body: Mapping[str, Any], vocab_size: int, version: Version
) -> Rollout:
    """Return the rollout in a server's completion.

    Args:
        answer: JSON of the completion of `body`.
        body: body of the call, from `generate_body`.

    Raises:
        EngineError: the server's setup changes responses, such as by other stop tokens or log-probs.
        LookupError, TypeError, ValueError: the completion has another form, or was cut short.
    """
    choice = _only_choice(answer, request.prompt.token_ids, request.uid)

    return checked_rollout(
        request,
        choice_rows(choice, request.sampling.num_top_log_probs, request.uid),
        choice["finish_reason"],
        max_tokens=body["max_tokens"],
        stop_token_ids=body["stop_token_ids"],
        vocab_size=vocab_size,
        version=version,
        remedies=_REMEDIES,  # what errors advise
    )


def choice_rows(choice: Mapping[str, Any], num_top: int, uid: str) -> list[list[tuple[int, float]]]:
    """Return, for each token of a completion, the token and its top tokens with log-probs, as `log_prob_row` does.

    Args:
        choice: JSON of a choice, asked for with `return_token_ids` and `return_tokens_as_token_ids`.
        num_top: number of top log-probs of each token.
        uid: name of the completion, for errors.

    Raises:
        EngineError, LookupError, TypeError, ValueError: as `parse_answer`.
    """
    log_probs = choice["logprobs"]
    # Of each token: its id, its log-prob, and the top tokens at its position.
    tokens = zip(choice["token_ids"], log_probs["token_logprobs"], log_probs["top_logprobs"], strict=True)
    return [
        log_prob_row(
            token=checked_token_id(token),
            log_prob=_log_prob(log_prob),
            top=_by_id(top),
            num_top=num_top,
            uid=uid,
            advice=_REMEDIES.few_log_probs,
        )
        for token, log_prob, top in tokens
    ]


def parse_log_probs(answer: Any, *, request: LogProbRequest, uid: str) -> list[float]:
    """Return the log-probs that a `LogProbRequest` asked for: first of the last prompt tokens, then of `token`.

    Args:
        answer: JSON of the completion of `log_prob_body(request)`.
        uid: name of the rollout, for errors.
    """
    choice = _only_choice(answer, request.prompt, uid)
    values = []

    if count := request.num_prompt_log_probs:
        entries = choice["prompt_logprobs"][-count:]  # for each token, a mapping that has the token's id as a key
        tokens = request.prompt[-count:]
        values = [_log_prob(entry[str(token)]["logprob"]) for token, entry in zip(tokens, entries, strict=True)]

    # Add the log-prob of `request.token` at the one sampled position, where vLLM names a token as in `token_id:42`.
    values.append(_log_prob(choice["logprobs"]["top_logprobs"][0][f"{_PREFIX}{request.token}"]))
    check_log_probs(values, uid)
    return values


def _only_choice(answer: Any, prompt: Sequence[int], uid: str) -> Any:
    """Return the only choice of a completion, once `check_answer` has accepted the completion."""
    [choice] = answer["choices"]
    check_answer(choice["finish_reason"], choice["prompt_token_ids"], prompt, uid)
    return choice


def _log_prob(value: Any) -> float:
    """Return a log-prob of vLLM's JSON, where `MINUS_INFINITY` becomes minus infinity."""
    return checked_log_prob(value, MINUS_INFINITY)


def _by_id(top: Mapping[str, Any]) -> dict[int, float]:
    """Return the log-probs of one position's top tokens by token id; vLLM may have added the sampled token."""
    return {int(name.removeprefix(_PREFIX)): _log_prob(value) for name, value in top.items()}
