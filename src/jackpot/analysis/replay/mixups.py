"""Detection of mix-ups in the two columns of log-probs, the engine's and the policy's, which no correction can mend.

The columns may be swapped, unrelated, at two temperatures, or shifted by one token against each other.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from jackpot.analysis.replay.responses import SavedResponse
from jackpot.core.statistics import Sample

MOST_TOKENS = 100_000  # tokens that are compared, from the beginning of a dump
LEAST_LOG_PROB = -20.0  # lower log-probs and log-odds count as this one, so that no single token decides a correlation
LEAST_TOKENS = 100  # fewest tokens for which a mix-up, or rounding, is reported
LEAST_CORRELATION = 0.5  # least correlation of two columns, after one was shifted back, at which a shift is reported
LEAST_GAIN = 0.2  # least increase of the correlation by shifting back, at which a shift is reported
LEAST_EXPLAINED_DIFFERENCE = 0.05  # least difference in explained variance that says which of two columns is shifted
UNRELATED_CORRELATION = 0.1  # correlation below which two columns have nothing to do with each other
RELIABLE_PROBABILITIES = (0.02, 0.98)  # probabilities between which log-odds are reliable
LEAST_QUOTIENT = 1.15  # least quotient of the higher over the lower temperature that is reported
LEAST_LINEARITY = 0.85  # least correlation of two columns of log-odds that may be one model's at two temperatures
# Two columns of log-odds are at two temperatures if at least this share of the variance of their difference vanishes
# when one of them is multiplied by the quotient of the temperatures.
LEAST_EXPLAINED = 0.4
SURE_ERRORS = 4.0  # standard errors that a mean must lie below 0 to be negative not just by chance
LIKELY_ERRORS = 3.0  # standard errors that a mean must lie from 0 for its sign to say which of two columns is wrong
LEAST_KL = 0.005  # nats; a negative mean that is closer to 0 may be rounding
# The least share of a column's log-probs below 0 that a number format holds exactly, if the column was rounded to it.
LEAST_ROUNDED = 0.99
GRIDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # formats of rounded log-probs, the coarser first


class ColumnPairs:
    """A collector of the engine's and the policy's log-probs at the first sampled tokens, which compares the two.

    Args:
        engine, policy: names of the columns in the dump.
        one_model: whether both columns are of one model, so that they must be related and at one temperature.
    """

    def __init__(self, engine: str, policy: str, one_model: bool) -> None:
        self._engine, self._policy = f"{engine} (the engine's)", f"{policy} (the policy's)"
        self._one_model = one_model
        self._rows: list[Tensor] = []  # for each response [3, T]: the engine's column, the policy's, token ids
        self._tokens = 0

    def add(self, responses: Sequence[SavedResponse]) -> None:
        """Add the sampled tokens of the next responses, which all have log-probs of the policy."""
        for response in responses:
            if self._tokens < MOST_TOKENS:
                old, _ = response.policy_log_probs
                columns = (response.rollout_log_probs, old, response.token_ids.double())
                self._rows.append(torch.stack(columns)[:, response.sampled_mask])
                self._tokens += self._rows[-1].shape[1]

    @property
    def mixup(self) -> str | None:
        """Return a sentence on the mix-up and its remedy; None if there is none, or there are too few tokens."""
        if self._tokens < LEAST_TOKENS:
            return None
        return self._shifted() or self._two_temperatures() or self._swapped()

    @property
    def rounding(self) -> str:
        """Say which columns are rounded to half precision, and what total variation the rounding makes; "" for none."""
        engine, policy, _ = torch.cat(self._rows, 1)
        texts = (_rounding_text(self._engine, engine), _rounding_text(self._policy, policy))
        return "; ".join(filter(None, texts))

    def _shifted(self) -> str | None:
        """Return a sentence if a column is shifted by one token, or if one model's columns are unrelated; else None.

        The log-probs of a shifted column correlate with the other column at the next token. The token ids tell which of
        the two columns is wrong, since a log-prob depends on its token.
        """
        # Log-probs and token ids, [N] each: at all tokens that have a next one, and at those next ones.
        engine, policy, ids = torch.cat([row[:, :-1] for row in self._rows], 1)
        next_engine, next_policy, next_ids = torch.cat([row[:, 1:] for row in self._rows], 1)
        unshifted = _correlation(engine, policy)
        shifts = (  # (correlation if shifted back, column that is ahead, column that is behind, sum of both columns)
            (_correlation(engine, next_policy), self._engine, self._policy, engine + next_policy),
            (_correlation(policy, next_engine), self._policy, self._engine, policy + next_engine),
        )

        correlation, ahead, behind, sum_of_both = max(shifts, key=lambda shift: shift[0])
        if correlation >= max(LEAST_CORRELATION, unshifted + LEAST_GAIN):
            where = f"{ahead} is one token ahead of {behind}"
            # How much better the next token's id explains the log-probs than the token's own; above 0 `ahead` is wrong.
            by_next = _explained(sum_of_both, next_ids) - _explained(sum_of_both, ids)
            wrong = self._padded()  # a shifted column may have padding at its first or last token
            if not wrong and abs(by_next) >= LEAST_EXPLAINED_DIFFERENCE:
                wrong = ahead if by_next > 0.0 else behind
            if wrong:
                token = "next token" if wrong == ahead else "token before"
                where = f"{wrong} has at each token the log-prob of the {token}"
            return (
                f"a column is shifted by one: {where} (correlation {unshifted:.2f} as they are, {correlation:.2f} "
                f"shifted back). Shift it by one and replay again"
            )

        # A constant column has the correlation 0 too, and is no finding. Its standard deviation is exactly 0 if taken
        # along a dimension; if taken over a whole tensor, it may be rounded to another number.
        vary = bool((torch.stack([engine, policy]).std(-1) > 0.0).all())
        if self._one_model and vary and abs(unshifted) < UNRELATED_CORRELATION:
            return (
                f"{self._engine} and {self._policy} have nothing to do with each other (correlation {unshifted:.2f}): "
                f"they are of other tokens or weights, or logits were taken one position too late"
            )
        return None

    def _padded(self) -> str | None:
        """Return the name of the column that has padding in place of a log-prob; None if none or both have.

        Padding shows as a column that has the same value at the first, or at the last, token of all responses.
        """
        # [responses, 2, 2]: both columns at the first and at the last token. A column is padded if all responses equal
        # the first response at either of the two tokens.
        edges = torch.stack([row[:2, [0, -1]] for row in self._rows])
        engine_is_padded, policy_is_padded = edges.eq(edges[0]).all(0).any(-1).tolist()
        if engine_is_padded == policy_is_padded:
            return None
        return self._engine if engine_is_padded else self._policy

    def _two_temperatures(self) -> str | None:
        """Return a sentence if the columns are one model's at two temperatures, else None.

        The log-odds log p - log(1 - p) of a sampled token at two temperatures are nearly proportional, and their slope
        is the quotient of the temperatures. Only tokens that are neither rare nor sure are compared. The result is None
        also if the columns are of two models, or there are too few such tokens.
        """
        # The log-odds of both columns, at tokens that are neither rare nor sure in either.
        columns = torch.cat(self._rows, 1)[:2]
        lowest, highest = RELIABLE_PROBABILITIES
        is_reliable = columns.exp().gt(lowest) & columns.exp().lt(highest)
        engine, policy = (column - torch.log1p(-column.exp()) for column in columns[:, is_reliable.all(0)])
        if not self._one_model or len(engine) < LEAST_TOKENS:
            return None

        # The variance of engine - slope * policy, as a share of that of engine - policy. It is divided by the slope, so
        # that the share is the same if the columns are exchanged.
        slope = float(engine.std() / policy.std())  # the policy's temperature over the engine's
        unexplained = float((engine - slope * policy).var() / (slope * (engine - policy).var()).clamp(min=1e-12))
        is_linear = _correlation(engine, policy) >= LEAST_LINEARITY and unexplained <= 1.0 - LEAST_EXPLAINED
        if not is_linear or 1.0 / LEAST_QUOTIENT < slope < LEAST_QUOTIENT:
            return None

        # The tokens were sampled from the column in which they are more probable, so the other column is wrong.
        kl, error = self._kl()  # mean of log p_engine - log p_policy, and its standard error
        where = "one of them is not at the temperature that sampled the tokens"
        if kl > LIKELY_ERRORS * error:
            where = f"{self._policy} is wrong. Score the policy at about {1.0 / slope:.2g} times its temperature"
        if kl < -LIKELY_ERRORS * error:
            where = (
                f"{self._engine} is wrong. The tokens were sampled at about {slope:.2g} times its temperature: have "
                f"the engine report what it sampled from (vLLM: logprobs_mode=processed_logprobs)"
            )
        return f"the columns are at two temperatures (slope of their log-odds {slope:.2f}): {where}"

    def _swapped(self) -> str | None:
        """Return a sentence if the tokens are more probable in the policy's column, else None.

        If the engine's column sampled the tokens, the mean difference is a KL divergence, which is not negative. So a
        mean is reported that is below 0 by more than rounding (LEAST_KL) and chance (SURE_ERRORS) explain.
        """
        kl, error = self._kl()  # mean of log p_engine - log p_policy, and its standard error
        if kl > -max(LEAST_KL, SURE_ERRORS * error):
            return None
        return (
            f"the columns are swapped, or {self._engine} is not what sampled the tokens (other weights, top-p or "
            f"top-k): they are more probable under {self._policy}, by {-kl:.3f} nats on average. Exchange the columns"
        )

    def _kl(self) -> tuple[float, float]:
        """Return the mean of log p_engine - log p_policy over tokens, and the standard error of the mean."""
        # The error comes from sums over responses, since the tokens of a response depend on each other.
        sums = [float((row[0] - row[1]).sum()) for row in self._rows]
        mean = sum(sums) / self._tokens
        deviations = Sample(tuple(total - mean * row.shape[1] for total, row in zip(sums, self._rows, strict=True)))
        return mean, (deviations.error or math.inf) * len(sums) / self._tokens


def _rounding_text(name: str, column: Tensor) -> str:
    """Say how a column is rounded to half precision, and what total variation that makes; "" for none or few tokens."""
    values = column[column < 0.0]
    if len(values) < LEAST_TOKENS:
        return ""

    for grid, dtype in GRIDS.items():
        is_on_grid = values.to(dtype).double() == values
        if is_on_grid.double().mean() >= LEAST_ROUNDED:
            # The grid's spacing at a value is eps times the greatest power of 2 that is not above the value's size.
            spacings = torch.finfo(dtype).eps * 2.0 ** (values.frexp().exponent - 1)
            # Rounding to a spacing u changes a log-prob by u / 4 on average, and a log-prob of 0, which is not among
            # `values`, not at all. Half of the mean change over the column is the total variation from exact log-probs.
            variation = float(spacings.sum() / len(column)) / 8.0
            return f"{name} is rounded to {grid}, which alone makes {variation:.2%} total variation"
    return ""


def _correlation(first: Tensor, second: Tensor) -> float:
    """Return the correlation of two columns, after lower values are raised to LEAST_LOG_PROB; 0 if one is constant."""
    return float(torch.corrcoef(torch.stack([first, second]).clamp(min=LEAST_LOG_PROB))[0, 1].nan_to_num())


def _explained(values: Tensor, ids: Tensor) -> float:
    """Return the share of the variance of values [N] that their token ids [N] explain beyond chance.

    It is epsilon squared of an analysis of variance, in which each token id is a group.
    """
    tokens, index = ids.unique(return_inverse=True)
    counts = index.bincount().double()
    means = torch.zeros_like(counts).index_add(0, index, values) / counts
    within = (values - means[index]).square().sum() / max(1, len(values) - len(tokens))  # variance within ids
    return float(1.0 - within / values.var())
