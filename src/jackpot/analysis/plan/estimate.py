"""Estimates the GPUs and hours of a large run: `sharding` and `cost_model` with the numbers of the run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from transformers import PreTrainedModel

from jackpot.analysis.plan.cost_model import (
    ACCEPTANCE,
    DYNAMIC_ROUNDS,
    GPUS,
    Drafts,
    EngineSpeed,
    Gpu,
    Hours,
    Lengths,
    ModelCost,
    Work,
    evaluation_hours,
    mean_response,
    on_policy,
    run_hours,
)
from jackpot.analysis.plan.memory import plan_memory
from jackpot.analysis.plan.sharding import (
    COUNTS,
    EngineNeeds,
    Shard,
    blocks,
    cache_bytes,
    degree,
    engine_needs,
    needs_of,
    shard,
    sharded,
)
from jackpot.analysis.plan.sizes import ModelSize, PromptLengths, outline
from jackpot.config.published import GpusConfig
from jackpot.config.run import Config
from jackpot.core.types import Role
from jackpot.launch.local import model_paths
from jackpot.models.cost import cached_numbers, forward_cost, head_cost
from jackpot.models.load import DTYPES
from jackpot.rollout.tasks.benchmarks import BENCHMARKS

DRAFTED = 4  # assumed of `engine.draft.tokens: auto`
MOST_DRAFTS = 8  # before a pass of the policy, that are tried
LARGE = 100_000_000  # parameters of all models from which on a plan shows GPUs and hours
SHOWN_KINDS, SHOWN_COUNTS = ("H100", "H200"), (1, 2, 4, 8)


class MachineEstimate(NamedTuple):
    """Holds memory and hours of a run on some GPUs."""

    kind: str  # name of the GPU, a key of GPUS
    shard: Shard
    hours: Hours | None  # None where the run does not fit
    alone: Hours | None  # of the policy alone, on-policy: it generates as many responses, one step on each batch
    by_writer: Mapping[str, Hours]  # by which model generates the same batches; none without a rollout model


class CostEstimate(NamedTuple):
    """Holds the estimates of a run on several numbers of GPUs, and the lengths that they assume."""

    prompts: PromptLengths
    response: float  # mean length of a response, tokens
    rows: list[MachineEstimate]
    stated: MachineEstimate  # on the GPUs that the recipe names, else on one H100
    fewest: dict[str, int]  # fewest GPUs of each kind on which the run fits; 0 where it fits on none of COUNTS


def is_large(sizes: Mapping[Role, ModelSize]) -> bool:
    """Tell whether the models have so many parameters that a plan shows GPUs and hours."""
    return sum(size.parameters for size in sizes.values()) >= LARGE


def estimate(
    config: Config, sizes: Mapping[Role, ModelSize], prompts: PromptLengths, stated: GpusConfig | None
) -> CostEstimate:
    """Estimate memory and hours of a run on each shown kind and number of GPUs, and on those that its recipe names.

    Raises:
        ModelError: as `plan_memory`.
    """
    stated = stated or GpusConfig(kind="H100", count=1)
    plan = _Estimator(config, sizes, prompts)
    return CostEstimate(
        prompts=prompts,
        response=plan.lengths.mean,
        rows=[plan.row(kind, count) for kind in SHOWN_KINDS for count in SHOWN_COUNTS],
        stated=plan.row(stated.kind, stated.count),
        fewest={
            kind: next((count for count in COUNTS if plan.shard(kind, count).fits), 0)
            for kind in dict.fromkeys((stated.kind, *SHOWN_KINDS))
        },
    )


class _Estimator:
    """Holds what does not depend on the GPUs, which is computed once."""

    def __init__(self, config: Config, sizes: Mapping[Role, ModelSize], prompts: PromptLengths) -> None:
        self._config, self._prompt = config, prompts.longest
        with sharded():
            self._memory = plan_memory(config, sizes, prompts.longest)
        self._blocks, self._needs = blocks(config), engine_needs(config, prompts.longest)
        limit = config.sampling.max_new_tokens
        self.lengths = Lengths(prompt=prompts.mean, mean=mean_response(limit), limit=limit)
        self._costs = {role: _cost(outline(path), sizes[role]) for role, path in model_paths(config, None).items()}
        self._others = _others(config, self.lengths, self._costs["policy"])

    def shard(self, kind: str, count: int) -> Shard:
        """Return the memory on each of `count` GPUs of a kind."""
        return shard(self._memory, self._blocks, self._needs, GPUS[kind], count)

    def row(self, kind: str, count: int) -> MachineEstimate:
        """Return memory and hours on `count` GPUs of a kind."""
        here = self.shard(kind, count)
        return MachineEstimate(kind, here, *(self._hours(GPUS[kind], count, here) if here.fits else (None, None, {})))

    def _hours(self, gpu: Gpu, count: int, here: Shard) -> tuple[Hours, Hours, dict[str, Hours]]:
        config, costs = self._config, self._costs
        own = needs_of(config, "policy", config.engine, self._prompt)
        engines = {name: self._engine_speed(one, here.tensor_parallel[name], gpu) for name, one in self._needs.items()}
        policy_engine = self._engine_speed(own, degree(own, gpu, count) or count, gpu)
        peak, work = gpu.bf16 if config.precision == "bf16" else gpu.fp32, self._work()
        (alone, times), policy = on_policy(work), [costs["policy"]]
        hours = run_hours(work, engines["engine"], [*costs.values()], self._others, config.iterations, gpu, count, peak)
        writer = engines.get("evaluation.engine", policy_engine)  # the policy's, beside that of the rollout model
        if config.rollout_model and config.rollout_model.is_mixed:
            drafted = writer
            if config.draft:
                tokens = DRAFTED if config.draft.tokens == "auto" else config.draft.tokens
                drafted = replace(writer, drafts=Drafts(costs["rollout_model"], tokens, ACCEPTANCE))
            hours = hours._replace(generation=_shared_hours(config, work, drafted, engines["engine"], gpu, count))
        sets = _evaluated(config, engines["engine"], engines.get("evaluation.engine", engines["engine"]))
        evaluations = config.iterations // config.evaluation.every + 1
        return (
            hours._replace(evaluating=evaluation_hours(sets, evaluations, self.lengths, gpu, count)),
            run_hours(alone, policy_engine, policy, self._others, config.iterations * times, gpu, count, peak),
            self._by_writer(work, policy_engine, writer, engines["engine"], gpu, count, peak),
        )

    def _by_writer(
        self,
        work: Work,
        alone: EngineSpeed,
        policy: EngineSpeed,
        rollout_model: EngineSpeed,
        gpu: Gpu,
        count: int,
        peak: float,
    ) -> dict[str, Hours]:
        """Return the hours, without evaluations, in which each model generates the same batches, or half of each.

        Both models are trained but where the policy generates alone; a batch has the same optimizer steps.

        Args:
            alone, policy: the policy's engine without another one beside it, and with that of the rollout model.
        """
        costs = self._costs
        if "rollout_model" not in costs:
            return {}

        def hours(engine: EngineSpeed, part: Work = work, roles: Mapping[Role, ModelCost] = costs) -> Hours:
            return run_hours(part, engine, [*roles.values()], self._others, self._config.iterations, gpu, count, peak)

        small = hours(rollout_model)
        drafted = {
            f"policy, {number} {'drafts' if number > 1 else 'draft'} a pass": hours(
                replace(policy, drafts=Drafts(costs["rollout_model"], number, ACCEPTANCE))
            )
            for number in range(1, MOST_DRAFTS + 1)
        }
        fastest = min(drafted, key=lambda name: drafted[name].generation)
        half = replace(work, sequences=work.sequences / 2)
        halves = [hours(engine, half).generation for engine in (policy, rollout_model)]
        sending = small.sending + hours(policy).sending
        return {
            "rollout model": small,
            "each a half, in turn": small._replace(generation=sum(halves), sending=sending),
            fastest: drafted[fastest]._replace(sending=sending),
            "policy alone": hours(alone, roles={"policy": costs["policy"]}),
        }

    def _engine_speed(self, one: EngineNeeds, spread: int, gpu: Gpu) -> EngineSpeed:
        return EngineSpeed(
            model=self._costs[one.role],
            number_bytes=DTYPES[one.settings.dtype].itemsize,
            max_num_seqs=one.settings.max_num_seqs,
            cache_bytes=cache_bytes(one, spread, gpu),
            gpus=spread,
            peak=gpu.bf16 if one.settings.dtype == "bf16" else gpu.fp32,
        )

    def _work(self) -> Work:
        config, batch = self._config, self._config.batch
        return Work(
            sequences=batch.rollouts,
            steps=batch.steps_per_iteration,
            epochs=batch.ppo_epochs,
            generated=DYNAMIC_ROUNDS if batch.filter_groups else 1.0,
            lengths=self.lengths,
            checkpoints=config.activation_checkpointing,
            extra=extra_passes(config),
        )


def extra_passes(config: Config) -> float:
    """Return the number of forward passes without gradient over a rollout batch.

    One is for the anchors of several steps. One in every epoch is for kappa, where it is computed beforehand, as with a
    regularized loss, and the anchors do not give it.
    """
    steps, objective, correction = config.batch.steps_per_iteration, config.objective, config.objective.correction
    anchored = steps > 1 and getattr(correction, "target", "old") == "old"
    is_regularized = objective.entropy_coeff > 0.0 or bool(objective.reference and objective.reference.kl_loss_coef)
    beforehand = ("prepass", "auto") if is_regularized else ("prepass",)
    needs_pass = getattr(correction, "kappa", "none") in beforehand and not anchored
    return float(steps > 1) + (config.batch.ppo_epochs if needs_pass else 0)


def _shared_hours(
    config: Config, work: Work, policy: EngineSpeed, rollout_model: EngineSpeed, gpu: Gpu, gpus: int
) -> float:
    """Return the hours in which both models generate their shares of all rollout batches, one after the other."""
    shares = Counter(config.rollout_model.share_at(number) for number in range(1, config.iterations + 1))
    seconds = 0.0
    for share, iterations in shares.items():
        for engine, part in ((rollout_model, share), (policy, 1.0 - share)):
            sequences = part * work.sequences * work.generated * engine.gpus / gpus
            seconds += iterations * (engine.seconds(sequences, work.lengths, gpu) if part else 0.0)
    return seconds / 3600


def _evaluated(config: Config, rollout: EngineSpeed, policy: EngineSpeed) -> list[tuple[EngineSpeed, int]]:
    """Return engine and number of responses for each set: both models answer the task, the policy each other set."""
    settings = config.evaluation
    sizes = [settings.problems, *(BENCHMARKS[name].test.size for name in settings.benchmarks if name in BENCHMARKS)]
    sets = [(policy, size * settings.k) for size in sizes]
    return sets if config.rollout_model is None else [*sets, (rollout, settings.problems * settings.k)]


def _cost(model: PreTrainedModel, size: ModelSize) -> ModelCost:
    forward, head = forward_cost(model), head_cost(model)
    return ModelCost(
        parameters=size.parameters,
        trained=size.trained,
        body=forward.per_token - head,
        head=head,
        pair=forward.per_pair,
        cache=cached_numbers(model),
    )


def _others(config: Config, lengths: Lengths, policy: ModelCost) -> float:
    """Return the FLOPs of reference and critic for one sequence.

    The reference reads it once. The critic is as large as the policy, reads it once more and has no output layer.
    """
    flops = policy.forward(lengths) if config.objective.reference else 0.0
    if config.critic:
        body = replace(policy, head=0, trained=policy.parameters)
        flops += body.training(lengths, config.activation_checkpointing, 1 / config.batch.ppo_epochs)
    return flops
