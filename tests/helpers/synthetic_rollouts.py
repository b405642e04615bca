"""Rollouts of two synthetic distributions over a small vocabulary, with a known gap, as JSONL."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 12  # tokens
Gap = Callable[[Tensor, torch.Generator], Tensor]  # maps the sampler's logits to the policy's


def noise(size: float) -> Gap:
    """Return the gap of another engine or an older policy: every logit is a little off."""
    return lambda logits, generator: logits + size * torch.randn(logits.shape, generator=generator, dtype=logits.dtype)


def discovered(share: float, lift: float) -> Gap:
    """Return a gap with heavy tails: in `share` of the states the policy favors a token that the sampler avoids."""

    def gap(logits: Tensor, generator: torch.Generator) -> Tensor:
        policy_logits = logits.clone()
        is_lifted = torch.rand(len(logits), generator=generator) < share
        rarest_ids = logits.argmin(-1)
        policy_logits[is_lifted, rarest_ids[is_lifted]] += lift
        return policy_logits

    return gap


def records(
    gap: Gap, *, responses: int = 60, length: int = 20, seed: int = 0, stale: bool = False, lists: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield one record for each response. `stale`: an older version of the policy sampled it, else another model."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(responses):
        logits = 2.0 * torch.randn(length, VOCABULARY, generator=generator, dtype=torch.float64)
        sampler = logits.log_softmax(-1)
        policy = gap(logits, generator).log_softmax(-1)
        ids = torch.multinomial(sampler.exp(), 1, generator=generator)
        sampler_log_probs, policy_log_probs = (rows.gather(1, ids).squeeze(1).tolist() for rows in (sampler, policy))
        record = {
            "uid": f"response {index}",
            "token_ids": ids.squeeze(1).tolist(),
            "rollout_log_probs": sampler_log_probs,
            "old_log_probs": sampler_log_probs if stale else policy_log_probs,
            "log_probs": policy_log_probs,
            "advantages": 1.0 if index % 2 else -1.0,
        }
        if lists:
            all_ids = torch.arange(VOCABULARY).expand(length, -1).tolist()
            record |= {"rollout_top_ids": all_ids, "rollout_top_log_probs": sampler.tolist()}
            record |= {"policy_top_ids": all_ids, "policy_top_log_probs": policy.tolist()}
        yield record


def write(path: Path, lines: Iterator[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
