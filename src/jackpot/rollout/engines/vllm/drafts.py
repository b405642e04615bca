"""vLLM's own decoding with a draft model: the policy's vLLM holds a copy of the rollout model and verifies its drafts.

It is exact: the tokens have the policy's distribution, and the log-probs that vLLM returns are the policy's. Repaired
or avoided here is what vLLM 0.32 does otherwise:

- its draft model draws from torch's global generator, so that a response depended on its batch (`repair_sampling`);
- it ends in a step without drafts where a request has top-k, and such a step does not return the log-probs of tokens
  that are asked for (`repair_sampling`);
- on a CPU without Triton it drops the temperatures of drafted tokens, and samples nonsense (`expand`);
- where a step has no room for all drafts, or a request has one unread token, responses depend on their batch
  (`draft_arguments`);
- near the end of the context no request of the batch is drafted for (`VLLMEngine` leaves it free).

Needs no vLLM.

Status: experimental.
"""

from typing import Any

import torch
from torch import Tensor

from jackpot.rollout.engines.draft_counts import DraftCounts

_STEP_TOKENS = 2048  # that vLLM reads in a step at least, as by its own default


def draft_arguments(tokens: int, folder: str, max_num_seqs: int, max_model_len: int) -> dict[str, Any]:
    """Return the keywords of vLLM's `EngineArgs` with which the model in `folder` drafts.

    Args:
        tokens: that are drafted at once.
        max_model_len: context that both models have, tokens.
    """
    return {
        "speculative_config": {
            "method": "draft_model",
            "model": folder,
            "num_speculative_tokens": tokens,
            # For every size of the batch the same. Without it vLLM pads a request of one unread token with empty drafts
            # and judges the drafts of the whole batch in another way, exact as well, in that step.
            "num_speculative_tokens_per_batch_size": [(1, max_num_seqs, tokens)],
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "standard",
        },
        "per_request_spec_decode_metrics": "detailed",
        "max_model_len": max_model_len,
        # A step has room for every request: a token, its drafts, and one token that only the draft model reads.
        "max_num_batched_tokens": max(_STEP_TOKENS, max_model_len, max_num_seqs * (2 + tokens)),
    }


def repair_sampling(worker: Any) -> None:
    """Have vLLM's first model runner draw drafts with the generator of their request, and steps without drafts sampled
    as without a draft model. Its second one is refused.

    Args:
        worker: vLLM's worker.
    """
    runner = worker.model_runner
    if (drafter := getattr(runner, "drafter", None)) is None:
        return
    drafter._sample_from_logits, sample = _draw_drafts, runner._sample

    def sample_step(logits: Tensor, drafts: Any) -> Any:
        return sample(logits, drafts if any(drafts.num_draft_tokens) else None)

    runner._sample = sample_step


def _draw_drafts(logits: Tensor, sampling: Any) -> tuple[Tensor, Tensor]:
    """Return drafts [N] and their distributions [N, V], in place of vLLM's `_sample_from_logits`.

    Args:
        logits: [N, V]; changed.
        sampling: vLLM's `SamplingMetadata` of N requests with a temperature above 0 and a generator each.
    """
    probs = logits.div_(sampling.temperature[:, None]).softmax(dim=-1, dtype=torch.float32)
    noise = torch.ones_like(probs)
    for row, generator in sampling.generators.items():
        noise[row].exponential_(generator=generator)
    return (probs / noise).argmax(dim=-1), probs


def expand(
    output: Tensor, values: Tensor, cu_num_tokens: Tensor, replace_from: float, replace_to: float, *_: Any
) -> None:
    """Copy the value of each request to its drafted tokens, in place of vLLM's `expand_kernel` on a CPU.

    vLLM 0.32's own function rounds temperatures to integers and writes them to a copy that it drops.

    Args:
        output: [N], of all drafted tokens.
        values: [B], of each request.
        cu_num_tokens: [B], the drafted tokens of each request and those before it.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(torch.where(values == replace_from, replace_to, values).repeat_interleave(counts))


def count_drafts(prompt: int, tokens: int, metrics: Any) -> DraftCounts:
    """Return the counts of one response.

    Args:
        prompt: tokens of its prompt.
        tokens: tokens of the response.
        metrics: vLLM's `RequestSpecDecodeMetrics` of it. Each pass of the policy after that of the prompt verifies.
    """
    accepted, drafted = metrics.per_step_accepted, metrics.per_step_drafted
    most = metrics.num_spec_tokens
    return DraftCounts(
        tokens=tokens,
        passes=1 + len(drafted),
        verifications=len(drafted),
        verified=tokens - 1,
        judged=sum(min(yes + 1, all_) for yes, all_ in zip(accepted, drafted, strict=True)),
        accepted=sum(accepted),
        read_alone=prompt + tokens - 1,
        read_by_policy=prompt + sum(drafted) + len(drafted),
        # The draft model reads what the policy has read, rejected tokens too, and one token more, then its own drafts.
        read_by_draft=prompt + most + sum(drafted) + len(drafted) * (1 + most),
    )
