"""vLLM's own decoding with a draft model: the policy's vLLM holds a copy of the rollout model and verifies its drafts.

Such decoding is exact: tokens have the policy's distribution, and the log-probs that vLLM returns are the policy's. For
that, this file repairs or avoids faults of vLLM 0.32:

- the draft model draws from torch's global generator, so a response would depend on its batch (`repair_sampling`);
- a step without drafts fails where a request has top-k, and does not return the log-probs of tokens that are asked for
  (`repair_sampling`);
- on a CPU without Triton the temperatures of drafted tokens are dropped, and nonsense is sampled (`expand`);
- where a step has no room for all drafts, or a request has one unread token, responses depend on their batch
  (`draft_arguments`);
- near the end of the context no request of the batch is drafted for (`VLLMEngine` leaves that end free).

The file can be imported without vLLM.

Status: experimental.
"""

from typing import Any

import torch
from torch import Tensor

from jackpot.rollout.engines.draft_counts import DraftCounts

_STEP_TOKENS = 2048  # smallest limit on the tokens that vLLM reads in a step, vLLM's default


def draft_arguments(num_drafts: int, folder: str, max_num_seqs: int, max_model_len: int) -> dict[str, Any]:
    """Return the keywords of vLLM's `EngineArgs` with which the model in `folder` drafts.

    Args:
        num_drafts: number of tokens that are drafted at once.
        folder: model folder of the draft model.
        max_num_seqs: most requests in a batch.
        max_model_len: context length of both models, tokens.
    """
    return {
        "speculative_config": {
            "method": "draft_model",
            "model": folder,
            "num_speculative_tokens": num_drafts,
            # An equal number for every batch size. Without this setting vLLM adds empty drafts to a request that has
            # one token left to read. In such a step it verifies the drafts of the whole batch by another method, also
            # exact, so a response would depend on its batch.
            "num_speculative_tokens_per_batch_size": [(1, max_num_seqs, num_drafts)],
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "standard",
        },
        "per_request_spec_decode_metrics": "detailed",
        "max_model_len": max_model_len,
        # A step has room for each request's token, its drafts, and one token that only the draft model reads.
        "max_num_batched_tokens": max(_STEP_TOKENS, max_model_len, max_num_seqs * (2 + num_drafts)),
    }


def repair_sampling(worker: Any) -> None:
    """Have vLLM draw each draft with the random generator of its request, and repair steps without drafts.

    A step without drafts then samples as vLLM does without a draft model. Without a draft model nothing changes.

    Args:
        worker: vLLM's worker, with the first of vLLM's two model runners; the second (V2) is not supported.
    """
    runner = worker.model_runner
    if (drafter := getattr(runner, "drafter", None)) is None:
        return
    drafter._sample_from_logits = _draw_drafts
    sample = runner._sample

    def sample_step(logits: Tensor, drafts: Any) -> Any:
        """Sample the tokens of a step as vLLM does; if no request has drafts, as vLLM does without a draft model."""
        return sample(logits, drafts if any(drafts.num_draft_tokens) else None)

    runner._sample = sample_step


def _draw_drafts(logits: Tensor, sampling: Any) -> tuple[Tensor, Tensor]:
    """Draw N drafts; return their token ids [N] and distributions [N, V]. Replaces vLLM's `_sample_from_logits`.

    Args:
        logits: [N, V], overwritten.
        sampling: vLLM's `SamplingMetadata` of N requests with a temperature above 0 and a generator each.
    """
    probs = logits.div_(sampling.temperature[:, None]).softmax(dim=-1, dtype=torch.float32)

    # Divide each probability by exponential noise: the token with the largest quotient is a draw from the distribution.
    noise = torch.ones_like(probs)
    for row, generator in sampling.generators.items():
        noise[row].exponential_(generator=generator)

    return (probs / noise).argmax(dim=-1), probs


def expand(
    output: Tensor, values: Tensor, cu_num_tokens: Tensor, replace_from: float, replace_to: float, *_: Any
) -> None:
    """Copy each request's value, such as its temperature, to its drafted tokens; replaces vLLM's CPU `expand_kernel`.

    The function of vLLM 0.32 rounds temperatures to integers and writes them to a copy that is dropped.

    Args:
        output: [N], written: a value for each drafted token of all requests.
        values: [B], a value for each request.
        cu_num_tokens: [B], cumulative number of drafted tokens.
        replace_from, replace_to: values equal to the first are replaced by the second. Further arguments are not read.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(torch.where(values == replace_from, replace_to, values).repeat_interleave(counts))


def count_drafts(prompt_length: int, response_length: int, metrics: Any) -> DraftCounts:
    """Compute `DraftCounts` of one response that vLLM generated with a draft model.

    Args:
        prompt_length, response_length: numbers of tokens.
        metrics: vLLM's `RequestSpecDecodeMetrics` of the response. It has the numbers of drafted and of accepted tokens
            for each forward pass of the policy after the pass over the prompt; every such pass verifies drafts.
    """
    accepted, drafted = metrics.per_step_accepted, metrics.per_step_drafted
    max_drafts = metrics.num_spec_tokens  # largest number of drafts that one pass can verify

    return DraftCounts(
        tokens=response_length,
        passes=1 + len(drafted),  # the pass over the prompt, and those that verify drafts
        verifications=len(drafted),
        verified=response_length - 1,  # the first token is that of the pass over the prompt
        # Each pass judges the accepted drafts and, if not all were accepted, the one that was rejected.
        judged=sum(min(right + 1, drafts) for right, drafts in zip(accepted, drafted, strict=True)),
        accepted=sum(accepted),
        read_alone=prompt_length + response_length - 1,  # what the policy would read without drafts
        # After the prompt, each pass reads its drafts and the token before them.
        read_by_policy=prompt_length + sum(drafted) + len(drafted),
        # For every pass the draft model reads what the policy reads, rejected drafts too, and `max_drafts` tokens more:
        # one that the policy does not read, and all but the last of the drafts that it proposes.
        read_by_draft=prompt_length + sum(drafted) + len(drafted) + (1 + len(drafted)) * max_drafts,
    )
