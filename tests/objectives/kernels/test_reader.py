"""Triton's tile reader gives what the eager one gives, and the kernel is chosen by the device and by what runs there.

Without a GPU, Triton runs in its interpreter.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from helpers.naive_head import assert_same, leaves, loss_of, random_head, random_ids
from jackpot.core.errors import ConfigError
from jackpot.launch import head_kernel
from jackpot.objectives.kernels import reader
from jackpot.objectives.kernels.autograd import HeadOptions
from jackpot.objectives.kernels.linear_head import Head, joint_linear_head, linear_head

N, V = 3, 150  # no multiples of a block
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def triton() -> reader.TileReader:
    """Return Triton's tile reader, or skip the test where it cannot run."""
    pytest.importorskip("triton", reason="Triton is not installed: make test-all installs it")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton runs without a GPU where TRITON_INTERPRET=1 was set before it was imported")
    return head_kernel.tile_reader("triton", CPU)


def as_float32(head: Head) -> Head:
    """Return the head with trainable copies of its tensors in float32."""
    tensors = {name: getattr(head, name) for name in ("hidden", "weight", "bias") if getattr(head, name) is not None}
    copies = {name: tensor.detach().float().requires_grad_() for name, tensor in tensors.items()}
    return Head(**copies, soft_cap=head.soft_cap)


def head_that_bans(head: Head) -> Head:
    """Return the head with a bias of -inf at some tokens."""
    bias = torch.zeros(V).index_fill(0, torch.tensor([0, 3, 70]), -torch.inf).requires_grad_()
    return Head(hidden=head.hidden, weight=head.weight, bias=bias)


def heads_of(kind: str) -> list[Head]:
    """Return a policy of this kind and a rollout model, in float32."""
    policy = as_float32(random_head(1, "plain" if kind == "banned" else kind, N, V))
    heads = [head_that_bans(policy) if kind == "banned" else policy]
    return [*heads, as_float32(random_head(2, "bias", N, V, h=3))]


def output_and_gradients(heads: list[Head], tile_reader: reader.TileReader, memory: int, bf16: bool, **options):
    """Compute one head or two with this reader; the loss leaves out divergences where one is infinite."""
    settings = dict(options, options=HeadOptions(tile_reader, memory), gather_ids=random_ids(N, 3, v=V))
    head_function = joint_linear_head if len(heads) == 2 else linear_head
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = head_function(*heads, random_ids(N, v=60) + 71, **settings)
    divergences = [output.forward_kl, output.reverse_kl] if len(heads) == 2 else []
    if all(bool(divergence.isfinite().all()) for divergence in divergences):
        loss = loss_of(output)
    else:
        loss = output.policy.log_probs.sum() + output.rollout_model.log_probs.sum()
    return output, torch.autograd.grad(loss, leaves(*heads))


@pytest.mark.slow  # the interpreter is
@pytest.mark.parametrize(("bf16", "tile", "memory"), [(False, (2, 64), 0), (True, (3, 100), 2**20), (True, None, 0)])
@pytest.mark.parametrize("kind", ["plain", "bias", "soft_cap", "banned"])
def test_triton_gives_what_the_eager_reader_gives(kind, bf16, tile, memory, triton):
    temperature = 1.0 if kind == "plain" else 0.7
    heads = heads_of(kind)
    cases = [
        (heads, dict(lam=0.8, num_top=3, tile=tile)),
        (heads, dict(tile=tile)),
        (heads[:1], dict(num_top=3, tile=tile)),
    ]

    for case_heads, options in cases:
        settings = dict(memory=memory, bf16=bf16, temperature=temperature, **options)
        expected, expected_gradients = output_and_gradients(case_heads, reader.EAGER, **settings)
        output, gradients = output_and_gradients(case_heads, triton, **settings)

        assert_same(output, expected, rtol=1e-5, atol=2e-5)
        tolerance = dict(rtol=2**-6, atol=2e-2) if bf16 else dict(rtol=1e-5, atol=5e-5)
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, **tolerance)


@pytest.mark.slow
def test_triton_leaves_float64_to_eager_and_takes_no_positions(triton):
    settings = dict(memory=0, bf16=False, temperature=0.7, num_top=3, lam=0.8)
    heads = [random_head(1, n=N, v=V), random_head(2, n=N, v=V)]

    expected, expected_gradients = output_and_gradients(heads, reader.EAGER, **settings)
    output, gradients = output_and_gradients(heads, triton, **settings)

    assert_same(output, expected)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.equal(expected_gradient)

    empty_head = as_float32(random_head(1, n=0, v=V))
    output = linear_head(empty_head, random_ids(0), temperature=1.0, num_top=2, options=HeadOptions(triton))
    output.log_probs.sum().backward()

    assert output.top_ids.shape == (0, 2)
    assert not empty_head.weight.grad.any()


def test_the_kernel_is_chosen_by_setting_device_and_package(monkeypatch):
    assert head_kernel.tile_reader("auto", CPU) is reader.EAGER
    assert head_kernel.tile_reader("eager", torch.device("cuda")) is reader.EAGER

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(head_kernel, "find_spec", lambda name: object())

    with pytest.raises(ConfigError, match="head_kernel is triton, but the device is cpu"):
        head_kernel.tile_reader("triton", CPU)

    monkeypatch.setattr(head_kernel, "find_spec", lambda name: None)
    assert head_kernel.tile_reader("auto", torch.device("cuda")) is reader.EAGER
    with pytest.raises(ConfigError, match="Triton is not installed"):
        head_kernel.tile_reader("triton", torch.device("cuda"))


def test_auto_takes_the_eager_reader_where_triton_cannot_run(monkeypatch):
    class WithoutCompiler(reader.TorchReader):
        def read(self, *_, **__):
            raise RuntimeError("Failed to find C compiler\nand a long trace")

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # a GPU is not asked for
    monkeypatch.setattr(head_kernel, "find_spec", lambda name: object())
    monkeypatch.setattr(head_kernel, "import_module", lambda name: SimpleNamespace(TRITON=WithoutCompiler()))

    with pytest.raises(ConfigError, match=r"no kernel here: Failed to find C compiler; it needs .* Python's headers"):
        head_kernel.tile_reader("triton", CPU)
    with pytest.warns(UserWarning, match="auto takes torch's operators, which are slower: Triton runs no kernel here"):
        assert head_kernel.tile_reader("auto", torch.device("cuda")) is reader.EAGER
