"""The forward pass of one or two heads over a block of positions, tile by tile. Pure, torch only.

A block of C positions visits the tiles of the vocabulary in turn, as a block of queries visits the keys in
FlashAttention. Each tile's logits l [C, T] are formed once, and everything is updated from them: the logits at the
wanted ids, the running top K (the rollout model's logits at the policy's top K are carried along), and online sums,
which are rescaled whenever the running maximum m rises:

    s = sum exp(l - m)                             logsumexp = m + log s        log p(x) = l(x) - logsumexp
    t = sum exp(l - m) (l - m)                     entropy   = log s - t / s
    g = sum exp(l_p - m_p) ((l_p - m_p) - (l_q - m_q))      KL(p || q) = g / s_p - (log s_p - log s_q)

If m rises by d, the old sums become s exp(-d), (t - d s) exp(-d), and, for rises d_p and d_q of the two heads,
(g + s_p (d_q - d_p)) exp(-d_p).

Shapes: `C` positions, `T` tokens of a tile, `G` wanted ids, `K` top-k.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from jackpot.objectives.kernels.tiles import LOWEST, HeadOperands
from jackpot.objectives.kernels.topk import RunningTopK, block_max


class OnlineSoftmax:
    """Accumulates the softmax sums m, s and t of one head over the tiles; [C] each (formulas: module docstring)."""

    def __init__(self) -> None:
        self._max: Tensor | None = None  # m; None before the first tile, as are the others
        self.sum_exp: Tensor | None = None  # s
        self._moment: Tensor | None = None  # t
        self._log_sum_exp: Tensor | None = None  # log s, computed at its first use after a tile
        self.shift: Tensor | None = None  # -d of the last tile; None where that was the first one
        self.sum_exp_before: Tensor | None = None  # s before the last tile

    def update_(self, logits: Tensor, row_max: Tensor, probs: Tensor, may_mask: bool) -> None:
        """Add a tile to m and s, and rescale t.

        Overwrites `logits` by l - m, at least LOWEST, and `probs` by exp(l - m).

        Args:
            logits: [C, T].
            row_max: [C] the largest logit of each row.
            probs: [C, T] uninitialized.
            may_mask: whether a logit may be -inf.
        """
        before, self.sum_exp_before, self._log_sum_exp = self._max, self.sum_exp, None
        self._max = row_max.clamp(min=LOWEST)  # finite where all tokens so far are masked, so that m - m is 0
        if before is not None:
            self._max = torch.maximum(self._max, before)
        logits.sub_(self._max[:, None])
        torch.exp(logits, out=probs)
        if may_mask:
            logits.clamp_(min=LOWEST)
        if before is None:
            self.sum_exp = probs.sum(-1)
            return
        self.shift = before - self._max
        factor = self.shift.exp()
        self._moment = (self._moment + self.sum_exp_before * self.shift) * factor
        self.sum_exp = self.sum_exp_before * factor + probs.sum(-1)

    def add_moment(self, moment: Tensor) -> None:
        """Add a tile's sum of exp(l - m) (l - m), [C], to t."""
        self._moment = moment if self._moment is None else self._moment + moment

    @property
    def log_sum_exp(self) -> Tensor:
        """log s of the tiles so far: [C]."""
        if self._log_sum_exp is None:
            self._log_sum_exp = self.sum_exp.log()
        return self._log_sum_exp

    @property
    def logsumexp(self) -> Tensor:
        """m + log s, the normalizer of the logits themselves: [C]."""
        return self._max + self.log_sum_exp

    def log_probs(self, logits: Tensor) -> Tensor:
        """Turn logits, as the head formed them, into log-probs: [C, G]."""
        return (logits - self._max[:, None]).sub_(self.log_sum_exp[:, None])

    def entropy(self) -> Tensor:
        """log s - t / s: [C], nats."""
        return self.log_sum_exp - self._moment / self.sum_exp


class OnlineKL:
    """Accumulates the sum g of KL(p || q) over the tiles; [C] (formula: module docstring)."""

    def __init__(self, p: OnlineSoftmax, q: OnlineSoftmax, masked_by_q: Tensor | None) -> None:
        """
        Args:
            masked_by_q: `HeadOperands.masked_tokens` of q's head.
        """
        self._p, self._q, self._masked = p, q, masked_by_q
        self._sum: Tensor | None = None  # g
        self._max_at_masked: Tensor | None = None  # p's largest logit at tokens that q masks

    def update_masked(self, logits_p: Tensor, columns: slice, memory: Tensor) -> None:
        """Record p's largest logit at the tokens of a tile that q masks, before its logits [C, T] are overwritten.

        `memory` [C, T] is overwritten.
        """
        if self._masked is None:
            return
        lowest = torch.full((), -torch.inf, dtype=logits_p.dtype, device=logits_p.device)
        found = torch.where(self._masked[columns], logits_p, lowest, out=memory).amax(-1)
        self._max_at_masked = found if self._max_at_masked is None else torch.maximum(self._max_at_masked, found)

    def add(self, of_tile: Tensor) -> None:
        """Rescale g and add a tile's sum [C] to it, after `update_` of both heads with that tile."""
        p, q = self._p, self._q
        if self._sum is not None:
            of_tile = (self._sum + p.sum_exp_before * (p.shift - q.shift)) * p.shift.exp() + of_tile
        self._sum = of_tile

    def value(self) -> Tensor:
        """KL(p || q): [C], nats; inf where p has mass on a token that q masks."""
        p, q = self._p, self._q
        value = self._sum / p.sum_exp - (p.log_sum_exp - q.log_sum_exp)
        if self._max_at_masked is None:
            return value
        has_mass = (self._max_at_masked - p.logsumexp).exp() > 0.0
        return value.masked_fill(has_mass, torch.inf)


class PositionBlock:
    """Accumulates the outputs of C positions while they visit the tiles of the vocabulary.

    Args:
        heads: one head, or the policy and the rollout model.
        masked: `HeadOperands.masked_tokens` of each head; only read for two.
        rows: the positions of this block.
        wanted: [C, G] ids whose log-probs are returned.
        num_top: K.
        lam: at which the exact Z of two heads is taken; None leaves it out.
    """

    def __init__(
        self,
        heads: Sequence[HeadOperands],
        masked: Sequence[Tensor | None],
        rows: slice,
        wanted: Tensor,
        num_top: int,
        lam: float | None,
    ) -> None:
        self._heads, self._rows, self._wanted, self._num_top, self._lam = heads, rows, wanted, num_top, lam
        self._picked: list[Tensor | None] = [None for _ in heads]  # [C, G] logits at the wanted ids
        self._tops = [RunningTopK(num_top) for _ in heads]
        self.softmaxes = [OnlineSoftmax() for _ in heads]
        self._divergences: list[OnlineKL] = []  # KL(policy || rollout model), KL(rollout model || policy)
        if len(heads) == 2:
            p, q = self.softmaxes
            self._divergences = [OnlineKL(p, q, masked[1]), OnlineKL(q, p, masked[0])]
        self._z: Tensor | None = None  # [C] the exact Z of the tiles so far

    def update(self, columns: slice) -> None:
        """Form the logits of this tile, whose weights the heads have loaded, and update every output from them."""
        logits = [head.logits(self._rows, columns) for head in self._heads]
        maxima = [self._update_from_logits(i, logits, columns) for i in range(len(logits))]
        for divergence, its_logits in zip(self._divergences, logits, strict=False):
            divergence.update_masked(its_logits, columns, self._heads[0].buffer("product", tuple(its_logits.shape)))
        probs = []
        for head, softmax, its_logits, row_max in zip(self._heads, self.softmaxes, logits, maxima, strict=True):
            probs.append(head.buffer("probs", tuple(its_logits.shape)))
            softmax.update_(its_logits, row_max, probs[-1], head.may_mask)
        self._add_expectations(logits, probs)
        if self._lam is not None and columns.stop - columns.start == len(self._heads[0].weight):
            normalized = zip(probs, self.softmaxes, strict=True)
            self._add_z(*(its_probs.div_(softmax.sum_exp[:, None]) for its_probs, softmax in normalized))

    def _update_from_logits(self, i: int, logits: Sequence[Tensor], columns: slice) -> Tensor:
        """Update head i's wanted logits and top K; return the largest logit of each row [C]."""
        own, width = logits[i], columns.stop - columns.start
        places = self._wanted - columns.start if columns.start else self._wanted
        if self._picked[i] is None:
            self._picked[i] = own.gather(1, places.clamp(max=width - 1))
        else:
            found = own.gather(1, places.clamp(0, width - 1))
            self._picked[i] = torch.where((places >= 0) & (places < width), found, self._picked[i])
        if self._num_top == 0:
            self._tops[i].add(own, columns.start, None, logits[i + 1 :])
            return own.amax(-1)
        maxima = block_max(own)
        self._tops[i].add(own, columns.start, maxima, logits[i + 1 :])
        return maxima.amax(-1)

    def _add_expectations(self, logits: Sequence[Tensor], probs: Sequence[Tensor]) -> None:
        """Add the tile to t of each head and, for two heads, to g both ways. Overwrites the logits."""
        if len(logits) == 1:
            self.softmaxes[0].add_moment(logits[0].mul_(probs[0]).sum(-1))
            return
        product = self._heads[0].buffer("product", tuple(logits[0].shape))
        for softmax, its_logits, its_probs in zip(self.softmaxes, logits, probs, strict=True):
            softmax.add_moment(torch.mul(its_logits, its_probs, out=product).sum(-1))
        gap = logits[0].sub_(logits[1])
        self._divergences[0].add(torch.mul(gap, probs[0], out=product).sum(-1))
        self._divergences[1].add(-gap.mul_(probs[1]).sum(-1))

    def update_z(self, columns: slice) -> None:
        """Add this tile's share of the exact Z, in a second sweep, when both logsumexps are known."""
        logits = (head.logits(self._rows, columns) for head in self._heads)
        logsumexps = (softmax.logsumexp[:, None] for softmax in self.softmaxes)
        self._add_z(*(one.sub_(logsumexp).exp_() for one, logsumexp in zip(logits, logsumexps, strict=True)))

    def _add_z(self, p: Tensor, q: Tensor) -> None:
        """Add sum_x min(q, p / lam) of a tile, for probabilities p of the policy and q of the rollout model."""
        z = torch.minimum(q, p.div_(self._lam), out=p).sum(-1)
        self._z = z if self._z is None else self._z + z

    def outputs(self) -> list[Tensor]:
        """Return the outputs of these positions in the order of `autograd.tiled_heads`."""
        values, constants = [], []
        for softmax, top, picked in zip(self.softmaxes, self._tops, self._picked, strict=True):
            log_probs = softmax.log_probs(picked)
            values += [log_probs[:, 0], softmax.entropy()]
            constants += [top.ids, softmax.log_probs(top.values), log_probs[:, 1:]]
        if self._divergences:
            values += [divergence.value() for divergence in self._divergences]
            constants.append(self.softmaxes[1].log_probs(self._tops[0].others[0]))
        if self._lam is not None:
            constants.append(self._z)
        return [*values, *constants]
