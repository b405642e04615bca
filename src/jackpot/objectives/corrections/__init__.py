"""The formulas of corrections, by name, for rollouts that another distribution than the policy generated.

A formula is a function of tensors and plain numbers. `ratios` has the formulas that read log-probs alone, `signed`
those that also read the sign of the advantage, and `budgeted` OBRS and its parts. Each states its source and what it is
biased towards; its numbers are settings, in `config/corrections.py` under its name. `formula` turns a formula into a
correction, the interface in `base`; `jackpot.corrections` joins formulas and settings.

Status: supported.
"""

from jackpot.objectives.corrections import budgeted, ratios, signed
from jackpot.objectives.corrections.base import Correction, CorrectionFn, CorrectionInputs, measured
from jackpot.objectives.corrections.formula import Formula

__all__ = ["CORRECTIONS", "Correction", "CorrectionFn", "CorrectionInputs", "measured"]

CORRECTIONS: dict[str, Formula] = {
    "none": ratios.none,
    "is": ratios.importance_sampling,
    "tis": ratios.tis,
    "icepop": ratios.icepop,
    "drop": ratios.drop,
    "ipo": ratios.ipo,
    "seq_tis": ratios.seq_tis,
    "seq_mask": ratios.seq_mask,
    "geo_mask": ratios.geo_mask,
    "prefix": signed.prefix,
    "min_prefix": ratios.min_prefix,
    "f_tis": signed.f_tis,
    "dppo": signed.dppo,
    "obrs": budgeted.obrs,
    "mask_only": budgeted.mask_only,
    "reweight_only": budgeted.reweight_only,
    "z_only": budgeted.z_only,
    "target_only": budgeted.target_only,
    "coin_only": budgeted.coin_only,
}
