"""Settings of the corrections, by name; rho is the ratio p_target / p_inf of a token, R its product over a response.

A setting is the argument of the same name of the formula in `objectives/corrections/`; docs/corrections.md has formulas
and biases. In the docstrings below, p_inf is the probability with which the engine sampled a token, p_target that of
the policy which the rollouts are aligned to, and Z = sum min(p_inf, p_target / lam) over the vocabulary.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from jackpot.config.base import Bound, Conflicts, Finite, ImportPath, NonNegative, Strict, by_name
from jackpot.objectives.constants import LAM, Kappa

KAPPA_TOLERANCE = 1e-3  # default of `kappa_tolerance`, also for a user's own correction, which lacks the setting
AnyProximal = Annotated[
    Literal["old", "new", "rollout"],
    Field(
        description="Log-probs that PPO's ratio is taken from: of the policy before the iteration's first update "
        "(old), of the current policy without its gradient (new), or of the engine (rollout)."
    ),
]
Proximal = Annotated[
    Literal["old", "new"],
    Field(
        description="Log-probs that PPO's ratio is taken from and that rho is formed with: of the policy before the "
        "iteration's first update (old), or of the current policy without its gradient (new)."
    ),
]
Cap = Annotated[Bound, Field(description="Largest weight of a token; null or .inf: no cap.")]
C1 = Annotated[Bound, Field(description="Cap of the weight of an accepted token; null or .inf: no cap.")]
C2 = Annotated[
    Bound,
    Field(
        description="Cap of p_proximal / p_target, a factor of the weight, which is 1 where both are the same policy; "
        "null or .inf: no cap."
    ),
]
Mask = Annotated[
    Literal["sampled", "expected"],
    Field(
        description="Rejection by a random draw for each token (sampled, the paper's), or each token kept with its "
        "acceptance probability as a factor (expected, less variance)."
    ),
]


class NoCorrection(Strict):
    """No correction: the loss treats the rollouts as if the policy had sampled them."""

    name: Literal["none"] = "none"
    proximal: AnyProximal = "old"


class ISCorrection(Strict):
    """Importance sampling: each token is weighted by rho."""

    name: Literal["is"] = "is"
    proximal: Proximal = "old"


class TISCorrection(Strict):
    """Truncated importance sampling: each token is weighted by min(rho, cap)."""

    name: Literal["tis"] = "tis"
    proximal: Proximal = "old"
    cap: Cap = 3.0


class _BandCorrection(Strict):
    """A correction that keeps tokens or responses whose ratio (rho, R, or a root of R) lies from `low` to `high`."""

    proximal: Proximal = "old"
    low: NonNegative
    high: Bound

    def conflicts(self) -> Conflicts:
        """Refuse a lower bound above the upper one."""
        return [
            (
                self.low > self.high,
                f"low is {self.low} and high is {self.high}; low must lie from 0 to high",
            ),
        ]


class IcePopCorrection(_BandCorrection):
    """IcePop: tokens with low <= rho <= high are weighted by rho, the others are dropped."""

    name: Literal["icepop"] = "icepop"
    low: NonNegative = 0.5
    """Smallest rho of a token that is kept."""
    high: Bound = 5.0
    """Largest rho of a token that is kept; null or .inf: no bound."""


class DropCorrection(Strict):
    """Tokens with rho <= cap are weighted by rho, the others are dropped (AReaL)."""

    name: Literal["drop"] = "drop"
    proximal: Proximal = "old"
    cap: Bound = 5.0
    """Largest rho of a token that is kept; null or .inf: no bound."""


class IPOCorrection(Strict):
    """Tokens with |p_target - p_inf| <= max_tv are weighted by rho, the others are dropped (IPO, prime-rl)."""

    name: Literal["ipo"] = "ipo"
    proximal: Proximal = "new"
    max_tv: Bound = 0.3
    """Largest difference of the sampled token's two probabilities, at most 1, at which it is kept; null or .inf: no
    bound."""


class SequenceTISCorrection(Strict):
    """Every token of a response is weighted by min(R, cap) (verl's `rollout_is: sequence`)."""

    name: Literal["seq_tis"] = "seq_tis"
    proximal: Proximal = "old"
    cap: Bound = 2.0
    """Largest weight of a response; null or .inf: no cap."""


class SequenceMaskCorrection(_BandCorrection):
    """Responses with low <= R <= high are weighted by R, the others are dropped whole (TRL's `sequence_mask`)."""

    name: Literal["seq_mask"] = "seq_mask"
    low: NonNegative = 0.0
    """Smallest R of a response that is kept."""
    high: Bound = 3.0
    """Largest R of a response that is kept; null or .inf: no bound."""


class GeometricMaskCorrection(_BandCorrection):
    """Responses with low <= R^(1/n) <= high, n sampled tokens, keep the weight 1; the others are dropped whole."""

    name: Literal["geo_mask"] = "geo_mask"
    low: NonNegative = 0.999
    """Smallest geometric mean of rho of a response that is kept."""
    high: Bound = 1.001
    """Largest geometric mean of rho of a response that is kept; null or .inf: no bound."""


class PrefixCorrection(Strict):
    """Each token is weighted by the product of rho over its prefix, in a band that widens along the response (CTPO)."""

    name: Literal["prefix"] = "prefix"
    proximal: Proximal = "new"
    low: Bound = 0.025
    """How far the log of the product may be below 0 at the first token, and sqrt(t) times that at token t, where the
    advantage is negative; null or .inf: no bound."""
    high: Bound = 0.05
    """How far the log of the product may be above 0 at the first token, and sqrt(t) times that at token t; null or
    .inf: no bound."""


class MinPrefixCorrection(Strict):
    """Each token is weighted by its rho times the smallest rho before it, capped (after MinPRO)."""

    name: Literal["min_prefix"] = "min_prefix"
    proximal: Proximal = "new"
    cap: Cap = 3.0


class FTISCorrection(Strict):
    """TIS that drops the tokens of negative advantage of responses far from the policy (F-TIS)."""

    name: Literal["f_tis"] = "f_tis"
    proximal: Proximal = "new"
    cap: Cap = 2.0
    max_kl: Bound = 50.0
    """Largest KL of a response, nats, estimated as -log R, at which its tokens of negative advantage are kept; null or
    .inf: they always are."""


class DPPOCorrection(Strict):
    """TIS that drops tokens whose update would move the policy further than a total variation of max_tv (DPPO)."""

    name: Literal["dppo"] = "dppo"
    proximal: Proximal = "new"
    divergence: Literal["binary", "topk"] = "binary"
    """How the total variation between p_inf and p_target is measured: from the sampled token alone (binary), or from
    the most probable tokens that the engine returns (topk)."""
    max_tv: Bound = 0.15
    """Largest total variation, at most 1, at which the update of a token may lead further away from p_inf; null or
    .inf: no bound."""
    cap: Cap = 20.0


class TargetCorrection(Strict):
    """A correction with the setting `target`, the policy to align rollouts to: OBRS, its parts, and custom ones."""

    proximal: AnyProximal = "old"
    target: Literal["old", "new"] = "old"
    """Policy that the rollouts are aligned to, p_target: the one before the iteration's first update (old) or the
    current one (new)."""


class _LamCorrection(TargetCorrection):
    """A correction that compares the ratio rho of each token with the setting `lam`."""

    lam: Finite = LAM
    """lambda of OBRS: a token is accepted with probability min(1, rho / lam), so a larger one rejects more."""


class ZCorrection(_LamCorrection):
    """A correction whose weights contain Z, the probability that OBRS accepts a token of the rollout model."""

    c1: C1 = 3.0
    normalizer: Literal["topk", "exact"] = "topk"
    """How Z is summed: over the most probable tokens that the engine returns (topk), or over the vocabulary (exact),
    which needs rollouts of the unquantized, untruncated weights that training holds."""
    kappa: Kappa = "auto"
    """Factor that brings the mean of Z over an optimizer step to the mean acceptance. auto: 1 with `normalizer: exact`;
    else this step's, by rescaling the finished gradient and repairing what the caps touch. prepass: this step's, by one
    more forward pass before the first backward pass, which `auto` takes too where the loss has an entropy bonus or a
    reference. none: 1."""
    kappa_tolerance: NonNegative = KAPPA_TOLERANCE
    """Largest relative error of the policy's gradient, as estimated, that `kappa: auto` leaves: it reads as few of the
    sequences with a token at a cap again as that takes; 0: all of them. The estimate is no bound: where the gradients
    of tokens cancel, the error is a larger share of what is left (docs/corrections.md)."""


class OBRSCorrection(ZCorrection):
    """Optimal Budgeted Rejection Sampling, the paper's method: rejects tokens and reweights the accepted ones."""

    name: Literal["obrs"] = "obrs"
    budget: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Expected acceptance of every position, which chooses the lam of each by Theorem 3.4 in place of `lam`, and is its
    Z; null: off. It needs `normalizer: exact`, and another pass of the output layers."""
    beyond_c1: Literal["cap", "drop"] = "cap"
    """What becomes of a weight above c1, the F of eq. 5: it is c1 (cap, truncated importance sampling), or 0 (drop, the
    upper bound of IcePop)."""
    c2: C2 = 3.0
    mask: Mask = "sampled"

    def conflicts(self) -> Conflicts:
        """Refuse a budget, which chooses lam from whole distributions, beside a lam or top-k lists."""
        return [
            (
                self.budget and self.lam != LAM,  # LAM is the default
                f"budget {self.budget} chooses lam, but lam {self.lam} was given; leave one of them out",
            ),
            (
                self.budget and self.normalizer != "exact",
                f"budget {self.budget} needs the whole distributions, of which normalizer 'topk' knows the most "
                "probable tokens; use normalizer: exact, or budget: null and a lam",
            ),
        ]


class ReweightOnlyCorrection(ZCorrection):
    """The weight of OBRS without its rejection."""

    name: Literal["reweight_only"] = "reweight_only"
    c2: C2 = 3.0


class ZOnlyCorrection(ZCorrection):
    """Each token is weighted by min(kappa Z, c1), the weight that OBRS gives to the state."""

    name: Literal["z_only"] = "z_only"


class MaskOnlyCorrection(_LamCorrection):
    """The rejection of OBRS without its weight."""

    name: Literal["mask_only"] = "mask_only"
    mask: Mask = "sampled"


class TargetOnlyCorrection(TargetCorrection):
    """Truncated importance sampling with the target and the caps of OBRS, without Z and without rejection."""

    name: Literal["target_only"] = "target_only"
    c1: C1 = 3.0
    c2: C2 = 3.0


class CoinOnlyCorrection(_LamCorrection):
    """The rejection of OBRS with the weight min(max(lam, rho), c1), without Z."""

    name: Literal["coin_only"] = "coin_only"
    c1: C1 = 3.0
    c2: C2 = 3.0


class CustomCorrection(TargetCorrection):
    """A correction of your own: a formula, or a class with `measure` and `apply` (examples/own_correction.py)."""

    name: Literal["custom"] = "custom"
    import_path: ImportPath
    """Function or class of the correction as package.module:name; the module may lie in the current folder."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings: arguments of the function that are no tensors, or those that the class is constructed with."""


WITH_PROXIMAL = {  # a name in papers: our correction for it, and `proximal`, the policy that PPO's ratio is taken from
    "ppo_is": {"name": "none", "proximal": "rollout"},
    "tis_adjusted": {"name": "tis", "proximal": "new"},
}


def refuse_with_proximal(value: Any) -> Any:
    """Refuse a correction by a name that only papers use (WITH_PROXIMAL); return any other value as it is.

    Args:
        value: name of the correction, or its block of settings.

    Raises:
        ValueError: the name is one of WITH_PROXIMAL; the message has the settings to write instead.
    """
    name = value.get("name") if isinstance(value, Mapping) else value
    if isinstance(name, str) and name in WITH_PROXIMAL:
        instead = WITH_PROXIMAL[name]
        raise ValueError(
            f"{name!r} is correction {instead['name']} at another proximal point; write "
            f"{{name: {instead['name']}, proximal: {instead['proximal']}}}"
        )
    return value


RatioCorrection = (
    NoCorrection
    | ISCorrection
    | TISCorrection
    | IcePopCorrection
    | DropCorrection
    | IPOCorrection
    | SequenceTISCorrection
    | SequenceMaskCorrection
    | GeometricMaskCorrection
    | PrefixCorrection
    | MinPrefixCorrection
    | FTISCorrection
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
    for settings in (*get_args(RatioCorrection), DPPOCorrection, *get_args(BudgetedCorrection))
}
PolicyCorrection = Annotated[
    RatioCorrection | DPPOCorrection | BudgetedCorrection | CustomCorrection,
    Field(discriminator="name"),
    BeforeValidator(refuse_with_proximal),
    by_name("obrs"),
]
RolloutModelCorrection = Annotated[
    RatioCorrection, Field(discriminator="name"), BeforeValidator(refuse_with_proximal), by_name("tis")
]
