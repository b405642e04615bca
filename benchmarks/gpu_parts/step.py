"""Times one optimizer step of the learner at published shapes, in bf16 with fp32 weights: forward, backward, AdamW.

"of peak" counts the FLOPs that no implementation can do without. "backbones" and "head" are these alone, as a part of
the step. "read again" is the share of the sequences that a second pass repaired for kappa.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from gpu_parts import trl_update
from gpu_parts.machine import Machine
from gpu_parts.models import NUM_TOP, device_model, learner_of, make_config, random_samples, training_flops
from gpu_parts.results import Result, Row
from transformers import PreTrainedModel

from jackpot.core.types import TokenBatch, TrainingSample
from jackpot.models.forward import output_layer, response_hidden
from jackpot.objectives.kernels.linear_head import LinearHead
from jackpot.training.batching import batch_to, micro_batches
from jackpot.training.joint_learner import JointLearner
from jackpot.training.learner import StepResult

SECONDS = 120.0  # the most for a row
BOTH = ("Qwen3 1.7B", "Qwen3 0.6B")  # policy, rollout model


class Case(NamedTuple):
    prompts: int
    group: int
    prompt: int  # tokens
    longest: int  # response, tokens
    shortest: int
    budget: int  # tokens of a micro-batch


SHORT = Case(4, 8, 256, 1024, 256, 16_384)
LONG = Case(2, 8, 256, 4096, 512, 20_000)
EQUAL = Case(4, 8, 256, 1024, 1024, 16_384)  # no padding for anybody
TINY = Case(2, 4, 9, 24, 5, 150)


def rows(machine: Machine) -> list[Row]:
    both, alone = BOTH, BOTH[:1]
    cases = [
        ("two models, responses of 256 to 1,024", both, SHORT, {}),
        ("two models, responses of 512 to 4,096", both, LONG, {}),
        ("two models, kappa: prepass, responses of 512 to 4,096", both, LONG, {"kappa": "prepass"}),
        ("two models, kappa_tolerance: 0, responses of 512 to 4,096", both, LONG, {"kappa_tolerance": 0}),
        ("two models, kappa: none, responses of 512 to 4,096", both, LONG, {"kappa": "none"}),
        ("one model, responses of 1,024", alone, EQUAL, {}),
        ("one model, responses of 256 to 1,024", alone, SHORT, {}),
    ]
    if machine.tiny:  # shapes are all one then
        cases = cases[::3]
    found = [Row(name, partial(measure, machine, models, case, more), SECONDS) for name, models, case, more in cases]
    for name, case in (("responses of 1,024", EQUAL), ("responses of 256 to 1,024", SHORT))[: 1 if machine.tiny else 2]:
        found.append(Row(f"TRL's GRPOTrainer, one model, {name}", partial(measure_trl, machine, case), SECONDS))
    return found


def _case(machine: Machine, case: Case) -> Case:
    return TINY if machine.tiny else case


def samples_of(machine: Machine, case: Case, model: PreTrainedModel) -> list[TrainingSample]:
    return random_samples(model.config.vocab_size, case.prompts, case.group, case.prompt, case.longest, case.shortest)


def measure(machine: Machine, names: Sequence[str], case: Case, correction: dict[str, Any]) -> Result:
    case = _case(machine, case)
    models = [device_model(name, machine) for name in names]
    overrides = {"objective": {"correction": {"name": "obrs"} | correction}} if correction else {}
    learner = learner_of(make_config("bf16" if machine.has_gpu else "fp32", len(names), overrides), models)
    samples = samples_of(machine, case, models[0])
    batches = micro_batches(samples, case.budget, seed=0, epoch=0)
    update = partial(one_update, learner, batches)
    extra = machine.extra_gb(update)
    seconds = machine.seconds(update)
    result = rates(machine, models, samples, seconds)
    result |= {"micro-batches": len(batches), "extra GB": extra}
    if repaired := update().metrics.get("obrs/repaired_sequences"):
        result["read again"] = float(repaired.value)
    on_device = [batch_to(batch, machine.device) for batch in batches]
    result["backbones"] = machine.seconds(partial(run_backbones, models, on_device), 2) / seconds
    result["head"] = machine.seconds(partial(run_heads, models, on_device), 2) / seconds
    return result | machine.profile(update)


def one_update(learner: JointLearner, batches: Sequence[TokenBatch]) -> StepResult:
    """Take one step on responses that the models of now have generated, as far as the learner can know."""
    now = torch.tensor(learner.version)
    batches = [replace(batch, versions=now.expand_as(batch.versions).clone()) for batch in batches]
    [step] = learner.compute_old_log_probs([batches])
    result, _ = learner.update(step, trace=False)
    if result.events:
        raise RuntimeError(f"the optimizers did not step: {result.events}")
    return result


def rates(
    machine: Machine, models: Sequence[PreTrainedModel], samples: Sequence[TrainingSample], seconds: float
) -> Result:
    tokens = sum(len(sample.rollout.token_ids) for sample in samples)
    flops = training_flops(models, samples)
    result = {"tokens": tokens, "s": seconds, "tokens/s": tokens / seconds}
    return result | machine.shares(flops, seconds)


def run_backbones(models: Sequence[PreTrainedModel], batches: Sequence[TokenBatch]) -> None:
    for batch in batches:
        for model in models:
            with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
                response_hidden(model, batch).float().mean().backward()
            model.zero_grad()


def run_heads(models: Sequence[PreTrainedModel], batches: Sequence[TokenBatch]) -> None:
    head = LinearHead(*map(output_layer, models))
    for batch in batches:
        mask = batch.response_mask
        hidden = [
            torch.randn(int(mask.sum()), model.config.hidden_size, device=model.device, requires_grad=True)
            for model in models
        ]
        rollout_hidden = hidden[1] if len(hidden) == 2 else None
        with torch.autocast(mask.device.type, torch.bfloat16, enabled=mask.device.type == "cuda"):
            output = head(
                hidden[0],
                rollout_hidden,
                batch.response_ids[mask],
                temperature=1.0,
                num_top=NUM_TOP,
                gather_ids=batch.top_ids[mask],
            )
        if rollout_hidden is None:
            output.log_probs.sum().backward()
        else:
            (output.policy.log_probs + output.rollout_model.log_probs + output.forward_kl).sum().backward()
        head.zero_grad()


def measure_trl(machine: Machine, case: Case) -> Result:
    case = _case(machine, case)
    model = device_model(BOTH[0], machine)
    samples = samples_of(machine, case, model)
    fits = case.budget // (case.prompt + case.longest)  # sequences of a micro-batch
    micro_batch = max(size for size in range(1, fits + 1) if len(samples) % size == 0)
    update = trl_update.make_update(model, samples, micro_batch, machine.has_gpu)
    extra = machine.extra_gb(update)
    return rates(machine, [model], samples, machine.seconds(update)) | {"extra GB": extra} | machine.profile(update)
