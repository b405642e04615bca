"""Mix-ups in the two columns of log-probs, the engine's and the policy's, which no correction can mend.

Found are columns that are swapped, unrelated, at two temperatures, or shifted by one token against each other. The
docstrings of `ColumnPairs`' methods say how.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from jackpot.analysis.replay.responses import SavedResponse
from jackpot.core.statistics import Sample

MOST_TOKENS = 100_000  # tokens that are looked at, the first of a dump
RAREST = -20.0  # log-prob, or log-odds, that lower values count as, so that no single token decides a correlation
FEW = 100  # tokens below which nothing is said
ALIKE = 0.5  # least correlation of two columns after one was shifted back
CLEARLY = 0.2  # least gain of correlation by shifting back
TELLING = 0.05  # least difference in explained variance that says which of two columns is shifted
UNRELATED = 0.1  # correlation below which two columns have nothing to do with each other
COMMON = (0.02, 0.98)  # probabilities between which log-odds are reliable
SLOPE = 1.15  # least quotient of two temperatures, or its inverse, that is reported
LINEAR = 0.85  # least correlation of the log-odds of one model at two temperatures
EXPLAINED = 0.4  # least share of the variance of the difference of log-odds that the slope explains
SURE = 4.0  # standard errors below 0 from which on a mean is negative, and not by chance
LIKELY = 3.0  # standard errors that say which of two columns is wrong if one must be
LEAST_KL = 0.005  # nats; a smaller negative mean may be rounding
ROUNDED = 0.99  # least share of log-probs on the grid of a number format at which a column was rounded to the format
GRIDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # the coarser one first


class ColumnPairs:
    """The two columns of log-probs at the first sampled tokens of a dump, the engine's and the policy's.

    Args:
        engine, policy: names of the columns in the dump.
        one_model: whether both columns are of one model, so that they must be related and of one temperature.
    """

    def __init__(self, engine: str, policy: str, one_model: bool = True) -> None:
        self._engine, self._policy = f"{engine} (the engine's)", f"{policy} (the policy's)"
        self._one_model = one_model
        self._rows: list[Tensor] = []  # for each response [3, T]: the engine's column, the policy's, token ids
        self._tokens = 0

    def add(self, responses: Sequence[SavedResponse]) -> None:
        """Add the next responses, which have log-probs of a policy."""
        for response in responses:
            if self._tokens < MOST_TOKENS:
                columns = (response.rollout_log_probs, response.of_policy[0], response.token_ids.double())
                self._rows.append(torch.stack(columns)[:, response.sampled_mask])
                self._tokens += self._rows[-1].shape[1]

    @property
    def mixup(self) -> str | None:
        """A sentence about what is mixed up and what to do first; None if nothing is, or too few tokens tell."""
        if self._tokens < FEW:
            return None
        return self._shifted() or self._two_temperatures() or self._swapped()

    @property
    def rounding(self) -> str:
        """A text about which columns are in half precision, and the total variation of rounding alone; "": none is."""
        rounded = []
        for name, column in zip((self._engine, self._policy), torch.cat(self._rows, 1), strict=False):
            values = column[column < 0.0]
            for grid, dtype in GRIDS.items() if len(values) >= FEW else ():
                if values.to(dtype).double().eq(values).double().mean() >= ROUNDED:
                    # Rounding to a grid of spacing u is off by u / 4 on average; the total variation is half of that.
                    units = torch.finfo(dtype).eps * (2.0 ** (values.frexp().exponent - 1)).sum() / len(column)
                    rounded.append(
                        f"{name} is rounded to {grid}, which alone makes {float(units) / 8.0:.2%} total variation"
                    )
                    break
        return "; ".join(rounded)

    def _shifted(self) -> str | None:
        """Return a sentence if a column is shifted by one token against the other, else None.

        The log-probs of a shifted column go with the other column at the next token. The token ids tell which of both
        columns is off, since a log-prob depends on what token it is of.
        """
        here = torch.cat([row[:, :-1] for row in self._rows], 1)
        after = torch.cat([row[:, 1:] for row in self._rows], 1)
        same = _correlation(here[0], here[1])
        shifts = (  # the column that would be ahead, the other one, and the values that both then have
            (_correlation(here[0], after[1]), self._engine, self._policy, here[0] + after[1]),
            (_correlation(here[1], after[0]), self._policy, self._engine, here[1] + after[0]),
        )

        alike, ahead, behind, values = max(shifts, key=lambda shift: shift[0])
        if alike >= max(ALIKE, same + CLEARLY):
            by_next = _explained(values, after[2]) - _explained(values, here[2])  # above 0: they are the next token's
            shifted = self._padded() or (abs(by_next) >= TELLING and (ahead if by_next > 0.0 else behind)) or ""
            of = "next token" if shifted == ahead else "token before"
            where = f"{shifted} has at each token the log-prob of the {of}"
            return (
                f"a column is shifted by one: {where if shifted else f'{ahead} is one token ahead of {behind}'} "
                f"(correlation {same:.2f} as they are, {alike:.2f} shifted back). Shift it by one and replay again"
            )

        if self._one_model and abs(same) < UNRELATED and (here[:2].std(-1) > 0.0).all():
            return (
                f"{self._engine} and {self._policy} have nothing to do with each other (correlation {same:.2f}): they "
                f"are of other tokens or weights, or logits were taken one position too late"
            )
        return None

    def _padded(self) -> str | None:
        """Return the column that has the same number at the first, or last, token of all responses, if just one has."""
        edges = torch.stack([row[:2, [0, -1]] for row in self._rows])
        padded = edges.eq(edges[0]).all(0).any(-1).tolist()
        return dict(zip(padded, (self._engine, self._policy), strict=True)).get(True) if sum(padded) == 1 else None

    def _two_temperatures(self) -> str | None:
        """Return a sentence if the columns are one model's at two temperatures, else None.

        The log-odds log p - log(1 - p) of a sampled token at two temperatures are nearly proportional, and their slope
        is the quotient of the temperatures. Only tokens that are neither rare nor sure are compared.
        """
        columns = torch.cat(self._rows, 1)[:2]
        common = columns.exp().gt(COMMON[0]) & columns.exp().lt(COMMON[1])
        engine, policy = (column - torch.log1p(-column.exp()) for column in columns[:, common.all(0)])
        if not self._one_model or len(engine) < FEW:
            return None

        slope = float(engine.std() / policy.std())
        left = float((engine - slope * policy).var() / (slope * (engine - policy).var()).clamp(min=1e-12))
        is_close = _correlation(engine, policy) >= LINEAR and left <= 1.0 - EXPLAINED
        if not is_close or 1.0 / SLOPE < slope < SLOPE:
            return None

        # The sign of the KL says which column is not of the distribution that sampled the tokens.
        kl, error = self._kl()
        where = "one of them is not at the temperature that sampled the tokens"
        if kl > LIKELY * error:
            where = f"{self._policy} is wrong. Score the policy at about {1.0 / slope:.2g} times its temperature"
        if kl < -LIKELY * error:
            where = (
                f"{self._engine} is wrong. The tokens were sampled at about {slope:.2g} times its temperature: have "
                f"the engine report what it sampled from (vLLM: logprobs_mode=processed_logprobs)"
            )
        return f"the columns are at two temperatures (slope of their log-odds {slope:.2f}): {where}"

    def _swapped(self) -> str | None:
        # If the engine's column sampled the tokens, the mean is a KL divergence, which is not negative.
        kl, error = self._kl()
        if kl > -max(LEAST_KL, SURE * error):
            return None
        return (
            f"the columns are swapped, or {self._engine} is not what sampled the tokens (other weights, top-p or "
            f"top-k): they are more probable under {self._policy}, by {-kl:.3f} nats on average. Exchange the columns"
        )

    def _kl(self) -> tuple[float, float]:
        """Return the mean of log p_engine - log p_policy over tokens, and the standard error of the mean."""
        sums = [float((row[0] - row[1]).sum()) for row in self._rows]
        mean = sum(sums) / self._tokens
        spread = Sample(tuple(one - mean * row.shape[1] for one, row in zip(sums, self._rows, strict=True)))
        return mean, (spread.error or math.inf) * len(sums) / self._tokens


def _correlation(one: Tensor, other: Tensor) -> float:
    """Return the correlation of two columns with values below RAREST raised to it; 0 if a column is constant."""
    return float(torch.corrcoef(torch.stack([one, other]).clamp(min=RAREST))[0, 1].nan_to_num())


def _explained(values: Tensor, ids: Tensor) -> float:
    """Return the share of the variance of values [N] that their token ids [N] explain beyond chance (epsilon^2)."""
    tokens, index = ids.unique(return_inverse=True)
    counts = index.bincount().double()
    means = torch.zeros_like(counts).index_add(0, index, values) / counts
    within = (values - means[index]).square().sum() / max(1, len(values) - len(tokens))
    return float(1.0 - within / values.var())
