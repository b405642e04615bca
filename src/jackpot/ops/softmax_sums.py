"""Softmax sums over a vocabulary that comes in tiles: normaliser, entropy, divergences. Layer 1: pure, torch only.

With m the largest logit so far, and all sums over the tokens so far, a row keeps

    s = sum exp(l - m)        t = sum exp(l - m) (l - m)

so that log Z = m + log s and, at the end, the entropy is log s - t / s. When a tile raises m by d, s becomes s e^-d and
t becomes (t - s d) e^-d. For two models, p and q, on the same tokens

    g = sum exp(l_p - m_p) ((l_p - m_p) - (l_q - m_q))        KL(p || q) = g / s_p - log s_p + log s_q

Only differences of the two models' logits go into g, so that of two models that are close a small divergence comes out
exact. A token that one model bans, with a bias of -inf, makes a divergence infinite if the other gives it any mass,
which is known only when the last tile has been seen: until then the other's largest logit there is kept.

Shapes: `C` positions, `T` tokens of a tile. NaN is passed on.
"""

import torch
from torch import Tensor

from jackpot.ops.head_tiles import LOWEST


class SoftmaxSums:
    """The sums of one model; [C] each."""

    def __init__(self, like: Tensor) -> None:
        """`like` [C, ...] gives count, dtype and device."""
        self._lowest = torch.finfo(like.dtype).min / 2
        self._peak = like.new_full((len(like),), self._lowest)  # of no token yet; half, so that differences are finite
        self._total = like.new_zeros(len(like))
        self._moment = like.new_zeros(len(like))
        self.shift = self._moment  # by how much the last tile lowered l - m, and the total before it
        self.total_before = self._total

    def absorb_(self, logits: Tensor, peak: Tensor, probs: Tensor, has_bans: bool) -> None:
        """Take in a tile: logits [C, T] become l - m, at least LOWEST, and probs exp(l - m).

        Args:
            peak: [C] the largest of each row.
        """
        before = self._peak
        self._peak = torch.maximum(before, peak.clamp(min=self._lowest))
        self.shift, self.total_before = before - self._peak, self._total
        logits.sub_(self._peak[:, None])
        torch.exp(logits, out=probs)
        if has_bans:
            logits.clamp_(min=LOWEST)
        factor = self.shift.exp()
        self._moment = (self._moment + self._total * self.shift) * factor
        self._total = self._total * factor + probs.sum(-1)

    def add_moment(self, moment: Tensor) -> None:
        """Add a tile's sum of exp(l - m) (l - m), [C]."""
        self._moment = self._moment + moment

    @property
    def total(self) -> Tensor:
        return self._total

    @property
    def log_total(self) -> Tensor:
        return self._total.log()

    @property
    def log_normaliser(self) -> Tensor:
        return self._peak + self.log_total

    def log_probs(self, logits: Tensor) -> Tensor:
        """[C, G] log-probs of logits as the model gave them."""
        return logits - self._peak[:, None] - self.log_total[:, None]

    def entropy(self) -> Tensor:
        return self.log_total - self._moment / self._total


class Divergence:
    """The sums of KL(p || q); [C]."""

    def __init__(self, p: SoftmaxSums, q: SoftmaxSums, banned_by_q: Tensor | None) -> None:
        """banned_by_q: [V] bool, None where there is none."""
        self._p, self._q, self._banned = p, q, banned_by_q
        self._sum = torch.zeros_like(p.total)
        self._peak_at_banned = torch.full_like(p.total, -torch.inf)

    def see(self, logits_p: Tensor, columns: slice) -> None:
        """Before a tile's logits [C, T] are overwritten."""
        if self._banned is None:
            return
        where = self._banned[columns].nonzero().flatten()
        if len(where):
            self._peak_at_banned = torch.maximum(self._peak_at_banned, logits_p[:, where].amax(-1))

    def add(self, of_tile: Tensor) -> None:
        """Add a tile's sum of exp(l_p - m_p) ((l_p - m_p) - (l_q - m_q)), [C], after both absorbed it."""
        p, q = self._p, self._q
        self._sum = (self._sum + p.total_before * (p.shift - q.shift)) * p.shift.exp() + of_tile

    def value(self) -> Tensor:
        p, q = self._p, self._q
        value = self._sum / p.total - (p.log_total - q.log_total)
        if self._banned is None:
            return value
        has_mass = (self._peak_at_banned - p.log_normaliser).exp() > 0.0
        return value.masked_fill(has_mass, torch.inf)
