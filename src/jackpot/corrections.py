"""Makes a correction from its name (`make_correction`), or applies one to rollouts in a single call (`correct`).

`correct` is for another framework's training loop: it checks its arguments, and fills in those left out. It computes
kappa, OBRS's factor on the normalizer Z, from the tokens of its call alone. A loop that splits an optimizer step into
micro-batches, and wants one kappa for the whole step, calls the correction's `measure` and `apply` itself.

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

# Settings that a recipe has beside a correction's own. The correction does not read them: whoever calls the correction
# decides them, each by the input that is named here.
IN_THE_INPUTS = {
    "proximal": "CorrectionInputs.proximal_log_probs",
    "target": "CorrectionInputs.target_log_probs",
    "normalizer": "CorrectionInputs.z",
    "budget": "CorrectionInputs.lam",
}
_ADVICE = {  # what to do about a missing tensor, by the name of the tensor
    "z": "estimate it with jackpot.estimate_z from the policy's logits and the engine's top-k log-probs, or take "
    "jackpot.obrs.exact_z of both whole distributions",
    "advantages": "pass those of the policy loss, [B, T] or expanded to it",
}


class Corrected(NamedTuple):
    """The weights and the acceptance mask of B responses of T tokens, and metrics of the correction. All detached.

    The loss is `-(accept_mask * weights * surrogate).sum() / response_mask.sum()`, for a policy-gradient surrogate such
    as PPO's ratio times the advantage.
    """

    weights: Tensor  # [B, T], factor on the surrogate of an accepted token; 0 where masked
    accept_mask: Tensor  # [B, T] float: 1 where accepted, else 0; with `mask="expected"` the probability of acceptance
    metrics: dict[str, Tensor]  # scalars on the device of the weights, named as in metrics.jsonl (docs/metrics.md)


def construct_correction(settings: PolicyCorrection) -> CorrectionFn:
    """Construct the correction that the settings name; a custom correction is imported.

    Raises:
        ConfigError: a custom correction cannot be imported, or does not take its `kwargs`.
    """
    if isinstance(settings, CustomCorrection):
        return _custom(import_object(settings.import_path, "correction"), settings.kwargs)

    formula = dppo_topk if getattr(settings, "divergence", None) == "topk" else CORRECTIONS[settings.name]
    # Those parameters of the formula that are no tensors have the names of settings.
    arguments = {name: getattr(settings, name) for name in signature(formula).parameters if name not in TENSORS}
    return ByFormula(formula, arguments, lam=getattr(settings, "lam", LAM), kappa=_kappa_timing(settings))


def make_correction(correction: str | Formula | type[CorrectionFn], **settings: Any) -> CorrectionFn:
    """Construct a correction from its name; settings left out have the defaults of `config/corrections.py`.

    >>> make_correction("tis").settings
    {'cap': 3.0}
    >>> make_correction("obrs", kappa="prepass", lam=2.0).lam
    2.0

    Args:
        correction: a name, or the user's own correction: a formula (`objectives.corrections.formula`) or a class.
        settings: settings of the correction, such as lam, cap or c1; `jackpot config objective.correction` explains
            each.

    Raises:
        ConfigError: an unknown name (the message lists the known ones), an unknown setting, a value that is not
            allowed, or a setting that the caller decides by `CorrectionInputs` (proximal, target, normalizer, budget).
    """
    if not isinstance(correction, str):
        return _custom(correction, settings)
    try:  # refuse a name that only papers use; the error says what to write, and the text below adds where
        refuse_with_proximal(correction)
    except ValueError as error:
        raise ConfigError(f"{error} in a recipe, and the point as `proximal_log_probs` here") from None
    if correction not in CORRECTIONS:
        raise ConfigError(unknown_name("correction", correction, CORRECTIONS))

    settings_class = CORRECTION_SETTINGS[correction]
    # Settings that only a recipe may have: here the caller decides them by an input.
    for key in IN_THE_INPUTS.keys() & settings.keys() & settings_class.model_fields.keys():
        raise ConfigError(
            f"correction {correction}: {key} {settings[key]!r} was given, but a correction does not read it; put what "
            f"it names into {IN_THE_INPUTS[key]}"
        )

    try:
        return construct_correction(validated(settings_class, {"name": correction, **settings}))
    except ConfigError as error:
        raise ConfigError(f"correction {correction}: {error}") from None


def _custom(correction: Callable[..., Any], settings: Mapping[str, Any]) -> CorrectionFn:
    """Construct the user's own correction: an instance of a class, or the correction that a formula defines.

    Raises:
        ConfigError: the class or formula does not take these settings.
    """
    is_class = isinstance(correction, type)

    try:  # bind the arguments without a call, so that a wrong setting is reported before the user's code runs
        parameters = signature(correction).parameters
        tensors = [] if is_class else [name for name in parameters if name in TENSORS]
        signature(correction).bind(**dict.fromkeys(tensors), **settings)
    except TypeError as error:
        takes = "its settings" if is_class else f"tensors named {', '.join(TENSORS)}, and its settings"
        raise ConfigError(
            f"correction {correction.__qualname__}{signature(correction)} got the settings {dict(settings)}: {error}; "
            f"it is called by name with {takes}"
        ) from None

    return correction(**settings) if is_class else ByFormula(correction, settings)


def _kappa_timing(settings: PolicyCorrection) -> Kappa:
    """Return when in an optimizer step a correction needs kappa, OBRS's factor on Z.

    "none": never; "prepass": before the first backward pass; "auto": before it if that costs no forward pass, else
    afterwards, when the gradient is repaired (`CorrectionFn.kappa`).
    """
    if not isinstance(settings, ZCorrection):
        return "none"
    if settings.kappa != "auto":
        return settings.kappa
    if settings.normalizer == "exact":  # an exact Z has the right mean, so there is nothing for kappa to correct
        return "none"
    # With "drop" kappa decides which tokens leave the loss. A token that has left it has no gradient that could be
    # repaired afterwards, so kappa must be known before.
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

    A correction with kappa, OBRS's factor on Z, computes it from the tokens of this call. So call `correct` with a
    whole optimizer step, or with one micro-batch after the other and `kappa="none"`.

    Args:
        correction: a name such as "obrs", "tis" or "icepop" (docs/corrections.md); or your own correction, as
            `make_correction` takes or returns it.
        rollout_log_probs: [B, T] nats, log-probs of the sampled tokens that the sampling engine computed.
        target_log_probs: [B, T] nats, log-probs of the policy: before the update (`old_log_probs`) or now.
        response_mask: [B, T] bool, True where a token was sampled; other entries of the tensors are ignored.
        z: [B, T] in [0, min(1, 1 / lam)], Z of every position at the same lam, the probability that OBRS accepts a
            token there (`estimate_z`, or `obrs.exact_z`); read by obrs and its parts, and by dppo with
            `divergence="topk"`.
        advantages: [B, T]; read by the corrections that look at their sign: prefix, f_tis, dppo.
        proximal_log_probs: [B, T] nats, log-probs that PPO's ratio is taken from; None: `target_log_probs`.
        uniforms: [B, T] in [0, 1), the random numbers that decide which tokens are rejected; None: drawn from `seed`.
        seed: seed of the drawn uniforms. These are a function of the seed, a response's `rollout_log_probs` and the
            position, and so the same on all devices and ranks, in any batch and in every epoch.
        settings: settings of the correction, such as lam, cap or c1; `jackpot config objective.correction` explains
            each.

    Raises:
        ConfigError: an unknown correction or setting, or a value that is not allowed.
        DataError: a tensor of another shape, dtype or device, or a missing one that this correction needs; a mask
            without a token; log-probs that are shifted by a token. On a CPU also impossible numbers, such as a z above
            its bound. A GPU is not waited for: there an empty mask and shifted log-probs of one call are reported by a
            later call.

    Warns:
        UserWarning: log-probs that are rounded to bfloat16, or look as if rollout and target had been exchanged.
    """
    correction_fn = _correction_fn(correction, settings)
    tensors = {
        "rollout_log_probs": rollout_log_probs,
        "target_log_probs": target_log_probs,
        "z": z.value if isinstance(z, obrs.ZEstimate) else z,  # for the checks; the whole estimate is passed on below
        "advantages": advantages,
        "proximal_log_probs": proximal_log_probs,
        "uniforms": uniforms,
    }

    check_tensors(response_mask, tensors)
    if response_mask.device.type == "cpu":  # reading numbers of a GPU would wait for it
        check_numbers(response_mask, tensors, correction_fn.lam)
    # Refuse log-probs that are shifted by a token, and warn of those that are rounded or exchanged.
    report_signs(signs_of_log_probs(response_mask, rollout_log_probs.detach(), target_log_probs.detach()))

    for name in sorted(correction_fn.reads):
        if tensors[name] is None:
            raise DataError(f"correction {correction} reads {name}, which is not given: {_ADVICE[name]}")

    return correct_unchecked(correction_fn, tensors | {"z": z}, response_mask, seed)


def correct_unchecked(
    correction: CorrectionFn,
    tensors: Mapping[str, Tensor | obrs.ZEstimate | None],
    response_mask: Tensor,
    seed: int = 0,
) -> Corrected:
    """Apply a correction as `correct` does, without its checks, to tensors that a framework made.

    Args:
        correction: the correction.
        tensors: arguments of `correct` by their names; `rollout_log_probs` and `target_log_probs` must be among them.
        response_mask: [B, T] bool, True where a token was sampled; may be False everywhere.
        seed: seed of uniforms that `tensors` lacks.
    """
    z = tensors.get("z")
    estimate = z if isinstance(z, obrs.ZEstimate) else None
    present = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    inputs = _inputs(present, response_mask, estimate, seed)
    totals = measured(correction, inputs)  # sums over the tokens, from which kappa, the factor on Z, follows
    result = correction.apply(inputs, totals)

    summary = correction_summary(result, inputs, totals, has_z=z is not None)
    kappa = {} if z is None else {"obrs/kappa": result.kappa}  # without Z there is no factor on it to report
    metrics = {name: metric.value for name, metric in summary.items()} | kappa
    return Corrected(weights=result.weights, accept_mask=result.accept_mask, metrics=metrics)


def _correction_fn(correction: str | CorrectionFn | Formula, settings: Mapping[str, Any]) -> CorrectionFn:
    """Return the correction that the arguments of `correct` name; refuse settings for a correction that has its own."""
    if callable(correction) or isinstance(correction, str):
        return make_correction(correction, **settings)
    if settings:
        raise ConfigError(f"settings {settings} were given beside a correction that has its own; leave them out")
    return correction


def _inputs(
    tensors: Mapping[str, Tensor], mask: Tensor, estimate: obrs.ZEstimate | None, seed: int
) -> CorrectionInputs:
    """Return the inputs of a correction from the arguments of `correct`, with defaults for missing ones.

    Args:
        tensors: arguments of `correct` that are tensors, by name.
        mask: [B, T] bool, the response mask.
        estimate: estimate of Z, the probability that OBRS accepts a token at a position; None: `tensors` has the
            exact Z, or the correction does not read Z.
        seed: seed of uniforms that `tensors` lacks.
    """
    detached = {name: tensor.detach() for name, tensor in tensors.items()}
    rollout, target = detached["rollout_log_probs"], detached["target_log_probs"]
    # A correction that reads no Z gets ones for it, and one that reads no advantages zeros.
    z = estimate or obrs.known_z(detached.get("z", torch.ones_like(rollout)))
    uniforms = detached.get("uniforms")

    return CorrectionInputs(
        rollout_log_probs=rollout,
        target_log_probs=target,
        proximal_log_probs=detached.get("proximal_log_probs", target),
        response_mask=mask,
        uniforms=_uniforms(rollout, mask, seed) if uniforms is None else uniforms,
        advantages=detached.get("advantages", torch.zeros_like(rollout)),
        z=obrs.ZEstimate(*(tensor.detach() for tensor in z)),
    )


def _uniforms(rollout_log_probs: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Return a random number in [0, 1) for every token, [B, T] float64: a hash of seed, response and column.

    Responses are told apart by the bits of their rollout log-probs, as `correct` gets no ids of responses.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    token_hashes = prng.bits(rollout_log_probs.float().view(torch.int32).long(), positions)
    response_hashes = torch.where(mask, token_hashes, 0).sum(-1)  # a sum of integers, which is the same in any order

    # `key` is added as a Python number, and the zeros are made on the device: a tensor that is copied to a GPU would
    # make the host wait for the GPU.
    key = int(prng.key_tensor([prng.fold_in(seed, "correct")]))
    response_keys = prng.bits(response_hashes + key, torch.zeros_like(response_hashes))  # [B], of seed and response
    return prng.uniforms(response_keys[:, None], positions)
