"""What OBRS adds to a GRPO step at K = 20: nanoseconds a token, matrix FLOPs, and shares of the step.

    python benchmarks/obrs_overhead.py --repetitions 3

The model, the prompts and the lengths of step.py's fixed shape, one policy that writes for itself: everything that two
models cost is left out, what stays is the correction. Parts take turns in one process; CPU seconds, medians:

    reweighting    dedup, Z, kappa, acceptance, weights and their metrics, on tensors that are there
    the head       top-20 and the log-probs at the engine's 20 ids, beside the loss alone
    writing        the engine's 20 log-probs, beside the sampled one
    the update     one optimizer step with OBRS, beside one without correction

The noise of a whole update is larger than the difference; the first three lines say what it is made of.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from interleaved import Benchmark, Job, Result, Results, cell, main, markdown
from step_ours import Words, model_folder, settings
from step_task import SHAPES
from torch.utils.flop_counter import FlopCounterMode

from jackpot.config.arms import build_config
from jackpot.config.config import Config
from jackpot.core.types import Rollout, Score, TokenBatch, TrainingSample, Version
from jackpot.launch.build import load_trained, make_learner
from jackpot.launch.engines import make_engine
from jackpot.models.load import load_tokenizer
from jackpot.objectives import obrs
from jackpot.objectives.corrections import CorrectionInputs
from jackpot.objectives.kernels.linear_head import Head, linear_head
from jackpot.rollout.engines.base import Request
from jackpot.training.batching import micro_batches
from jackpot.training.joint_learner import JointLearner
from jackpot.training.objectives import policy_objective

TOP, TURNS = 20, 3
SHAPE = SHAPES["fixed"]
PARTS = {
    "reweighting": "reweighting: dedup, Z, kappa, acceptance, weights",
    "the head": "the head: top 20, and the log-probs at the engine's 20",
    "writing": "writing: the engine's 20 log-probs",
    "the update": "the whole update, the first two in it",
}
Action = Callable[[], object]


def take_turns(actions: dict[str, Action], repetitions: int) -> dict[str, list[float]]:
    """CPU seconds of every action, in turn; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repetitions + 1):
        for name, action in actions.items():
            before = time.process_time()
            action()
            if turn:
                seconds[name].append(time.process_time() - before)
    return seconds


def config_of(job: Job, correction: str, top: int) -> Config:
    config = json.loads(settings(job | {"models": 1, "steps": 1}).model_dump_json())
    config["objective"]["correction"] = {"name": correction}
    config["sampling"]["num_top_log_probs"] = top
    return build_config(config)


def learner_of(config: Config) -> JointLearner:
    model = load_trained(config, "policy", config.policy.path, torch.device("cpu"), False)
    return make_learner(config, {"policy": model}, ["policy"])


def write(config: Config) -> tuple[list[Rollout], Action]:
    """A rollout batch, and how to write another one."""
    task = Words(load_tokenizer(config.policy.path), SHAPE)
    engine = make_engine(config.engine, config.policy.path, torch.device("cpu"), Version(0, 0))
    requests = [
        Request(uid=f"{i}/{j}", prompt=task.prompt("train", i), seed=SHAPE.group * i + j, sampling=config.sampling)
        for i in range(config.batch.prompts)
        for j in range(SHAPE.group)
    ]
    return engine.generate(requests), lambda: engine.generate(requests)


def batches_of(config: Config, rollouts: Sequence[Rollout], number: int = 0) -> list[TokenBatch]:
    """Micro-batches of a round, with random numbers as advantages, one for each response."""
    draw = torch.Generator().manual_seed(number)
    scored = [
        TrainingSample(
            rollout=rollout,
            score=Score(reward=0.0, correct=False),
            advantages=torch.randn(1, generator=draw).expand(len(rollout.token_ids)),
        )
        for rollout in rollouts
    ]
    return micro_batches(scored, config.batch.micro_batch_tokens, seed=0, epoch=number)


def reweighting(config: Config, tokens: int) -> Action:
    """Dedup, Z, kappa, acceptance, weights, metrics of `tokens` tokens of two distributions that overlap."""
    draw = torch.Generator().manual_seed(0)
    logits = 2.0 * torch.randn(tokens, 64, generator=draw)
    both = [torch.log_softmax(logits + 0.3 * torch.randn(tokens, 64, generator=draw), dim=-1) for _ in range(2)]
    (rollout_top, rollout_ids), (target_top, target_ids) = (one.topk(TOP) for one in both)
    mask = torch.ones(1, tokens, dtype=torch.bool)
    uniforms = torch.rand(1, tokens, dtype=torch.float64, generator=draw)
    correction = policy_objective(config.objective).correction

    def run() -> None:
        z = obrs.topk_z(
            rollout_top_log_probs=rollout_top,
            target_at_rollout_top=both[1].gather(1, rollout_ids),
            rollout_top_ids=rollout_ids,
            target_top_ids=target_ids,
            target_top_log_probs=target_top,
            fill_ins=both[0].gather(1, target_ids),
            fill_valid=mask[0],
            lam=1.0,
        )
        inputs = CorrectionInputs(
            rollout_log_probs=rollout_top[None, :, 0],
            target_log_probs=target_top[None, :, 0],
            proximal_log_probs=target_top[None, :, 0],
            response_mask=mask,
            uniforms=uniforms,
            advantages=torch.ones_like(uniforms),
            z=obrs.ZEstimate(*(part[None] for part in z)),
        )
        correction.apply(inputs, correction.measure(inputs))

    return run


def head(tokens: int, top: int) -> Action:
    """The loss layer alone, forward and backward, at the step's shape."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 256, generator=draw).requires_grad_()
    weight = (0.02 * torch.randn(4096, 256, generator=draw)).requires_grad_()
    ids = torch.randint(4096, (tokens,), generator=draw)
    gather_ids = torch.randint(4096, (tokens, top), generator=draw)

    def run() -> None:
        out = linear_head(Head(hidden=hidden, weight=weight), ids, temperature=1.0, num_top=top, gather_ids=gather_ids)
        out.log_probs.sum().backward()

    return run


def matrix_flops(action: Action) -> int:
    with FlopCounterMode(display=False) as counter:
        action()
    return counter.get_total_flops()


def work(job: Job) -> Result:
    """Nanoseconds a token and FLOPs a token that each part adds, and the nanoseconds a token of a step without."""
    torch.set_num_threads(1)
    model_folder(job, "policy")
    configs = {"without": config_of(job, "none", 0), "with": config_of(job, "obrs", TOP)}
    rollouts, write_with = write(configs["with"])
    _, write_without = write(configs["without"])
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    bare = [replace(one, top_ids=one.top_ids[:, :0], top_log_probs=one.top_log_probs[:, :0]) for one in rollouts]
    learners = {name: learner_of(config) for name, config in configs.items()}
    batches = {"without": batches_of(configs["without"], bare), "with": batches_of(configs["with"], rollouts)}
    updates = {
        name: lambda name=name: learners[name].train([batches[name]], trace=False) for name in ("without", "with")
    }
    parts = {
        "reweighting": {"with": reweighting(configs["with"], tokens)},
        "the head": {"without": head(tokens, 0), "with": head(tokens, TOP)},
        "writing": {"without": write_without, "with": write_with},
        "the update": updates,
    }
    found = {name: take_turns(actions, TURNS) for name, actions in parts.items()}
    step = sum(statistics.median(found[name]["without"]) for name in ("writing", "the update"))
    result: Result = {"step": 1e9 * step / tokens, "tokens": tokens}
    for name, actions in parts.items():
        without = found[name].get("without", [0.0] * TURNS)
        extra = [one - other for one, other in zip(found[name]["with"], without, strict=True)]
        more = matrix_flops(actions["with"]) - (matrix_flops(actions["without"]) if "without" in actions else 0)
        result |= {name: 1e9 * statistics.median(extra) / tokens, f"{name}, FLOPs": more / tokens}
    return result


def jobs(quick: bool) -> list[Job]:
    return [{"shape": "fixed"} | ({"prompts": 2, "new_tokens": 8} if quick else {})]


def share(results: Results, part: str) -> list[float]:
    """Percent of the step without correction that a part adds."""
    return [100 * one[part] / one["step"] for one in results.of()]


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    for part, text in PARTS.items():
        flops = cell(results.values(f"{part}, FLOPs"), 0)
        yield text, cell(results.values(part), 0), flops, cell(share(results, part))


def report(results: Results) -> str:
    step = cell((one["step"] / 1000 for one in results.of()), 0)
    columns = ("what OBRS adds", "ns a token", "matrix FLOPs a token", "percent of the step")
    return f"{markdown(columns, rows(results))}\n\nA step without correction takes {step} microseconds a token."


BENCHMARK = Benchmark("obrs_overhead", jobs, report)

if __name__ == "__main__":
    main(BENCHMARK, __doc__, work)
