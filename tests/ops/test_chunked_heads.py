"""The memory, the recomputation and the precision of the chunked pass."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jackpot.ops import chunked_heads
from jackpot.ops.linear_head import Head, joint_linear_head, linear_head
from ops.naive_head import (
    H,
    N,
    V,
    assert_same,
    leaves,
    loss_of,
    naive_joint,
    naive_log_probs,
    random_head,
    random_ids,
)


class Recorder(TorchDispatchMode):
    """Every operator that runs, with the shapes of the tensors it makes, and the dtypes of products."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.Size]] = []
        self.product_dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "mm":
            self.product_dtypes.add(out.dtype)
        self.calls += [(name, leaf.shape) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        return out

    def largest(self) -> int:
        return max(shape.numel() for _, shape in self.calls)

    def count(self, name: str, shape: tuple[int, ...]) -> int:
        return self.calls.count((name, torch.Size(shape)))


# Memory and recomputation


def test_no_tensor_of_positions_times_vocabulary_is_ever_made():
    n, v, h, chunk = 60, 50, 3, 4
    policy, rollout_model = random_head(1, "soft_cap", n, v, h), random_head(2, "bias", n, v, h)
    options = dict(temperature=0.9, lam=1.0, num_top=3, gather_ids=random_ids(n, 3, v=v), chunk_size=chunk)
    ids = random_ids(n, v=v)
    with Recorder() as forward:
        loss = loss_of(joint_linear_head(policy, rollout_model, ids, **options))
    with Recorder() as backward:
        loss.backward()
    assert forward.largest() == backward.largest() == chunk * v > max(v * h, n * h)


def test_only_inputs_and_single_numbers_are_kept_for_backward():
    policy, rollout_model = random_head(1, "bias"), random_head(2)
    inputs = {tensor.data_ptr() for tensor in leaves(policy, rollout_model)}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        joint_linear_head(policy, rollout_model, random_ids(N), temperature=1.0, lam=1.0, num_top=3, chunk_size=2)
    assert len(kept) > len(inputs)
    assert all(tensor.data_ptr() in inputs or tensor.shape == (N,) for tensor in kept)


def test_logits_are_formed_once_in_each_direction_and_the_rest_only_in_forward():
    n, v, chunk = 12, 13, 4
    heads = random_head(1, n=n, v=v), random_head(2, n=n, v=v)
    with Recorder() as forward:
        output = joint_linear_head(
            *heads,
            random_ids(n, v=v),
            temperature=1.0,
            lam=1.0,
            num_top=2,
            gather_ids=random_ids(n, 3, v=v),
            chunk_size=chunk,
        )
    with Recorder() as backward:
        loss_of(output).backward()
    assert forward.count("mm", (chunk, v)) == backward.count("mm", (chunk, v)) == 2 * n // chunk
    assert forward.count("topk", (chunk, 2)) == 2 * 2 * n // chunk  # values and ids
    names = {name for name, _ in backward.calls}
    assert not names & {"topk", "gather", "minimum"}


def logits_formed(of: Tensor) -> int:
    """How many [N, V] products the backward pass of these values makes."""
    with Recorder() as recorder:
        of.sum().backward(retain_graph=True)
    return recorder.count("mm", (N, V))


def test_backward_forms_only_the_logits_that_the_loss_needs():
    policy, rollout_model = random_head(1), random_head(2)
    frozen = Head(hidden=rollout_model.hidden.detach(), weight=rollout_model.weight.detach())
    options = {"temperature": 1.0, "lam": 1.0}
    output = joint_linear_head(policy, rollout_model, random_ids(N), **options)
    assert logits_formed(output.policy.log_probs) == 1
    assert logits_formed(output.rollout_model.entropy) == 1
    assert logits_formed(output.forward_kl) == logits_formed(output.reverse_kl) == 2
    output = joint_linear_head(policy, frozen, random_ids(N), **options)
    assert logits_formed(output.policy.entropy + output.rollout_model.log_probs) == 1


@pytest.mark.parametrize(
    ("elements", "positions", "expected"), [(44, 100, 4), (1000, 5, 4), (1, 100, 1), (10**6, 100, 7)]
)
def test_the_default_chunk_keeps_to_both_constants_in_equal_parts(monkeypatch, elements, positions, expected):
    monkeypatch.setattr(chunked_heads, "MAX_CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(chunked_heads, "MAX_CHUNK_POSITIONS", positions)
    with Recorder() as recorder:
        linear_head(random_head(1), random_ids(N), temperature=1.0)
    assert max(shape[0] for name, shape in recorder.calls if name == "_log_softmax") == expected


# Precision


def float64_copy(head: Head) -> Head:
    tensors = {name: getattr(head, name).detach().double().requires_grad_() for name in ("hidden", "weight")}
    return Head(**tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_accumulated_in_float32(dtype):
    """A sum of H products errs by H u sum|h w| at most, u = 2^-24; log-softmax doubles it and adds a few u."""
    head, ids = random_head(1, n=32, v=64, h=256, dtype=dtype), random_ids(32, v=64)
    every = torch.arange(64).expand(32, 64)
    output = linear_head(head, ids, temperature=1.0, gather_ids=every)
    exact = naive_log_probs(float64_copy(head), 1.0).detach()
    magnitude = (head.hidden.double().abs() @ head.weight.double().abs().t()).max().item()
    bound = 2 * (256 + 8) * 2**-24 * magnitude
    rounding_of_bfloat16 = 2**-9 * exact.abs().max().item()
    assert bound < rounding_of_bfloat16 / 5
    assert output.gathered.dtype == output.log_probs.dtype == output.entropy.dtype == torch.float32
    assert (output.gathered.double() - exact).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_products_are_rounded_but_not_the_softmax(dtype):
    """u = 2^-8: both operands and the logit err by u, so logits by 3 u sum|h w|, log-probs by twice that, shift.

    The weight's gradient, a sum of (onehot - p) h: p errs by p shift, to which rounding both operands and the product
    adds 3 u. The softmax's own sum over V keeps float32's V 2^-24.
    """
    u, n, v, h = 2**-8, 16, 64, 32
    wide = random_head(1, n=n, v=v, h=h)
    head = Head(hidden=wide.hidden.to(dtype), weight=(wide.weight * 0.05).detach().to(dtype).requires_grad_())
    ids, every = random_ids(n, v=v), torch.arange(v).expand(n, v)
    with Recorder() as recorder:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = linear_head(head, ids, temperature=1.0, gather_ids=every, chunk_size=4)
        output.log_probs.sum().backward()

    hidden, weight = head.hidden.detach().double(), head.weight.detach().double()
    exact = torch.log_softmax(hidden @ weight.t(), dim=-1)
    shift = 1.1 * 2 * 3 * u * (hidden.abs() @ weight.abs().t()).max()  # a tenth for what is of second order
    to_logits = torch.eye(v).double()[ids] - exact.exp()
    bound = (1.1 * 3 * u * to_logits.abs() + shift * exact.exp()).t() @ hidden.abs()
    assert recorder.product_dtypes == {torch.bfloat16}
    assert output.gathered.dtype == output.entropy.dtype == torch.float32
    assert head.weight.grad.dtype == dtype
    assert (output.gathered.double() - exact).abs().max() <= shift < 0.1
    assert (output.gathered.double().exp().sum(-1) - 1.0).abs().max() <= 4 * v * 2**-24
    assert ((head.weight.grad.double() - to_logits.t() @ hidden).abs() <= bound).all()


def test_float64_stays_float64_under_autocast():
    heads = random_head(1), random_head(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = joint_linear_head(*heads, random_ids(N), temperature=1.0, lam=1.0)
    expected = naive_joint(*(naive_log_probs(head, 1.0) for head in heads), random_ids(N), 1.0, 0, random_ids(N, 0))
    assert_same(output, expected)


def test_the_gradient_of_a_bfloat16_weight_is_summed_in_float32():
    """Equal positions, one chunk each: a sum in bfloat16 would stand still at 256 times one position's gradient."""
    n = 1024
    one = random_head(1, "bias", n=1, dtype=torch.bfloat16)
    head = Head(hidden=one.hidden.detach().expand(n, H), weight=one.weight, bias=one.bias)
    ids = torch.zeros(n, dtype=torch.int64)
    linear_head(head, ids, temperature=1.0, chunk_size=1).log_probs.sum().backward()
    p = naive_log_probs(Head(hidden=one.hidden, weight=one.weight, bias=one.bias), 1.0).detach().exp()[0]
    to_logits = n * (torch.eye(V).double()[0] - p)
    for given, expected in (
        (one.weight.grad, to_logits[:, None] * one.hidden.detach().double()),
        (one.bias.grad, to_logits),
    ):
        assert given.dtype == torch.bfloat16
        torch.testing.assert_close(given.double(), expected, rtol=2**-8, atol=1e-3)


def test_backward_within_autocast_is_the_backward_outside_it():
    head = random_head(1, dtype=torch.float32)
    output = linear_head(head, random_ids(N), temperature=1.0)
    outside = torch.autograd.grad(loss_of(output), leaves(head), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = torch.autograd.grad(loss_of(output), leaves(head))
    assert all(one.equal(other) for one, other in zip(within, outside, strict=True))
