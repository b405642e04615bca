"""The head that works tile by tile gives the values and gradients of full-vocabulary logits in float64, on the edges
as well (no positions, banned tokens, shared weights), and refuses what does not fit. The reference: naive_head.py.
"""

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
LOGITS_FORMED_TWICE = HeadOptions(logits_memory=0)
LOGITS_KEPT = HeadOptions(logits_memory=2**20)


# Values and gradients


@pytest.mark.parametrize("options", [LOGITS_FORMED_TWICE, LOGITS_KEPT])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("kind", "temperature"), [("plain", 1.0), ("bias", 0.6), ("soft_cap", 0.6)])
def test_one_head_is_the_full_softmax(kind, temperature, tile, options):
    head = random_head(1, kind)
    ids = random_ids(N)
    gather_ids = random_ids(N, 4)

    settings = dict(num_top=3, gather_ids=gather_ids, tile=tile, options=options)
    output = linear_head(head, ids, temperature=temperature, **settings)

    expected = naive_head(naive_log_probs(head, temperature), ids, num_top=3, gather_ids=gather_ids)
    assert_same(output, expected)
    assert_same_gradients(loss_of(output), loss_of(expected), leaves(head))


@pytest.mark.parametrize("options", [LOGITS_FORMED_TWICE, LOGITS_KEPT])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("kind", "lam"), [("plain", 1.0), ("bias", 0.4), ("soft_cap", 2.5)])
def test_two_heads_are_the_two_full_softmaxes(kind, lam, tile, options):
    policy = random_head(1, kind)
    rollout_model = random_head(2, "bias", h=H - 2)
    ids = random_ids(N)
    settings = dict(lam=lam, num_top=3, gather_ids=random_ids(N, 4))

    output = joint_linear_head(policy, rollout_model, ids, temperature=0.7, tile=tile, options=options, **settings)

    expected = naive_joint(naive_log_probs(policy, 0.7), naive_log_probs(rollout_model, 0.7), ids, **settings)
    assert_same(output, expected)
    assert_same_gradients(loss_of(output), loss_of(expected), leaves(policy, rollout_model))


@pytest.mark.parametrize("tile", [(40, 100), (16, 37), (7, 256)])
@pytest.mark.parametrize("num_top", [5, 70])
def test_a_top_in_several_tiles_of_different_widths(num_top, tile):
    n = 40
    v = 257
    policy = random_head(1, "bias", n, v)
    rollout_model = random_head(2, n=n, v=v, h=3)
    ids = random_ids(n, v=v)
    settings = dict(lam=0.8, num_top=num_top, gather_ids=random_ids(n, 6, v=v))

    output = joint_linear_head(policy, rollout_model, ids, temperature=0.9, tile=tile, **settings)

    expected = naive_joint(naive_log_probs(policy, 0.9), naive_log_probs(rollout_model, 0.9), ids, **settings)
    assert_same(output, expected)
    assert_same_gradients(loss_of(output), loss_of(expected), leaves(policy, rollout_model))


def test_a_vocabulary_of_one_token_is_certain():
    heads = random_head(1, "bias", v=1), random_head(2, v=1)
    ids = torch.zeros(N, dtype=torch.int64)

    output = joint_linear_head(*heads, ids, temperature=0.5, lam=1.0, num_top=4)

    for values in (output.policy.log_probs, output.rollout_model.entropy, output.forward_kl):
        assert values.tolist() == [0.0] * N
    assert output.fill_ins.tolist() == [[0.0]] * N
    assert output.policy.top_ids.tolist() == [[0]] * N
    assert output.exact_z.tolist() == [1.0] * N

    loss_of(output).backward()
    assert not any(tensor.grad.any() for tensor in leaves(*heads))


def test_tied_tokens_give_distinct_ids_and_their_log_probs():
    n = 9
    v = 130
    policy = random_head(1, n=n, v=v)
    rollout_model = random_head(2, n=n, v=v)
    uniform_policy = Head(hidden=torch.zeros(n, H, dtype=torch.float64), weight=policy.weight)

    ids = random_ids(n, v=v)
    output = joint_linear_head(uniform_policy, rollout_model, ids, temperature=1.0, num_top=50, tile=(4, 33))

    assert all(len(set(row)) == 50 for row in output.policy.top_ids.tolist())

    expected_log_probs = naive_log_probs(rollout_model, 1.0).gather(1, output.policy.top_ids)
    torch.testing.assert_close(output.fill_ins, expected_log_probs.detach())


def test_a_weight_that_both_heads_share_gets_both_gradients():
    policy = random_head(1)
    tied_head = Head(hidden=random_head(2).hidden, weight=policy.weight, soft_cap=2.0)
    ids = random_ids(N)

    output = joint_linear_head(policy, tied_head, ids, temperature=1.3, lam=1.0, tile=(2, 3))

    log_probs = naive_log_probs(policy, 1.3), naive_log_probs(tied_head, 1.3)
    expected = naive_joint(*log_probs, ids, lam=1.0, num_top=0, gather_ids=random_ids(N, 0))
    assert_same(output, expected)
    assert_same_gradients(loss_of(output), loss_of(expected), leaves(policy, tied_head))


@pytest.mark.parametrize("kind", ["plain", "bias", "soft_cap"])
def test_the_gradient_of_one_head_passes_gradcheck(kind):
    head = random_head(1, kind, n=3, v=4, h=2)
    ids = random_ids(3, v=4)

    def values(*tensors):
        varied_head = Head(**dict(zip(("hidden", "weight", "bias"), tensors, strict=False)), soft_cap=head.soft_cap)
        output = linear_head(varied_head, ids, temperature=0.8, tile=(2, 3))
        return output.log_probs, output.entropy

    assert torch.autograd.gradcheck(values, leaves(head))


def test_the_gradients_of_two_heads_pass_gradcheck():
    policy = random_head(1, n=3, v=4, h=2)
    rollout_model = random_head(2, n=3, v=4, h=3)
    ids = random_ids(3, v=4)

    def joint_output(policy_tensors, rollout_model_tensors):
        policy_head = Head(hidden=policy_tensors[0], weight=policy_tensors[1])
        rollout_model_head = Head(hidden=rollout_model_tensors[0], weight=rollout_model_tensors[1], soft_cap=2.0)
        return joint_linear_head(policy_head, rollout_model_head, ids, temperature=0.8, lam=1.0, tile=(2, 3))

    def policy_outputs(*tensors):
        output = joint_output(tensors, leaves(rollout_model))
        return output.policy.log_probs, output.policy.entropy

    def rollout_model_outputs(*tensors):
        output = joint_output([tensor.detach() for tensor in leaves(policy)], tensors)
        return output.rollout_model.log_probs, output.rollout_model.entropy, output.forward_kl, output.reverse_kl

    assert torch.autograd.gradcheck(policy_outputs, leaves(policy))
    assert torch.autograd.gradcheck(rollout_model_outputs, leaves(rollout_model))


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl"])
def test_divergences_train_the_rollout_model_only(name):
    policy = random_head(1, "bias")
    rollout_model = random_head(2, "bias")
    output = joint_linear_head(policy, rollout_model, random_ids(N), temperature=1.0, lam=1.0, tile=(2, 3))

    getattr(output, name).sum().backward()

    assert all(tensor.grad is None or not tensor.grad.any() for tensor in leaves(policy))
    assert all(tensor.grad.any() for tensor in leaves(rollout_model))


def test_tops_gathered_z_and_fill_ins_carry_no_gradient():
    heads = random_head(1), random_head(2)
    gather_ids = random_ids(N, 2)

    output = joint_linear_head(*heads, random_ids(N), temperature=1.0, lam=1.0, num_top=2, gather_ids=gather_ids)

    for head_output in (output.policy, output.rollout_model):
        assert not head_output.top_log_probs.requires_grad
        assert not head_output.gathered.requires_grad
    assert not output.exact_z.requires_grad
    assert not output.fill_ins.requires_grad


def test_a_frozen_model_gets_no_gradient_and_the_other_does():
    policy = random_head(1)
    rollout_model = random_head(2)
    frozen_model = Head(hidden=rollout_model.hidden.detach(), weight=rollout_model.weight.detach())

    output = joint_linear_head(policy, frozen_model, random_ids(N), temperature=1.0, lam=1.0)
    loss = output.policy.log_probs.sum() + output.forward_kl.sum() + output.rollout_model.log_probs.sum()

    expected = naive_head(naive_log_probs(policy, 1.0), random_ids(N), num_top=0, gather_ids=random_ids(N, 0))
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
    policy = random_head(1, "bias", n=0)
    rollout_model = random_head(2, n=0)

    output = joint_linear_head(
        policy, rollout_model, random_ids(0), temperature=1.0, lam=1.0, num_top=3, gather_ids=random_ids(0, 2)
    )

    assert output.forward_kl.shape == (0,)
    assert output.fill_ins.shape == (0, 3)
    assert output.policy.gathered.shape == (0, 2)
    assert output.policy.top_ids.dtype == torch.int64

    loss_of(output).backward()
    for tensor in leaves(policy, rollout_model):
        assert tensor.grad.shape == tensor.shape
        assert not tensor.grad.any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradient_the_values_are_the_same(mode):
    heads = random_head(1), random_head(2)
    ids = random_ids(N)

    with mode():
        output = joint_linear_head(*heads, ids, temperature=1.0, lam=1.0, num_top=2, tile=(3, 4))

    log_probs = [naive_log_probs(head, 1.0).detach() for head in heads]
    expected = naive_joint(*log_probs, ids, lam=1.0, num_top=2, gather_ids=random_ids(N, 0))
    assert not output.policy.log_probs.requires_grad
    assert_same(output, expected)


def head_that_bans(head: Head, *tokens: int) -> Head:
    """Return the head with a bias of -inf at these tokens."""
    bias = torch.zeros(V, dtype=torch.float64)
    bias[list(tokens)] = -torch.inf
    return Head(hidden=head.hidden, weight=head.weight, bias=bias.requires_grad_())


def test_a_token_that_both_ban_is_as_if_it_were_not_there():
    policy = random_head(1)
    rollout_model = random_head(2)
    ids = random_ids(N) % (V - 1)

    output = joint_linear_head(
        head_that_bans(policy, V - 1),
        head_that_bans(rollout_model, V - 1),
        ids,
        temperature=0.7,
        lam=1.0,
        num_top=V - 1,
    )

    shorter_heads = [Head(hidden=head.hidden, weight=head.weight[: V - 1]) for head in (policy, rollout_model)]
    log_probs = [naive_log_probs(head, 0.7) for head in shorter_heads]
    expected = naive_joint(*log_probs, ids, lam=1.0, num_top=V - 1, gather_ids=random_ids(N, 0))
    assert_same(output, expected)
    assert_same_gradients(loss_of(output), loss_of(expected), leaves(policy, rollout_model))


def test_mass_outside_the_rollout_model_has_a_finite_gradient():
    policy = random_head(1)
    rollout_model = head_that_bans(random_head(2), 3)
    ids = torch.zeros(N, dtype=torch.int64)

    output = joint_linear_head(policy, rollout_model, ids, temperature=1.0, lam=1.0)

    log_p = naive_log_probs(policy, 1.0).detach()
    log_q = naive_log_probs(rollout_model, 1.0).detach()
    assert output.forward_kl.isposinf().all()

    reverse_kl = torch.where(log_q.isneginf(), 0.0, log_q.exp() * (log_q - log_p)).sum(-1)
    torch.testing.assert_close(output.reverse_kl.detach(), reverse_kl)

    (to_hidden,) = torch.autograd.grad(output.forward_kl.sum(), rollout_model.hidden, retain_graph=True)
    torch.testing.assert_close(to_hidden, (log_q.exp() - log_p.exp()) @ rollout_model.weight)

    for value in (output.rollout_model.entropy, output.reverse_kl, output.rollout_model.log_probs):
        gradients = torch.autograd.grad(value.sum(), leaves(rollout_model), retain_graph=True)
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("tile", [(1, 2), (1, 1), (1, 4)])
@pytest.mark.parametrize(("later_logit", "is_infinite"), [(300.0, False), (50.0, True)])
def test_a_banned_token_counts_by_the_mass_of_the_other_head(later_logit, is_infinite, tile):
    """In float32 e^-300 is 0. Token 0 is most of its own tile; only the next tile shows how little that is."""
    hidden = torch.ones(1, 1)
    ids = torch.ones(1, dtype=torch.int64)
    policy = Head(hidden=hidden, weight=torch.tensor([[2.0], [1.0], [later_logit], [later_logit]]))
    bias = torch.tensor([-torch.inf, 0.0, 0.0, 0.0])
    rollout_model = Head(hidden=hidden, weight=torch.tensor([[1.0], [1.0], [3.0], [3.0]]), bias=bias)

    for heads, name in (((policy, rollout_model), "forward_kl"), ((rollout_model, policy), "reverse_kl")):
        output = joint_linear_head(*heads, ids, temperature=1.0, lam=1.0, tile=tile)
        if is_infinite:
            assert getattr(output, name).isposinf().all()
        else:
            expected_kl = -torch.log_softmax(torch.tensor([1.0, 3.0, 3.0]), -1)[1] - math.log(2.0)
            torch.testing.assert_close(getattr(output, name)[0], expected_kl)

        assert output.policy.entropy.isfinite().all()
        assert output.rollout_model.entropy.isfinite().all()


def test_a_tile_whose_tokens_are_all_masked_adds_nothing():
    policy = random_head(1)
    rollout_model = random_head(2)
    ids = random_ids(N) % 3 + 4
    heads = [head_that_bans(head, 0, 1, 2, 3, 8, 9) for head in (policy, rollout_model)]  # 0 to 3 are the first tile

    output = joint_linear_head(*heads, ids, temperature=0.7, lam=1.0, tile=(3, 4))

    kept_ids = [4, 5, 6, 7, 10]
    shorter_heads = [Head(hidden=head.hidden, weight=head.weight[kept_ids]) for head in (policy, rollout_model)]
    log_probs = [naive_log_probs(head, 0.7) for head in shorter_heads]
    expected = naive_joint(*log_probs, ids - 4, lam=1.0, num_top=0, gather_ids=random_ids(N, 0))
    assert_same(output, expected)
    assert_same_gradients(loss_of(output), loss_of(expected), leaves(policy, rollout_model))


def test_an_infinite_kl_that_the_loss_leaves_out_is_harmless():
    policy = head_that_bans(random_head(1), 3)
    rollout_model = random_head(2)
    ids = torch.zeros(N, dtype=torch.int64)

    output = joint_linear_head(policy, rollout_model, ids, temperature=1.0, lam=1.0)

    assert output.reverse_kl.isposinf().all()
    assert output.forward_kl.isfinite().all()

    finite_kl = torch.where(output.reverse_kl.isfinite(), output.reverse_kl, 0.0)
    loss = (output.rollout_model.log_probs + finite_kl).sum()
    expected = naive_head(naive_log_probs(rollout_model, 1.0), ids, num_top=0, gather_ids=random_ids(N, 0))
    assert_same_gradients(loss, expected.log_probs.sum(), leaves(rollout_model))


def test_a_nan_is_passed_on():
    head = random_head(1)
    broken_head = Head(hidden=head.hidden.detach().index_fill(0, torch.tensor([2]), torch.nan), weight=head.weight)

    output = linear_head(broken_head, random_ids(N), temperature=1.0)

    for value in (output.log_probs, output.entropy):
        assert value.isnan().nonzero().flatten().tolist() == [2]


# The module


def test_the_module_is_the_function_of_the_layers_parameters():
    torch.manual_seed(0)
    policy_layer = nn.Linear(H, V, bias=False).double()
    model_layer = nn.Linear(3, V).double()
    module = LinearHead(policy_layer, model_layer, policy_soft_cap=2.0, rollout_model_soft_cap=0.5)

    layer_parameters = (policy_layer.weight, model_layer.weight, model_layer.bias)
    assert [id(parameter) for parameter in module.parameters()] == [id(parameter) for parameter in layer_parameters]

    hidden = random_head(1).hidden
    model_hidden = random_head(2, h=3).hidden
    ids = random_ids(N)
    policy = Head(hidden=hidden, weight=policy_layer.weight, soft_cap=2.0)
    rollout_model = Head(hidden=model_hidden, weight=model_layer.weight, bias=model_layer.bias, soft_cap=0.5)
    policy_log_probs = naive_log_probs(policy, 0.7)
    model_log_probs = naive_log_probs(rollout_model, 0.7)
    settings = dict(num_top=2, gather_ids=random_ids(N, 2))

    joint_output = module(hidden, model_hidden, ids, temperature=0.7, lam=1.4, tile=(2, 3), **settings)
    policy_output = module(hidden, None, ids, temperature=0.7, **settings)

    assert_same(joint_output, naive_joint(policy_log_probs, model_log_probs, ids, lam=1.4, **settings))
    assert_same(policy_output, naive_head(policy_log_probs, ids, **settings))


def test_a_module_of_the_policy_alone_refuses_the_others_states():
    hidden = random_head(1).hidden
    ids = random_ids(N)
    with pytest.raises(ValueError, match="policy alone"):
        LinearHead(nn.Linear(H, V))(hidden, hidden, ids, temperature=1.0, lam=1.0)


def test_fsdp_gathers_both_weights_for_forward_and_backward(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    policy_layer = nn.Linear(H, V).double()
    model_layer = nn.Linear(3, V).double()
    hidden = random_head(1).hidden
    model_hidden = random_head(2, h=3).hidden
    ids = random_ids(N)

    parameters = (*policy_layer.parameters(), *model_layer.parameters())
    copies = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    policy_weight, policy_bias, model_weight, model_bias = copies
    heads = (
        Head(hidden=hidden, weight=policy_weight, bias=policy_bias),
        Head(hidden=model_hidden, weight=model_weight, bias=model_bias),
    )
    log_probs = [naive_log_probs(head, 1.0) for head in heads]
    loss_of(naive_joint(*log_probs, ids, lam=1.0, num_top=0, gather_ids=random_ids(N, 0))).backward()

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = LinearHead(policy_layer, model_layer)
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
        output = module(hidden, model_hidden, ids, temperature=1.0, lam=1.0, tile=(2, 3))

        with pytest.raises(ValueError, match="fully_shard"):
            linear_head(Head(hidden=hidden, weight=policy_layer.weight), ids, temperature=1.0)

        loss_of(output).backward()
        for parameter, expected in zip(module.parameters(), copies, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
    finally:
        torch.distributed.destroy_process_group()


def test_the_outputs_are_pytrees_of_their_tensors():
    """FSDP of torch 2.11 finds the tensors whose backward needs the weights again through the pytree of the output."""
    output = joint_linear_head(random_head(1), random_head(2), random_ids(N), temperature=1.0, lam=1.0)
    tensors = tree_leaves(output)
    last_fields = [getattr(output, field.name) for field in fields(output)[2:]]  # without those of the two heads

    assert [id(tensor) for tensor in tensors[-4:]] == [id(tensor) for tensor in last_fields]
    assert len(tensors) == 14  # and five of each head


# Errors


def heads_with(**change) -> tuple[Head, Head]:
    """Return two heads, of which the first has these tensors in place of its own."""
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
