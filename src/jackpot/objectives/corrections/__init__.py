"""Corrections for text that another distribution wrote, by name.

`ratios` looks at the ratio alone, `budgeted` is OBRS and its parts; `base` says what a correction is. What each
computes, its source, its default and what it is biased towards stand in its docstring.
"""

import math
from typing import get_args

from jackpot.core.errors import ConfigError, unknown_name
from jackpot.objectives.corrections.base import Correction, CorrectionFn, CorrectionInputs, Totals, measure_overlap
from jackpot.objectives.corrections.budgeted import MASKS, CoinOnly, MaskOnly, Obrs, ReweightOnly, TargetOnly, ZOnly
from jackpot.objectives.corrections.ratios import (
    Band,
    GeometricBand,
    ImportanceSampling,
    SequenceBand,
    SequenceImportanceSampling,
    Uncorrected,
)

__all__ = ["CORRECTIONS", "Correction", "CorrectionFn", "CorrectionInputs", "make_correction", "measure_overlap"]

CORRECTIONS = {
    "none": Uncorrected,
    "ppo_is": Uncorrected,
    "is": lambda: ImportanceSampling(cap=math.inf),
    "tis": ImportanceSampling,
    "tis_adjusted": ImportanceSampling,
    "icepop": Band,
    "drop": lambda cap: Band(low=0.0, high=cap),
    "seq_tis": SequenceImportanceSampling,
    "seq_mask": SequenceBand,
    "geo_mask": GeometricBand,
    "obrs": Obrs,
    "mask_only": MaskOnly,
    "reweight_only": ReweightOnly,
    "z_only": ZOnly,
    "target_only": TargetOnly,
    "coin_only": CoinOnly,
}


def make_correction(name: str, **numbers) -> CorrectionFn:
    """`CORRECTIONS[name]` with its numbers, e.g. make_correction("tis", cap=2.0).

    Raises:
        ConfigError: an unknown name (all are listed), or numbers that it does not take or that are out of range.
    """
    if name not in CORRECTIONS:
        raise ConfigError(unknown_name("correction", name, CORRECTIONS))
    for key in ("cap", "c1", "c2", "lam", "high"):
        if key in numbers and not numbers[key] > 0:
            raise ConfigError(f"correction {name}: {key} is {numbers[key]}; it must be above 0")
    high = numbers.get("high", math.inf)
    if "low" in numbers and not 0 <= numbers["low"] <= high:
        raise ConfigError(f"correction {name}: low is {numbers['low']}; it must lie from 0 to high {high}")
    for key, valid in (("mask", MASKS), ("totals", get_args(Totals))):
        if key in numbers and numbers[key] not in valid:
            raise ConfigError(unknown_name(key, numbers[key], valid))
    try:
        return CORRECTIONS[name](**numbers)
    except TypeError as error:
        raise ConfigError(f"correction {name} does not take {sorted(numbers)}: {error}") from None
