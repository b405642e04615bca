"""Corrections for rollouts that another distribution than the policy generated, by name.

`ratios` holds those that read the ratio alone, `signed` those that read the sign of the advantage too, `budgeted` OBRS
and its parts, `base` the interface. Each class states
its formula, its source and what it is biased towards; it reads its numbers from its settings in
`config/corrections.py`, where the defaults stand.

Status: supported.
"""

from jackpot.config.build import validated
from jackpot.config.corrections import CORRECTION_SETTINGS, CustomCorrection, PolicyCorrection
from jackpot.core.errors import ConfigError, unknown_name
from jackpot.core.imports import import_object
from jackpot.objectives.corrections.base import Correction, CorrectionFn, CorrectionInputs, measure_overlap
from jackpot.objectives.corrections.budgeted import CoinOnly, MaskOnly, Obrs, ReweightOnly, TargetOnly, ZOnly
from jackpot.objectives.corrections.ratios import (
    Drop,
    GeometricMask,
    IcePop,
    ImportanceSampling,
    MinPrefix,
    SequenceMask,
    SequenceTIS,
    TruncatedImportanceSampling,
    Uncorrected,
)
from jackpot.objectives.corrections.signed import DPPO, FTIS, Prefix

__all__ = ["CORRECTIONS", "Correction", "CorrectionFn", "CorrectionInputs", "make_correction", "measure_overlap"]

CORRECTIONS = {  # name -> class, constructed from the settings of that name
    "none": Uncorrected,
    "ppo_is": Uncorrected,
    "is": ImportanceSampling,
    "tis": TruncatedImportanceSampling,
    "tis_adjusted": TruncatedImportanceSampling,
    "icepop": IcePop,
    "drop": Drop,
    "seq_tis": SequenceTIS,
    "seq_mask": SequenceMask,
    "geo_mask": GeometricMask,
    "prefix": Prefix,
    "min_prefix": MinPrefix,
    "f_tis": FTIS,
    "dppo": DPPO,
    "obrs": Obrs,
    "mask_only": MaskOnly,
    "reweight_only": ReweightOnly,
    "z_only": ZOnly,
    "target_only": TargetOnly,
    "coin_only": CoinOnly,
}
_IN_THE_INPUTS = {  # settings of a run that a correction itself does not read, and where the caller decides them
    "proximal": "CorrectionInputs.proximal_log_probs",
    "target": "CorrectionInputs.target_log_probs",
    "normalizer": "CorrectionInputs.z",
    "budget": "CorrectionInputs.lam",
}


def construct_correction(settings: PolicyCorrection) -> CorrectionFn:
    """Construct the correction that the settings name; a custom one is imported.

    Raises:
        ConfigError: a custom correction cannot be imported.
    """
    if isinstance(settings, CustomCorrection):
        return import_object(settings.import_path, "correction")(settings)
    return CORRECTIONS[settings.name](settings)


def make_correction(name: str, **settings: float | str | None) -> CorrectionFn:
    """Construct the correction of that name; settings that are not given have the defaults of `config/corrections.py`.

    >>> make_correction("tis").settings.cap
    3.0
    >>> make_correction("obrs", kappa="prepass", lam=2.0).lam
    2.0

    Raises:
        ConfigError: an unknown name (all are listed), an unknown setting, a value that is not allowed, or a setting
            that says what stands in `CorrectionInputs` (proximal, target, normalizer, budget).
    """
    if name not in CORRECTIONS:
        raise ConfigError(unknown_name("correction", name, CORRECTIONS))
    for key in _IN_THE_INPUTS.keys() & settings.keys() & CORRECTION_SETTINGS[name].model_fields.keys():
        raise ConfigError(
            f"correction {name}: {key} {settings[key]!r} was given, but a correction does not read it; put what it "
            f"names into {_IN_THE_INPUTS[key]}"
        )
    try:
        return CORRECTIONS[name](validated(CORRECTION_SETTINGS[name], {"name": name, **settings}))
    except ConfigError as error:
        raise ConfigError(f"correction {name}: {error}") from None
