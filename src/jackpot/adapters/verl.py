"""Corrections of this package in verl's rollout correction: a module for VERL_USE_EXTERNAL_MODULES (docs/verl.md).

verl 0.8.0 to 0.9.1 computes the weights and the rejection mask of a batch in one function, which its trainers and its
bypass loss look up in the module that defines it, at every call. Importing this module wraps that function there:
`rollout_is: jackpot:NAME:SETTING=VALUE:...` then names a correction of ours, and every correction, verl's own too, is
measured before and after masking.

Shapes: `B` responses, `T` tokens; log-probs in nats.

Status: experimental. It ran inside verl's own functions, never in a training run of verl.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from jackpot.core.errors import ConfigError
from jackpot.core.metrics import Max, Mean
from jackpot.corrections import Corrected, correct_unchecked, make_correction
from jackpot.objectives.corrections import CorrectionFn

try:
    from verl.protocol import DataProto
    from verl.trainer.ppo import rollout_corr_helper
except ModuleNotFoundError as error:
    raise ImportError(f"jackpot.adapters.verl works inside verl, 0.8.0 to 0.9.1, which is not here: {error}") from error

__all__ = ["compute_rollout_correction_and_rejection_mask"]

_PREFIX = "jackpot:"
_verls = rollout_corr_helper.compute_rollout_correction_and_rejection_mask
_THRESHOLD = signature(_verls).parameters["rollout_is_threshold"].default
_REFUSED = {  # what decides the result beside the ratio, or other log-probs that PPO's ratio is taken from
    "z": "reads Z, from the top-k of whoever sampled, and verl asks its engines for the sampled token's log-prob "
    "alone; use tis, or coin_only, which is OBRS without Z",
    "advantages": "reads advantages, which verl computes after its rollout correction; use one that does not, such as "
    "tis or icepop",
    "ppo_is": "takes PPO's ratio from the rollout log-probs, which is verl's algorithm.rollout_correction.bypass_mode",
    "tis_adjusted": "takes PPO's ratio from the current policy; use tis with bypass_mode: true and loss_type: "
    "reinforce, which does so in verl",
}


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float | None = _THRESHOLD,
    rollout_is_batch_normalize: bool = False,
    **rejection: Any,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """Compute what verl's function of this name returns, by a correction of ours where `rollout_is` names one.

    Weights are ours times the acceptance mask, so a token that the correction rejects stays in verl's denominators;
    `rollout_rs` takes its tokens out, as in verl. A token whose log-probs are not finite has the weight 0.

    Args:
        old_log_prob: [B, T] of the policy: before the update, or the current one with `bypass_mode`.
        rollout_log_prob: [B, T] of the engine that sampled.
        response_mask: [B, T], 1 where a token was sampled.
        rollout_is: "token", "sequence" or None of verl, or "jackpot:NAME" with settings, as "jackpot:tis:cap=5".
        rollout_is_threshold, rollout_is_batch_normalize: of verl's own weights.
        rejection: `rollout_rs` and its threshold.

    Returns:
        Weights, [B, T] in `rollout_is_weights`, or None; the mask that remains; verl's metrics and ours (docs/verl.md).

    Raises:
        ConfigError: an unknown correction or setting, one that verl lacks the inputs of, or settings of verl's own
            weights beside it.
    """
    weighting = {"rollout_is_threshold": rollout_is_threshold, "rollout_is_batch_normalize": rollout_is_batch_normalize}
    correction = None
    if rollout_is is not None and rollout_is.startswith(_PREFIX):
        correction, rollout_is = _named(rollout_is, weighting), None
    logs, mask = (old_log_prob, rollout_log_prob), response_mask.bool()
    proto, remaining, metrics = _verls(*logs, response_mask, rollout_is, **weighting, **rejection)

    usable = mask & rollout_log_prob.isfinite() & (old_log_prob < torch.inf)
    accepted = usable.double()
    if correction is not None:
        done = _corrected(correction, *logs, usable)
        weights, accepted = done.weights * done.accept_mask, done.accept_mask
        proto = DataProto.from_dict(tensors={"rollout_is_weights": weights.to(old_log_prob.dtype)})
    elif proto is not None:
        weights = proto.batch["rollout_is_weights"]
        accepted = accepted * (weights > 0)
    else:
        weights = torch.ones_like(old_log_prob)

    measured = _measured(*logs, mask, usable, remaining.bool() & usable, weights, accepted)
    return proto, remaining, metrics | {f"jackpot/{name}": float(value) for name, value in measured.items()}


def _measured(
    old: Tensor, rollout: Tensor, mask: Tensor, usable: Tensor, left: Tensor, weights: Tensor, accepted: Tensor
) -> dict[str, Tensor]:
    """Measure the mismatch of all usable tokens, of those that count in the loss, and what the correction did.

    Args:
        left: [B, T] bool, what `rollout_rs` leaves of the usable tokens.
        weights: [B, T], 0 where the correction rejects.
        accepted: [B, T], 1 where the correction accepts, or the acceptance with an expected mask.
    """
    uncorrected = make_correction("none")
    before = _corrected(uncorrected, old, rollout, usable).metrics
    kept = _corrected(uncorrected, old, rollout, left & (weights > 0)).metrics
    factor = Mean.of(weights * left, mask)
    return {
        **{name: before[name] for name in before if name.startswith(("mismatch/", "obrs/"))},
        **{f"kept/{name}": kept[name] for name in kept if name.startswith("mismatch/")},
        "correction/accepted": Mean.of(accepted * left, mask).value,
        "correction/weight": factor.value,
        "correction/weight_max": Max.of(weights * left, mask).value,
        "correction/ess": factor.effective_share,
        "unusable_tokens": Mean.of(mask & ~usable, mask).value,
    }


def _named(rollout_is: str, weighting: dict[str, Any]) -> CorrectionFn:
    """Return the correction of ours that a value of `rollout_is` names."""
    if weighting["rollout_is_threshold"] not in (None, _THRESHOLD) or weighting["rollout_is_batch_normalize"]:
        beside = ", ".join(f"{key} {value!r}" for key, value in weighting.items())
        raise ConfigError(
            f"rollout_is is {rollout_is!r} beside {beside}, which are of verl's own weights; leave them at "
            f"{_THRESHOLD!r} and False, and put numbers into the name, as in jackpot:tis:cap=5"
        )
    name, *parts = rollout_is.removeprefix(_PREFIX).split(":")
    settings = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"rollout_is {rollout_is!r}: {part!r} is no setting; write jackpot:{name}:SETTING=VALUE")
        settings[key] = _number(value)

    if name in _REFUSED:
        raise ConfigError(f"rollout_is {rollout_is!r}: correction {name} {_REFUSED[name]}")
    correction = make_correction(name, **settings)
    for reason in sorted(_REFUSED.keys() & set(correction.reads)):
        raise ConfigError(f"rollout_is {rollout_is!r}: correction {name} {_REFUSED[reason]}")
    return correction


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _corrected(correction: CorrectionFn, old: Tensor, rollout: Tensor, mask: Tensor) -> Corrected:
    """Apply a correction of ours, with numbers in place of what is not finite outside of the mask.

    No look for swapped or shifted models: verl aligned them, and tokens that a rejection left are nobody's sample.
    """
    rollout, old = (torch.where(mask, log_probs.detach(), 0.0) for log_probs in (rollout, old))
    return correct_unchecked(correction, {"rollout_log_probs": rollout, "target_log_probs": old}, mask)


rollout_corr_helper.compute_rollout_correction_and_rejection_mask = compute_rollout_correction_and_rejection_mask
