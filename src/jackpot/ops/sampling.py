"""The distribution that a token is drawn from, and the draw. Layer 1: torch only, pure.

Shapes: `N` rows, `V` vocabulary. Log-probabilities are in nats.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 128  # tokens; a draw reads the sums of all blocks and the tokens of one


def sampling_log_probs(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Log-probs after temperature, then top-k, then top-p, as vLLM applies them: [N, V] float32.

    With q = softmax(logits / temperature):
    top-k keeps the `top_k` most probable tokens and whatever ties with the last of them; 0 keeps all;
    top-p renormalises what is left, sorts it, and keeps each token before which less than `top_p` has been summed, so
    the token that crosses `top_p` stays and so does the first.
    What is dropped gets -inf and the rest sums to 1.

    Args:
        logits: [N, V] float32.
    """
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    if 0 < top_k < log_probs.shape[-1]:
        smallest = log_probs.topk(top_k, dim=-1).values[:, -1:]
        log_probs = _keep(log_probs, log_probs >= smallest)
    if top_p < 1.0:
        ordered, order = log_probs.sort(dim=-1, descending=True, stable=True)
        probs = ordered.double().exp()
        before = probs.cumsum(dim=-1) - probs
        log_probs = _keep(log_probs, torch.empty_like(before, dtype=torch.bool).scatter_(-1, order, before < top_p))
    return log_probs


def sample_tokens(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF draw: the first token at which the running sum of `probs` exceeds u times the total. [N] int64

    Sums are float64, first over blocks of tokens, then inside the chosen block. A token of probability 0 is never
    drawn, whatever the rounding. A row with NaN gives an arbitrary token: check its probability.

    Args:
        probs: [N, V], not negative; it need not be normalised.
        uniforms: [N] float64 in [0, 1).
    """
    missing = -probs.shape[-1] % _BLOCK
    blocks = (pad(probs, (0, missing)) if missing else probs).view(probs.shape[0], -1, _BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    running = sums.cumsum(dim=-1)
    goal = uniforms[:, None] * running[:, -1:]
    block = _first_above(running, sums, goal)
    left = (goal - (running.gather(1, block) - sums.gather(1, block))).clamp(min=0.0)
    inside = blocks[torch.arange(probs.shape[0], device=probs.device), block[:, 0]].double()
    tokens = block * _BLOCK + _first_above(inside.cumsum(dim=-1), inside, left)
    return tokens[:, 0].clamp(max=probs.shape[-1] - 1)  # only a row with NaN comes out above


def _keep(log_probs: Tensor, kept: Tensor) -> Tensor:
    """-inf outside `kept` [N, V], renormalised inside."""
    return torch.log_softmax(log_probs.masked_fill(~kept, -torch.inf), dim=-1)


def _first_above(running: Tensor, masses: Tensor, goal: Tensor) -> Tensor:
    """The first index whose running sum exceeds `goal`, or, where rounding left none, the last with mass: [N, 1]."""
    last = masses.shape[-1] - 1 - (masses > 0).flip(-1).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(running, goal, right=True), last)
