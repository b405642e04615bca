"""Joins the formulas of corrections with their settings, by name; and the correction in one call.

The call is for another framework's training loop: it checks what is given, and fills in the rest. A loop that splits
an optimizer step into micro-batches, and wants kappa of the whole step, calls `measure` and `apply` itself.

Status: supported.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jackpot.config.build import validated
from jackpot.config.corrections import (
    CORRECTION_SETTINGS,
    CustomCorrection,
    PolicyCorrection,
    ZCorrection,
    refuse_with_proximal,
)
from jackpot.core import prng
from jackpot.core.errors import ConfigError, DataError, unknown_name
from jackpot.core.imports import import_object
from jackpot.objectives import obrs
from jackpot.objectives.constants import LAM, Kappa
from jackpot.objectives.corrections import CORRECTIONS, CorrectionFn, CorrectionInputs, measured
from jackpot.objectives.corrections.formula import TENSORS, ByFormula, Formula
from jackpot.objectives.corrections.signed import dppo_topk
from jackpot.objectives.metrics import correction_summary
from jackpot.objectives.tensor_checks import check_numbers, check_tensors, report_signs, signs_of_log_probs

IN_THE_INPUTS = {  # settings of a run that a correction itself does not read, and where the caller decides them
    "proximal": "CorrectionInputs.proximal_log_probs",
    "target": "CorrectionInputs.target_log_probs",
    "normalizer": "CorrectionInputs.z",
    "budget": "CorrectionInputs.lam",
}
_ADVICE = {  # what to do where a correction lacks a tensor
    "z": "estimate it with jackpot.estimate_z from the policy's logits and the engine's top-k log-probs, or take "
    "jackpot.obrs.exact_z of both whole distributions",
    "advantages": "pass those of the policy loss, [B, T] or expanded to it",
}


class Corrected(NamedTuple):
    """Holds a correction of B responses of T tokens. Detached; the loss is
    `-(accept_mask * weights * surrogate).sum() / response_mask.sum()`."""

    weights: Tensor  # [B, T], factor on the surrogate of an accepted token; 0 where masked
    accept_mask: Tensor  # [B, T] float: 1 where accepted, 0 where rejected; the acceptance with `mask="expected"`
    metrics: dict[str, Tensor]  # scalars on the same device, named as in metrics.jsonl (docs/metrics.md)


def construct_correction(settings: PolicyCorrection) -> CorrectionFn:
    """Construct the correction that the settings name; a custom one is imported.

    Raises:
        ConfigError: a custom correction cannot be imported, or does not take its `kwargs`.
    """
    if isinstance(settings, CustomCorrection):
        return _custom(import_object(settings.import_path, "correction"), settings.kwargs)
    formula = dppo_topk if getattr(settings, "divergence", None) == "topk" else CORRECTIONS[settings.name]
    arguments = {name: getattr(settings, name) for name in signature(formula).parameters if name not in TENSORS}
    return ByFormula(formula, arguments, getattr(settings, "lam", LAM), _kappa(settings))


def make_correction(correction: str | Formula | type[CorrectionFn], **settings: Any) -> CorrectionFn:
    """Construct the correction of that name; settings that are not given have the defaults of `config/corrections.py`.

    >>> make_correction("tis").settings
    {'cap': 3.0}
    >>> make_correction("obrs", kappa="prepass", lam=2.0).lam
    2.0

    Args:
        correction: a name, or a correction of one's own: a formula (`objectives.corrections.formula`), or a class.
        settings: of the correction, as `jackpot config objective.correction` explains them; lam, cap, c1, ...

    Raises:
        ConfigError: an unknown name (all are listed), an unknown setting, a value that is not allowed, or a setting
            that says what stands in `CorrectionInputs` (proximal, target, normalizer, budget).
    """
    if not isinstance(correction, str):
        return _custom(correction, settings)
    try:
        refuse_with_proximal(correction)
    except ValueError as error:
        raise ConfigError(f"{error} in a recipe, and the point as `proximal_log_probs` here") from None
    if correction not in CORRECTIONS:
        raise ConfigError(unknown_name("correction", correction, CORRECTIONS))

    kind = CORRECTION_SETTINGS[correction]
    for key in IN_THE_INPUTS.keys() & settings.keys() & kind.model_fields.keys():
        raise ConfigError(
            f"correction {correction}: {key} {settings[key]!r} was given, but a correction does not read it; put what "
            f"it names into {IN_THE_INPUTS[key]}"
        )

    try:
        return construct_correction(validated(kind, {"name": correction, **settings}))
    except ConfigError as error:
        raise ConfigError(f"correction {correction}: {error}") from None


def _custom(correction: Callable[..., Any], settings: Mapping[str, Any]) -> CorrectionFn:
    """Construct a correction of the user's own: an instance of a class, or what a formula defines."""
    is_class = isinstance(correction, type)
    try:
        names = signature(correction).parameters
        tensors = [] if is_class else [name for name in names if name in TENSORS]
        signature(correction).bind(**dict.fromkeys(tensors), **settings)
    except TypeError as error:
        takes = "its settings" if is_class else f"tensors named {', '.join(TENSORS)}, and its settings"
        raise ConfigError(
            f"correction {correction.__qualname__}{signature(correction)} got the settings {dict(settings)}: {error}; "
            f"it is called by name with {takes}"
        ) from None
    return correction(**settings) if is_class else ByFormula(correction, settings)


def _kappa(settings: PolicyCorrection) -> Kappa:
    """Say when a correction needs the sums of a step."""
    if not isinstance(settings, ZCorrection):
        return "none"
    if settings.kappa != "auto":
        return settings.kappa
    if settings.normalizer == "exact":  # the mean of Z is right
        return "none"
    # no gradient tells what a dropped token is worth
    return "prepass" if getattr(settings, "beyond_c1", "cap") == "drop" else "auto"


def correct(
    correction: str | CorrectionFn | Formula,
    *,
    rollout_log_probs: Tensor,
    target_log_probs: Tensor,
    response_mask: Tensor,
    z: obrs.ZEstimate | Tensor | None = None,
    advantages: Tensor | None = None,
    proximal_log_probs: Tensor | None = None,
    uniforms: Tensor | None = None,
    seed: int = 0,
    **settings: float | str | None,
) -> Corrected:
    """Compute the weights and the acceptance mask of rollouts that another distribution than the policy sampled.

    kappa, where the correction has it, is that of the tokens given: call this with a whole optimizer step, or with one
    micro-batch after the other and `kappa="none"`.

    Args:
        correction: its name: "obrs", "tis", "icepop", ... (docs/corrections.md); or one of your own, as
            `make_correction` takes it or has made it.
        rollout_log_probs: [B, T] nats, of the sampled tokens as the engine that sampled them computed them.
        target_log_probs: [B, T] nats, of the policy: before the update (`old_log_probs`) or now.
        response_mask: [B, T] bool, True where a token was sampled; what stands elsewhere is ignored.
        z: [B, T] in [0, min(1, 1 / lam)], Z of every position (`estimate_z`, or `obrs.exact_z`) at the same lam; only
            obrs and its parts read it.
        advantages: [B, T]; only corrections that look at their sign read them: prefix, f_tis, dppo.
        proximal_log_probs: [B, T] nats, of the point that PPO's ratio is taken from; None: `target_log_probs`.
        uniforms: [B, T] in [0, 1), what rejection is drawn by; None: drawn here.
        seed: of those that are drawn here, as a pure function of the seed, a response's `rollout_log_probs` and the
            position: alike on all devices and ranks, in any batch and in every epoch.
        settings: of the correction, as `jackpot config objective.correction` explains them; lam, cap, c1, ...

    Raises:
        ConfigError: an unknown correction or setting, or a value that is not allowed.
        DataError: tensors of other shapes, dtypes or devices, or one that this correction needs and that is missing; on
            a CPU also numbers that cannot be what their name says, where a look at them waits for nothing; a mask
            without a token, or log-probs that are shifted by a token (on a GPU a later call says so).

    Warns:
        UserWarning: log-probs that are swapped, as far as none of healthy models look so, or rounded to bfloat16.
    """
    chosen = _chosen(correction, settings)
    tensors = {
        "rollout_log_probs": rollout_log_probs,
        "target_log_probs": target_log_probs,
        "z": z.value if isinstance(z, obrs.ZEstimate) else z,
        "advantages": advantages,
        "proximal_log_probs": proximal_log_probs,
        "uniforms": uniforms,
    }

    check_tensors(response_mask, tensors)
    if response_mask.device.type == "cpu":  # elsewhere a look waits for the device
        check_numbers(response_mask, tensors, chosen.lam)
    report_signs(signs_of_log_probs(response_mask, rollout_log_probs.detach(), target_log_probs.detach()))

    for needed in sorted(chosen.reads):
        if tensors[needed] is None:
            raise DataError(f"correction {correction} reads {needed}, which is not given: {_ADVICE[needed]}")

    return correct_unchecked(chosen, tensors | {"z": z}, response_mask, seed)


def correct_unchecked(
    correction: CorrectionFn,
    tensors: Mapping[str, Tensor | obrs.ZEstimate | None],
    response_mask: Tensor,
    seed: int = 0,
) -> Corrected:
    """Apply a correction as `correct` does, to tensors that a framework made: unchecked, of no token too.

    Args:
        tensors: the arguments of `correct` by their names; those of the sampled tokens must be among them.
    """
    z = tensors.get("z")
    estimate = z if isinstance(z, obrs.ZEstimate) else None
    known = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    inputs = _filled(known, response_mask, estimate, seed)
    totals = measured(correction, inputs)

    result = correction.apply(inputs, totals)
    sums = correction_summary(result, inputs, totals, has_z=z is not None)
    kappa = {} if z is None else {"obrs/kappa": result.kappa}
    return Corrected(result.weights, result.accept_mask, {name: metric.value for name, metric in sums.items()} | kappa)


def _chosen(correction: str | CorrectionFn | Formula, settings: Mapping[str, Any]) -> CorrectionFn:
    """Return the correction of `correct`: one that is made has its settings."""
    if callable(correction) or isinstance(correction, str):
        return make_correction(correction, **settings)
    if settings:
        raise ConfigError(f"settings {settings} were given beside a correction that has its own; leave them out")
    return correction


def _filled(
    tensors: Mapping[str, Tensor], mask: Tensor, estimate: obrs.ZEstimate | None, seed: int
) -> CorrectionInputs:
    """Return the inputs of a correction from the arguments of `correct`, with what stands for those left out.

    Args:
        estimate: of Z; None: `z` is known exactly, or read by nobody.
    """
    given = {name: tensor.detach() for name, tensor in tensors.items()}
    rollout, target = given["rollout_log_probs"], given["target_log_probs"]
    z = estimate or obrs.known_z(given.get("z", torch.ones_like(rollout)))
    uniforms = given.get("uniforms")
    return CorrectionInputs(
        rollout_log_probs=rollout,
        target_log_probs=target,
        proximal_log_probs=given.get("proximal_log_probs", target),
        response_mask=mask,
        uniforms=_uniforms(rollout, mask, seed) if uniforms is None else uniforms,
        advantages=given.get("advantages", torch.zeros_like(rollout)),
        z=obrs.ZEstimate(*(part.detach() for part in z)),
    )


def _uniforms(rollout_log_probs: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Return a uniform for every token: [B, T] float64 in [0, 1), a hash of the seed, the response and the position.

    The bits of its log-probs stand for a response, which has no name here. A position counts from the first column.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    tokens = prng.bits(rollout_log_probs.float().view(torch.int32).long(), positions)
    rows = torch.where(mask, tokens, 0).sum(-1)
    key = prng.key_tensor([prng.fold_in(seed, "correct")]).to(mask.device)
    return prng.uniforms(prng.bits(rows + key, 0)[:, None], positions)
