"""The tiled head against full-vocabulary logits in float64 (naive_head.py), its edge cases, and refused arguments."""

import math
from dataclasses import fields

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from helpers.naive_head import (
    H,
    N,
    V,
    assert_same,
    assert_same_gradients,
    leaves,
    loss_of,
    naive_head,
    naive_joint,
    naive_log_probs,
    random_head,
    random_ids,
)
from jackpot.objectives.kernels.autograd import HeadOptions
from jackpot.objectives.kernels.linear_head import Head, LinearHead, joint_linear_head, linear_head

TILES = [(1, 1), (3, 4), (N, 6), (2, V), (N + 5, V + 5), None]
AGAIN, KEPT = HeadOptions(logits_memory=0), HeadOptions(logits_memory=2**20)  # logits formed twice, and once


# Values and gradients


@pytest.mark.parametrize("options", [AGAIN, KEPT])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("kind", "temperature"), [("plain", 1.0), ("bias", 0.6), ("soft_cap", 0.6)])
def test_one_head_is_the_full_softmax(kind, temperature, tile, options):
    head = random_head(1, kind)
    ids = random_ids(N)
    gather_ids = random_ids(N, 4)
    rest = dict(num_top=3, gather_ids=gather_ids, tile=tile, options=options)
    output = linear_head(head, ids, temperature=temperature, **rest)

    expected = naive_head(naive_log_probs(head, temperature), ids, 3, gather_ids)

    assert_same(output, expected)
    assert_same_gradients(loss_of(output), loss_of(expected), leaves(head))


@pytest.mark.parametrize("options", [AGAIN, KEPT])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("kind", "lam"), [("plain", 1.0), ("bias", 0.4), ("soft_cap", 2.5)])
def test_two_heads_are_the_two_full_softmaxes(kind, lam, tile, options):
    policy, rollout_model = random_head(1, kind), random_head(2, "bias", h=H - 2)
    ids, gather_ids = random_ids(N), random_ids(N, 4)
    rest, how = dict(num_top=3, gather_ids=gather_ids), dict(tile=tile, options=options)
    output = joint_linear_head(policy, rollout_model, ids, temperature=0.7, lam=lam, **how, **rest)

    expected = naive_joint(naive_log_probs(policy, 0.7), naive_log_probs(rollout_model, 0.7), ids, lam, **rest)

    assert_same(output, expected)
    assert_same_gradients(loss_of(output), loss_of(expected), leaves(policy, rollout_model))


@pytest.mark.parametrize("tile", [(40, 100), (16, 37), (7, 256)])
@pytest.mark.parametrize("num_top", [5, 70])
def test_a_top_in_several_tiles_of_different_widths(num_top, tile):
    n, v = 40, 257
    policy, rollout_model = random_head(1, "bias", n, v), random_head(2, n=n, v=v, h=3)
    ids, gather_ids = random_ids(n, v=v), random_ids(n, 6, v=v)
    options = dict(num_top=num_top, gather_ids=gather_ids)
    output = joint_linear_head(policy, rollout_model, ids, temperature=0.9, lam=0.8, tile=tile, **options)

    expected = naive_joint(naive_log_probs(policy, 0.9), naive_log_probs(rollout_model, 0.9), ids, 0.8, **options)

    assert_same(output, expected)
    assert_same_gradients(loss_of(output), loss_of(expected), leaves(policy, rollout_model))


def test_a_vocabulary_of_one_token_is_certain():
    heads, ids = (random_head(1, "bias", v=1), random_head(2, v=1)), torch.zeros(N, dtype=torch.int64)
    output = joint_linear_head(*heads, ids, temperature=0.5, lam=1.0, num_top=4)

    for zero in (output.policy.log_probs, output.rollout_model.entropy, output.forward_kl, output.fill_ins):
        assert not zero.any()
    assert output.policy.top_ids.tolist() == [[0]] * N
    assert output.exact_z.tolist() == [1.0] * N

    loss_of(output).backward()
    assert not any(tensor.grad.any() for tensor in leaves(*heads))


def test_tied_tokens_give_distinct_ids_and_their_log_probs():
    n, v = 9, 130
    policy, rollout_model = random_head(1, n=n, v=v), random_head(2, n=n, v=v)
    flat = Head(hidden=torch.zeros(n, H, dtype=torch.float64), weight=policy.weight)

    output = joint_linear_head(flat, rollout_model, random_ids(n, v=v), temperature=1.0, num_top=50, tile=(4, 33))

    assert all(len(set(row)) == 50 for row in output.policy.top_ids.tolist())

    expected = naive_log_probs(rollout_model, 1.0).gather(1, output.policy.top_ids)
    torch.testing.assert_close(output.fill_ins, expected.detach())


def test_a_weight_that_both_heads_share_gets_both_gradients():
    policy, other = random_head(1), random_head(2)
    tied = Head(hidden=other.hidden, weight=policy.weight, soft_cap=2.0)
    ids, gather_ids = random_ids(N), random_ids(N, 0)
    output = joint_linear_head(policy, tied, ids, temperature=1.3, lam=1.0, tile=(2, 3))

    expected = naive_joint(naive_log_probs(policy, 1.3), naive_log_probs(tied, 1.3), ids, 1.0, 0, gather_ids)

    assert_same(output, expected)
    assert_same_gradients(loss_of(output), loss_of(expected), leaves(policy, tied))


@pytest.mark.parametrize("kind", ["plain", "bias", "soft_cap"])
def test_gradcheck_of_one_head(kind):
    head, ids = random_head(1, kind, n=3, v=4, h=2), random_ids(3, v=4)

    def values(*tensors):
        given = Head(**dict(zip(("hidden", "weight", "bias"), tensors, strict=False)), soft_cap=head.soft_cap)
        output = linear_head(given, ids, temperature=0.8, tile=(2, 3))
        return output.log_probs, output.entropy

    assert torch.autograd.gradcheck(values, leaves(head))


def test_gradcheck_of_two_heads():
    policy = random_head(1, n=3, v=4, h=2)
    rollout_model = random_head(2, n=3, v=4, h=3)
    ids = random_ids(3, v=4)

    def run(policy_tensors, rollout_model_tensors):
        first = Head(hidden=policy_tensors[0], weight=policy_tensors[1])
        second = Head(hidden=rollout_model_tensors[0], weight=rollout_model_tensors[1], soft_cap=2.0)
        return joint_linear_head(first, second, ids, temperature=0.8, lam=1.0, tile=(2, 3))

    def of_policy(*tensors):
        output = run(tensors, leaves(rollout_model))
        return output.policy.log_probs, output.policy.entropy

    def of_rollout_model(*tensors):
        output = run([tensor.detach() for tensor in leaves(policy)], tensors)
        return output.rollout_model.log_probs, output.rollout_model.entropy, output.forward_kl, output.reverse_kl

    assert torch.autograd.gradcheck(of_policy, leaves(policy))
    assert torch.autograd.gradcheck(of_rollout_model, leaves(rollout_model))


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl"])
def test_divergences_train_the_rollout_model_only(name):
    policy, rollout_model = random_head(1, "bias"), random_head(2, "bias")
    output = joint_linear_head(policy, rollout_model, random_ids(N), temperature=1.0, lam=1.0, tile=(2, 3))
    getattr(output, name).sum().backward()
    assert all(tensor.grad is None or not tensor.grad.any() for tensor in leaves(policy))
    assert all(tensor.grad.any() for tensor in leaves(rollout_model))


def test_what_is_constant_carries_no_gradient():
    heads = random_head(1), random_head(2)
    gather_ids = random_ids(N, 2)
    output = joint_linear_head(*heads, random_ids(N), temperature=1.0, lam=1.0, num_top=2, gather_ids=gather_ids)

    for head_output in (output.policy, output.rollout_model):
        assert not head_output.top_log_probs.requires_grad
        assert not head_output.gathered.requires_grad
    assert not output.exact_z.requires_grad
    assert not output.fill_ins.requires_grad


def test_a_frozen_model_gets_no_gradient_and_the_other_does():
    policy, rollout_model = random_head(1), random_head(2)
    frozen = Head(hidden=rollout_model.hidden.detach(), weight=rollout_model.weight.detach())
    output = joint_linear_head(policy, frozen, random_ids(N), temperature=1.0, lam=1.0)
    expected = naive_head(naive_log_probs(policy, 1.0), random_ids(N), 0, random_ids(N, 0))

    loss = output.policy.log_probs.sum() + output.forward_kl.sum() + output.rollout_model.log_probs.sum()

    assert_same_gradients(loss, expected.log_probs.sum(), leaves(policy))


def test_a_second_derivative_is_refused():
    head = random_head(1)
    output = linear_head(head, random_ids(N), temperature=1.0)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(output.entropy.sum(), head.hidden, create_graph=True)


# Edges


def test_more_top_tokens_than_the_vocabulary_gives_all_of_it():
    output = joint_linear_head(random_head(1), random_head(2), random_ids(N), temperature=1.0, lam=1.0, num_top=V + 9)
    assert output.policy.top_ids.sort(-1).values.equal(torch.arange(V).expand(N, V))
    assert output.fill_ins.shape == (N, V)


def test_no_positions_give_empty_outputs_and_zero_gradients():
    policy, rollout_model = random_head(1, "bias", n=0), random_head(2, n=0)
    output = joint_linear_head(
        policy, rollout_model, random_ids(0), temperature=1.0, lam=1.0, num_top=3, gather_ids=random_ids(0, 2)
    )

    assert output.forward_kl.shape == (0,)
    assert output.fill_ins.shape == (0, 3)
    assert output.policy.gathered.shape == (0, 2)
    assert output.policy.top_ids.dtype == torch.int64

    loss_of(output).backward()
    assert all(tensor.grad.shape == tensor.shape and not tensor.grad.any() for tensor in leaves(policy, rollout_model))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradient_the_values_are_the_same(mode):
    heads, ids = (random_head(1), random_head(2)), random_ids(N)
    with mode():
        output = joint_linear_head(*heads, ids, temperature=1.0, lam=1.0, num_top=2, tile=(3, 4))
    expected = naive_joint(*(naive_log_probs(head, 1.0).detach() for head in heads), ids, 1.0, 2, random_ids(N, 0))

    assert not output.policy.log_probs.requires_grad
    assert_same(output, expected)


def banning(head: Head, *tokens: int) -> Head:
    bias = torch.zeros(V, dtype=torch.float64)
    bias[list(tokens)] = -torch.inf
    return Head(hidden=head.hidden, weight=head.weight, bias=bias.requires_grad_())


def test_a_token_that_both_ban_is_as_if_it_were_not_there():
    policy = random_head(1)
    rollout_model = random_head(2)
    ids = random_ids(N) % (V - 1)
    output = joint_linear_head(
        banning(policy, V - 1), banning(rollout_model, V - 1), ids, temperature=0.7, lam=1.0, num_top=V - 1
    )
    shorter = [Head(hidden=head.hidden, weight=head.weight[: V - 1]) for head in (policy, rollout_model)]

    expected = naive_joint(*(naive_log_probs(head, 0.7) for head in shorter), ids, 1.0, V - 1, random_ids(N, 0))

    assert_same(output, expected)
    assert_same_gradients(loss_of(output), loss_of(expected), leaves(policy, rollout_model))


def test_mass_outside_the_rollout_model_has_a_finite_gradient():
    policy = random_head(1)
    rollout_model = banning(random_head(2), 3)
    ids = torch.zeros(N, dtype=torch.int64)
    output = joint_linear_head(policy, rollout_model, ids, temperature=1.0, lam=1.0)

    log_p, log_q = naive_log_probs(policy, 1.0).detach(), naive_log_probs(rollout_model, 1.0).detach()

    assert output.forward_kl.isposinf().all()

    reverse = torch.where(log_q.isneginf(), 0.0, log_q.exp() * (log_q - log_p)).sum(-1)
    torch.testing.assert_close(output.reverse_kl.detach(), reverse)

    (to_hidden,) = torch.autograd.grad(output.forward_kl.sum(), rollout_model.hidden, retain_graph=True)
    torch.testing.assert_close(to_hidden, (log_q.exp() - log_p.exp()) @ rollout_model.weight)
    for value in (output.rollout_model.entropy, output.reverse_kl, output.rollout_model.log_probs):
        assert all(
            grad.isfinite().all() for grad in torch.autograd.grad(value.sum(), leaves(rollout_model), retain_graph=True)
        )


@pytest.mark.parametrize("tile", [(1, 2), (1, 1), (1, 4)])
@pytest.mark.parametrize(("later", "is_infinite"), [(300.0, False), (50.0, True)])
def test_a_banned_token_counts_by_the_mass_of_the_other_head(later, is_infinite, tile):
    """In float32 e^-300 is 0. Token 0 is most of its own tile; only the next tile shows how little that is."""
    hidden, ids = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
    policy = Head(hidden=hidden, weight=torch.tensor([[2.0], [1.0], [later], [later]]))
    bias = torch.tensor([-torch.inf, 0.0, 0.0, 0.0])
    rollout_model = Head(hidden=hidden, weight=torch.tensor([[1.0], [1.0], [3.0], [3.0]]), bias=bias)
    for heads, name in (((policy, rollout_model), "forward_kl"), ((rollout_model, policy), "reverse_kl")):
        output = joint_linear_head(*heads, ids + 1, temperature=1.0, lam=1.0, tile=tile)
        if is_infinite:
            assert getattr(output, name).isposinf().all()
        else:
            expected = -torch.log_softmax(torch.tensor([1.0, 3.0, 3.0]), -1)[1] - math.log(2.0)
            torch.testing.assert_close(getattr(output, name)[0], expected)

        assert output.policy.entropy.isfinite().all()
        assert output.rollout_model.entropy.isfinite().all()


def test_a_tile_whose_tokens_are_all_masked_adds_nothing():
    policy = random_head(1)
    rollout_model = random_head(2)
    ids = random_ids(N) % 3 + 4
    output = joint_linear_head(
        *(banning(head, 0, 1, 2, 3, 8, 9) for head in (policy, rollout_model)),
        ids,
        temperature=0.7,
        lam=1.0,
        tile=(3, 4),
    )
    kept = [4, 5, 6, 7, 10]
    shorter = [Head(hidden=head.hidden, weight=head.weight[kept]) for head in (policy, rollout_model)]
    log_probs = [naive_log_probs(head, 0.7) for head in shorter]

    expected = naive_joint(*log_probs, ids - 4, 1.0, 0, random_ids(N, 0))

    assert_same(output, expected)
    assert_same_gradients(loss_of(output), loss_of(expected), leaves(policy, rollout_model))


def test_an_infinite_kl_that_the_loss_leaves_out_is_harmless():
    policy, rollout_model = banning(random_head(1), 3), random_head(2)
    ids = torch.zeros(N, dtype=torch.int64)
    output = joint_linear_head(policy, rollout_model, ids, temperature=1.0, lam=1.0)

    assert output.reverse_kl.isposinf().all()
    assert output.forward_kl.isfinite().all()

    left_out = torch.where(output.reverse_kl.isfinite(), output.reverse_kl, 0.0)
    expected = naive_head(naive_log_probs(rollout_model, 1.0), ids, 0, random_ids(N, 0))
    loss = (output.rollout_model.log_probs + left_out).sum()

    assert_same_gradients(loss, expected.log_probs.sum(), leaves(rollout_model))


def test_a_nan_is_passed_on():
    head = random_head(1)
    broken = Head(hidden=head.hidden.detach().index_fill(0, torch.tensor([2]), torch.nan), weight=head.weight)
    output = linear_head(broken, random_ids(N), temperature=1.0)
    for value in (output.log_probs, output.entropy):
        assert value.isnan().nonzero().flatten().tolist() == [2]


# The module


def test_the_module_is_the_function_of_the_layers_parameters():
    torch.manual_seed(0)
    first, second = nn.Linear(H, V, bias=False).double(), nn.Linear(3, V).double()
    module = LinearHead(first, second, policy_soft_cap=2.0, rollout_model_soft_cap=0.5)

    assert [id(p) for p in module.parameters()] == [id(p) for p in (first.weight, second.weight, second.bias)]

    hidden = random_head(1).hidden
    other = random_head(2, h=3).hidden
    ids = random_ids(N)
    policy = Head(hidden=hidden, weight=first.weight, soft_cap=2.0)
    rollout_model = Head(hidden=other, weight=second.weight, bias=second.bias, soft_cap=0.5)
    rest = dict(num_top=2, gather_ids=random_ids(N, 2))

    log_probs = [naive_log_probs(head, 0.7) for head in (policy, rollout_model)]

    assert_same(
        module(hidden, other, ids, temperature=0.7, lam=1.4, tile=(2, 3), **rest),
        naive_joint(*log_probs, ids, 1.4, **rest),
    )
    assert_same(module(hidden, None, ids, temperature=0.7, **rest), naive_head(log_probs[0], ids, **rest))


def test_the_module_refuses_what_it_cannot_compare():
    hidden, ids = random_head(1).hidden, random_ids(N)
    with pytest.raises(ValueError, match="policy alone"):
        LinearHead(nn.Linear(H, V))(hidden, hidden, ids, temperature=1.0, lam=1.0)


def test_fsdp_gathers_both_weights_for_forward_and_backward(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    first, second = nn.Linear(H, V).double(), nn.Linear(3, V).double()
    hidden = random_head(1).hidden
    other = random_head(2, h=3).hidden
    ids = random_ids(N)
    whole = [p.detach().clone().requires_grad_() for p in (*first.parameters(), *second.parameters())]
    heads = Head(hidden=hidden, weight=whole[0], bias=whole[1]), Head(hidden=other, weight=whole[2], bias=whole[3])
    loss_of(naive_joint(*(naive_log_probs(head, 1.0) for head in heads), ids, 1.0, 0, random_ids(N, 0))).backward()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = fully_shard(LinearHead(first, second), mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
        output = module(hidden, other, ids, temperature=1.0, lam=1.0, tile=(2, 3))

        with pytest.raises(ValueError, match="fully_shard"):
            linear_head(Head(hidden=hidden, weight=first.weight), ids, temperature=1.0)

        loss_of(output).backward()
        for parameter, expected in zip(module.parameters(), whole, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
    finally:
        torch.distributed.destroy_process_group()


def test_the_outputs_are_pytrees_of_their_tensors():
    """FSDP of torch 2.11 finds the tensors whose backward needs the weights again through the pytree of the output."""
    output = joint_linear_head(random_head(1), random_head(2), random_ids(N), temperature=1.0, lam=1.0)
    assert [id(leaf) for leaf in tree_leaves(output)][-4:] == [id(getattr(output, f.name)) for f in fields(output)[2:]]
    assert len(tree_leaves(output)) == 14


# Errors


def heads_with(**change) -> tuple[Head, Head]:
    policy, rollout_model = random_head(1, "bias"), random_head(2)
    tensors = dict(hidden=policy.hidden, weight=policy.weight, bias=policy.bias) | change
    return Head(**tensors), rollout_model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weight=torch.zeros(V + 2, H), bias=None), r"vocabularies of \[13, 11\] tokens"),
        (dict(hidden=torch.zeros(N + 1, H)), r"\[8, 7\] hidden states and ids 7"),
    ],
)
def test_heads_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        joint_linear_head(*heads_with(**change), random_ids(N), temperature=1.0, lam=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(ids=random_ids(N + 1)), r"\[7, 7\] hidden states and ids 8"),
        (dict(ids=torch.full((N,), -100)), r"ids holds ids from -100 to -100: all must be in \[0, 11\)"),
        (dict(ids=torch.full((N,), V)), "ids holds ids from 11 to 11"),
        (dict(gather_ids=torch.full((N, 2), V)), "gather_ids holds ids from 11 to 11"),
    ],
)
def test_ids_that_mean_nothing_are_refused(change, message):
    options = dict(ids=random_ids(N), temperature=1.0, lam=1.0) | change
    with pytest.raises(ValueError, match=message):
        joint_linear_head(random_head(1), random_head(2), **options)
