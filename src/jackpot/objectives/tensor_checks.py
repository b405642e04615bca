"""Checks of the tensors that another framework's loop gives."""

from collections.abc import Mapping

import torch
from torch import Tensor

from jackpot.core.errors import DataError

_ROUNDING = 0.01  # largest log-prob, and Z above its bound, by rounding


def described(given: object) -> str:
    """Say what was given in place of something else: a tensor's shape, or a type."""
    return str(list(given.shape)) if isinstance(given, Tensor) else f"of type {type(given).__name__}"


def check_tensors(mask: object, given: Mapping[str, object]) -> None:
    """Raise the DataErrors of `correct` about types, shapes, dtypes and devices."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2:
        text = f"{list(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else described(mask)
        raise DataError(
            f"response_mask is {text}; it must be [B, T] torch.bool (`.bool()`), True where a token was sampled"
        )
    for name, tensor in given.items():
        if tensor is None and name not in ("rollout_log_probs", "target_log_probs"):
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


def check_numbers(mask: Tensor, given: Mapping[str, Tensor | None], lam: float) -> None:
    """Raise the DataErrors of `correct` about numbers at tokens of the mask."""
    most = min(1.0, 1.0 / lam)
    for name, tensor in given.items():
        if tensor is None:
            continue
        numbers = tensor.detach()[mask]
        may_be_zero = numbers.isneginf() if name == "target_log_probs" else torch.zeros_like(numbers, dtype=torch.bool)
        if wrong := int((~numbers.isfinite() & ~may_be_zero).sum()):
            why = "; estimate_z gives NaN where the engine's list names a token twice or sums to more than 1"
            raise DataError(
                f"{name} holds {wrong} numbers that are not finite at tokens of the response mask{why * (name == 'z')}"
            )
        if name.endswith("log_probs") and (numbers > _ROUNDING).sum() > (numbers < -_ROUNDING).sum():
            raise DataError(f"{name} is above 0 at most tokens; log-probs are natural logarithms of probabilities")
        if name == "z" and not ((numbers >= 0) & (numbers <= most + _ROUNDING)).all():
            raise DataError(
                f"z holds numbers from {float(numbers.min()):.4g} to {float(numbers.max()):.4g}; at lam = {lam:g} Z is "
                f"in [0, {most:g}]: estimate it at the lam of the correction"
            )
        if name == "uniforms" and not ((numbers >= 0) & (numbers < 1)).all():
            raise DataError("uniforms holds numbers outside of [0, 1); draw them with torch.rand")
