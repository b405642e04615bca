"""Measures how often the intervals of `jackpot eval` hold the truth, beside those of a bootstrap over problems.

    python benchmarks/coverage.py

A set has P problems; the chance that a response to one of them is correct is drawn from a beta distribution of known
mean, and n responses are drawn with it. Prints for mean@n and pass@n with n of 1, 4 and 16, and two spreads of the
chances, the lowest and the highest coverage, and the mean width in points; docs/compare.md has the range of coverages
of 30 and of 512 problems.
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from jackpot.rollout.pass_at_k import estimate_mean, pass_probabilities

SETS = 2_000  # for each row
RESAMPLES = 1_000  # of each bootstrap
PROBLEMS, TRUTHS, SPREADS, RESPONSES = (30, 83, 512), (0.01, 0.03, 0.1, 0.5), (0.5, 2.0), (1, 4, 16)
Bounds = tuple[float, float]


def wilson(values: NDArray[np.float64], draw: np.random.Generator) -> Bounds:
    """The interval of the package."""
    found = estimate_mean(values)
    return found.low, found.high


def bootstrap(values: NDArray[np.float64], draw: np.random.Generator) -> Bounds:
    """Percentiles of the means of resampled problems."""
    kinds, counts = np.unique(values, return_counts=True)
    draws = draw.multinomial(len(values), counts / len(values), size=RESAMPLES)
    low, high = np.percentile(draws @ kinds / len(values), (2.5, 97.5))
    return low, high


def expected_pass(truth: float, spread: float, k: int) -> float:
    """E[1 - (1 - p)^k] for p of a beta distribution with this mean and a + b = spread."""
    misses = [(spread * (1.0 - truth) + i) / (spread + i) for i in range(k)]
    return 1.0 - float(np.prod(misses))


def measure(problems: int, truth: float, spread: float, n: int, k: int) -> dict[str, tuple[float, float]]:
    """Coverage and mean width of both intervals for pass@k from n responses."""
    draw = np.random.default_rng([problems, round(1000 * truth), round(10 * spread), n, k])
    wanted, table = expected_pass(truth, spread, k), pass_probabilities(n, k)
    chances = draw.beta(truth * spread, (1.0 - truth) * spread, size=(SETS, problems))
    sets = [table[right] for right in draw.binomial(n, chances)]
    found = {}
    for method in (bootstrap, wilson):
        bounds = np.array([method(values, draw) for values in sets])
        held = (bounds[:, 0] <= wanted + 1e-12) & (wanted <= bounds[:, 1] + 1e-12)
        found[method.__name__] = float(held.mean()), float((bounds[:, 1] - bounds[:, 0]).mean())
    return found


def main() -> None:
    print("| problems | accuracy | bootstrap covers | width | Wilson covers | width |")
    print("|---|---|---|---|---|---|")
    for problems, truth in itertools.product(PROBLEMS, TRUTHS):
        numbers = [(n, k) for n in RESPONSES for k in sorted({1, n})]
        found = [measure(problems, truth, spread, *number) for number in numbers for spread in SPREADS]
        cells = []
        for method in ("bootstrap", "wilson"):
            held, widths = zip(*(one[method] for one in found), strict=True)
            cells += [f"{100 * min(held):.0f} to {100 * max(held):.0f} %", f"{100 * np.mean(widths):.1f}"]
        print(f"| {problems} | {truth:.0%} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
