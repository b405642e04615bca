"""The distribution that a token is drawn from, and the draw. Torch only, pure.

Shapes: `N` rows, `V` vocabulary. Log-probabilities are in nats.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.objectives.kernels.topk import top_k as largest

_CHUNK = 2**18  # probabilities that a draw on a CPU reads at a time, in whole rows: they stay in the cache
_BLOCK = 128  # tokens of a block; a draw reads the sums of all blocks and the tokens of one


def sampling_log_probs(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return log-probs after temperature, then top-k, then top-p, as vLLM applies them: [N, V] float32.

    Of softmax(logits / temperature),
    top-k keeps the `top_k` most probable tokens and all that tie with the last of them; 0 keeps all;
    top-p renormalizes and sorts the kept tokens, and keeps each token whose predecessors sum to less than `top_p`, so
    that the token at which the sum crosses `top_p` is kept, and so is the first.
    Dropped tokens get -inf, and the probabilities of the others sum to 1.

    Args:
        logits: [N, V] float32.
    """
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    if 0 < top_k < log_probs.shape[-1]:
        smallest = log_probs.topk(top_k, dim=-1).values[:, -1:]
        log_probs = _restricted(log_probs, log_probs >= smallest)

    if top_p < 1.0:
        ordered, order = log_probs.sort(dim=-1, descending=True, stable=True)
        probs = ordered.double().exp()
        mass_before = probs.cumsum(dim=-1) - probs  # the sum of the probabilities before each token
        mask = torch.empty_like(mass_before, dtype=torch.bool).scatter_(-1, order, mass_before < top_p)
        log_probs = _restricted(log_probs, mask)
    return log_probs


class Draw(NamedTuple):
    """A drawn token of each row and the row's most probable tokens, on the device of the logits."""

    tokens: Tensor  # [N] int64
    log_probs: Tensor  # [N] float32, of `tokens`
    top_ids: Tensor  # [N, K] int64, the most probable token first
    top_log_probs: Tensor  # [N, K] float32, in descending order


def draw_tokens(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_k: int, top_p: float, num_top_log_probs: int
) -> Draw:
    """Draw a token of each row from the distribution of `sampling_log_probs`, with its log-prob and the top log-probs.

    Without truncation the distribution [N, V] is never normalised: tokens are drawn by weights relative to the most
    probable token, and log-probs are taken from the float64 sum of these weights. A row with NaN gets an arbitrary
    token with a log-prob that is not finite.

    Args:
        logits: [N, V] float32.
        uniforms: [N] float64 in [0, 1).
        num_top_log_probs: K.
    """
    # Rows that are drawn at a time: a few on a CPU, all on a GPU.
    size = max(1, _CHUNK // logits.shape[-1]) if logits.device.type == "cpu" else max(1, len(logits))
    scores = _scores(logits, temperature, top_k, top_p)
    chunks = zip(scores.split(size), uniforms.split(size), strict=True)
    draws = [_draw(some_scores, some_uniforms, num_top_log_probs) for some_scores, some_uniforms in chunks]
    # Join the chunks' draws, field by field.
    return Draw(*map(torch.cat, zip(*draws, strict=True))) if len(draws) > 1 else draws[0]


def _draw(scores: Tensor, uniforms: Tensor, num_top_log_probs: int) -> Draw:
    """Draw a token of each row from scores [N, V], which `_scores` returned, and find the row's top log-probs."""
    highest = scores.amax(dim=-1, keepdim=True)
    tokens, totals = _invert((scores - highest).exp_(), uniforms)
    top_scores, top_ids = largest(scores, num_top_log_probs)
    # The first column is of the drawn token, the others of the top tokens.
    log_probs = _normalized(torch.cat([scores.gather(1, tokens[:, None]), top_scores], dim=1), highest, totals)
    return Draw(tokens, log_probs[:, 0].contiguous(), top_ids, log_probs[:, 1:].contiguous())


def log_probs_at(logits: Tensor, ids: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return the log-probs of given tokens in the distribution of `sampling_log_probs`: [N, G] float32.

    The formula is that of the log-probs which `draw_tokens` returns.

    Args:
        logits: [N, V] float32.
        ids: [N, G] int64, G tokens for each row.
    """
    scores = _scores(logits, temperature, top_k, top_p)  # log-probs up to a constant in each row, [N, V]
    highest = scores.amax(dim=-1, keepdim=True)
    totals = (scores - highest).exp_().sum(dim=-1, dtype=torch.float64)
    return _normalized(scores.gather(1, ids), highest, totals)


def _scores(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return scores of the tokens, [N, V] float32: their log-probs, plus a constant in each row."""
    if top_k > 0 or top_p < 1.0:
        return sampling_log_probs(logits, temperature, top_k, top_p)
    return logits if temperature == 1.0 else logits / temperature


def _normalized(scores: Tensor, highest: Tensor, totals: Tensor) -> Tensor:
    """Return log-probs, [N, G] float32, computed in float64 and rounded once.

    Args:
        scores: [N, G], some scores of each row.
        highest: [N, 1], the largest score of each row.
        totals: [N] float64, the sum of exp(score - highest) over each row.
    """
    return (scores - (highest.double() + totals[:, None].log())).float()


def sample_tokens(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from each row the first token at which the running sum of `probs` exceeds uniform x total: [N] int64.

    Sums are float64, first over blocks of tokens, then inside the chosen block. A token of probability 0 is never
    drawn, at any rounding. A row with NaN gives an arbitrary token: check the token's probability.

    Args:
        probs: [N, V], not negative; rows need not sum to 1.
        uniforms: [N] float64 in [0, 1).
    """
    return _invert(probs, uniforms)[0]


def _invert(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens that `sample_tokens` draws, [N] int64, and the sum of each row of `probs`, [N] float64.

    A token is the inverse of the cumulative distribution at the row's uniform, found in two steps: among the sums of
    blocks of _BLOCK tokens, then among the tokens of one block.
    """
    size = probs.shape[-1]
    whole = size - size % _BLOCK  # number of tokens in whole blocks; the others are a last, shorter block
    block_sums = probs[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=-1, dtype=torch.float64)
    if whole < size:
        block_sums = torch.cat([block_sums, probs[:, whole:].sum(dim=-1, keepdim=True, dtype=torch.float64)], dim=1)

    # Step 1: the block at which the running sum exceeds the goal, uniform x total, and what is left of the goal there.
    running = block_sums.cumsum(dim=-1)
    goal = uniforms[:, None] * running[:, -1:]
    block = _first_above(running, block_sums, goal)  # [N, 1]
    rest = (goal - (running.gather(1, block) - block_sums.gather(1, block))).clamp(min=0.0)

    # Step 2: the token of that block at which the running sum of the block exceeds the rest.
    indices = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)  # [N, _BLOCK]
    inside = probs.gather(1, indices.clamp(max=size - 1)).double().masked_fill(indices >= size, 0.0)
    tokens = block * _BLOCK + _first_above(inside.cumsum(dim=-1), inside, rest)
    return tokens[:, 0].clamp(max=size - 1), running[:, -1]  # the clamp is for rows with NaN


def _restricted(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return log-probs with -inf where `mask` [N, V] is False, renormalized over the rest."""
    return torch.log_softmax(log_probs.masked_fill(~mask, -torch.inf), dim=-1)


def _first_above(running: Tensor, masses: Tensor, goal: Tensor) -> Tensor:
    """Return in each row the first index whose running sum exceeds the goal, [N, 1]; where rounding left none, the last
    index with a mass above 0. `running` has the running sums of `masses`."""
    # In each row the last index with a mass above 0; argmax finds the first one in reversed order.
    last = masses.shape[-1] - 1 - (masses > 0).flip(-1).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(running, goal, right=True), last)
