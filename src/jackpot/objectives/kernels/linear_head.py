"""The joint head: log-probs, entropy, top-k, KLs and Z of one or two models, without the logits of all tokens. Pure,
torch only.

Logits are formed in tiles of positions by tokens, so that of [N, V] only a tile ever exists; backward forms them again
instead of keeping them, as FlashAttention does, unless all of them fit into a memory that is set aside for them
(`kernels/autograd.py`). Both models' logits of a tile are formed once, and every output is computed from them. The
gradient is in closed form (`kernels/backward.py`); there is no second derivative, and create_graph=True raises
RuntimeError.

Shapes: `N` positions, `H` hidden size (each model its own), `V` vocabulary, `K` top-k, `G` ids to look up.
Log-probabilities, entropies and divergences are in nats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from jackpot.core.shards import is_sharded
from jackpot.objectives import obrs
from jackpot.objectives.kernels.autograd import DEFAULT_OPTIONS, HeadOptions, tiled_heads
from jackpot.objectives.kernels.tiles import Head, has_mixed_product

_SORTED_AT_ONCE = 2**22  # most logits of a model that `z_for_budget` sorts at a time


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """The outputs of one head for N positions, in float32, or in float64 if any operand is float64."""

    log_probs: Tensor  # [N] log-probs of the given ids; differentiable
    entropy: Tensor | None  # [N] -sum_x p(x) log p(x); differentiable; None where only log-probs are computed
    top_ids: Tensor  # [N, K] int64, most probable first; no gradient
    top_log_probs: Tensor  # [N, K] log-probs of top_ids; no gradient
    gathered: Tensor  # [N, G] log-probs at gather_ids; no gradient

    @classmethod
    def of(cls, values: Sequence[Tensor], constants: Sequence[Tensor]) -> "HeadOutput":
        """Build the output of one head from its outputs with a gradient (log-probs, perhaps entropy) and without."""
        top_ids, top_log_probs, gathered = constants
        return cls(
            log_probs=values[0],
            entropy=values[1] if len(values) > 1 else None,
            top_ids=top_ids,
            top_log_probs=top_log_probs,
            gathered=gathered,
        )


@dataclass(frozen=True, slots=True)
class JointOutput:
    """The outputs of two heads for the same N positions, and the divergences between them."""

    policy: HeadOutput
    rollout_model: HeadOutput
    # Both KLs [N] have a gradient into the rollout model only, and are None where only log-probs are computed; SG is
    # the stop-gradient.
    forward_kl: Tensor | None  # KL(SG(policy) || rollout_model)
    reverse_kl: Tensor | None  # KL(rollout_model || SG(policy))
    fill_ins: Tensor  # [N, K] the rollout model's log-probs at policy.top_ids; no gradient
    exact_z: Tensor | None  # [N] sum_x min(p_rollout_model(x), p_policy(x) / lam); no gradient; None without lam

    @classmethod
    def of(cls, values: Sequence[Tensor], constants: Sequence[Tensor]) -> "JointOutput":
        """Build the output of two heads from their outputs with a gradient (`values`) and without (`constants`)."""
        # `values` are log-probs and entropy of each head, then the two KLs; or the log-probs of each head alone.
        per_head = 2 if len(values) > 2 else 1
        forward_kl, reverse_kl = values[4:] if per_head == 2 else (None, None)

        # `constants` are top_ids, top_log_probs and gathered of each head, then fill_ins, and exact_z if there is one.
        return cls(
            policy=HeadOutput.of(values[:per_head], constants[:3]),
            rollout_model=HeadOutput.of(values[per_head : 2 * per_head], constants[3:6]),
            forward_kl=forward_kl,
            reverse_kl=reverse_kl,
            fill_ins=constants[6],
            exact_z=constants[7] if len(constants) > 7 else None,
        )


register_dataclass(HeadOutput)  # FSDP reads a module's output as a pytree, and so finds the output's tensors
register_dataclass(JointOutput)


def linear_head(
    head: Head,
    ids: Tensor,
    *,
    temperature: float,
    num_top: int = 0,
    gather_ids: Tensor | None = None,
    only_log_probs: bool = False,
    tile: tuple[int, int] | None = None,
    options: HeadOptions = DEFAULT_OPTIONS,
) -> HeadOutput:
    """Compute log-probs of `ids`, entropy, top-k and log-probs of `gather_ids` under one head.

    With weight W [V, H], bias b [V], a position's hidden state h [H], the temperature tau and the soft cap c (Gemma's;
    None: no cap), and 0 log 0 = 0, also for a probability that underflows to 0:

        raw = W h + b        logits = c tanh(raw / c) / tau        log p = log_softmax(logits)

    Precision: logits, softmax, and all sums over tokens, positions and tiles are float32, or float64 if any operand is.
    On CUDA, bfloat16 and float16 operands are multiplied as they are, with products in float32. Other devices have no
    such product: there the operands are cast to float32, the weight tile by tile. Under autocast the operands, and in
    backward the gradient of the logits, are cast to autocast's dtype instead. On the other devices that also rounds the
    products to this dtype, before they are summed in float32: the logits, and each tile's share of the gradients of
    hidden states and weight. The operands of an `Fp32Linear` are cast to float32 everywhere.

    Args:
        head: float tensors on one device.
        ids: [N] int64 in [0, V), also for padding: give that any id and mask its outputs.
        temperature: divides the logits, above 0.
        num_top: K; more than V gives V columns. Ties come in any order.
        gather_ids: [N, G] int64 in [0, V).
        only_log_probs: leave out what takes further sums over the vocabulary: entropy, and the KLs of two heads.
        tile: the most positions and the most tokens that have logits at a time; None takes `autograd.default_tile`.
        options: how the head is computed; changes the results by rounding only.

    Raises:
        ValueError: another number of ids than of hidden states, ids out of range, or a weight that FSDP has sharded. On
            CUDA ids out of range are no ValueError but fail an assertion on the device, so that nothing is waited for.
    """
    _check([head], ids)
    _check_range(head, ids=ids, gather_ids=gather_ids)

    return HeadOutput.of(
        *tiled_heads(
            [head],
            ids,
            gather_ids=gather_ids,
            temperature=temperature,
            lam=None,
            num_top=num_top,
            tile=tile,
            moments=not only_log_probs,
            options=options,
        )
    )


def joint_linear_head(
    policy: Head,
    rollout_model: Head,
    ids: Tensor,
    *,
    temperature: float,
    lam: float | None = None,
    num_top: int = 0,
    gather_ids: Tensor | None = None,
    only_log_probs: bool = False,
    tile: tuple[int, int] | None = None,
    options: HeadOptions = DEFAULT_OPTIONS,
) -> JointOutput:
    """Compute `linear_head` of both models at the same ids, their KL divergences, and OBRS's Z over the vocabulary.

    Arguments as in `linear_head`. The models may differ in hidden size, not in the number of positions or tokens. Z,
    the expected acceptance (`objectives.obrs`), is computed if its `lam`, above 0, is given; where a tile has only a
    part of the vocabulary, that forms all logits once more.

    Both divergences and Z take p_policy as a constant: no gradient reaches the policy's hidden states or its weight
    (but for a weight that both heads share). forward_kl is inf where the policy has mass and the rollout model none;
    its gradient, the rollout model's probabilities minus the policy's, stays finite. reverse_kl is inf where the
    rollout model has mass and the policy none; such a position gets a gradient of inf or NaN if the
    loss depends on its reverse_kl, else none from it. Rounding may leave a KL near 0 slightly negative.

    Raises:
        ValueError: as `linear_head`; also heads of different N or V.
    """
    heads = [policy, rollout_model]
    _check(heads, ids)
    _check_range(policy, ids=ids, gather_ids=gather_ids)

    return JointOutput.of(
        *tiled_heads(
            heads,
            ids,
            gather_ids=gather_ids,
            temperature=temperature,
            lam=lam,
            num_top=num_top,
            tile=tile,
            moments=not only_log_probs,
            options=options,
        )
    )


class CutLinear(nn.Linear):
    """An output layer that uses only the first `out_features` rows of its weight and bias.

    A `LinearHead`, which reads the weights of an output layer itself, uses only these rows too. The attributes `weight`
    and `bias` stay the whole parameters; the gradient of the other rows is 0.
    """

    bias: nn.Parameter | None  # pyright: ignore[reportIncompatibleVariableOverride]  # torch omits the None

    @classmethod
    def of(cls, layer: nn.Linear) -> Self:
        """Build a layer of this class that shares the weight and the bias of `layer`."""
        sharing = cls(layer.in_features, layer.out_features, bias=False, device="meta")
        sharing.weight, sharing.bias = layer.weight, layer.bias
        return sharing

    def read(self) -> tuple[Tensor, Tensor | None]:
        """Return the first `out_features` rows of the weight, [V, H], and of the bias, [V] or None."""
        rows = self.out_features
        if rows == len(self.weight):
            return self.weight, self.bias
        return self.weight[:rows], None if self.bias is None else self.bias[:rows]

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, *self.read())


class Fp32Linear(CutLinear):
    """An output layer that multiplies hidden states [..., H] and weight in float32, whatever their dtype and autocast.

    `LinearHead` does the same with this layer's weight.
    """

    rounded_to: torch.dtype | None = None  # dtype to which weight and bias are rounded before the product; None: none

    @classmethod
    def of(cls, layer: nn.Linear, rounded_to: torch.dtype | None = None) -> Self:
        """Build a layer of this class that shares the weight and the bias of `layer`.

        Args:
            rounded_to: dtype to which weight and bias are rounded before the cast to float32; None: no rounding.
        """
        widened = super().of(layer)
        widened.rounded_to = rounded_to
        return widened

    def read(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias, cut as by `CutLinear.read` and rounded to `rounded_to`; callers cast to float32."""
        weight, bias = super().read()
        if self.rounded_to is None:
            return weight, bias
        return weight.to(self.rounded_to), None if bias is None else bias.to(self.rounded_to)

    def forward(self, input: Tensor) -> Tensor:
        """Return W input + b in float32: [..., H] -> [..., rows of W], also under autocast."""
        weight, bias = self.read()
        bias = None if bias is None else bias.float()

        with torch.autocast(input.device.type, enabled=False):
            if input.dtype == weight.dtype != torch.float32 and has_mixed_product(input.device):
                # Half-precision operands and float32 results: the same product as below, without a copy of the weight.
                products = torch.mm(input.flatten(0, -2), weight.t(), out_dtype=torch.float32)
                products = products.unflatten(0, input.shape[:-1])
                return products if bias is None else products + bias

            return nn.functional.linear(input.float(), weight.float(), bias)


class LinearHead(nn.Module):
    """A module of the output layers of one or two models, which reads the weights of both layers in one forward.

    The layers are kept by reference, so their parameters stay the models' own. The forward of a layer never runs here,
    so FSDP must gather the layers' weights while a module around this one runs (`models.gathered`). FSDP may wrap this
    module itself only where no embedding shares a weight with a layer: FSDP would make a shared weight two weights,
    without an error.
    """

    def __init__(
        self,
        policy: nn.Linear,
        rollout_model: nn.Linear | None = None,
        *,
        policy_soft_cap: float | None = None,
        rollout_model_soft_cap: float | None = None,
        options: HeadOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Keep references to the output layers; `rollout_model` None: the policy alone; a soft cap None: no cap."""
        super().__init__()
        self.policy = policy
        self.rollout_model = rollout_model
        self.policy_soft_cap = policy_soft_cap
        self.rollout_model_soft_cap = rollout_model_soft_cap
        self.options = options

    def forward(
        self,
        policy_hidden: Tensor,
        rollout_model_hidden: Tensor | None,
        ids: Tensor,
        *,
        temperature: float,
        lam: float | None = None,
        num_top: int = 0,
        gather_ids: Tensor | None = None,
        only_log_probs: bool = False,
        tile: tuple[int, int] | None = None,
    ) -> HeadOutput | JointOutput:
        """Compute `joint_linear_head` of both models, or `linear_head` of the policy without `rollout_model_hidden`.

        Ids are not checked here; those out of range give meaningless numbers. A run checks ids when it gets them from
        the engine (`training.guards`).

        Raises:
            ValueError: as these two functions, but for ids; `rollout_model_hidden` without a rollout model.
        """
        heads = self.heads(policy_hidden, rollout_model_hidden)
        _check(heads, ids)

        is_pair = len(heads) == 2
        lam = lam if is_pair else None  # one head has no Z
        outputs = tiled_heads(
            heads,
            ids,
            gather_ids=gather_ids,
            temperature=temperature,
            lam=lam,
            num_top=num_top,
            tile=tile,
            moments=not only_log_probs,
            options=self.options,
        )
        return JointOutput.of(*outputs) if is_pair else HeadOutput.of(*outputs)

    def heads(self, policy_hidden: Tensor, rollout_model_hidden: Tensor | None) -> list[Head]:
        """Return the head of the policy, and that of the rollout model where its hidden states are given.

        Raises:
            ValueError: `rollout_model_hidden` without a rollout model.
        """
        heads = [head_of(self.policy, policy_hidden, self.policy_soft_cap)]
        if rollout_model_hidden is not None:
            if self.rollout_model is None:
                raise ValueError("rollout_model_hidden given to a LinearHead of the policy alone: give it None")
            heads.append(head_of(self.rollout_model, rollout_model_hidden, self.rollout_model_soft_cap))
        return heads

    @torch.no_grad()
    def z_for_budget(
        self, policy_hidden: Tensor, rollout_model_hidden: Tensor | None, *, temperature: float, budget: float
    ) -> tuple[Tensor, Tensor]:
        """Return (Z, lam) of every position, with that lam at which Z, OBRS's expected acceptance, is `budget`.

        Both are [N], float64, without gradient.

        All logits are formed once more, a few positions at a time, and the vocabulary is sorted at each position. Where
        `rollout_model_hidden` is None, the policy also takes the place of the rollout model.
        """
        vocabulary = self.policy.out_features
        step = max(1, _SORTED_AT_ONCE // vocabulary)  # positions whose logits are in memory at a time
        chunks = [policy_hidden.new_empty(2, 0, dtype=torch.float64)]  # empty (Z, lam), for `cat` if N is 0

        for start in range(0, len(policy_hidden), step):
            rows = slice(start, start + step)
            hidden = policy_hidden[rows]
            output: HeadOutput | JointOutput = self(
                hidden,
                None if rollout_model_hidden is None else rollout_model_hidden[rows],
                torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device),  # ids whose log-probs are not read
                temperature=temperature,
                num_top=vocabulary,  # sorts the whole vocabulary
                only_log_probs=True,
                tile=(step, vocabulary),  # all these positions and tokens in one tile
            )
            # Log-probs of all tokens under both models, both sorted by falling probability under the policy: `fill_ins`
            # has those under the rollout model.
            if isinstance(output, HeadOutput):
                policy = rollout = output.top_log_probs
            else:
                policy, rollout = output.policy.top_log_probs, output.fill_ins
            chunks.append(torch.stack(obrs.z_for_budget(rollout, policy, budget)))

        z, lam = torch.cat(chunks, dim=1)
        return z, lam


def head_of(layer: nn.Linear, hidden: Tensor, soft_cap: float | None) -> Head:
    """Return the head of an output layer over hidden states [N, H], in float32 where the layer is an `Fp32Linear`."""
    weight, bias = layer.read() if isinstance(layer, CutLinear) else (layer.weight, layer.bias)
    return Head(hidden=hidden, weight=weight, bias=bias, soft_cap=soft_cap, is_fp32=isinstance(layer, Fp32Linear))


def _check(heads: Sequence[Head], ids: Tensor) -> None:
    """Raise ValueError if heads and ids differ in positions or heads in vocabulary, or if FSDP has sharded a tensor."""
    vocabularies = [len(head.weight) for head in heads]
    positions = [len(head.hidden) for head in heads]
    if len(set(vocabularies)) > 1:
        raise ValueError(f"the heads have vocabularies of {vocabularies} tokens: both models must share one vocabulary")
    if {*positions, len(ids)} != {len(ids)}:  # a head has another number of positions than there are ids
        raise ValueError(f"the heads have {positions} hidden states and ids {len(ids)}: all must be of the same tokens")
    if any(is_sharded(tensor) for head in heads for tensor in head.tensors if tensor is not None):
        raise ValueError("a head is sharded: call it within models.gathered, or fully_shard it")


def _check_range(head: Head, **named_ids: Tensor | None) -> None:
    """Raise ValueError for ids outside of the vocabulary; on CUDA, let the device assert instead, without waiting."""
    vocabulary = head.weight.shape[0]
    for name, ids in named_ids.items():
        if ids is None or not ids.numel() or ids.is_meta:
            continue

        advice = f"all must be in [0, {vocabulary}); give padding any such id and mask the result"
        low, high = torch.aminmax(ids)
        if ids.is_cuda:
            is_in_range = (low >= 0) & (high < vocabulary)
            # torch has no public assertion that does not wait for the device.
            torch._assert_async(is_in_range, f"{name} holds ids out of range: {advice}")  # pyright: ignore[reportPrivateUsage]
        elif low < 0 or high >= vocabulary:
            raise ValueError(f"{name} holds ids from {low} to {high}: {advice}")
