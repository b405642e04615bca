"""The settings of every correction, with their defaults. Pydantic only.

What each computes, and what it is biased towards, stands in `objectives/corrections/`.
"""

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from jackpot.config.base import NonNegative, Positive, Strict, by_name

Kappa = Literal["auto", "prepass", "previous", "none"]
Mask = Literal["sampled", "expected"]


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


class _BandCorrection(_RatioCorrection):
    """Keeps tokens or responses whose ratio lies from `low` to `high`."""

    low: NonNegative
    high: Positive

    @model_validator(mode="after")
    def _check(self) -> "_BandCorrection":
        if self.low > self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}; low must lie from 0 to high")
        return self


class TISCorrection(_RatioCorrection):
    name: Literal["tis"] = "tis"
    cap: Positive = 3.0


class TISAdjustedCorrection(Strict):
    name: Literal["tis_adjusted"] = "tis_adjusted"
    proximal: Literal["new"] = "new"
    cap: Positive = 3.0


class IcePopCorrection(_BandCorrection):
    name: Literal["icepop"] = "icepop"
    low: NonNegative = 0.5
    high: Positive = 5.0


class DropCorrection(_RatioCorrection):
    name: Literal["drop"] = "drop"
    cap: Positive = 5.0


class SequenceTISCorrection(_RatioCorrection):
    name: Literal["seq_tis"] = "seq_tis"
    cap: Positive = 2.0


class SequenceMaskCorrection(_BandCorrection):
    name: Literal["seq_mask"] = "seq_mask"
    low: NonNegative = 0.0
    high: Positive = 3.0


class GeometricMaskCorrection(_BandCorrection):
    name: Literal["geo_mask"] = "geo_mask"
    low: NonNegative = 0.999
    high: Positive = 1.001


class TargetCorrection(Strict):
    """Aligns to a target of its own, OBRS and its parts."""

    proximal: Literal["old", "new", "rollout"] = "old"
    target: Literal["old", "new"] = "old"


class ZCorrection(TargetCorrection):
    """Weighs by Z."""

    lam: Positive = 1.0
    c1: Positive = 3.0
    normalizer: Literal["topk", "exact"] = "topk"
    # auto: of this step where that is free, else of the step before; with an exact Z, none spares its noise
    kappa: Kappa = "auto"


class OBRSCorrection(ZCorrection):
    name: Literal["obrs"] = "obrs"
    c2: Positive = 3.0
    mask: Mask = "sampled"


class ReweightOnlyCorrection(ZCorrection):
    name: Literal["reweight_only"] = "reweight_only"
    c2: Positive = 3.0


class ZOnlyCorrection(ZCorrection):
    name: Literal["z_only"] = "z_only"


class MaskOnlyCorrection(TargetCorrection):
    name: Literal["mask_only"] = "mask_only"
    lam: Positive = 1.0
    mask: Mask = "sampled"


class TargetOnlyCorrection(TargetCorrection):
    name: Literal["target_only"] = "target_only"
    c1: Positive = 3.0
    c2: Positive = 3.0


class CoinOnlyCorrection(TargetCorrection):
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
CORRECTION_SETTINGS = {
    settings.model_fields["name"].default: settings
    for settings in (*get_args(RatioCorrection), *get_args(BudgetedCorrection))
}
PolicyCorrection = Annotated[RatioCorrection | BudgetedCorrection, Field(discriminator="name"), by_name("obrs")]
RolloutModelCorrection = Annotated[RatioCorrection, Field(discriminator="name"), by_name("tis")]
