"""What two heads, or one, say of a block of positions, read tile by tile. Pure, torch only.

Each tile's logits are formed once, and everything is read from them: the logits of wanted ids, the running top k (the
rollout model's logits at the policy's top k travel with it), and the sums of `softmax_sums`.

Shapes: `C` positions, `T` tokens of a tile, `G` wanted ids, `K` top-k.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from jackpot.objectives.kernels.tiles import LOWEST, Side
from jackpot.objectives.kernels.topk import RunningTop, block_peaks


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


class Block:
    """C positions on their way over the vocabulary.

    Args:
        sides: one head, or the policy and the rollout model.
        banned: of each side as `Side.banned` gives it; only read for two.
        wanted: [C, G] ids of which log-probs are asked for.
        lam: that of the exact Z of two heads; None leaves it out.
    """

    def __init__(
        self,
        sides: Sequence[Side],
        banned: Sequence[Tensor | None],
        rows: slice,
        wanted: Tensor,
        num_top: int,
        lam: float | None,
    ) -> None:
        self._sides, self._rows, self._wanted, self._num_top, self._lam = sides, rows, wanted, num_top, lam
        self._picked: list[Tensor | None] = [None for _ in sides]  # [C, G] logits at the wanted ids
        self._tops = [RunningTop(num_top) for _ in sides]
        self.sums = [SoftmaxSums() for _ in sides]
        self._divergences: list[Divergence] = []
        if len(sides) == 2:
            p, q = self.sums
            self._divergences = [Divergence(p, q, banned[1]), Divergence(q, p, banned[0])]
        self._kept: Tensor | None = None  # [C] the exact Z so far

    def read(self, columns: slice) -> None:
        """The tile of these tokens, which the sides have loaded."""
        logits = [side.logits(self._rows, columns) for side in self._sides]
        peaks = [self._read_raw(i, logits, columns) for i in range(len(logits))]
        for divergence, its_logits in zip(self._divergences, logits, strict=False):
            divergence.see(its_logits, columns)
        probs = []
        for side, sums, its_logits, peak in zip(self._sides, self.sums, logits, peaks, strict=True):
            probs.append(side.buffer("probs", tuple(its_logits.shape)))
            sums.absorb_(its_logits, peak, probs[-1], side.has_bans)
        self._add_expectations(logits, probs)
        if self._lam is not None and columns.stop - columns.start == len(self._sides[0].weight):
            self._add_kept(
                *(its_probs.div_(sums.total[:, None]) for its_probs, sums in zip(probs, self.sums, strict=True))
            )

    def _read_raw(self, i: int, logits: Sequence[Tensor], columns: slice) -> Tensor:
        """Reads side i's wanted logits and top k; the largest logit of each row [C]."""
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
        peaks = block_peaks(own)
        self._tops[i].add(own, columns.start, peaks, logits[i + 1 :])
        return peaks.amax(-1)

    def _add_expectations(self, logits: Sequence[Tensor], probs: Sequence[Tensor]) -> None:
        """The sums of p log p, and of two heads those of p (log p - log q) both ways. Overwrites the logits."""
        if len(logits) == 1:
            self.sums[0].add_moment(logits[0].mul_(probs[0]).sum(-1))
            return
        product = self._sides[0].buffer("product", tuple(logits[0].shape))
        for sums, its_logits, its_probs in zip(self.sums, logits, probs, strict=True):
            sums.add_moment(torch.mul(its_logits, its_probs, out=product).sum(-1))
        gap = logits[0].sub_(logits[1])
        self._divergences[0].add(torch.mul(gap, probs[0], out=product).sum(-1))
        self._divergences[1].add(-gap.mul_(probs[1]).sum(-1))

    def read_kept(self, columns: slice) -> None:
        """The tile's share of the exact Z, in a second sweep."""
        logits = (side.logits(self._rows, columns) for side in self._sides)
        normalisers = (sums.log_normaliser[:, None] for sums in self.sums)
        self._add_kept(*(one.sub_(normaliser).exp_() for one, normaliser in zip(logits, normalisers, strict=True)))

    def _add_kept(self, p: Tensor, q: Tensor) -> None:
        kept = torch.minimum(q, p.div_(self._lam), out=p).sum(-1)
        self._kept = kept if self._kept is None else self._kept + kept

    def outputs(self) -> list[Tensor]:
        """As `tiled_heads.read_heads` orders them."""
        values, constants = [], []
        for sums, top, picked in zip(self.sums, self._tops, self._picked, strict=True):
            log_probs = sums.log_probs(picked)
            values += [log_probs[:, 0], sums.entropy()]
            constants += [top.ids, sums.log_probs(top.values), log_probs[:, 1:]]
        if self._divergences:
            values += [divergence.value() for divergence in self._divergences]
            constants.append(self.sums[1].log_probs(self._tops[0].others[0]))
        if self._lam is not None:
            constants.append(self._kept)
        return [*values, *constants]
