"""Compares a learner that FSDP shards over one rank with one that holds its models, and checks `vllm serve` as a peer.

Gradients and weights after three steps of tiny models are those of no sharding up to the order of sums. "weights" is
the time until a model's are gathered. The server gets new weights through its folder; its gap is of log-probs, in nats.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_parts.check import BF16_GAP, BF16_LOG_PROB_GAP, ONE, SEVERAL, on_device, verdict
from gpu_parts.machine import Machine
from gpu_parts.models import (
    TINY_VOCABULARY,
    device_model,
    learner_of,
    make_config,
    make_requests,
    random_samples,
)
from gpu_parts.results import NotInstalled, Result, Row
from gpu_parts.step import BOTH, SHORT, TINY, one_update, samples_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jackpot.config.engines import VLLMServerEngineConfig
from jackpot.core.digest import weights_digest
from jackpot.core.shards import whole
from jackpot.core.types import Version
from jackpot.launch import engines
from jackpot.launch.ranks import BACKENDS
from jackpot.training.batching import micro_batches, plain_batches
from jackpot.training.joint_learner import JointLearner

GAP, STEPS = 1e-6, 3
SERVED = "Qwen3 0.6B"
OFFLOAD = {"placement": {"offload": True}}


def rows(machine: Machine) -> list[Row]:
    device, found = machine.device, []
    for precision, allowed in (("fp32", GAP), ("bf16", BF16_GAP)):
        for name, budget in (("one micro-batch", ONE), ("several micro-batches", SEVERAL)):
            compare = partial(compare_steps, device, precision, budget, allowed, {})
            found.append(Row(f"{STEPS} steps in {precision}, {name}", compare))
    found.append(Row(f"{STEPS} steps in fp32, offload", partial(compare_steps, device, "fp32", SEVERAL, GAP, OFFLOAD)))
    found.append(Row("a step, held and sharded", partial(time_step, machine), 120.0))
    return [*found, Row("vllm serve as a peer", partial(serve, machine), 180.0)]


@contextmanager
def one_rank(device: torch.device) -> Iterator[DeviceMesh]:
    """Set up torch.distributed for this process alone."""
    dist.init_process_group(BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device.type, (1,))
    finally:
        dist.destroy_process_group()


def compare_steps(
    device: torch.device, precision: str, budget: int, allowed: float, overrides: dict[str, Any]
) -> Result:
    """Compare gradients of all steps and the weights after them."""
    wanted = outcome(device, precision, budget, {}, None)
    with one_rank(device) as mesh:
        found = outcome(device, precision, budget, overrides, mesh)
    if len(found) != len(wanted):
        raise RuntimeError(f"{len(found)} tensors of the sharded learner stand beside {len(wanted)} of the other")
    gaps = [((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]
    return verdict(max(gaps), allowed) | {"equal": max(gaps) == 0.0}


def outcome(
    device: torch.device, precision: str, budget: int, overrides: dict[str, Any], mesh: DeviceMesh | None
) -> list[Tensor]:
    learner = learner_of(make_config(precision, 2, overrides), on_device(device, 2), mesh)
    samples = random_samples(TINY_VOCABULARY, prompts=2, group=4, prompt_length=9, longest=24, shortest=5)
    found: list[Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        found.extend(whole(one.grad).cpu() for group in optimizer.param_groups for one in group["params"])

    hook = register_optimizer_step_pre_hook(keep)
    try:
        for _ in range(STEPS):
            one_update(learner, micro_batches(samples, budget, seed=0, epoch=0))
    finally:
        hook.remove()
    return found + [one.cpu() for role in ("policy", "rollout_model") for _, one in learner.weights(role)]


def time_step(machine: Machine) -> Result:
    held = timed(machine, None)
    machine.forget()
    with one_rank(machine.device) as mesh:
        sharded = timed(machine, mesh)
    both = {f"{name}, held": one for name, one in held.items()} | sharded
    return both | {"of held": sharded["s"] / held["s"]}


def timed(machine: Machine, mesh: DeviceMesh | None) -> Result:
    """Time a step and the weights of the larger model, and measure the memory that each takes."""
    case, models = TINY if machine.tiny else SHORT, [device_model(name, machine) for name in BOTH]
    samples = samples_of(machine, case, models[0])
    learner = learner_of(make_config("bf16" if machine.has_gpu else "fp32", 2), models, mesh)
    update = partial(one_update, learner, micro_batches(samples, case.budget, seed=0, epoch=0))
    result = {"s": machine.seconds(update), "extra GB": machine.extra_gb(update)}
    return result | {"s, weights": machine.seconds(partial(send, learner))}


def send(learner: JointLearner) -> None:
    """Get all weights of the policy to the host as an engine in bf16 takes them."""
    deque((one.to("cpu", torch.bfloat16) for _, one in learner.weights("policy", torch.bfloat16)), maxlen=0)


def serve(machine: Machine) -> Result:
    if find_spec("vllm") is None:
        raise NotInstalled("vLLM is not installed")
    model = device_model(SERVED, machine, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        began = time.monotonic()
        with server(folder) as url:
            answers = time.monotonic() - began
            return {"s until it answers": answers} | checked_peer(machine, model, url, folder)


def checked_peer(machine: Machine, model: torch.nn.Module, url: str, folder: str) -> Result:
    """Send other weights to a server, and compare its log-probs with those of the model that has them."""
    settings = VLLMServerEngineConfig(urls=(url,), weights_folder=f"{folder}/weights", dtype="bf16")
    engine = engines.make_engine(settings, folder, machine.device, Version(0, 0))
    try:
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
        learner = learner_of(make_config("bf16", 1), [model.float()])
        began = time.monotonic()
        held = engine.update_weights(learner.weights("policy", torch.bfloat16), Version(1, 1))
        sending = time.monotonic() - began
        rollouts = engine.generate(make_requests(16, 32, 64, model.config.vocab_size))
    finally:
        engine.close()
    scores = learner.score("policy", plain_batches(rollouts, ONE, 0), make_requests(1, 32, 64, 9)[0].sampling)
    gaps = [(one.rollout_log_probs - scores[one.uid][: len(one.token_ids), 0]).abs() for one in rollouts]
    result = verdict(torch.cat(gaps).mean().item(), BF16_LOG_PROB_GAP)
    sent = weights_digest(learner.weights("policy"), torch.bfloat16)
    return result | {"right": result["right"] and held == sent, "s, new weights": sending}


@contextmanager
def server(folder: str) -> Iterator[str]:
    """Start `vllm serve` on a free port of the loopback interface, wait for it, and end it after the body."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--skip-tokenizer-init"]
    flags = {"host": "127.0.0.1", "port": port, "dtype": "bfloat16", "logprobs-mode": "processed_logprobs"}
    flags |= {"max-logprobs": -1, "generation-config": "vllm", "max-model-len": 1024, "gpu-memory-utilization": 0.3}
    command += [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    log = Path(folder) / "server.log"
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        while not answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None:
                raise RuntimeError(f"vllm serve ended: {log.read_text().strip().splitlines()[-1:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=5.0).status == 200
    except (urllib.error.URLError, OSError):
        return False
