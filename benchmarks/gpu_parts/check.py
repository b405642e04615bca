"""Compares the GPU's numbers with the CPU's: gradients, states, top-k lists, log-probs of the engine, weights sent.

A gap is |a - b| / |b|, of log-probs in nats. A row fails too where another kernel attends than the one that serves
there, or where the engine replays no CUDA graphs.
"""

import copy
from functools import cache, partial
from typing import Any

import torch
from gpu_parts.attention import READERS, Reader, attending
from gpu_parts.machine import Machine
from gpu_parts.models import (
    TINY_VOCABULARY,
    head_kernels,
    learner_of,
    make_config,
    make_engine,
    make_model,
    make_requests,
    random_samples,
)
from gpu_parts.results import Result, Row
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jackpot.core.digest import weights_digest
from jackpot.core.types import Version
from jackpot.objectives.kernels.linear_head import Head, linear_head
from jackpot.training.batching import batch_to, collate, micro_batches, plain_batches

CPU = torch.device("cpu")
FP32_GAP, BF16_GAP = 1e-4, 0.05  # of gradients
LOG_PROB_GAP = 1e-4  # nats
BF16_LOG_PROB_GAP = 0.01  # nats, mean over sampled tokens
ONE, SEVERAL = 10_000, 150  # tokens of a micro-batch
NAMES = ("Qwen3 1.7B", "Qwen3 0.6B")


def rows(machine: Machine) -> list[Row]:
    device = machine.device
    updates = [
        ("two models, one micro-batch", 2, ONE),
        ("two models, several micro-batches", 2, SEVERAL),
        ("one model, several micro-batches", 1, SEVERAL),
    ]
    found = [
        Row(f"gradients in fp32, {name}", partial(compare_gradients, device, "fp32", count, budget, FP32_GAP))
        for name, count, budget in updates
    ]
    for kernel in head_kernels(machine):
        compare = partial(compare_gradients, device, "fp32", 2, SEVERAL, FP32_GAP, kernel)
        found.append(Row(f"gradients in fp32, two models, head_kernel: {kernel['head_kernel']}", compare))
    found.append(Row("gradients in bf16, one model", partial(compare_gradients, device, "bf16", 1, ONE, BF16_GAP)))
    for precision, allowed in (("fp32", FP32_GAP), ("bf16", BF16_GAP)):
        for name, reader in READERS.items():
            found.append(
                Row(f"states in {precision}, {name}", partial(compare_states, device, precision, reader, allowed))
            )
    found.append(Row("top-k lists of the head in fp32", partial(compare_head, device, torch.float32)))
    found.append(Row("top-k lists of the head in bf16", partial(compare_head, device, torch.bfloat16)))
    for precision in ("fp32", "bf16"):
        for name, is_eager in (("", False), (", enforce_eager", True)):
            compare = partial(compare_engine, device, precision, is_eager)
            found.append(Row(f"log-probs of the engine in {precision}{name}", compare))
    found.append(Row("weights sent to the engine", partial(compare_weights, device)))
    return found


def verdict(gap: float, allowed: float) -> Result:
    return {"gap": gap, "allowed": allowed, "right": gap <= allowed}


@cache
def _models(count: int) -> list[torch.nn.Module]:
    return [make_model(name, CPU, tiny=True) for name in NAMES[:count]]


def on_device(device: torch.device, count: int) -> list[torch.nn.Module]:
    return [copy.deepcopy(model).to(device) for model in _models(count)]


def gradients(
    device: torch.device, precision: str, count: int, budget: int, overrides: dict[str, Any] | None = None
) -> list[Tensor]:
    """Return the gradients with which the optimizers step after one update, on the CPU."""
    learner = learner_of(make_config(precision, count, overrides), on_device(device, count))
    samples = random_samples(TINY_VOCABULARY, prompts=2, group=4, prompt_length=9, longest=24, shortest=5)
    [step] = learner.compute_old_log_probs([micro_batches(samples, budget, seed=0, epoch=0)])
    found: list[Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        found.extend(one.grad.detach().cpu() for group in optimizer.param_groups for one in group["params"])

    hook = register_optimizer_step_pre_hook(keep)
    try:
        learner.update(step, trace=False)
    finally:
        hook.remove()
    return found


_of_the_cpu = cache(partial(gradients, CPU, "fp32"))


def compare_gradients(
    device: torch.device,
    precision: str,
    count: int,
    budget: int,
    allowed: float,
    overrides: dict[str, Any] | None = None,
) -> Result:
    wanted = _of_the_cpu(count, budget)
    with attending(READERS["as trained"], precision == "bf16", device):
        found = gradients(device, precision, count, budget, overrides)
    if len(wanted) != sum(len(list(model.parameters())) for model in _models(count)):
        raise RuntimeError(f"the optimizers of {count} models stepped on {len(wanted)} tensors on the CPU")
    gaps = [((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]
    return verdict(max(gaps), allowed)


def compare_states(device: torch.device, precision: str, reader: Reader, allowed: float) -> Result:
    """Compare the hidden states of all response tokens with those that the CPU reads as padded rows in fp32."""
    samples = random_samples(TINY_VOCABULARY, prompts=2, group=4, prompt_length=9, longest=24, shortest=5)
    batch = collate(samples, seed=0, epoch=0)
    with torch.no_grad():
        wanted = READERS["padded rows, every prompt once"].read(_models(1)[0], batch)
        with (
            attending(reader, precision == "bf16", device),
            torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"),
        ):
            found = reader.read(on_device(device, 1)[0], batch_to(batch, device)).cpu().float()
    return verdict(((found - wanted).norm() / wanted.norm()).item(), allowed)


def compare_head(device: torch.device, dtype: torch.dtype) -> Result:
    """Compare ids and log-probs of the lists with those of full logits in float64, over tiles that divide nothing."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=generator).to(dtype)
    weight = (0.3 * torch.randn(5003, 64, generator=generator)).to(dtype)
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), dim=-1).topk(20)
    head = Head(hidden=hidden.to(device), weight=weight.to(device))
    found = linear_head(head, exact.indices[:, 0].to(device), temperature=1.0, num_top=20, tile=(128, 1000))
    swapped = found.top_ids.cpu() != exact.indices
    gap = (found.top_log_probs.cpu().double() - exact.values).abs().max().item()
    return verdict(gap, LOG_PROB_GAP) | {"lists that differ": int(swapped.any(dim=1).sum())}


def compare_engine(device: torch.device, precision: str, enforce_eager: bool) -> Result:
    """Compare log-probs that the engine samples with, and those of its lists, with those of a training forward pass."""
    [model] = on_device(device, 1)
    learner = learner_of(make_config(precision, 1), [model])
    engine_model = copy.deepcopy(model).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    engine = make_engine(engine_model, rows=8, dtype=precision, enforce_eager=enforce_eager)

    requests = make_requests(16, 12, 9, TINY_VOCABULARY)
    rollouts = engine.generate(requests)
    graphs = any(event.get("cuda_graphs") for event in engine.take_events()[-1:])
    if graphs != (device.type == "cuda" and not enforce_eager):
        raise RuntimeError(f"the engine replays {'CUDA graphs' if graphs else 'no CUDA graphs'}")

    scores = learner.score("policy", plain_batches(rollouts, ONE, seed=0), requests[0].sampling)
    pairs = [
        (torch.cat([one.rollout_log_probs[:, None], one.top_log_probs], dim=1), scores[one.uid][: len(one.token_ids)])
        for one in rollouts
    ]

    if precision == "bf16":
        gaps = torch.cat([(engine[:, 0] - scored[:, 0]).abs() for engine, scored in pairs])
        return verdict(gaps.mean().item(), BF16_LOG_PROB_GAP)
    return verdict(max((engine - scored).abs().max().item() for engine, scored in pairs), LOG_PROB_GAP)


def compare_weights(device: torch.device) -> Result:
    """Compare the engine's digest of new weights with that of the CPU; a gap of 1 is another digest."""
    [model] = on_device(device, 1)
    learner = learner_of(make_config("fp32", 1), [model])
    engine = make_engine(make_model(NAMES[0], device, tiny=True, dtype=torch.bfloat16), rows=8, dtype="bf16")
    found = engine.update_weights(learner.weights("policy"), Version(1, 1))
    wanted = weights_digest(((name, one.cpu()) for name, one in learner.weights("policy")), torch.bfloat16)
    return verdict(float(found != wanted), 0.0)
