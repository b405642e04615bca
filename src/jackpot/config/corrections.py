"""The settings of every correction, with their defaults. Pydantic only.

What each computes, and what it is biased towards, stands in `objectives/corrections/`.
"""

from typing import Annotated, Literal

from pydantic import Field

from jackpot.config.base import NonNegative, Positive, Strict, by_name


class NoCorrection(Strict):
    name: Literal["none"] = "none"
    proximal: Literal["old", "new", "rollout"] = "old"


class PPOISCorrection(Strict):
    name: Literal["ppo_is"] = "ppo_is"
    proximal: Literal["rollout"] = "rollout"


class _RatioCorrection(Strict):
    """Its target is the proximal point."""

    proximal: Literal["old", "new"] = "old"


class ISCorrection(_RatioCorrection):
    name: Literal["is"] = "is"


class TISCorrection(_RatioCorrection):
    name: Literal["tis"] = "tis"
    cap: Positive = 3.0


class TISAdjustedCorrection(Strict):
    name: Literal["tis_adjusted"] = "tis_adjusted"
    proximal: Literal["new"] = "new"
    cap: Positive = 3.0


class IcePopCorrection(_RatioCorrection):
    name: Literal["icepop"] = "icepop"
    low: NonNegative = 0.5
    high: Positive = 5.0


class DropCorrection(_RatioCorrection):
    name: Literal["drop"] = "drop"
    cap: Positive = 5.0


class SequenceTISCorrection(_RatioCorrection):
    name: Literal["seq_tis"] = "seq_tis"
    cap: Positive = 2.0


class SequenceMaskCorrection(_RatioCorrection):
    name: Literal["seq_mask"] = "seq_mask"
    low: NonNegative = 0.0
    high: Positive = 3.0


class GeometricMaskCorrection(_RatioCorrection):
    name: Literal["geo_mask"] = "geo_mask"
    low: NonNegative = 0.999
    high: Positive = 1.001


class _TargetCorrection(Strict):
    """Aligns to a target of its own, OBRS and its parts."""

    proximal: Literal["old", "new", "rollout"] = "old"
    target: Literal["old", "new"] = "old"


class ZCorrection(_TargetCorrection):
    """Weighs by Z."""

    lam: Positive = 1.0
    c1: Positive = 3.0
    normalizer: Literal["topk", "exact"] = "topk"
    # auto: of this step where that is free, else of the step before; with an exact Z, none spares its noise
    kappa: Literal["auto", "prepass", "previous", "none"] = "auto"


class OBRSCorrection(ZCorrection):
    name: Literal["obrs"] = "obrs"
    c2: Positive = 3.0
    mask: Literal["sampled", "expected"] = "sampled"


class ReweightOnlyCorrection(ZCorrection):
    name: Literal["reweight_only"] = "reweight_only"
    c2: Positive = 3.0


class ZOnlyCorrection(ZCorrection):
    name: Literal["z_only"] = "z_only"


class MaskOnlyCorrection(_TargetCorrection):
    name: Literal["mask_only"] = "mask_only"
    lam: Positive = 1.0
    mask: Literal["sampled", "expected"] = "sampled"


class TargetOnlyCorrection(_TargetCorrection):
    name: Literal["target_only"] = "target_only"
    c1: Positive = 3.0
    c2: Positive = 3.0


class CoinOnlyCorrection(_TargetCorrection):
    name: Literal["coin_only"] = "coin_only"
    lam: Positive = 1.0
    c1: Positive = 3.0
    c2: Positive = 3.0


RatioCorrection = (
    NoCorrection
    | ISCorrection
    | TISCorrection
    | TISAdjustedCorrection
    | PPOISCorrection
    | IcePopCorrection
    | DropCorrection
    | SequenceTISCorrection
    | SequenceMaskCorrection
    | GeometricMaskCorrection
)
BudgetedCorrection = (
    OBRSCorrection
    | MaskOnlyCorrection
    | ReweightOnlyCorrection
    | ZOnlyCorrection
    | TargetOnlyCorrection
    | CoinOnlyCorrection
)
PolicyCorrection = Annotated[RatioCorrection | BudgetedCorrection, Field(discriminator="name"), by_name("obrs")]
RolloutModelCorrection = Annotated[RatioCorrection, Field(discriminator="name"), by_name("tis")]
