"""Limits of a healthy run: how far an engine's log-probs may be from training's, and how far accuracy may fall.

The module needs no torch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jackpot.config.config import Config
from jackpot.config.sampling import Sampling

# Mean |p_engine - p_training| of sampled tokens beyond which a run stops. A quantized engine is meant to have a gap:
# 1e-3 to 2e-2 are usual, more in a run that drifts. 0.25 is larger than all of these.
CPU_FP32 = "fp32 on a CPU"
LARGEST_GAPS = {CPU_FP32: 1e-5, "fp32": 1e-3, "bf16": 2e-2, "quantized": 0.25}


def precisions(engine: str, training: str, device: str, sampling: Sampling) -> list[str]:
    """Return the keys of `LARGEST_GAPS` for the precisions of an engine and of training: "fp32", "bf16" or "quantized".

    If both are fp32 on a CPU, they agree to 1e-6, and the only key is CPU_FP32. With top-p or top-k they may not agree:
    one may just keep a token that the other just drops, and then the token's whole probability is the gap.

    Args:
        device: kind of device of the engine, as in `Capabilities.device`.
    """
    if engine == training == "fp32" and device == "cpu" and not sampling.truncated:
        return [CPU_FP32]
    return [engine, training]


COLLAPSED_BELOW = 0.5  # share of the best accuracy below which a policy counts as collapsed
IN_A_ROW = 2  # number of low evaluations in a row that make a collapse; a single one may be chance


class Fall(NamedTuple):
    """A fall of a policy's accuracy: its iteration, and the accuracy before and after."""

    iteration: int  # iteration of the first low evaluation
    accuracy: float  # accuracy in that evaluation
    best: float  # highest accuracy in the evaluations before it

    @property
    def why(self) -> str:
        """Describe the fall in a phrase, for tables and events."""
        return f"{self.accuracy:.1%} right at iteration {self.iteration}, after {self.best:.1%}"


def evaluations(lines: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return (iteration, accuracy) for each line of metrics.jsonl in which the policy's accuracy was evaluated."""
    name = "eval/policy_accuracy"
    return [(line["iteration"], line[name]) for line in lines if line.get(name) is not None]


def problems_of(lines: Iterable[Mapping[str, Any]], config: Config) -> int:
    """Return how many held-out problems each evaluation of a run has: `evaluation.problems`, or all if there are fewer.

    Args:
        lines: lines of metrics.jsonl, whose newest `eval/problems` is the number; before the first evaluation the
            settings give it.
    """
    counted = [line["eval/problems"] for line in lines if line.get("eval/problems")]
    return int(counted[-1]) if counted else config.evaluation.problems


def fall_of(evaluated: Sequence[tuple[int, float]], problems: int) -> Fall | None:
    """Return the first fall of a policy's accuracy, or None if the policy has not collapsed.

    A policy has collapsed if in 2 evaluations in a row its accuracy is below half of the best accuracy before, and also
    below that best accuracy by more than two standard errors.

    Args:
        evaluated: (iteration, accuracy of the policy) of each evaluation.
        problems: number of problems in each evaluation.
    """
    best = 0.0
    low_in_a_row: list[tuple[int, float]] = []  # the newest evaluations, all low; empty if the newest is not
    for iteration, accuracy in evaluated:
        if accuracy < COLLAPSED_BELOW * best and accuracy < best - two_errors(problems, best):
            low_in_a_row.append((iteration, accuracy))
            if len(low_in_a_row) == IN_A_ROW:
                first_low, fallen_to = low_in_a_row[0]
                return Fall(iteration=first_low, accuracy=fallen_to, best=best)
        else:
            low_in_a_row, best = [], max(best, accuracy)
    return None


def two_errors(problems: int, accuracy: float) -> float:
    """Return two standard errors of the difference in accuracy between two evaluations on `problems` problems.

    It is computed as if each evaluation had two more right and two more wrong answers, so that it is not 0 where all
    answers are right, or all wrong.
    """
    share = (accuracy * problems + 2) / (problems + 4)
    return 2.0 * math.sqrt(2.0 * share * (1.0 - share) / (problems + 4))
