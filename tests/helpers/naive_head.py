"""The reference for the tiled head: the definitions, on [N, V] tensors in float64, differentiated by autograd."""

from dataclasses import fields

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from jackpot.objectives.kernels.linear_head import Head, HeadOutput, JointOutput

N, V = 7, 11  # tokens, vocabulary
H = 5  # hidden size


def random_head(seed: int, kind: str = "plain", n: int = N, v: int = V, h: int = H, dtype=torch.float64) -> Head:
    """Return a head of random tensors; a `kind` other than plain has a bias, and `soft_cap` caps the logits too."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    bias = leaf(v) if kind != "plain" else None
    return Head(hidden=leaf(n, h), weight=leaf(v, h), bias=bias, soft_cap=1.5 if kind == "soft_cap" else None)


def random_ids(*shape: int, v: int = V) -> Tensor:
    return torch.randint(v, shape, generator=torch.Generator().manual_seed(9))


def leaves(*heads: Head) -> list[Tensor]:
    """Return the distinct tensors that gradient flows into."""
    tensors = [tensor for head in heads for tensor in head.tensors if tensor is not None]
    return list({id(tensor): tensor for tensor in tensors}.values())


def naive_log_probs(head: Head, temperature: float) -> Tensor:
    """Return the log-probs of the whole vocabulary, [N, V]."""
    logits = head.hidden.double() @ head.weight.double().t()
    if head.bias is not None:
        logits = logits + head.bias.double()
    if head.soft_cap is not None:
        logits = head.soft_cap * torch.tanh(logits / head.soft_cap)
    return torch.log_softmax(logits / temperature, dim=-1)


def naive_head(log_probs: Tensor, ids: Tensor, num_top: int, gather_ids: Tensor) -> HeadOutput:
    """Return what one head gives, from the log-probs of the whole vocabulary."""
    top = log_probs.detach().topk(min(num_top, log_probs.shape[-1]))
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    token_log_probs = torch.stack([row[token] for row, token in zip(log_probs, ids, strict=True)])
    return HeadOutput(token_log_probs, entropy, top.indices, top.values, log_probs.detach().gather(-1, gather_ids))


def naive_joint(policy: Tensor, rollout_model: Tensor, ids: Tensor, lam: float, num_top: int, gather_ids: Tensor):
    """Return what both heads give together, from the log-probs of the whole vocabulary."""
    fixed = policy.detach()
    outputs = [naive_head(log_probs, ids, num_top, gather_ids) for log_probs in (policy, rollout_model)]
    forward_kl = (fixed.exp() * (fixed - rollout_model)).sum(-1)
    reverse_kl = (rollout_model.exp() * (rollout_model - fixed)).sum(-1)
    kept_mass = torch.minimum(rollout_model.detach().exp(), fixed.exp() / lam)
    return JointOutput(
        *outputs, forward_kl, reverse_kl, rollout_model.detach().gather(-1, outputs[0].top_ids), kept_mass.sum(-1)
    )


def loss_of(output: HeadOutput | JointOutput) -> Tensor:
    """Add all entries up that have a gradient, each with a coefficient of its own."""
    values = [leaf for leaf in tree_leaves(output) if leaf.requires_grad]
    assert len(values) == (6 if isinstance(output, JointOutput) else 2)
    return sum((value * (torch.arange(len(value)) * 0.3 + k - 2.0)).sum() for k, value in enumerate(values))


def assert_same(output, expected, **tolerance) -> None:
    """Compare two outputs of one type field by field."""
    assert type(output) is type(expected)
    for field in fields(output):
        value, expected_value = getattr(output, field.name), getattr(expected, field.name)
        if isinstance(value, HeadOutput):
            assert_same(value, expected_value, **tolerance)
        else:
            torch.testing.assert_close(
                value, expected_value, msg=lambda text, name=field.name: f"{name}: {text}", **tolerance
            )


def assert_same_gradients(loss: Tensor, expected: Tensor, of: list[Tensor]) -> None:
    """Compare the gradients of two losses by the same tensors."""
    for gradient, expected_gradient in zip(
        torch.autograd.grad(loss, of), torch.autograd.grad(expected, of), strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)
