"""Our corrections in verl's rollout correction: a module for VERL_USE_EXTERNAL_MODULES (docs/frameworks.md).

verl 0.8.0 to 0.9.1 computes the weights and the rejection mask of a batch in one function. Importing this module
replaces that function in verl, so that `rollout_is: jackpot:NAME:SETTING=VALUE:...` names a correction of ours. The
effect of a correction, also of verl's own, is measured before and after masking.

Corrections that read Z, the sum over the vocabulary of min(p_sampler, p_policy / lam), need the sampler's top-k lists
beside the policy's logits. With docs/verl.patch, verl carries the lists as it carries a teacher's, and calls the
functions below: `top_lists` and `join_top_lists` for vLLM's answers, `align_top_lists` for the sequence of an agent
loop, and `z_of_logits` in the worker that computes `old_log_probs`. Z of every token then returns to the trainer, which
uses `z_request` and `z_names`.

Shapes: `B` responses, `T` tokens, `K` entries of a list, `N` tokens of packed sequences, `V` vocabulary; log-probs in
nats.

Status: experimental. It ran inside verl's own functions, on a CPU, never in a training run of verl.
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from jackpot.core.errors import ConfigError, DataError
from jackpot.core.metrics import Max, Mean
from jackpot.corrections import IN_THE_INPUTS, Corrected, correct_unchecked, make_correction
from jackpot.objectives.corrections import CorrectionFn
from jackpot.objectives.estimate import estimate_z
from jackpot.objectives.obrs import ZEstimate

try:
    from verl.protocol import DataProto
    from verl.trainer.ppo import rollout_corr_helper
    from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size, slice_input_tensor
except ModuleNotFoundError as error:
    raise ImportError(f"jackpot.adapters.verl works inside verl, 0.8.0 to 0.9.1, which is not here: {error}") from error

__all__ = [
    "Z_FIELDS",
    "align_top_lists",
    "compute_rollout_correction_and_rejection_mask",
    "join_top_lists",
    "top_lists",
    "z_names",
    "z_of_logits",
    "z_request",
]

Z_FIELDS = tuple(f"jackpot_z_{field}" for field in ZEstimate._fields)  # columns of a batch, named as in docs/verl.patch
_LAM = "jackpot_lam"  # key in a batch for the lam at which workers estimate Z
_LISTS = "jackpot_top"  # key in an answer's extra fields for the list of each token: ids and log-probs, [K, 2]
_CHUNK = 1024  # positions whose logits are copied at a time
# Metrics of a correction that are logged only where the batch has Z.
_OF_Z = ("obrs/z", "obrs/z_bound_width", "obrs/acceptance_minus_z", "obrs/kappa")
_TOLERANCE = 1e-3  # nats by which two log-probs that one engine reports for one token may differ
_PREFIX = "jackpot:"
_verl_correction = rollout_corr_helper.compute_rollout_correction_and_rejection_mask
_THRESHOLD = signature(_verl_correction).parameters["rollout_is_threshold"].default
_Z_NEEDS = {  # verl's settings, and the values with which top-k lists reach the policy's logits
    "actor_rollout_ref.rollout.name": ("vllm",),
    "actor_rollout_ref.actor.strategy": ("fsdp", "fsdp2"),
    "actor_rollout_ref.model.use_fused_kernels": (None, False),
    "distillation.enabled": (None, False),  # a teacher's lists are carried in the same columns
}
_REFUSED = {  # why a correction cannot be used, by its name or by an input that it reads
    "advantages": "reads advantages, which verl computes after its rollout correction; use one that does not, such as "
    "tis or icepop",
    "ppo_is": "takes PPO's ratio from the rollout log-probs; use algorithm.rollout_correction.bypass_mode=True of verl "
    "in its place, which does so",
    "tis_adjusted": "takes PPO's ratio from the current policy; use tis with bypass_mode: true and loss_type: "
    "reinforce, which does so in verl, since 0.9 only with trainer.use_v1: false",
}


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float | None = _THRESHOLD,
    rollout_is_batch_normalize: bool = False,
    **options: Any,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """Compute what verl's function of this name returns, by a correction of ours where `rollout_is` names one.

    The weights are ours times the acceptance mask, so verl still counts a token that the correction rejects in the
    denominator of its loss. A token that `rollout_rs` rejects is not counted, as in verl. A token whose log-probs or Z
    cannot be used, such as NaN, has the weight 0.

    Args:
        old_log_prob: [B, T] log-probs of the policy: before the update, or the current one with `bypass_mode`.
        rollout_log_prob: [B, T] log-probs of the engine that sampled.
        response_mask: [B, T], 1 where a token was sampled.
        rollout_is: "token", "sequence" or None of verl, or "jackpot:NAME" with settings, as "jackpot:tis:cap=5".
        rollout_is_threshold, rollout_is_batch_normalize: settings of verl's own weights.
        options: `rollout_rs` and its threshold; with docs/verl.patch the columns of Z, [B, T] each, by `Z_FIELDS`.

    Returns:
        Weights, [B, T] in `rollout_is_weights`, or None; `response_mask` without the tokens that verl rejects;
        verl's metrics and ours (docs/frameworks.md).

    Raises:
        ConfigError: the correction or one of its settings is unknown, verl lacks what the correction reads, or settings
            of verl's own weights are given too.
    """
    weighting = {"rollout_is_threshold": rollout_is_threshold, "rollout_is_batch_normalize": rollout_is_batch_normalize}
    columns = [options.pop(name) for name in z_names(options)]
    z = ZEstimate(*columns) if columns else None

    correction = corrected = None
    if rollout_is is not None and rollout_is.startswith(_PREFIX):
        correction = _correction_named(rollout_is, weighting)
        if z is None and "z" in correction.reads:
            raise ConfigError(
                f"rollout_is {rollout_is!r} reads Z, and the batch has none: apply docs/verl.patch to verl, and leave "
                f"bypass_mode off; or use jackpot:tis, or jackpot:coin_only, which is OBRS without Z"
            )
        rollout_is = None  # verl has no weights to compute

    # verl's part: its own weights if no correction of ours is named, and its rejections (`rollout_rs`).
    both_log_probs = (old_log_prob, rollout_log_prob)
    proto, remaining, metrics = _verl_correction(*both_log_probs, response_mask, rollout_is, **weighting, **options)

    # A log-prob of -inf is usable only if it is the policy's: the policy never samples the token, so the ratio is 0.
    mask = response_mask.bool()
    usable = mask & rollout_log_prob.isfinite() & (old_log_prob < torch.inf)
    if z is not None:
        usable &= z.value.isfinite()
    accepted = usable.double()  # where nothing rejects: 1 at every usable token

    # The weights that verl will use: ours, its own, or 1.
    if correction is not None:
        corrected = _corrected(correction, *both_log_probs, usable, z)
        accepted = corrected.accept_mask
        weights = corrected.weights * accepted
        proto = DataProto.from_dict(tensors={"rollout_is_weights": weights.to(old_log_prob.dtype)})
    elif proto is not None:  # verl's own weights
        weights = proto.batch["rollout_is_weights"]
        accepted = accepted * (weights > 0)
    else:
        weights = torch.ones_like(old_log_prob)

    measured = _measured(
        *both_log_probs,
        mask=mask,
        usable=usable,
        remaining=remaining.bool() & usable,
        weights=weights,
        accepted=accepted,
    )
    if corrected is not None and z is not None:
        measured |= {name: corrected.metrics[name] for name in _OF_Z}
    return proto, remaining, metrics | {f"jackpot/{name}": float(value) for name, value in measured.items()}


def _measured(
    old: Tensor, rollout: Tensor, mask: Tensor, usable: Tensor, remaining: Tensor, weights: Tensor, accepted: Tensor
) -> dict[str, Tensor]:
    """Return metrics of the mismatch, of all usable tokens and of those with a weight in the loss (`kept/`).

    Those named `correction/` are of acceptance and weights; `unusable_tokens` is a share of the sampled tokens.

    Args:
        old, rollout: [B, T] log-probs of the policy and of the engine.
        mask, usable: [B, T] bool, the sampled tokens, and those of them whose log-probs and Z can be used.
        remaining: [B, T] bool, the usable tokens that `rollout_rs` does not reject.
        weights: [B, T], 0 where the correction rejects.
        accepted: [B, T], 1 where the correction accepts, or the acceptance probability with an expected mask.
    """
    uncorrected = make_correction("none")
    # The mismatch before and after masking: over all usable tokens, and over those that keep a weight above 0.
    before = _corrected(uncorrected, old, rollout, usable).metrics
    after = _corrected(uncorrected, old, rollout, remaining & (weights > 0)).metrics
    mean_weight = Mean.of(weights * remaining, mask)

    return {
        **{name: before[name] for name in before if name.startswith(("mismatch/", "obrs/"))},
        **{f"kept/{name}": after[name] for name in after if name.startswith("mismatch/")},
        "correction/accepted": Mean.of(accepted * remaining, mask).value,
        "correction/weight": mean_weight.value,
        "correction/weight_max": Max.of(weights * remaining, mask).value,
        "correction/ess": mean_weight.effective_share,
        "unusable_tokens": Mean.of(mask & ~usable, mask).value,
    }


def _correction_named(rollout_is: str, weighting: Mapping[str, Any]) -> CorrectionFn:
    """Return the correction of ours that a value of `rollout_is` names.

    Args:
        rollout_is: such as jackpot:tis:cap=5.
        weighting: verl's settings of its own importance weights, by name, which have to be the defaults.

    Raises:
        ConfigError: an unknown correction or setting, a correction that reads what verl does not have, or settings of
            verl's own weights that are not the default.
    """
    if weighting["rollout_is_threshold"] not in (None, _THRESHOLD) or weighting["rollout_is_batch_normalize"]:
        beside = ", ".join(f"{key} {value!r}" for key, value in weighting.items())
        raise ConfigError(
            f"rollout_is is {rollout_is!r} beside {beside}, which are of verl's own weights; leave them at "
            f"{_THRESHOLD!r} and False, and put numbers into the name, as in jackpot:tis:cap=5"
        )

    name, *assignments = rollout_is.removeprefix(_PREFIX).split(":")
    settings = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or key in IN_THE_INPUTS:
            raise ConfigError(
                f"rollout_is {rollout_is!r}: {text!r} is no setting here; write jackpot:{name}:SETTING=VALUE, and "
                f"leave {', '.join(IN_THE_INPUTS)} out, which verl decides"
            )
        settings[key] = _number_or_text(value)

    if name in _REFUSED:  # its keys are names of corrections, and of inputs that corrections read
        raise ConfigError(f"rollout_is {rollout_is!r}: correction {name} {_REFUSED[name]}")
    correction = make_correction(name, **settings)
    for input_read in sorted(_REFUSED.keys() & set(correction.reads)):  # inputs that verl does not have
        raise ConfigError(f"rollout_is {rollout_is!r}: correction {name} {_REFUSED[input_read]}")
    return correction


def _number_or_text(text: str) -> float | str:
    """Return a setting's value as a number if the text is one, else as the text."""
    try:
        return float({"null": "inf", ".inf": "inf"}.get(text, text))  # `null` and .inf mean no bound, as in a recipe
    except ValueError:
        return text


def _corrected(
    correction: CorrectionFn, old: Tensor, rollout: Tensor, mask: Tensor, z: ZEstimate | None = None
) -> Corrected:
    """Apply a correction of ours to the tokens of a mask; other tokens may have log-probs that are not finite.

    `old` and `rollout` are log-probs of the policy and of the engine, [B, T]; `z` is None where verl has no Z.
    Nothing checks whether the log-probs are swapped or shifted by a token: verl has aligned them, and the check is for
    all tokens that an engine sampled, not for those that a rejection has left.
    """
    rollout = torch.where(mask, rollout.detach(), 0.0)
    old = torch.where(mask, old.detach(), 0.0)
    if z is not None:
        z = ZEstimate(*(torch.where(mask, column, 0.0) for column in z))
    return correct_unchecked(correction, {"rollout_log_probs": rollout, "target_log_probs": old, "z": z}, mask)


def top_lists(log_probs: Sequence[Mapping[int, Any]], k: int) -> dict[str, Any]:
    """Return the extra fields of an answer of vLLM that hold the top-k list of every token; empty if `k` is below 2.

    Args:
        log_probs: for each token vLLM's `Logprob` by id, of the top k and of the sampled token.
    """
    if k < 2:
        return {}
    lists = []
    for entries in log_probs:
        top = sorted(entries.items(), key=lambda entry: entry[1].rank)[:k]  # by rank, without a sampled token behind k
        lists.append(np.array([(token, entry.logprob) for token, entry in top]))
    return {_LISTS: lists}


def join_top_lists(fields: dict[str, Any], later: Mapping[str, Any]) -> None:
    """Append the top-k lists of a later answer of vLLM, if it has any, to those of the same response's earlier answers.

    Args:
        fields: extra fields of the answers before; changed in place.
        later: extra fields of the later answer.
    """
    if _LISTS in later:
        fields[_LISTS] = fields.get(_LISTS, []) + later[_LISTS]


def align_top_lists(output: Any, validate: bool) -> None:
    """Put an agent loop's top-k lists where verl carries a teacher's: each in the row before that of its sampled token.

    All other rows are empty, with log-probs of -inf. The lists of a validation are dropped.

    Args:
        output: an AgentLoopOutput. Its extra fields get `teacher_ids` and `teacher_logprobs`, [tokens of prompt and
            response, K].
        validate: whether the loop is part of a validation.

    Raises:
        DataError: there are fewer lists than sampled tokens, or they are lists of other tokens, as where an agent loop
            edits what was sampled.
    """
    lists = output.extra_fields.pop(_LISTS, None)
    if not lists or validate:
        return

    sampled = torch.tensor(output.response_mask).nonzero()[:, 0]  # positions of the sampled tokens in the response
    if not len(sampled):
        return
    rows = torch.from_numpy(np.stack(lists[: len(sampled)]))  # [lists, K, 2]: id and log-prob of each entry
    top_ids, top = rows[..., 0].int(), rows[..., 1].float()

    # A list is of another token if it gives the sampled token's id another log-prob than was reported for the token.
    is_same = torch.zeros(len(sampled), dtype=torch.bool)
    if len(rows) == len(sampled):
        log_probs = torch.tensor(output.response_logprobs)[sampled, None]
        is_sampled = top_ids == torch.tensor(output.response_ids)[sampled, None]
        is_same = ~(is_sampled & ((top - log_probs).abs() > _TOLERANCE)).any(-1)
    if not is_same.all():
        raise DataError(
            f"an agent loop returned {len(lists)} top-k lists for {len(sampled)} sampled tokens, of which "
            f"{int((~is_same).sum())} have none or that of another token; Z needs a loop that keeps what was sampled, "
            f"such as verl's single_turn_agent and tool_agent"
        )

    shape = len(output.prompt_ids) + len(output.response_ids), top.shape[-1]
    before = len(output.prompt_ids) - 1 + sampled  # rows of the tokens before the sampled ones
    ids = torch.zeros(shape, dtype=torch.int32)
    ids[before] = top_ids
    log_probs = torch.full(shape, -torch.inf)
    log_probs[before] = top
    output.extra_fields.update(teacher_ids=ids, teacher_logprobs=log_probs)


def z_request(config: DictConfig) -> dict[str, float]:
    """Return the lam at which workers estimate Z, under the key that it has in a batch; {} if Z is not needed.

    Args:
        config: verl's settings.

    Raises:
        ConfigError: with these settings no worker has both the policy's logits and the sampler's top-k lists.
    """
    rollout_is = OmegaConf.select(config, "algorithm.rollout_correction.rollout_is")
    if rollout_is is None or not rollout_is.startswith(_PREFIX):
        return {}
    # The settings of verl's own weights are passed as defaults; the function that corrects checks the real ones.
    correction = _correction_named(rollout_is, {"rollout_is_threshold": None, "rollout_is_batch_normalize": False})
    if "z" not in correction.reads:
        return {}

    for setting, allowed in _Z_NEEDS.items():  # the error names the last of the allowed values
        if (value := OmegaConf.select(config, setting)) not in allowed:
            raise ConfigError(f"rollout_is {rollout_is!r} reads Z: {setting} is {value!r}; it must be {allowed[-1]!r}")
    if (k := int(OmegaConf.select(config, "actor_rollout_ref.rollout.calculate_log_probs") or 0)) < 2:
        raise ConfigError(
            f"rollout_is {rollout_is!r} reads Z: set actor_rollout_ref.rollout.calculate_log_probs to the length of "
            f"the sampler's top-k lists, such as 20, in place of {k}"
        )
    return {_LAM: correction.lam}


def z_names(columns: Any) -> list[str]:
    """Return the names in `Z_FIELDS` that a batch has as columns, in the order of `Z_FIELDS`."""
    names = set(columns.keys())  # `in` would not look among the keys of a TensorDict
    return [name for name in Z_FIELDS if name in names]


def z_of_logits(*, data: Any, student_logits: Tensor | None = None, **_: Any) -> Any:
    """Estimate Z of every token; verl's engine calls this function as it calls the loss of top-k distillation.

    Args:
        data: a packed micro-batch with lam and the lists of `align_top_lists`.
        student_logits: [1, N, V] logits of the policy, divided by the temperature; None: verl asks for the loss.

    Returns:
        With logits, the estimate of Z by `Z_FIELDS`, [1, N] each; without logits, a loss of 0 and no metrics.

    Raises:
        DataError: the micro-batch has no lists, as from an engine that returned only the sampled token's log-prob.
    """
    if student_logits is None:  # verl asks for the loss and its metrics; there is nothing to train here
        return torch.zeros(()), {}
    names = sorted(data.keys())
    if "teacher_ids" not in names:
        raise DataError(
            f"the batch has {', '.join(names)} and no top-k lists; apply docs/verl.patch to verl's server of vLLM too, "
            f"on every node"
        )

    # `align_top_lists` has put the sampler's lists under verl's names for those of a teacher: [1, N, K] each.
    ids, top = (data[name].values()[None] for name in ("teacher_ids", "teacher_logprobs"))
    # With Ulysses each process has the logits of its part of the sequences, and takes the same part of the lists.
    if get_ulysses_sequence_parallel_world_size() > 1:
        ids, top = slice_input_tensor(ids, dim=1), slice_input_tensor(top, dim=1)

    # In chunks of _CHUNK positions, as estimating Z copies the logits.
    packed = student_logits[0].split(_CHUNK), ids[0].long().split(_CHUNK), top[0].split(_CHUNK)
    chunks = [
        estimate_z(rollout_top_ids=chunk_ids, rollout_top_log_probs=chunk_top, policy_logits=logits, lam=data[_LAM])
        for logits, chunk_ids, chunk_top in zip(*packed, strict=True)
    ]
    columns = map(torch.cat, zip(*chunks, strict=True))
    return {name: column[None] for name, column in zip(Z_FIELDS, columns, strict=True)}


rollout_corr_helper.compute_rollout_correction_and_rejection_mask = compute_rollout_correction_and_rejection_mask
