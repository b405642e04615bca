"""What the FP8 flow (precision: fp8) is equal to bit for bit and what not, and what it costs in gradients and memory.

An engine generates rollouts token by token; the learner's model reads them. A row says how far the two are apart:
|p_engine - p_learner| of the sampled tokens, and how many tokens have hidden states, before the output layer, that are
equal bit for bit to those of the engine's model, which reads them token by token with its cache. Zeros have a control
beside them that is not. Rows about two engines or two runs compare these.

    python -m research.fp8_flow        # the tables of docs/precision.md, about 4 CPU minutes
"""

import argparse
import copy
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from jackpot.config.config import Config, LoraConfig, OptimizerConfig
from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.recipes import resolve
from jackpot.config.sampling import Sampling
from jackpot.config.tasks import ArithmeticConfig
from jackpot.core.types import Prompt, Rollout, Version
from jackpot.launch.start import train_run
from jackpot.models.forward import checkpoint_activations, output_layer, response_hidden
from jackpot.models.load import DTYPES, eos_token_ids, load_model, load_tokenizer
from jackpot.models.lora import add_adapter, merged_weights
from jackpot.models.quantization.attention import attend_as_engine
from jackpot.models.quantization.convert import quantize_named, replace_linears
from jackpot.models.quantization.product import product
from jackpot.models.quantization.quantizer import FP8_TOKEN_BLOCKS, SCHEMES, dequantize, quantize
from jackpot.models.quantization.training import CodedLinear, LastRows, train_in_codes
from jackpot.objectives.kernels.linear_head import linear_head
from jackpot.objectives.kernels.tiles import Head
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.rollout.engines.transformers.kv_cache import make_cache
from jackpot.rollout.tasks.registry import make_task
from jackpot.training.batching import plain_batches
from jackpot.training.joint_learner import JointLearner
from jackpot.training.optimizer import ModelOptimizer
from research import parity

MODEL = "starter:policy"
PROMPTS, GROUP = 16, 4
FLOWS: dict[str, dict[str, Any]] = {  # settings of the engine
    "FP8": {"quantization": "fp8"},
    "FP8 and FP8 cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "FP8 in bf16": {"quantization": "fp8", "dtype": "bf16"},
    "`int8_w8a8` and FP8 cache in bf16": {"quantization": "int8_w8a8", "kv_cache_dtype": "fp8", "dtype": "bf16"},
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


def rollouts_of(engine: TransformersEngine, prompts: Sequence[Prompt] | None = None) -> list[Rollout]:
    if prompts is None:
        task = make_task(ArithmeticConfig(), load_tokenizer(MODEL))
        prompts = [task.prompt("train", number) for number in range(PROMPTS)]
    sampling = Sampling(max_new_tokens=32)
    requests = [
        Request(uid=f"{n}/{k}", prompt=prompt, seed=n * GROUP + k, sampling=sampling)
        for n, prompt in enumerate(prompts)
        for k in range(GROUP)
    ]
    return engine.generate(requests)


class Reading(NamedTuple):
    """What a model says of each response, by uid."""

    states: dict[str, Tensor]  # [T, H], before the output layer
    scores: dict[str, Tensor]  # [T], log-probs of its tokens


@torch.no_grad()
def read(model: nn.Module, rollouts: Sequence[Rollout], budget: int = BUDGET, pads: bool = False) -> Reading:
    """Read each response through the head of training, in micro-batches of at most `budget` tokens."""
    found = Reading({}, {})
    for batch in plain_batches(rollouts, budget, 0, pads):
        hidden = response_hidden(model, batch)
        head = Head(hidden=hidden, weight=output_layer(model).weight)
        scores = linear_head(head, batch.at_sampled(batch.response_ids), temperature=1.0, only_log_probs=True).log_probs
        lengths = batch.response_mask.sum(1).tolist()
        found.states.update(zip(batch.uids, hidden.split(lengths), strict=True))
        found.scores.update(zip(batch.uids, scores.split(lengths), strict=True))
    return found


@torch.no_grad()
def written(engine: TransformersEngine, rollouts: Sequence[Rollout]) -> Reading:
    """What the engine said, and its model's states where it decodes each prompt's responses again, token by token."""
    body, states = engine._weights.model.base_model, {}
    for _, group in groupby(rollouts, lambda one: one.uid.partition("/")[0]):
        rows = list(group)
        prompt = torch.tensor([one.prompt.token_ids for one in rows])
        tokens = torch.nn.utils.rnn.pad_sequence([one.token_ids for one in rows], batch_first=True)
        cache = make_cache(engine._weights.model.config, prompt.shape[1] + tokens.shape[1])
        found = [body(prompt, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]]
        cache.reorder_cache(torch.arange(len(rows)))  # gives every row its place, as a batch of the engine does
        for column in tokens[:, :-1].split(1, dim=1):
            found.append(body(column, past_key_values=cache, use_cache=True).last_hidden_state[:, -1])
        states |= {one.uid: row[: len(one.token_ids)] for one, row in zip(rows, torch.stack(found, 1), strict=True)}
    return Reading(states, {one.uid: one.rollout_log_probs for one in rollouts})


class Apart(NamedTuple):
    """How far two readings are apart."""

    mean: float  # of |p - p'| over tokens
    largest: float
    equal: int  # tokens with the same bits before the output layer
    tokens: int

    def __str__(self) -> str:
        gaps = (f"{one:.1e}" if one else "0" for one in (self.mean, self.largest))
        return f"{' | '.join(gaps)} | {self.equal}/{self.tokens}"


def apart(ours: Reading, theirs: Reading) -> Apart:
    gaps = torch.cat([(ours.scores[uid].exp() - theirs.scores[uid].exp()).abs() for uid in ours.scores])
    same = torch.cat([(ours.states[uid] == theirs.states[uid]).all(-1) for uid in ours.scores])
    return Apart(float(gaps.mean()), float(gaps.max()), int(same.sum()), len(gaps))


def worst(found: Iterable[Apart]) -> Apart:
    means, largest, equal, tokens = zip(*found, strict=True)
    return Apart(max(means), max(largest), min(equal), tokens[0])


def print_rows(what: str, same: Apart, controls: Mapping[str, Apart]) -> None:
    """Print what must be equal beside each of its controls, which must not."""
    for control, gap in controls.items():
        print(f"| {what} | {same} | {control} | {gap} |", flush=True)


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
    replace_linears(twin, lambda layer: StaleLinear(layer, SCHEMES["fp8"].weights, "dequantized", rows))
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


def in_its_dtype(settings: dict[str, Any]) -> torch.autocast:
    """Autocast of training's output layer where the engine computes in bf16."""
    return torch.autocast("cpu", torch.bfloat16, enabled="dtype" in settings)


def one_flow(model: nn.Module, name: str) -> None:
    settings = FLOWS[name]
    with closing(engine_of(model, settings)) as engine:
        rollouts = rollouts_of(engine)
        wanted = written(engine, rollouts)

    def found(reader: nn.Module, *args: Any) -> Apart:
        return apart(wanted, read(reader, rollouts, *args))

    learner, same = learner_of(model, settings), []
    for count in (1, 5, 16):
        parts = [read(learner, rollouts[first : first + count]) for first in range(0, len(rollouts), count)]
        states, scores = ({uid: one for part in parts for uid, one in part[place].items()} for place in (0, 1))
        same.append(apart(wanted, Reading(states, scores)))
    checkpointed = learner_of(model, settings, checkpoints=True)
    same += [found(learner), found(learner, 120), found(learner, BUDGET, True), found(checkpointed)]
    controls = {f"attention in {settings.get('dtype', 'float32')}": found(learner_of(model, settings, False))}

    other = {key: value for key, value in settings.items() if key != "kv_cache_dtype"}
    side = "engine" if other != settings else "learner"
    other |= {} if side == "engine" else {"kv_cache_dtype": "fp8"}
    controls[f"FP8 keys and values in the {side} alone"] = found(learner_of(model, other))

    if "dtype" in settings:
        in_fp32 = {key: value for key, value in settings.items() if key != "dtype"}
        controls["the learner under autocast"] = found(learner_of(model, in_fp32))
    controls["`precision: fp32`"] = found(copy.deepcopy(model).eval())
    print_rows(f"{name}, in seven ways", worst(same), controls)


def after_steps(model: nn.Module, name: str) -> None:
    """Gaps on what the engine generates after each number of steps in STEPS, whose weights it has taken."""
    with closing(engine_of(model, FLOWS[name])) as engine:
        rollouts = rollouts_of(engine)
        for steps in STEPS:
            gaps = []
            for make in (learner_of, stale_of):
                learner = stepped(make(model, FLOWS[name]), rollouts, steps)
                engine.update_weights(learner.named_parameters(), Version(steps, steps))
                fresh = rollouts_of(engine)
                gaps.append(apart(written(engine, fresh), read(learner, fresh)))

            what = f"{name}, after {steps} step{'s' * (steps > 1)}"
            print_rows(what, gaps[0], {"codes kept until `_version` moves": gaps[1]})


def shipped(model: nn.Module, name: str) -> None:
    """An engine that is sent codes, as a run sends them, beside one that is sent weights and quantizes them itself."""
    settings = FLOWS[name]
    scheme, dtype = SCHEMES[settings["quantization"]], DTYPES[settings.get("dtype", "fp32")]
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    with closing(engine_of(model, settings)) as engine:
        rollouts, codes = rollouts_of(engine), engine.capabilities.coded_weights.names

        def sent(named: Iterable[tuple[str, Tensor]]) -> Reading:
            engine.update_weights(named, Version(1, 1))
            scores = engine.score(rollouts, temperature=1.0)
            return Reading(
                written(engine, rollouts).states, {one.uid: of for one, of in zip(rollouts, scores, strict=True)}
            )

        weights = {name: weight.detach() for name, weight in model.named_parameters()}

        def cast(kind: torch.dtype) -> Iterable[tuple[str, Tensor]]:
            return ((name, weight.to(kind) if name in codes else weight) for name, weight in weights.items())

        own, whole, wrong = (
            sent(weights.items() if kind is None else quantize_named(cast(kind), codes, scheme))
            for kind in (None, dtype, other)
        )
    rounded = "bfloat16" if other == torch.bfloat16 else "unrounded"
    controls = {f"sent codes of {rounded} weights": apart(own, wrong)}
    print_rows(f"{name}, sent weights and sent their codes", apart(own, whole), controls)


def split_product(layer: CodedLinear, inputs: Tensor) -> Tensor:
    """What two ranks add up of which each has half of the features in, in whole blocks of 128."""
    half, scheme = layer.in_features // 2, SCHEMES["fp8"]
    parts = zip(inputs.flatten(0, -2).split(half, dim=1), layer.weight.to(inputs.dtype).split(half, dim=1), strict=True)
    sums = (product(quantize(rows, scheme.activations), quantize(held, scheme.weights)) for rows, held in parts)
    return sum(one.to(inputs.dtype) for one in sums).reshape(*inputs.shape[:-1], layer.out_features)


def split_tensors() -> None:
    """What two ranks of tensor parallelism change, on a model whose parts are whole blocks of 128."""
    text = parity.library_bytes()
    model = parity.trained("qwen3", 0, text, hidden_size=256, intermediate_size=512, head_dim=64)
    starts = torch.randint(len(text) - 16, (PROMPTS,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [
        Prompt(uid=f"{start}", text="", answer="", token_ids=tuple(text[start : start + 16].tolist()))
        for start in starts
    ]
    for name in ("FP8", "FP8 in bf16"):
        learner, settings = learner_of(model, FLOWS[name]), FLOWS[name]
        with closing(engine_of(model, settings)) as engine, in_its_dtype(settings):
            rollouts = rollouts_of(engine, prompts)
            wanted = written(engine, rollouts)
            same = apart(wanted, read(learner, rollouts))
            for layer in (one for path, one in learner.named_modules() if path.endswith(("o_proj", "down_proj"))):
                layer.forward = partial(split_product, layer)
            controls = {"its tensors split over 2 ranks": apart(wanted, read(learner, rollouts))}
            print_rows(f"{name}, 256 wide", same, controls)


def run_config() -> Config:
    settings = ("precision=fp8", "engine.quantization=fp8", "iterations=4", "batch.prompts=8", "checkpoint.every=2")
    return resolve("quickstart", "on_policy", [*settings, "evaluation.problems=8", "threads=1"])


def run_and_kill(folder: Path) -> None:
    """Train until the line of the third iteration is written, and be killed."""
    train_run(run_config(), folder, lambda line: line["iteration"] == 3 and os.kill(os.getpid(), signal.SIGKILL))


def from_codes(learner: JointLearner, *given: Any, load: Callable[..., None] = JointLearner.load) -> None:
    """The control: continue from the numbers that codes stand for, as if the weights themselves had not been kept."""
    load(learner, *given)
    for name, weight in learner.weights("policy"):
        if "_proj" in name:
            weight.detach().copy_(dequantize(quantize(weight.detach(), SCHEMES["fp8"].weights), torch.float32))


def killed(home: Path) -> None:
    """The policies of a run that ends, of the same killed and continued, and of one continued otherwise."""
    process = get_context("spawn").Process(target=run_and_kill, args=(home / "killed",))
    process.start()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        raise SystemExit(f"the run that was to be killed ended with {process.exitcode}")
    shutil.copytree(home / "killed", home / "control", symlinks=True)
    train_run(run_config(), home / "whole", lambda line: None)
    train_run(run_config(), home / "killed", lambda line: None)
    with patch.object(JointLearner, "load", from_codes):
        train_run(run_config(), home / "control", lambda line: None)
    policies = {
        path.name: load_model(str(path / "checkpoints" / "last" / "policy"), torch.float32) for path in home.iterdir()
    }
    with closing(engine_of(policies["whole"], FLOWS["FP8"])) as engine:
        rollouts = rollouts_of(engine)
    found = {name: read(learner_of(policy), rollouts) for name, policy in policies.items()}
    controls = {"continued from the numbers of its codes": apart(found["whole"], found["control"])}
    print_rows(
        "FP8, a run killed in its third iteration and continued", apart(found["whole"], found["killed"]), controls
    )


def adapted(model: nn.Module) -> None:
    """An adapter that is merged before its layer is quantized, beside one that is added to the codes of the weight."""
    learner = learner_of(model)
    add_adapter(learner, LoraConfig(rank=8, alpha=16), 0)
    for name, parameter in learner.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    beside = copy.deepcopy(learner)
    for layer in beside.modules():
        if hasattr(layer, "get_delta_weight"):
            del layer.forward  # the class's own
    with closing(engine_of(model, FLOWS["FP8"])) as engine:
        engine.update_weights(merged_weights(learner), Version(1, 1))
        rollouts = rollouts_of(engine)
        wanted = written(engine, rollouts)
    controls = {"the adapter beside the codes of the frozen weight": apart(wanted, read(beside, rollouts))}
    print_rows("FP8, with an adapter of rank 8", apart(wanted, read(learner, rollouts)), controls)


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
        own = CodedLinear(layer, SCHEMES["fp8"].weights, backward, LastRows(FP8_TOKEN_BLOCKS))
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
                        (CodedLinear(layer, SCHEMES["fp8"].weights, "dequantized", rows) if what == "fp8" else layer)(
                            inputs
                        )
        size = sum(one.untyped_storage().nbytes() for one in kept.values() if len(one) == tokens)  # not of weights
        print(f"| `{what}` | {size / tokens:.0f} |")


def table() -> None:
    model = load_model(MODEL, torch.float32)
    print("| engine and learner | mean | largest | equal states | control | mean | largest | equal states |")
    print("|---|---|---|---|---|---|---|---|")
    for name, settings in FLOWS.items():
        with in_its_dtype(settings):
            one_flow(model, name)
    for name in ("FP8", "FP8 and FP8 cache"):
        after_steps(model, name)
    adapted(model)
    for name in ("FP8", "FP8 in bf16"):
        shipped(model, name)
    with tempfile.TemporaryDirectory() as home:
        killed(Path(home))
    split_tensors()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    table()
    gradients()
    memory()
    print(f"\ntorch {torch.__version__}, 1 thread, {time.process_time() - began:.0f} CPU s")


if __name__ == "__main__":
    main()
