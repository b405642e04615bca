"""Softmax sums over a vocabulary that comes in tiles: normaliser, entropy, divergences. Layer 1: pure, torch only.

With m the largest logit so far, and all sums over the tokens so far, a row keeps

    s = sum exp(l - m)        t = sum exp(l - m) (l - m)

so that log Z = m + log s and, at the end, the entropy is log s - t / s. When a tile raises m by d, s becomes s e^-d and
t becomes (t - s d) e^-d. For two models, p and q, on the same tokens

    g = sum exp(l_p - m_p) ((l_p - m_p) - (l_q - m_q))        KL(p || q) = g / s_p - log s_p + log s_q

A token that one model bans, with a bias of -inf, makes a divergence infinite if the other gives it any mass, which is
known only when the last tile has been seen: until then the other's largest logit there is kept.

Shapes: `C` positions, `T` tokens of a tile. NaN is passed on.
"""

import torch
from torch import Tensor

from jackpot.ops.head_tiles import LOWEST


class SoftmaxSums:
    """The sums of one model; [C] each."""

    def __init__(self) -> None:
        self._peak: Tensor | None = None  # m; None before the first tile, and so are the others
        self.total: Tensor | None = None  # s
        self._moment: Tensor | None = None  # t
        self._log_total: Tensor | None = None  # once somebody asked
        self.shift: Tensor | None = None  # -d of the last tile; None where it was the first
        self.total_before: Tensor | None = None

    def absorb_(self, logits: Tensor, peak: Tensor, probs: Tensor, has_bans: bool) -> None:
        """Take in a tile: logits [C, T] become l - m, at least LOWEST, and probs exp(l - m).

        Args:
            peak: [C] the largest of each row.
        """
        before, self.total_before, self._log_total = self._peak, self.total, None
        self._peak = peak.clamp(min=LOWEST)  # where all are banned so far; a sum times a difference of two is finite
        if before is not None:
            self._peak = torch.maximum(self._peak, before)
        logits.sub_(self._peak[:, None])
        torch.exp(logits, out=probs)
        if has_bans:
            logits.clamp_(min=LOWEST)
        if before is None:
            self.total = probs.sum(-1)
            return
        self.shift = before - self._peak
        factor = self.shift.exp()
        self._moment = (self._moment + self.total_before * self.shift) * factor
        self.total = self.total_before * factor + probs.sum(-1)

    def add_moment(self, moment: Tensor) -> None:
        """Add a tile's sum of exp(l - m) (l - m), [C]."""
        self._moment = moment if self._moment is None else self._moment + moment

    @property
    def log_total(self) -> Tensor:
        if self._log_total is None:
            self._log_total = self.total.log()
        return self._log_total

    @property
    def log_normaliser(self) -> Tensor:
        return self._peak + self.log_total

    def log_probs(self, logits: Tensor) -> Tensor:
        """[C, G] log-probs of logits as the model gave them."""
        return (logits - self._peak[:, None]).sub_(self.log_total[:, None])

    def entropy(self) -> Tensor:
        return self.log_total - self._moment / self.total


class Divergence:
    """The sums of KL(p || q); [C]."""

    def __init__(self, p: SoftmaxSums, q: SoftmaxSums, banned_by_q: Tensor | None) -> None:
        """banned_by_q: [V] bool, None where there is none."""
        self._p, self._q, self._banned = p, q, banned_by_q
        self._sum: Tensor | None = None  # g
        self._peak_at_banned: Tensor | None = None  # the largest of p's logits there; None before there was one

    def see(self, logits_p: Tensor, columns: slice) -> None:
        """Before a tile's logits [C, T] are overwritten."""
        if self._banned is None:
            return
        where = self._banned[columns].nonzero().flatten()
        if len(where):
            peak = logits_p[:, where].amax(-1)
            self._peak_at_banned = peak if self._peak_at_banned is None else torch.maximum(self._peak_at_banned, peak)

    def add(self, of_tile: Tensor) -> None:
        """Add a tile's sum of exp(l_p - m_p) ((l_p - m_p) - (l_q - m_q)), [C], after both absorbed it."""
        p, q = self._p, self._q
        if self._sum is not None:
            of_tile = (self._sum + p.total_before * (p.shift - q.shift)) * p.shift.exp() + of_tile
        self._sum = of_tile

    def value(self) -> Tensor:
        p, q = self._p, self._q
        value = self._sum / p.total - (p.log_total - q.log_total)
        if self._peak_at_banned is None:
            return value
        has_mass = (self._peak_at_banned - p.log_normaliser).exp() > 0.0
        return value.masked_fill(has_mass, torch.inf)
