"""A small token batch: prompts of several lengths, responses in mixed order, a tool's tokens, any padding."""

import torch

from jackpot.core.types import TokenBatch
from jackpot.models.forward import pad_tokens

PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10], [11, 12, 13]]
RESPONSES = [(0, [5, 6, 7]), (2, [8]), (1, [9, 10, 11, 12, 13, 14]), (1, [15, 16]), (0, [17])]  # prompt, tokens


def token_batch(padding: int = 0) -> TokenBatch:
    """Return all prompts and responses, with `padding` more columns than needed and nonsense where nothing is."""
    prompt_ids, prompt_mask = pad_tokens([[0] * padding + prompt for prompt in PROMPTS], "left", torch.device("cpu"))
    prompt_mask = prompt_mask & (prompt_ids > 0)
    rows = [response + [0] * padding for _, response in RESPONSES]
    response_ids, mask = pad_tokens(rows, "right", torch.device("cpu"))
    mask = mask & (response_ids > 0)
    shape = response_ids.shape
    is_sampled = mask & (torch.arange(shape[1]) != 1)  # a tool's tokens are read, but not sampled
    return TokenBatch(
        uids=tuple(map(str, range(len(RESPONSES)))),
        prompt_ids=torch.where(prompt_mask, prompt_ids, -7),
        prompt_mask=prompt_mask,
        prompt_index=torch.tensor([prompt for prompt, _ in RESPONSES]),
        response_ids=torch.where(mask, response_ids, 10**6),
        attention_mask=mask,
        response_mask=is_sampled,
        response_index=is_sampled.flatten().nonzero()[:, 0],
        rollout_log_probs=torch.zeros(shape),
        advantages=torch.zeros(shape),
        uniforms=torch.zeros(shape, dtype=torch.float64),
        top_ids=torch.zeros(*shape, 0, dtype=torch.int64),
        top_log_probs=torch.zeros(*shape, 0),
        versions=torch.zeros(*shape, 2, dtype=torch.int64),
    )
