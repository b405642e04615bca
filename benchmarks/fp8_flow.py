"""What the FP8 flow (precision: fp8) is equal to bit for bit and what not, and what it costs in gradients and memory.

An engine generates rollouts token by token; the learner's model reads them. A row says how far their log-probs are
apart: |p_engine - p_learner| of the sampled tokens, and the share of tokens whose hidden states, before the output
layer, are equal bit for bit where the engine's model reads them too. Zeros have a control beside them that is not.

    python benchmarks/fp8_flow.py        # the tables of docs/precision.md, about 60 CPU seconds
"""

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.run import LoraConfig, OptimizerConfig, Sampling
from jackpot.config.tasks import ArithmeticConfig
from jackpot.core.types import Rollout, Version
from jackpot.models.forward import checkpoint_activations, output_layer, response_hidden
from jackpot.models.load import DTYPES, eos_token_ids, load_model, load_tokenizer
from jackpot.models.lora import add_adapter, merged_weights
from jackpot.models.quantization.attention import attend_as_engine
from jackpot.models.quantization.convert import quantize_named, replace_linears
from jackpot.models.quantization.quantizer import FP8_BLOCKS, FP8_TOKEN_BLOCKS, SCHEMES, quantize
from jackpot.models.quantization.training import CodedLinear, LastRows, train_in_codes
from jackpot.objectives.kernels.linear_head import linear_head
from jackpot.objectives.kernels.tiles import Head
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.rollout.tasks.registry import make_task
from jackpot.training.batching import plain_batches
from jackpot.training.optimizer import ModelOptimizer

MODEL = "starter:policy"
PROMPTS, GROUP = 16, 4
FLOWS: dict[str, dict[str, Any]] = {  # settings of the engine
    "FP8": {"quantization": "fp8"},
    "FP8 and FP8 cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "FP8 in bf16": {"quantization": "fp8", "dtype": "bf16"},
    "INT8 blocks": {"quantization": "int8_blocks"},
    "INT8 (w8a8), FP8 cache, bf16": {"quantization": "int8_w8a8", "kv_cache_dtype": "fp8", "dtype": "bf16"},
}
STEPS = (1, 30, 300)
BUDGET = 100_000  # tokens of a micro-batch that holds all rollouts


class StaleLinear(CodedLinear):
    """The control: a layer with a cache of its weight's numbers that is renewed where `_version` moves."""

    def forward(self, inputs: Tensor) -> Tensor:
        if getattr(self, "_at", None) != self.weight._version:
            self._at, self._old = self.weight._version, self.weight.detach().clone()
        now, self.weight.data = self.weight.data, self._old
        try:
            return super().forward(inputs)
        finally:
            self.weight.data = now


def engine_of(model: nn.Module, settings: dict[str, Any]) -> TransformersEngine:
    own = copy.deepcopy(model)
    for weight in own.parameters():  # not rotary frequencies
        weight.data = weight.data.to(DTYPES[settings.get("dtype", "fp32")])
    return TransformersEngine(
        own, TransformersEngineConfig(**settings), eos_token_ids=eos_token_ids(own), version=Version(0, 0)
    )


def rollouts_of(engine: TransformersEngine) -> list[Rollout]:
    task, sampling = make_task(ArithmeticConfig(), load_tokenizer(MODEL)), Sampling(max_new_tokens=32)
    requests = [
        Request(uid=f"{n}/{k}", prompt=task.prompt("train", n), seed=n * GROUP + k, sampling=sampling)
        for n in range(PROMPTS)
        for k in range(GROUP)
    ]
    return engine.generate(requests)


@torch.no_grad()
def read(
    model: nn.Module, rollouts: Sequence[Rollout], budget: int, pads: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """States [T, H] and log-probs [T] of each response by uid, through the head of training."""
    states, scores = {}, {}
    for batch in plain_batches(rollouts, budget, 0, pads):
        hidden = response_hidden(model, batch)
        head = Head(hidden=hidden, weight=output_layer(model).weight)
        found = linear_head(head, batch.at_sampled(batch.response_ids), temperature=1.0, only_log_probs=True).log_probs
        lengths = batch.response_mask.sum(1).tolist()
        states |= dict(zip(batch.uids, hidden.split(lengths), strict=True))
        scores |= dict(zip(batch.uids, found.split(lengths), strict=True))
    return states, scores


def gap(rollouts: Sequence[Rollout], scores: dict[str, Tensor]) -> str:
    found = torch.cat([(one.rollout_log_probs.exp() - scores[one.uid].exp()).abs() for one in rollouts])
    return f"{found.mean():.1e} | {found.max():.1e}"


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> str:
    same = torch.cat([(ours[uid] == theirs[uid]).all(-1) for uid in ours])
    return f"{int(same.sum())} of {len(same)}"


def learner_of(
    model: nn.Module, settings: dict[str, Any] = FLOWS["FP8"], exact: bool = True, checkpoints: bool = False
) -> nn.Module:
    twin, dtype = copy.deepcopy(model).eval(), DTYPES[settings.get("dtype", "fp32")]
    train_in_codes(twin, SCHEMES[settings["quantization"]], "dequantized", "kv_cache_dtype" in settings, exact, dtype)
    if checkpoints:
        checkpoint_activations(twin)
    return twin


def stale_of(model: nn.Module, settings: dict[str, Any]) -> nn.Module:
    twin, rows = copy.deepcopy(model).eval(), LastRows(FP8_TOKEN_BLOCKS)
    attend_as_engine(twin, fp8_cache="kv_cache_dtype" in settings, exact=True)
    replace_linears(twin, lambda layer: StaleLinear(layer, SCHEMES["fp8"], "dequantized", rows))
    return twin


def stepped(model: nn.Module, rollouts: Sequence[Rollout], steps: int) -> nn.Module:
    """Take optimizer steps on the rollouts' log-probs, as a run takes them, with a fused AdamW."""
    optimizer = ModelOptimizer(model.parameters(), OptimizerConfig(learning_rate=1e-4), steps)
    batches = plain_batches(rollouts[:8], BUDGET, 0)
    for _ in range(steps):
        for batch in batches:
            head = Head(hidden=response_hidden(model, batch), weight=output_layer(model).weight)
            linear_head(head, batch.at_sampled(batch.response_ids), temperature=1.0).log_probs.sum().neg().backward()
        optimizer.reduce(torch.tensor(100.0))
        optimizer.clip()
        optimizer.step()
    return model


def parity() -> None:
    model = load_model(MODEL, torch.float32)
    print("| engine | learner | mean | largest | equal states |\n|---|---|---|---|---|")
    for name, settings in FLOWS.items():
        with torch.autocast("cpu", torch.bfloat16, enabled="dtype" in settings):  # of the output layer
            one_flow(model, name, settings)
    for name in ("FP8", "FP8 and FP8 cache"):
        after_steps(model, name, FLOWS[name])


def one_flow(model: nn.Module, name: str, settings: dict[str, Any]) -> None:
    with closing(engine_of(model, settings)) as engine:
        rollouts = rollouts_of(engine)
    learner = learner_of(model, settings)
    whole, scores = read(learner, rollouts, BUDGET)
    print(f"| {name} | the same, all rollouts at once | {gap(rollouts, scores)} | |")
    for rows in (1, 5, 16):
        parts = [read(learner, rollouts[first : first + rows], BUDGET) for first in range(0, len(rollouts), rows)]
        states, found = ({uid: row for part in parts for uid, row in part[place].items()} for place in (0, 1))
        print(f"| {name} | the same, {rows} rollouts at a time | {gap(rollouts, found)} | {equal(states, whole)} |")
    others = {
        "the same, micro-batches of 120 tokens": (learner, 120, False),
        "the same, padded, prompts shared by a cache": (learner, BUDGET, True),
        "the same, activations checkpointed": (learner_of(model, settings, checkpoints=True), BUDGET, False),
        "control: attention in float32": (learner_of(model, settings, exact=False), BUDGET, False),
        "control: cache the other way": (learner_of(model, _other_cache(settings)), BUDGET, False),
        "control: no quantization": (copy.deepcopy(model).eval(), BUDGET, False),
    }
    if "dtype" in settings:
        in_fp32 = {key: value for key, value in settings.items() if key != "dtype"}
        others["control: autocast"] = (learner_of(model, in_fp32), BUDGET, False)
    for what, (reader, budget, pads) in others.items():
        states, found = read(reader, rollouts, budget, pads)
        print(f"| {name} | {what} | {gap(rollouts, found)} | {equal(states, whole)} |")


def _other_cache(settings: dict[str, Any]) -> dict[str, Any]:
    if "kv_cache_dtype" in settings:
        return {key: value for key, value in settings.items() if key != "kv_cache_dtype"}
    return settings | {"kv_cache_dtype": "fp8"}


def after_steps(model: nn.Module, name: str, settings: dict[str, Any]) -> None:
    """Gaps on what the engine generates after each number of steps in STEPS, whose weights it has taken."""
    with closing(engine_of(model, settings)) as engine:
        rollouts = rollouts_of(engine)
        for steps in STEPS:
            controls = {"control: codes kept until `_version` moves": stale_of} if steps < STEPS[-1] else {}
            for what, make in ({"the same": learner_of} | controls).items():
                learner = stepped(make(model, settings), rollouts, steps)
                engine.update_weights(learner.named_parameters(), Version(steps, steps))
                fresh = rollouts_of(engine)
                print(f"| {name}, after {steps} steps | {what} | {gap(fresh, read(learner, fresh, BUDGET)[1])} | |")


def shipped() -> None:
    """Codes that are sent beside weights that the engine quantizes itself, and an adapter that is merged first."""
    model = load_model(MODEL, torch.float32)
    adapted = learner_of(model)
    add_adapter(adapted, LoraConfig(rank=8, alpha=16), 0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    weights = dict(merged_weights(adapted))
    beside = copy.deepcopy(adapted)
    for layer in beside.modules():
        if hasattr(layer, "get_delta_weight"):
            del layer.forward  # the class's own
    with closing(engine_of(model, {"quantization": "fp8"})) as engine:
        found = {}
        for how in ("codes", "weights"):
            named = weights.items()
            if how == "codes":
                named = quantize_named(named, engine.capabilities.codes.names, SCHEMES["fp8"])
            engine.update_weights(named, Version(1, 1))
            found[how] = rollouts_of(engine)
        same = all(
            torch.equal(one.rollout_log_probs, other.rollout_log_probs)
            for one, other in zip(found["codes"], found["weights"], strict=True)
        )
        which = f"FP8, codes or weights sent: rollouts {'equal' if same else 'DIFFER'}"
        own = gap(found["codes"], read(adapted, found["codes"], BUDGET)[1])
        print(f"| {which} | an adapter merged first | {own} | |")
        print("| FP8 | control: adapter beside the codes of the frozen weight | ", end="")
        print(f"{gap(found['codes'], read(beside, found['codes'], BUDGET)[1])} | |")
    half = quantize(weights["model.layers.0.mlp.down_proj.weight"].bfloat16(), FP8_BLOCKS)
    full = quantize(weights["model.layers.0.mlp.down_proj.weight"], FP8_BLOCKS)
    differ = int((half.codes.view(torch.uint8) != full.codes.view(torch.uint8)).sum())
    print(f"\ncodes of bfloat16 weights beside those of float32 weights: {differ} of {full.codes.numel()} differ")


def gradients() -> None:
    """Errors of gradients of one layer beside float64 without rounding, and of a model's beside its own in fp32."""
    print("\n| backward | d X | d W | projections of the model, cosine | worst layer |\n|---|---|---|---|---|")
    model = load_model(MODEL, torch.float32)
    with closing(engine_of(model, {"quantization": "fp8"})) as engine:
        (batch,) = plain_batches(rollouts_of(engine), BUDGET, 0)

    def of_model(prepare: Callable[[nn.Module], None]) -> list[Tensor]:
        twin = copy.deepcopy(model).eval()
        prepare(twin)
        advantages = torch.randn(batch.response_index.shape, generator=torch.Generator().manual_seed(0))
        head = Head(hidden=response_hidden(twin, batch), weight=output_layer(twin).weight)
        found = linear_head(head, batch.at_sampled(batch.response_ids), temperature=1.0).log_probs
        (found * advantages).sum().backward()
        return [one.grad.flatten() for name, one in twin.named_parameters() if "proj" in name]

    truth = of_model(lambda twin: None)
    for backward in ("dequantized", "fp8"):
        torch.manual_seed(0)
        layer, inputs, grad = nn.Linear(1024, 512, bias=False), torch.randn(512, 1024), torch.randn(512, 512)
        own = CodedLinear(layer, SCHEMES["fp8"], backward, LastRows(FP8_TOKEN_BLOCKS))
        own(inputs.requires_grad_()).backward(grad)
        wanted = grad.double() @ layer.weight.detach().double(), grad.double().T @ inputs.detach().double()
        errors = [
            float((a - b).norm() / b.norm()) for a, b in zip((inputs.grad, layer.weight.grad), wanted, strict=True)
        ]
        found = of_model(lambda twin, backward=backward: train_in_codes(twin, SCHEMES["fp8"], backward, False, True))
        whole = torch.cosine_similarity(torch.cat(found), torch.cat(truth), dim=0)
        worst = min(float(torch.cosine_similarity(a, b, dim=0)) for a, b in zip(found, truth, strict=True))
        print(f"| `{backward}` | {errors[0]:.3f} | {errors[1]:.3f} | {whole:.4f} | {worst:.4f} |")


def memory() -> None:
    """Bytes of a token's activations that the linear layers of a layer keep for backward."""
    model = load_model(MODEL, torch.float32)
    config, layers = model.config, {name: one for name, one in model.model.layers[0].named_modules()}
    tokens = 512
    print(f"\n| linear layers of one layer, {config.hidden_size} wide, keep for backward | bytes a token |\n|---|---|")
    groups = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
    groups += [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]  # of one input each
    rows = LastRows(FP8_TOKEN_BLOCKS)
    for what in ("fp32", "bf16", "fp8"):
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            for group in groups:
                inputs = torch.randn(tokens, layers[group[0]].in_features, requires_grad=True)
                for layer in (layers[name] for name in group):
                    with torch.autocast("cpu", torch.bfloat16, enabled=what == "bf16"):
                        (CodedLinear(layer, SCHEMES["fp8"], "dequantized", rows) if what == "fp8" else layer)(inputs)
        size = sum(one.untyped_storage().nbytes() for one in kept.values() if len(one) == tokens)  # not of weights
        print(f"| `{what}` | {size / tokens:.0f} |")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    parity()
    shipped()
    gradients()
    memory()
    print(f"\ntorch {torch.__version__}, 1 thread, {time.process_time() - began:.0f} CPU s")


if __name__ == "__main__":
    main()
