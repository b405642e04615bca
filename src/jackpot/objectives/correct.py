"""The correction in one call, for another framework's training loop: checks what is given, and fills in the rest.

A loop that splits an optimizer step into micro-batches, and wants kappa of the whole step, makes the two calls of
`corrections.base` itself.

Status: supported.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from jackpot.config.corrections import OBRSCorrection
from jackpot.config.run import Sampling
from jackpot.core import prng
from jackpot.core.errors import DataError
from jackpot.core.metrics import Max, Sums, means
from jackpot.objectives import obrs
from jackpot.objectives.corrections import Correction, CorrectionInputs, make_correction
from jackpot.objectives.kernels.linear_head import linear_head
from jackpot.objectives.kernels.tiles import Head

FillIns = Callable[[Tensor], Tensor]
_LAM, _TEMPERATURE = OBRSCorrection().lam, Sampling().temperature
_MASS = 1.01  # largest sum of probabilities of a top-k list, by rounding
_ROUNDING = 0.01  # largest log-prob, and Z above its bound, by rounding

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


def correct(
    name: str,
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
        name: of the correction: "obrs", "tis", "icepop", ... (docs/corrections.md).
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
            a CPU also numbers that cannot be what their name says, where a look at them waits for nothing.
    """
    correction = make_correction(name, **settings)
    given = {
        "rollout_log_probs": rollout_log_probs,
        "target_log_probs": target_log_probs,
        "z": z.value if isinstance(z, obrs.ZEstimate) else z,
        "advantages": advantages,
        "proximal_log_probs": proximal_log_probs,
        "uniforms": uniforms,
    }
    _check(response_mask, given)
    if response_mask.device.type == "cpu":  # elsewhere a look waits for the device
        _check_numbers(response_mask, given, correction.lam)
    for needed in sorted(correction.reads):
        if given[needed] is None:
            raise DataError(f"correction {name} reads {needed}, which is not given: {_ADVICE[needed]}")
    rollout, target = rollout_log_probs.detach(), target_log_probs.detach()
    estimate = z if isinstance(z, obrs.ZEstimate) else obrs.known_z(torch.ones_like(rollout) if z is None else z)
    inputs = CorrectionInputs(
        rollout_log_probs=rollout,
        target_log_probs=target,
        proximal_log_probs=target if proximal_log_probs is None else proximal_log_probs.detach(),
        response_mask=response_mask,
        uniforms=_drawn(rollout, response_mask, seed) if uniforms is None else uniforms,
        advantages=torch.zeros_like(rollout) if advantages is None else advantages,
        z=obrs.ZEstimate(*(part.detach() for part in estimate)),
    )
    done = correction.apply(inputs, correction.measure(inputs))
    sums = correction_sums(done, inputs, correction.lam, z is not None)
    kappa = {} if z is None else {"obrs/kappa": done.kappa}
    return Corrected(done.weights, done.accept_mask, {name: one.value for name, one in sums.items()} | kappa)


def estimate_z(
    *,
    rollout_top_ids: Tensor,
    rollout_top_log_probs: Tensor,
    policy_logits: Tensor | None = None,
    hidden_states: Tensor | None = None,
    head: nn.Linear | None = None,
    temperature: float = _TEMPERATURE,
    lam: float = _LAM,
    fill_ins: FillIns | None = None,
) -> obrs.ZEstimate:
    """Estimate Z of every position from the top-k log-probs of the engine that sampled, and the policy's distribution.

    Give the policy's logits, or its last hidden states and its output layer, from which the logits are formed tile by
    tile. Z is a lower bound unless K is the vocabulary; `correct` brings its mean to the right place with kappa.

    Args:
        rollout_top_ids: [..., K] int64, the most probable tokens of each position by the engine; at masked positions
            any K ids of the vocabulary.
        rollout_top_log_probs: [..., K] nats, of these tokens as the engine sampled them; -inf where the engine named
            fewer than K, whatever id stands there.
        policy_logits: [..., V] float.
        hidden_states: [..., H] float.
        head: V by H, maps hidden states to logits.
        temperature: of sampling, above 0, by which the policy's logits are divided.
        lam: of the correction that reads Z.
        fill_ins: returns log p_inf, [..., K], of given ids [..., K], the policy's most probable ones, by a forward pass
            of the weights that sampled; None: nothing is known of those which the engine does not name.

    Returns:
        Z, its bounds, and the mass that was captured: [...] each, without gradient. Z is NaN where a list of the engine
        names a token twice or sums to more than 1, as it may at masked positions.

    Raises:
        DataError: tensors of other shapes, dtypes or devices, neither or both forms of the policy's distribution, a
            temperature or lam that is not above 0, or, on a CPU, ids outside of the vocabulary.
    """
    ids, top = rollout_top_ids, rollout_top_log_probs
    _check_distributions(ids, top, policy_logits, hidden_states, head)
    if not (temperature > 0 and lam > 0):
        raise DataError(f"temperature is {temperature} and lam {lam}; both must be above 0")
    with torch.no_grad():
        if hidden_states is None:
            at_ids, policy_ids, policy_top = _read_logits(policy_logits, ids, temperature)
        else:
            at_ids, policy_ids, policy_top = _read_head(hidden_states, head, ids, temperature)
        filled = torch.full_like(policy_top, -torch.inf) if fill_ins is None else fill_ins(policy_ids)
        if not isinstance(filled, Tensor) or filled.shape != policy_ids.shape:
            raise DataError(f"fill_ins returned {_described(filled)}; it must be {list(policy_ids.shape)}, as the ids")
        is_absent = top.isneginf()
        z = obrs.topk_z(
            rollout_top_log_probs=top.float(),
            target_at_rollout_top=at_ids.masked_fill(is_absent, -torch.inf),
            rollout_top_ids=ids.masked_fill(is_absent, -1),
            target_top_ids=policy_ids,
            target_top_log_probs=policy_top,
            fill_ins=filled,
            fill_valid=ids.new_full(ids.shape[:-1], fill_ins is not None, dtype=torch.bool),
            lam=lam,
        )
        return z._replace(value=torch.where(_is_distribution(ids, top), z.value, torch.nan))


def _is_distribution(ids: Tensor, top: Tensor) -> Tensor:
    """Tell of each list, [..., K], whether its ids differ and its probabilities sum to at most 1: [...]."""
    absent = -1 - torch.arange(ids.shape[-1], device=ids.device)  # ids of their own, for places without a token
    named = torch.where(top > -torch.inf, ids, absent).sort(-1).values
    return (named.diff(dim=-1) != 0).all(-1) & (top.float().exp().sum(-1) <= _MASS)


def _check_distributions(
    ids: Tensor, top: Tensor, policy_logits: Tensor | None, hidden_states: Tensor | None, head: nn.Linear | None
) -> None:
    """Raise the DataErrors of `estimate_z`; `ids` and `top` are its `rollout_top_ids` and `rollout_top_log_probs`."""
    if (policy_logits is None) == (hidden_states is None) or (hidden_states is None) != (head is None):
        raise DataError("the policy's distribution is needed once: give policy_logits, or hidden_states and head")
    name, scores = ("policy_logits", policy_logits) if hidden_states is None else ("hidden_states", hidden_states)
    given = {"rollout_top_ids": ids, "rollout_top_log_probs": top, name: scores}
    for one, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise DataError(f"{one} is {_described(tensor)}; it must be a tensor")
    if ids.shape != top.shape or not ids.dim() or ids.dtype != torch.int64 or not top.is_floating_point():
        raise DataError(
            f"rollout_top_ids is {list(ids.shape)} {ids.dtype}, rollout_top_log_probs {list(top.shape)} {top.dtype}; "
            f"they must be [..., K], int64 and float"
        )
    if scores.shape[:-1] != ids.shape[:-1] or scores.device != ids.device or top.device != ids.device:
        raise DataError(
            f"{name} is {list(scores.shape)} on {scores.device}, rollout_top_ids {list(ids.shape)} on {ids.device} and "
            f"rollout_top_log_probs on {top.device}; they must be of the same positions and on one device"
        )
    if head is not None and not isinstance(head, nn.Linear):
        raise DataError(f"head is {_described(head)}; it must be the policy's output layer, a torch.nn.Linear")
    size = scores.shape[-1] if head is None else head.out_features
    if ids.device.type == "cpu" and ids.numel() and not (ids.min() >= 0 and ids.max() < size):
        raise DataError(
            f"rollout_top_ids holds ids from {int(ids.min())} to {int(ids.max())}; the policy's vocabulary has 0 to "
            f"{size - 1}; at masked positions and for absent tokens, whose log-prob is -inf, give any of these"
        )


def _read_logits(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the policy's log-probs of ids [..., K], and its own K most probable ids with theirs."""
    scaled = logits.float() / temperature
    normalizer = scaled.logsumexp(-1, keepdim=True)
    top, top_ids = scaled.topk(min(ids.shape[-1], scaled.shape[-1]), dim=-1)
    return scaled.gather(-1, ids) - normalizer, top_ids, top - normalizer


def _read_head(hidden: Tensor, head: nn.Linear, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    rows, k = hidden.reshape(-1, hidden.shape[-1]), ids.shape[-1]
    found = linear_head(
        Head(hidden=rows, weight=head.weight, bias=head.bias, soft_cap=None),
        ids.new_zeros(len(rows)),  # of sampled tokens, whose log-probs nothing reads
        temperature=temperature,
        num_top=k,
        gather_ids=ids.reshape(len(rows), k),
        only_log_probs=True,
    )
    top_ids, top, at_ids = (
        one.view(*ids.shape[:-1], one.shape[-1]) for one in (found.top_ids, found.top_log_probs, found.gathered)
    )
    return at_ids, top_ids, top


def _described(given: object) -> str:
    """Say what was given in place of something else: a tensor's shape, or a type."""
    return str(list(given.shape)) if isinstance(given, Tensor) else f"of type {type(given).__name__}"


def _check(mask: Tensor, given: dict[str, Tensor | None]) -> None:
    """Raise the DataErrors of `correct` about types, shapes, dtypes and devices."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2:
        found = f"{list(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else _described(mask)
        raise DataError(
            f"response_mask is {found}; it must be [B, T] torch.bool (`.bool()`), True where a token was sampled"
        )
    for name, tensor in given.items():
        if tensor is None and name not in ("rollout_log_probs", "target_log_probs"):
            continue
        if not isinstance(tensor, Tensor) or tensor.shape != mask.shape:
            raise DataError(
                f"{name} is {_described(tensor)} and response_mask {list(mask.shape)}; both must be tensors, [B, T], "
                f"one number a token"
            )
        if not tensor.is_floating_point():
            raise DataError(f"{name} is {tensor.dtype}; it must be a float tensor")
        if tensor.device != mask.device:
            raise DataError(f"{name} is on {tensor.device} and response_mask on {mask.device}; move one of them")


def _check_numbers(mask: Tensor, given: dict[str, Tensor | None], lam: float) -> None:
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


def _drawn(rollout_log_probs: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Return a uniform for every token: [B, T] float64 in [0, 1), a hash of the seed, the response and the position.

    The bits of its log-probs stand for a response, which has no name here. A position counts from the first column.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    own = prng.bits(rollout_log_probs.float().view(torch.int32).long(), positions)
    rows = torch.where(mask, own, 0).sum(-1)
    key = prng.key_tensor([prng.fold_in(seed, "correct")]).to(mask.device)
    return prng.uniforms(prng.bits(rows + key, 0)[:, None], positions)


def correction_sums(correction: Correction, inputs: CorrectionInputs, lam: float, has_z: bool) -> Sums:
    """Measure a correction and the mismatch before it, in few numbers, by the names of metrics.jsonl (docs/metrics.md).

    Args:
        lam: at which acceptance is measured.
        has_z: Z is known; else nothing is said of it.
    """
    mask, log_ratio, z = inputs.response_mask, inputs.log_ratio.double(), inputs.z
    ratio, factor = log_ratio.exp(), correction.weights * correction.accept_mask
    acceptance = obrs.acceptance(inputs.rollout_log_probs, inputs.target_log_probs, lam)
    columns = {
        "mismatch/ratio": ratio,
        "mismatch/kl_k1": -log_ratio,
        "mismatch/kl_k3": ratio - 1.0 - log_ratio,
        "obrs/acceptance": acceptance,
        "correction/accepted": correction.accept_mask,
        "correction/weight": factor,
        "correction/clip_frac": correction.capped,
    }
    if has_z:
        columns |= {
            "obrs/z": z.value,
            "obrs/acceptance_minus_z": acceptance - z.value,
            "obrs/z_bound_width": z.upper - z.lower,
        }
    sums = means(columns, {"": mask}) | {
        "mismatch/ratio_max": Max.of(ratio, mask),
        "correction/weight_max": Max.of(factor, mask),
    }
    return dict(sorted(sums.items()))
