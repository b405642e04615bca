"""Checks of the tensors that another framework's loop passes: their form, their numbers, and signs of a mistake.

A sign is a bool scalar, True where the tensors look like those of a known mistake, and not like those of healthy
models. On a CPU the call reads it at once. Reading it on a GPU would wait for the device, so there signs are copied in
the background, and a later call reads those of an earlier call.
"""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from jackpot.core.errors import DataError

_LEAST = 64  # least number of tokens in which a sign is looked for
_SIGNS = {  # text of the error or warning, by the name of the sign
    "empty": "response_mask is False at every token, so there is nothing to correct; leave this batch out",
    "swapped": "the tokens were not sampled by what rollout_log_probs are of, and look as sampled by what "
    "target_log_probs are of: are the two swapped? rollout_log_probs are those of the engine that sampled",
    "shifted": "rollout_log_probs and target_log_probs agree where one is shifted by a token, and not as they stand; "
    "logits at index t predict token t + 1: take logits[:, :-1] for ids[:, 1:]",
    "shifted_logits": "the policy's most probable tokens are those of the engine's lists one position further, and not "
    "of their own; logits at index t predict token t + 1: give those that predict the tokens of the lists",
    "rounded": "all log-probs of one model are rounded to bfloat16, 1 part in 256, which OBRS reads as mismatch; take "
    "them from float32 logits, logits.float().log_softmax(-1)",
}
_WARNED = ("swapped", "rounded")  # signs that only warn: made-up or inexact tensors may show them too
_ROUNDING = 0.01  # most by which rounding may raise a log-prob above 0, and Z above its bound

_Copied = tuple[Mapping[str, Tensor], torch.cuda.Event | torch.Event]  # signs, and the event at the end of their copy
_pending: list[_Copied] = []  # empty, or the signs of one call that are being copied from a GPU


def described(argument: object) -> str:
    """Describe an argument of the wrong form: a tensor by its shape, anything else by its type."""
    return str(list(argument.shape)) if isinstance(argument, Tensor) else f"of type {type(argument).__name__}"


def check_tensors(mask: object, tensors: Mapping[str, object]) -> None:
    """Raise the DataErrors of `correct` on types, shapes, dtypes and devices; `tensors` are its arguments by name."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2:
        text = f"{list(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else described(mask)
        raise DataError(
            f"response_mask is {text}; it must be [B, T] torch.bool (`.bool()`), True where a token was sampled"
        )

    for name, tensor in tensors.items():
        if tensor is None and name not in ("rollout_log_probs", "target_log_probs"):  # the others may be left out
            continue

        if not isinstance(tensor, Tensor) or tensor.shape != mask.shape:
            raise DataError(
                f"{name} is {described(tensor)} and response_mask {list(mask.shape)}; both must be tensors, [B, T], "
                f"one number a token"
            )

        if not tensor.is_floating_point():
            raise DataError(f"{name} is {tensor.dtype}; it must be a float tensor")
        if tensor.device != mask.device:
            raise DataError(f"{name} is on {tensor.device} and response_mask on {mask.device}; move one of them")


def check_numbers(mask: Tensor, tensors: Mapping[str, Tensor | None], lam: float) -> None:
    """Check the numbers that `correct` was given at the tokens where `mask` is True: finite, and within their bounds.

    Args:
        mask: [B, T] bool, the response mask.
        tensors: [B, T] each, by the names of the arguments of `correct`; None: the argument was not given.
        lam: lam of the correction, which bounds z.

    Raises:
        DataError: a number is not finite or not possible.
    """
    largest_z = min(1.0, 1.0 / lam)
    for name, tensor in tensors.items():
        if tensor is None:
            continue

        numbers = tensor.detach()[mask]
        # The policy may give a sampled token the probability 0, and the engine that sampled it may not.
        may_be_zero = numbers.isneginf() if name == "target_log_probs" else torch.zeros_like(numbers, dtype=torch.bool)
        if wrong := int((~numbers.isfinite() & ~may_be_zero).sum()):
            # A likely cause, which the error names where `name` is z.
            why = "; estimate_z gives NaN where the engine's list names a token twice or sums to more than 1"
            raise DataError(
                f"{name} holds {wrong} numbers that are not finite at tokens of the response mask{why * (name == 'z')}"
            )

        # An error takes more log-probs clearly above 0 than clearly below it: rounding raises only single ones.
        if name.endswith("log_probs") and (numbers > _ROUNDING).sum() > (numbers < -_ROUNDING).sum():
            raise DataError(f"{name} is above 0 at most tokens; log-probs are natural logarithms of probabilities")
        if name == "z" and not ((numbers >= 0) & (numbers <= largest_z + _ROUNDING)).all():
            raise DataError(
                f"z holds numbers from {float(numbers.min()):.4g} to {float(numbers.max()):.4g}; at lam = {lam:g} Z is "
                f"in [0, {largest_z:g}]: estimate it at the lam of the correction"
            )

        if name == "uniforms" and not ((numbers >= 0) & (numbers < 1)).all():
            raise DataError("uniforms holds numbers outside of [0, 1); draw them with torch.rand")


def report_signs(signs: Mapping[str, Tensor]) -> None:
    """Raise a DataError about the first sign that is True; warn about signs of `_WARNED`.

    On a GPU the error is about the signs of an earlier call, if they have arrived; nothing waits for the device, and
    while signs are on their way, those of further calls are dropped. Meta tensors have no signs to read.
    Status: tested on the CPU and on a virtual GPU, never on a real GPU (docs/gpu.md).
    """
    device = next(iter(signs.values())).device.type
    if device == "cuda":
        # `_pending` holds at most one pair: the signs of an earlier call, on their way to the CPU, and the event of
        # their arrival. Signs that have arrived are reported now; then this call's signs are sent in turn.
        has_arrived = any(event.query() for _, event in _pending)
        arrived = _pending.pop()[0] if has_arrived else {}
        if not _pending:
            copied = {name: sign.to("cpu", non_blocking=True) for name, sign in signs.items()}
            _pending.append((copied, torch.cuda.current_stream().record_event()))
        signs = arrived

    # The names of the signs that are True; the tensors on the device "meta" have no values.
    for name in (name for name, sign in signs.items() if device != "meta" and sign):
        if name not in _WARNED:
            raise DataError(f"{_SIGNS[name]}{' (an earlier call)' * (device == 'cuda')}")
        warnings.warn(_SIGNS[name], stacklevel=3)


def signs_of_log_probs(mask: Tensor, rollout: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Look for signs of a mistake in sampled tokens' log p_inf (`rollout`) and log p_target (`target`), [B, T] each.

    Each sign is a bool scalar, returned under its name: no token ("empty"), "swapped" (see below), one model's
    log-probs moved by a token ("shifted"), and one model's log-probs all rounded to bfloat16 ("rounded").

    Swapped: where p_inf sampled the tokens, the product of rho = p_target / p_inf over all tokens has an expectation of
    at most 1, whatever the models, so its logarithm exceeds 30 with a chance of at most e^-30. It does exceed 30 if the
    two are swapped, and the mean of 1 / rho is then 1. (The mean of 1 / rho is not 1 for a p_target that was trained on
    these very tokens, which may also raise the product.)
    """
    count, log_ratio = mask.sum(), torch.where(mask, target - rollout, 0.0).double()
    inverse = torch.where(mask, (-log_ratio).exp(), 0.0)
    mean = inverse.sum() / count  # mean of 1 / rho; `error` is its standard error
    error = ((inverse.square().sum() / count - mean.square()).clamp(min=0.0) / count).sqrt()

    # Shifted: the log-probs of one model correlate better with the other's at the token before or after. `pairs` are
    # tokens whose next token was sampled too.
    pairs, unshifted = mask[:, 1:] & mask[:, :-1], _correlation(rollout, target, mask)
    shifted = torch.maximum(
        _correlation(rollout[:, 1:], target[:, :-1], pairs), _correlation(rollout[:, :-1], target[:, 1:], pairs)
    )
    # For "swapped" the log of the product of rho must exceed 30 and also, in a large batch, 0.02 times the token count.
    return {
        "empty": count == 0,
        "swapped": (log_ratio.sum() > (0.02 * count).clamp(min=30.0)) & ((mean - 1.0).abs() < 0.01 + 4.0 * error),
        "shifted": (shifted > 0.7) & (unshifted < 0.5 * shifted) & (pairs.sum() >= _LEAST),
        "rounded": _is_rounded(rollout, mask) | _is_rounded(target, mask),
    }


def sign_of_shift(policy_best: Tensor, rollout_best: Tensor, usable: Tensor) -> dict[str, Tensor]:
    """Tell if logits look shifted by a token, from the most probable tokens of both models, [..., T] ids each.

    They do where the two models agree far more often after the tokens of one are moved by one position.

    Args:
        usable: [..., T] bool, True at positions for which the engine returned top tokens.
    """
    # The shares of usable positions at which the models agree: as they stand, then with one model moved by a position.
    every, after_first, before_last = slice(None), slice(1, None), slice(None, -1)  # positions
    unshifted, *shifted = (
        ((policy_best[..., at_policy] == rollout_best[..., at_rollout]) & usable[..., at_rollout]).sum()
        / usable[..., at_rollout].sum()
        for at_policy, at_rollout in ((every, every), (after_first, before_last), (before_last, after_first))
    )
    agreement = torch.maximum(*shifted)  # the larger share of the two shifts
    return {"shifted_logits": (agreement > 0.5) & (unshifted < 0.5 * agreement) & (usable.sum() >= _LEAST)}


def _correlation(left: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    """Return the correlation of two tensors [B, T] where `mask` is True, a scalar; NaN where a tensor is constant."""
    columns = torch.stack([left, right]).double().where(mask, 0.0)
    centred = (columns - columns.sum((1, 2), keepdim=True) / mask.sum()).where(mask, 0.0)
    squares = centred.square().sum((1, 2))
    return centred.prod(0).sum() / squares.prod().sqrt()


def _is_rounded(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Tell if bfloat16 holds all log-probs [B, T] exactly, although they are many and not all equal: a bool scalar."""
    counted = mask & (log_probs < 0)
    is_short = torch.where(counted, log_probs.bfloat16().to(log_probs.dtype) == log_probs, True)
    differ = (log_probs[:, 1:] != log_probs[:, :-1]) & counted[:, 1:] & counted[:, :-1]
    return is_short.all() & differ.any() & (counted.sum() >= _LEAST)
