"""Synthetic pairs of models whose gap is a parameter: the effect of OBRS depends on the kind of gap, so there are four.

One of the two distributions of a state is Zipf's, p ~ rank^-e with e uniform in [1, 2.5] (0.7 to 7 nats of entropy over
32,768 tokens, as a language model has). The other is derived from it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from jackpot.analysis.simulate.distributions import StatePairs
from jackpot.core.prng import fold_in

VOCABULARY = 32_768
DRAWS = 32  # tokens drawn from the rollout model at each state
_EXPONENTS = (1.0, 2.5)
_MOVED_RANKS = (20, 200)


@dataclass(frozen=True, kw_only=True, slots=True)
class GapFamily:
    """One kind of gap between policy and rollout model, of any size."""

    name: str
    gaps: tuple[float, ...]  # sizes to measure, from small to large
    pair: Callable[[Tensor, float, Generator], tuple[Tensor, Tensor]]  # (Zipf's, gap, ...) -> log p_inf, log p_target


def sample_states(
    family: GapFamily, gap: float, count: int, seed: int, part: int = 0, vocabulary: int = VOCABULARY
) -> StatePairs:
    """Sample `count` states of a family at one gap.

    Equal arguments give equal states, another `part` gives other states. States of different gaps share their random
    numbers.
    """
    generator = Generator().manual_seed(fold_in(seed, "simulate", family.name, part))
    low, high = _EXPONENTS
    exponents = low + (high - low) * torch.rand(count, 1, generator=generator, dtype=torch.float64)
    ranks = torch.arange(1, vocabulary + 1, dtype=torch.float64)
    rollout, target = family.pair(torch.log_softmax(-exponents * ranks.log(), -1), gap, generator)
    ids = torch.multinomial(rollout.exp(), DRAWS, replacement=True, generator=generator)
    return StatePairs(rollout=rollout, target=target, token_ids=ids)


def _noise(zipf: Tensor, gap: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """Add Gaussian noise, whose standard deviation is the gap, to p_inf's logits."""
    noise = torch.randn(zipf.shape, generator=generator, dtype=torch.float64)
    return zipf, torch.log_softmax(zipf + gap * noise, -1)


def _sharper(zipf: Tensor, gap: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """Take p_inf at the temperature 1 / (1 + gap)."""
    return zipf, torch.log_softmax((1.0 + gap) * zipf, -1)


def _moved_mode(zipf: Tensor, gap: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """Move the share gap of all mass to one token of rank 21 to 201 in p_inf."""
    low, high = (min(rank, zipf.shape[1] - 1) for rank in _MOVED_RANKS)
    ranks = torch.randint(low, high + 1, (len(zipf), 1), generator=generator)
    return zipf, ((1.0 - gap) * zipf.exp()).scatter_add(1, ranks, torch.full_like(zipf[:, :1], gap)).log()


def _leak(zipf: Tensor, gap: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """Let p_inf leak the share gap of its mass evenly over the vocabulary."""
    return ((1.0 - gap) * zipf.exp() + gap / zipf.shape[1]).log(), zipf


def _steps(low: float, high: float, count: int = 12) -> tuple[float, ...]:
    return tuple(low * (high / low) ** (step / (count - 1)) for step in range(count))


FAMILIES = (
    GapFamily(name="noise", gaps=_steps(0.045, 4.0), pair=_noise),
    GapFamily(name="sharper", gaps=_steps(0.025, 6.0), pair=_sharper),
    GapFamily(name="moved mode", gaps=_steps(5e-4, 0.6), pair=_moved_mode),
    GapFamily(name="leak", gaps=_steps(1e-3, 0.95), pair=_leak),
)
