"""The tiled head keeps little memory, computes logits no oftener than it must, and sums in float32 or better."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.naive_head import (
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
from jackpot.objectives.kernels import autograd
from jackpot.objectives.kernels.linear_head import Fp32Linear, Head, LinearHead, joint_linear_head, linear_head

FORMED_AGAIN = autograd.HeadOptions(logits_memory=0)  # no logits are kept: backward forms them again


class Recorder(TorchDispatchMode):
    """Records every operator that runs, with the shapes of its results and the dtypes of products."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.Size]] = []
        self.product_dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in {"mm", "addmm_"}:
            self.product_dtypes.add(out.dtype)
        self.calls += [(name, leaf.shape) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        return out

    def largest(self) -> int:
        return max(shape.numel() for _, shape in self.calls)

    def count(self, name: str, shape: tuple[int, ...]) -> int:
        return self.calls.count((name, torch.Size(shape)))


# Memory and recomputation


def test_no_tensor_is_larger_than_a_tile_a_weight_or_the_states():
    n = 60
    v = 50
    h = 3
    tile = (20, 13)
    policy = random_head(1, "soft_cap", n, v, h)
    rollout_model = random_head(2, "bias", n, v, h)
    options = dict(temperature=0.9, lam=1.0, num_top=3, gather_ids=random_ids(n, 3, v=v), tile=tile)
    ids = random_ids(n, v=v)

    with Recorder() as forward:
        loss = loss_of(joint_linear_head(policy, rollout_model, ids, **options))
    with Recorder() as backward:
        loss.backward()

    tile_size = 20 * 13
    assert tile_size > max(v * h, n * h, n * 4)
    assert forward.largest() == tile_size
    assert backward.largest() == tile_size


def test_only_inputs_and_single_numbers_are_kept_for_backward():
    policy = random_head(1, "bias")
    rollout_model = random_head(2)
    inputs = {tensor.data_ptr() for tensor in leaves(policy, rollout_model)}
    kept_tensors = []

    def keep(tensor: Tensor) -> Tensor:
        kept_tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        joint_linear_head(
            policy, rollout_model, random_ids(N), temperature=1.0, lam=1.0, num_top=3, tile=(2, 3), options=FORMED_AGAIN
        )

    assert len(kept_tensors) > len(inputs)
    assert all(tensor.data_ptr() in inputs or tensor.shape == (N,) for tensor in kept_tensors)


def test_logits_are_formed_once_in_each_direction():
    n = 12
    v = 15
    tile = (4, 5)
    heads = random_head(1, n=n, v=v), random_head(2, n=n, v=v)
    options = dict(temperature=1.0, num_top=2, gather_ids=random_ids(n, 3, v=v), tile=tile, options=FORMED_AGAIN)

    with Recorder() as forward:
        output = joint_linear_head(*heads, random_ids(n, v=v), **options)
    with Recorder() as backward:
        loss_of(output).backward()

    product_count = 2 * 3 * 3  # of two heads, in three by three tiles
    assert forward.count("mm", tile) == product_count
    assert backward.count("mm", tile) == product_count
    assert not {name for name, _ in backward.calls} & {"topk", "gather", "minimum"}


@pytest.mark.parametrize(("tile", "sweeps"), [((4, 15), 1), ((4, 5), 2)])
def test_the_exact_z_takes_a_second_sweep_over_many_tiles_only(tile, sweeps):
    n = 12
    v = 15
    heads = random_head(1, n=n, v=v), random_head(2, n=n, v=v)

    with Recorder() as recorder:
        joint_linear_head(*heads, random_ids(n, v=v), temperature=1.0, lam=0.6, tile=tile, options=FORMED_AGAIN)

    tile_count = (n // tile[0]) * (v // tile[1])
    assert recorder.count("mm", tile) == sweeps * 2 * tile_count  # of two heads


@pytest.mark.parametrize("kind", ["plain", "bias", "soft_cap"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kept_logits_are_formed_once_and_give_the_same_bits(temperature, kind):
    n = 12
    v = 150
    tile = (4, 64)
    heads = random_head(1, kind, n, v), random_head(2, n=n, v=v)
    settings = dict(temperature=temperature, lam=0.8, num_top=2, tile=tile)
    size = 2 * n * v * 8  # bytes of all logits of two heads in float64
    product_counts = {}
    tensors = {}

    for memory in (0, size - 1, size):
        options = autograd.HeadOptions(logits_memory=memory)
        with Recorder() as recorder:
            output = joint_linear_head(*heads, random_ids(n, v=v), options=options, **settings)
            loss = loss_of(output)
            first_gradients = torch.autograd.grad(loss, leaves(*heads), retain_graph=True)
            second_gradients = torch.autograd.grad(loss, leaves(*heads))
        product_counts[memory] = sum(name == "mm" for name, _ in recorder.calls)
        tensors[memory] = [*tree_leaves(output), *first_gradients, *second_gradients]

    tiles = 2 * 3 * 3
    # without memory: forward, Z, which takes a sweep too, and two backward passes
    assert list(product_counts.values()) == [tiles * 4, tiles * 4, tiles]
    assert all(formed.equal(kept) for formed, kept in zip(tensors[0], tensors[size], strict=True))


def test_only_logits_that_a_gradient_reads_are_kept():
    trained_head = random_head(1)
    frozen_head = Head(hidden=trained_head.hidden.detach(), weight=trained_head.weight.detach())
    size = N * V * 8  # bytes of one head's logits in float64

    def keeps(memory: int, *heads: Head) -> tuple[bool, ...]:
        return autograd.keeps_logits(heads, autograd.HeadOptions(logits_memory=memory))

    assert keeps(size, trained_head) == (True,)
    assert keeps(size - 1, trained_head) == (False,)
    assert keeps(9 * size, frozen_head) == (False,)
    assert keeps(size, trained_head, frozen_head) == (True, False)
    assert keeps(2 * size, frozen_head, trained_head) == (True, True)
    assert keeps(size, frozen_head, trained_head) == (False, False)
    with torch.no_grad():
        assert keeps(size, trained_head) == (False,)


def test_log_probs_alone_are_the_same_without_the_rest():
    heads = (random_head(1), random_head(2, "bias"))
    ids = random_ids(N)
    gather_ids = random_ids(N, 2)
    settings = dict(temperature=0.7, lam=0.8, num_top=3, gather_ids=gather_ids, tile=(3, 4))
    full_output = joint_linear_head(*heads, ids, **settings)

    short_output = joint_linear_head(*heads, ids, only_log_probs=True, **settings)

    assert short_output.forward_kl is None
    assert short_output.reverse_kl is None
    assert short_output.policy.entropy is None
    assert short_output.rollout_model.entropy is None

    for role in ("policy", "rollout_model"):
        short_head_output = getattr(short_output, role)
        full_head_output = getattr(full_output, role)
        for name in ("log_probs", "top_ids", "top_log_probs", "gathered"):
            assert getattr(short_head_output, name).equal(getattr(full_head_output, name))
    assert short_output.exact_z.equal(full_output.exact_z)
    assert short_output.fill_ins.equal(full_output.fill_ins)

    gradients = []
    for output in (short_output, full_output):
        loss = output.policy.log_probs.sum() + output.rollout_model.log_probs.sum()
        gradients.append(torch.autograd.grad(loss, leaves(*heads)))
    assert all(gradient.equal(full_gradient) for gradient, full_gradient in zip(*gradients, strict=True))

    del settings["lam"]
    single_output = linear_head(heads[0], ids, only_log_probs=True, **settings)
    assert single_output.entropy is None
    assert single_output.log_probs.equal(full_output.policy.log_probs)


def test_without_lam_there_is_no_exact_z():
    output = joint_linear_head(random_head(1), random_head(2), random_ids(N), temperature=1.0)
    assert output.exact_z is None


def test_the_gradient_of_a_weight_is_written_once():
    n = 12
    v = 15
    h = 2
    head = random_head(1, n=n, v=v, h=h, dtype=torch.bfloat16)
    output = linear_head(head, random_ids(n, v=v), temperature=1.0, tile=(4, 5))

    with Recorder() as recorder:
        output.log_probs.sum().backward()

    assert recorder.count("addmm_", (5, h)) == 3 * 3
    assert recorder.count("copy_", (5, h)) == 3 + 3  # the weight to float32, its gradient to bfloat16

    full_size_calls = [
        name for name, shape in recorder.calls if shape == (v, h) and name not in {"detach", "empty_like"}
    ]
    assert full_size_calls == []


def logits_formed(values: Tensor) -> int:
    """Count the [N, V] products that the backward pass of these values computes."""
    with Recorder() as recorder:
        values.sum().backward(retain_graph=True)
    return recorder.count("mm", (N, V))


def test_backward_forms_only_the_logits_that_the_loss_needs():
    policy = random_head(1)
    rollout_model = random_head(2)
    frozen_model = Head(hidden=rollout_model.hidden.detach(), weight=rollout_model.weight.detach())
    options = {"temperature": 1.0, "lam": 1.0, "options": FORMED_AGAIN}

    output = joint_linear_head(policy, rollout_model, random_ids(N), **options)

    assert logits_formed(output.policy.log_probs) == 1
    assert logits_formed(output.rollout_model.entropy) == 1
    assert logits_formed(output.forward_kl) == 2
    assert logits_formed(output.reverse_kl) == 2

    output = joint_linear_head(policy, frozen_model, random_ids(N), **options)
    assert logits_formed(output.policy.entropy + output.rollout_model.log_probs) == 1


@pytest.mark.parametrize(
    ("n", "vocabulary", "expected_tile"),
    [
        (5000, 4096, (1024, 4096)),  # rows of the whole vocabulary
        (5000, 16384, (1024, 16384)),
        (100, 151_936, (100, 151_936)),
        (5000, 16385, (4096, 4096)),  # cut
        (1000, 151_936, (1000, 16777)),
        (5000, 151_936, (4096, 4096)),
        (0, 7, (1, 7)),
        (1, 2**25, (1, 2**24)),
    ],
)
def test_the_default_tile_is_the_whole_vocabulary_where_it_fits(n, vocabulary, expected_tile):
    assert autograd.default_tile(n, vocabulary, "cpu") == expected_tile


def test_a_tile_on_a_gpu_is_larger_for_fewer_launches():
    assert autograd.default_tile(5000, 151_936, "cuda") == (4096, 16384)


@pytest.mark.parametrize(
    ("count", "largest_part", "grain", "sizes"),
    [
        (7, 4, 1, [4, 3]),
        (7, 5, 1, [4, 3]),
        (7, 100, 1, [7]),
        (0, 3, 1, [0]),
        (257, 100, 64, [100, 100, 57]),  # 86 would do, and 128 would be too many
        (300, 128, 64, [128, 128, 44]),
        (151_936, 16_777, 64, [15_232] * 9 + [14_848]),
    ],
)
def test_parts_are_few_about_equal_and_of_whole_grains(count, largest_part, grain, sizes):
    parts = autograd.split_range(count, largest_part, grain)
    assert [part.stop - part.start for part in parts] == sizes
    assert [part.start for part in parts] == [sum(sizes[:i]) for i in range(len(sizes))]


WAITING_OPERATORS = {
    "_local_scalar_dense",
    "nonzero",
    "bincount",
    "masked_select",
    "unique",
    "repeat_interleave",
    "equal",
}


@pytest.mark.parametrize("tile", [(20, 1300), (40, 4200), None])
def test_the_module_waits_for_no_number_of_a_gpu(tile):
    """On the CPU these operators stand for the waits: the shape of their result is in the numbers."""
    n = 40
    v = 4100
    policy_layer, rollout_model_layer = nn.Linear(H, v), nn.Linear(3, v)
    with torch.no_grad():
        policy_layer.bias[5] = -torch.inf
        rollout_model_layer.bias[7] = -torch.inf
    inputs = torch.randn(n, H, requires_grad=True), torch.randn(n, 3, requires_grad=True), random_ids(n, v=v)
    module = LinearHead(policy_layer, rollout_model_layer)

    with Recorder() as recorder:
        output = module(*inputs, temperature=1.0, lam=0.8, num_top=20, gather_ids=random_ids(n, 3, v=v), tile=tile)
        loss_of(output).backward()
    names = [name for name, _ in recorder.calls]

    assert not WAITING_OPERATORS & set(names)
    assert "topk" in names


def test_ids_are_checked_in_the_functions_and_not_in_a_run():
    layer = nn.Linear(H, V)
    hidden = torch.randn(N, H)
    ids = torch.full((N,), V)  # none of the vocabulary

    with pytest.raises(ValueError, match="ids from 11 to 11"):
        linear_head(Head(hidden=hidden, weight=layer.weight), ids, temperature=1.0)

    LinearHead(layer)(hidden, None, ids, temperature=1.0)


# Precision


def float64_copy(head: Head) -> Head:
    """Return the head with trainable copies of hidden states and weight in float64."""
    tensors = {name: getattr(head, name).detach().double().requires_grad_() for name in ("hidden", "weight")}
    return Head(**tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_accumulated_in_float32(dtype):
    """A sum of H products errs by H u sum|h w| at most, u = 2^-24; log-softmax doubles it and adds a few u."""
    head = random_head(1, n=32, v=64, h=256, dtype=dtype)
    ids = random_ids(32, v=64)
    every_id = torch.arange(64).expand(32, 64)

    output = linear_head(head, ids, temperature=1.0, gather_ids=every_id)

    exact_log_probs = naive_log_probs(float64_copy(head), 1.0).detach()
    magnitude = (head.hidden.double().abs() @ head.weight.double().abs().t()).max().item()
    bound = 2 * (256 + 8) * 2**-24 * magnitude
    rounding_of_bfloat16 = 2**-9 * exact_log_probs.abs().max().item()
    assert bound < rounding_of_bfloat16 / 5  # the test can tell one from the other

    assert output.gathered.dtype == torch.float32
    assert output.log_probs.dtype == torch.float32
    assert output.entropy.dtype == torch.float32
    assert (output.gathered.double() - exact_log_probs).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_products_are_rounded_but_not_the_softmax(dtype):
    """u = 2^-8: both operands and the logit err by u, so logits by 3 u sum|h w|, log-probs by twice that, shift.

    The weight's gradient, a sum of (onehot - p) h: p errs by p shift, to which rounding both operands and the product
    adds 3 u. The softmax's own sum over V keeps float32's V 2^-24.
    """
    u = 2**-8
    n = 16
    v = 64
    h = 32
    float64_head = random_head(1, n=n, v=v, h=h)
    head = Head(
        hidden=float64_head.hidden.to(dtype), weight=(float64_head.weight * 0.05).detach().to(dtype).requires_grad_()
    )
    ids = random_ids(n, v=v)
    every_id = torch.arange(v).expand(n, v)

    with Recorder() as recorder:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = linear_head(head, ids, temperature=1.0, gather_ids=every_id, tile=(4, 24))
        output.log_probs.sum().backward()

    hidden = head.hidden.detach().double()
    weight = head.weight.detach().double()
    exact_log_probs = torch.log_softmax(hidden @ weight.t(), dim=-1)
    shift = 1.1 * 2 * 3 * u * (hidden.abs() @ weight.abs().t()).max()  # a tenth for what is of second order
    to_logits = torch.eye(v).double()[ids] - exact_log_probs.exp()
    bound = (1.1 * 3 * u * to_logits.abs() + shift * exact_log_probs.exp()).t() @ hidden.abs()

    assert recorder.product_dtypes == {torch.bfloat16}
    assert output.gathered.dtype == torch.float32
    assert output.entropy.dtype == torch.float32
    assert head.weight.grad.dtype == dtype

    assert shift < 0.1
    assert (output.gathered.double() - exact_log_probs).abs().max() <= shift
    assert (output.gathered.double().exp().sum(-1) - 1.0).abs().max() <= 4 * v * 2**-24
    assert ((head.weight.grad.double() - to_logits.t() @ hidden).abs() <= bound).all()


@pytest.mark.parametrize("operands", [torch.float32, torch.bfloat16])
def test_a_head_in_fp32_does_not_feel_autocast(operands):
    float32_head = random_head(1, dtype=torch.float32)
    layers = [nn.Linear(H, V, bias=False), Fp32Linear.of(nn.Linear(H, V, bias=False))]

    results = {}
    for is_cast in (False, True):
        for layer in layers:
            layer.weight = nn.Parameter(float32_head.weight.detach().to(operands))
            hidden = float32_head.hidden.detach().to(operands).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                output = LinearHead(layer)(hidden, None, random_ids(N), temperature=1.0)
                logits = layer(hidden).float()
            output.log_probs.sum().backward()
            results[is_cast, type(layer)] = (output.log_probs, output.entropy, hidden.grad, layer.weight.grad, logits)

    plain_result = results[False, Fp32Linear]
    cast_result = results[True, Fp32Linear]

    assert all(tensor.equal(cast_tensor) for tensor, cast_tensor in zip(plain_result, cast_result, strict=True))

    exact_logits = (float32_head.hidden.detach().to(operands).double() @ layers[1].weight.detach().double().t()).float()
    *_, plain_logits = plain_result
    torch.testing.assert_close(plain_logits, exact_logits, atol=1e-6, rtol=1e-6)

    # a plain layer does feel it
    log_probs, *_, logits = results[True, nn.Linear]
    assert not log_probs.equal(plain_result[0])
    assert not logits.equal(plain_logits)


def test_float64_stays_float64_under_autocast():
    heads = random_head(1), random_head(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = joint_linear_head(*heads, random_ids(N), temperature=1.0, lam=1.0)

    log_probs = [naive_log_probs(head, 1.0) for head in heads]
    expected = naive_joint(*log_probs, random_ids(N), lam=1.0, num_top=0, gather_ids=random_ids(N, 0))
    assert_same(output, expected)


def test_the_gradient_of_a_bfloat16_weight_is_summed_in_float32():
    """Equal positions, one tile each: a sum in bfloat16 would stand still at 256 times one position's gradient."""
    n = 512
    single = random_head(1, "bias", n=1, dtype=torch.bfloat16)
    head = Head(hidden=single.hidden.detach().expand(n, H), weight=single.weight, bias=single.bias)
    ids = torch.zeros(n, dtype=torch.int64)

    linear_head(head, ids, temperature=1.0, tile=(1, V)).log_probs.sum().backward()

    p = naive_log_probs(Head(hidden=single.hidden, weight=single.weight, bias=single.bias), 1.0).detach().exp()[0]

    to_logits = n * (torch.eye(V).double()[0] - p)
    for gradient, expected_gradient in (
        (single.weight.grad, to_logits[:, None] * single.hidden.detach().double()),
        (single.bias.grad, to_logits),
    ):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=2**-8, atol=1e-3)


def test_backward_within_autocast_is_the_backward_outside_it():
    head = random_head(1, dtype=torch.float32)
    output = linear_head(head, random_ids(N), temperature=1.0)

    outside_gradients = torch.autograd.grad(loss_of(output), leaves(head), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside_gradients = torch.autograd.grad(loss_of(output), leaves(head))

    assert all(inside.equal(outside) for inside, outside in zip(inside_gradients, outside_gradients, strict=True))
