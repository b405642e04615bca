"""Measures what OBRS does to synthetic gaps between two models, and draws the paper's Figure 2 (docs/replay.md).

    python -m research.families                # ten seconds on one core
    python -m research.families quickstart     # a recipe's two models, on responses of the rollout model

Tables are printed; the folder gets figure2.html and figure2.json. The same seed gives the same numbers.

The effect of OBRS depends on the kind of gap, so there are four. One of the two distributions of a state is Zipf's,
p ~ rank^-e with e uniform in [1, 2.5] (0.7 to 7 nats of entropy over 32,768 tokens, as a language model has). The other
is derived from it.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Generator, Tensor

from jackpot.analysis.simulate.candidates import MOST_STATES, PROMPTS, PairBench, first_rollouts, pair_states
from jackpot.analysis.simulate.distributions import LAMS, StatePairs, measure_states
from jackpot.config.recipes import resolve
from jackpot.core.prng import fold_in
from jackpot.models.load import load_model
from jackpot.ui.results import write_results
from jackpot.ui.terminal.output import show_files, show_tables
from research.figure2 import (
    GapCurve,
    GapPoint,
    PairMeasurement,
    curve_by_kl,
    gap_curve,
    mean_point,
    measure_pair,
    token_ratios,
    view_sections,
)

VOCABULARY = 32_768
DRAWS = 32  # tokens drawn from the rollout model at each state
SWEEP_STATES = 32  # states at each gap of a family
EXAMPLE_STATES = 128  # states at the one gap at which ratios and top-k estimates are shown
EXAMPLE_KL = 0.5  # KL at that gap, nats
_CHUNK = 32  # states in memory at once
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


def synthetic_measurements(seed: int, vocabulary: int = VOCABULARY) -> tuple[list[GapCurve], list[PairMeasurement]]:
    """Measure each family over all its gaps, and many states at the gap of its example."""
    curves, pairs = [], []
    for family in FAMILIES:
        points = family_points(family, seed, vocabulary)
        curves.append(gap_curve(family.name, points))
        states = example_states(family, example_gap(family, points), seed, vocabulary)
        pairs.append(measure_pair(family.name, states, EXAMPLE_STATES))
    return curves, pairs


def family_points(family: GapFamily, seed: int, vocabulary: int) -> list[GapPoint]:
    """Measure a few states of a family at each of its gaps."""
    return [
        mean_point(measure_states(sample_states(family, gap, SWEEP_STATES, seed, vocabulary=vocabulary)))
        for gap in family.gaps
    ]


def example_gap(family: GapFamily, points: Sequence[GapPoint]) -> float:
    """Return the gap of a family whose KL is nearest to EXAMPLE_KL."""
    return min(zip(points, family.gaps, strict=True), key=lambda pair: abs(pair[0].kl - EXAMPLE_KL))[1]


def example_states(family: GapFamily, gap: float, seed: int, vocabulary: int) -> Iterator[StatePairs]:
    """Yield EXAMPLE_STATES states of a family at one gap, a few at a time."""
    for part in range(EXAMPLE_STATES // _CHUNK):
        yield sample_states(family, gap, _CHUNK, seed, part=part, vocabulary=vocabulary)


def recipe_states(
    recipe: str, arm: str | None, overrides: Sequence[str], prompts: int, seed: int
) -> tuple[str, int, Iterator[StatePairs]]:
    """Return the rollout model of a recipe, and the number and the states of its responses' tokens."""
    config = resolve(recipe, arm, list(overrides))
    paths = config.model_paths()
    policy, rollout_model = paths["policy"], paths["rollout_model"]
    answers = PairBench(config, policy, [rollout_model], prompts, seed).answers(rollout_model)
    chosen = first_rollouts(answers.rollouts, MOST_STATES)
    models = [load_model(path, torch.float32) for path in (policy, rollout_model)]
    states = pair_states(models[0], models[1], chosen, config.sampling.temperature)
    return rollout_model, sum(int(rollout.sampled_mask.sum()) for rollout in chosen), states


def source_parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """Make the parser of a script that measures the families or the models of a recipe."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", help="default: the synthetic families")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--arm")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser


def main() -> None:
    typed = source_parser(__doc__, "runs/figure2").parse_intermixed_args()
    if typed.recipe:
        name, total, states = recipe_states(typed.recipe, typed.arm, typed.overrides, typed.prompts, typed.seed)
        pairs = [measure_pair(name, states, total)]
        curves = [curve_by_kl(name, pairs[0].numbers)]
    else:
        curves, pairs = synthetic_measurements(typed.seed)

    ratios = list(map(token_ratios, pairs))
    sections = view_sections(curves, ratios)
    numbers = {
        "seed": typed.seed,
        "lams": LAMS,
        "curves": list(map(asdict, curves)),
        "ratios": list(map(asdict, ratios)),
    }
    files = write_results(typed.out, "figure2", "Figure 2", sections, numbers)
    show_tables(Console(), sections.values())
    show_files(Console(), files)


if __name__ == "__main__":
    main()
