"""The estimate of the GPUs and hours that a large run needs, by the rules of `sharding` and `cost_model`."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import fmean
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from jackpot.analysis.plan.cost_model import (
    ACCEPTANCE,
    DENSE_FP8_GAIN,
    DYNAMIC_ROUNDS,
    FP8_TRAINING_GAIN,
    GPUS,
    HEAD_ACCEPTANCE,
    HEAD_DRAFTS,
    MIXTURE_FP8_GAIN,
    PLAIN,
    Drafts,
    EngineSpeed,
    Gpu,
    Hours,
    Lengths,
    Linear,
    ModelCost,
    Work,
    evaluation_hours,
    mean_response,
    on_policy,
    run_hours,
)
from jackpot.analysis.plan.memory import MemoryPlan, cached_number_bytes, engine_weights, plan_memory
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
from jackpot.config.config import Config
from jackpot.config.engines import EngineConfig, TransformersEngineConfig, VLLMEngineConfig
from jackpot.config.processes import place_engines
from jackpot.config.published import GpusConfig
from jackpot.core.roles import Role
from jackpot.models.cost import cached_numbers, forward_cost, head_cost
from jackpot.models.drafts import tokens_per_verification
from jackpot.rollout.tasks.benchmarks import BENCHMARKS

DRAFTED = 4  # drafts before each pass, assumed for `engine.draft.tokens: auto`
ENGINES_SHARE = 0.9  # share of a GPU's memory that engines take if no learner is on it: vLLM's own default
AT_ONCE = 4  # batches that engines generate at once if rollouts are made ahead of training, as with batch.ahead = 7
LARGE = 100_000_000  # least number of parameters of all models at which a plan shows GPUs and hours
SHOWN_KINDS, SHOWN_COUNTS = ("H100", "H200"), (1, 2, 4, 8)  # kinds and numbers of GPUs that every plan shows


class MachineEstimate(NamedTuple):
    """The memory and the hours of a run on some GPUs, and for comparison the hours if the policy alone generates."""

    kind: str  # name of the GPU, a key of GPUS
    shard: Shard  # memory of each GPU
    hours: Hours | None  # hours of the run; None where it does not fit
    alone: Hours | None  # hours if the policy alone generates as many responses, on-policy, with one step on each batch
    ahead: Hours | None = None  # hours if the policy generates batches ahead of training; None: no room, or one GPU


class FlopShares(NamedTuple):
    """The FLOPs of a run, divided by the FLOPs of an on-policy run of the policy alone with as many responses."""

    rollouts: float  # FLOPs of generating the rollouts
    all: float  # FLOPs of rollouts, training and evaluations


class CostEstimate(NamedTuple):
    """The estimates of a run on several kinds and numbers of GPUs, with the assumed lengths of its sequences."""

    prompts: PromptLengths
    response: float  # mean length of a response, tokens
    rows: list[MachineEstimate]  # for each of SHOWN_KINDS on each of SHOWN_COUNTS
    stated: MachineEstimate  # estimate on the GPUs that were asked about or that the recipe names, else on one H100
    this_machine: list[MachineEstimate]  # on the GPUs of this machine; empty without GPUs of a known kind
    fewest: dict[str, int]  # fewest GPUs of each kind on which the run fits; 0: not even on the most that are tried
    flops: FlopShares


def is_large(sizes: Mapping[Role, ModelSize]) -> bool:
    """Return whether the models have so many parameters that a plan shows GPUs and hours."""
    return sum(size.parameters for size in sizes.values()) >= LARGE


def estimate(
    config: Config, sizes: Mapping[Role, ModelSize], prompts: PromptLengths, stated: GpusConfig | None
) -> CostEstimate:
    """Estimate memory and hours of a run on the kinds and numbers of GPUs that every plan shows, and on those stated.

    Args:
        config: settings of the run.
        sizes: numbers of parameters by role.
        prompts: lengths of prompts.
        stated: GPUs that were asked about, or that the recipe names; None: one H100.

    Raises:
        ModelError: as `plan_memory`.
    """
    stated = stated or GpusConfig(kind="H100", count=1)
    estimator = Estimator(config, sizes, prompts)
    machine = gpus_here()

    return CostEstimate(
        prompts=prompts,
        response=estimator.lengths.mean,
        rows=[estimator.row(kind, count) for kind in SHOWN_KINDS for count in SHOWN_COUNTS],
        stated=estimator.row(stated.kind, stated.count),
        this_machine=[estimator.row(machine.kind, machine.count)] if machine else [],
        fewest={kind: estimator.fewest(kind) for kind in dict.fromkeys((stated.kind, *SHOWN_KINDS))},
        flops=estimator.flop_shares(),
    )


def gpus_here() -> GpusConfig | None:
    """Return the GPUs of this machine; None without GPUs, or if they are not all of one known kind and its memory."""
    if not torch.cuda.is_available():
        return None

    # Variants of a kind, such as the A100 of 40 and of 80 GB, differ in their memory. Drivers report a few percent less
    # than the data sheet.
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    for kind, gpu in GPUS.items():
        if all(kind in device.name.replace(" ", "") and device.total_memory > 0.85 * gpu.memory for device in devices):
            return GpusConfig.model_validate({"kind": kind, "count": len(devices)})
    return None


def without_learner(needs: Mapping[str, EngineNeeds]) -> dict[str, EngineNeeds]:
    """Return engines' needs of memory if no learner is on their GPUs, so that vLLM engines can take more of it.

    The shares of a GPU's memory that vLLM engines take are scaled so that they sum to `ENGINES_SHARE`.
    """
    shares = {
        name: engine.settings.gpu_memory_utilization
        for name, engine in needs.items()
        if isinstance(engine.settings, VLLMEngineConfig) and engine.settings.kv_cache_memory_bytes is None
    }

    enlarged = dict(needs)
    for name, share in shares.items():
        update = {"gpu_memory_utilization": ENGINES_SHARE * share / sum(shares.values())}
        enlarged[name] = needs[name]._replace(settings=needs[name].settings.model_copy(update=update))
    return enlarged


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareHours:
    """The hours of a run, without evaluations, by the share of the rollouts that each model generates.

    A batch takes the same optimizer steps, whichever model generates the batch.
    """

    # Returns the hours of all iterations, from one iteration's work, the engine that generates, and the trained models.
    run: Callable[[Work, EngineSpeed, Sequence[ModelCost]], Hours]
    work: Work  # work of one iteration
    policy: EngineSpeed  # the policy's engine in a run without a rollout model
    policy_beside: EngineSpeed  # the policy's engine if the rollout model's engine has memory of the same GPUs
    rollout_model: EngineSpeed
    costs: Mapping[Role, ModelCost]
    gpu: Gpu
    gpus: int

    def generation(self, share: float, drafts: Drafts | None = None) -> float:
        """Return the hours in which the rollout model generates `share` of each batch, and then the policy the rest."""
        writers = ((share, self.rollout_model), (1.0 - share, replace(self.policy_beside, drafts=drafts)))
        return sum(
            self.run(replace(self.work, sequences=self.work.sequences * writer_share), engine, ()).generation
            for writer_share, engine in writers
            if writer_share > 0.0
        )

    def at(self, share: float, drafts: Drafts | None = None) -> Hours:
        """Return the hours if the rollout model generates `share` of each batch, and the policy the rest.

        Both models are trained. With `drafts`, the rollout model drafts for the policy. The hours of sending weights
        count each model that generates or drafts.
        """
        by_rollout_model = self.run(self.work, self.rollout_model, [*self.costs.values()])
        sending = by_rollout_model.sending if share > 0.0 or drafts else 0.0
        if share < 1.0:
            sending += self.run(self.work, self.policy_beside, ()).sending
        return by_rollout_model._replace(generation=self.generation(share, drafts), sending=sending)


class Estimator:
    """An estimator of one run on any GPUs, which computes once what does not depend on the kind and number of GPUs.

    Args:
        config: settings of the run.
        sizes: numbers of parameters by role.
        prompts: lengths of prompts.
        response: mean length of a response, tokens; None: assumed, from the greatest length that sampling allows.
    """

    def __init__(
        self, config: Config, sizes: Mapping[Role, ModelSize], prompts: PromptLengths, response: float | None = None
    ) -> None:
        """Compute the lengths of sequences, costs of models, blocks that GPUs gather, and memory needs of engines.

        `response` is the mean length of a response, tokens; None: `mean_response` assumes it from the limit.
        """
        self._config, self._sizes = config, sizes
        self._prompt = prompts.longest
        self.blocks, self.needs = blocks(config), engine_needs(config, prompts.longest)

        limit = config.sampling.max_new_tokens
        self.lengths = Lengths(prompt=prompts.mean, mean=response or mean_response(limit), limit=limit)
        self._costs: dict[Role, ModelCost] = {
            role: _cost(outline(path), sizes[role]) for role, path in config.model_paths().items()
        }
        self._other_flops = _other_flops(config, self.lengths, self._costs["policy"])

    @cached_property
    def memory(self) -> MemoryPlan:
        """Return the memory that training takes in one process, without the copies of weights that autocast makes."""
        with sharded():
            return plan_memory(self._config, self._sizes, self._prompt)

    def shard(self, kind: str, count: int) -> Shard:
        """Return the memory of the run on each of `count` GPUs of a kind."""
        config = self._config
        needs = self.needs if count == 1 else engine_needs(place_engines(config, count, on_gpu=True), self._prompt)
        return shard(self.memory, self.blocks, needs, GPUS[kind], count, offloads=config.placement.offload)

    def fewest(self, kind: str) -> int:
        """Return the fewest GPUs of a kind on which the run fits, one of COUNTS; 0: none of these numbers suffices."""
        return next((count for count in COUNTS if self.shard(kind, count).fits), 0)

    def row(self, kind: str, count: int) -> MachineEstimate:
        """Return memory and hours of the run on `count` GPUs of a kind; the hours are None where it does not fit."""
        shard = self.shard(kind, count)
        if not shard.fits:
            return MachineEstimate(kind=kind, shard=shard, hours=None, alone=None)

        shares = self.shares(GPUS[kind], count)
        evaluating = self.evaluating(shares)
        hours = self.run_hours(shares)._replace(evaluating=evaluating)

        # For comparison: the hours to train the policy alone, on-policy, on as many responses. In place of each
        # iteration of the run there are `times` on-policy iterations.
        work, times = on_policy(shares.work)
        if_as_many_iterations = shares.run(work, shares.policy, [self._costs["policy"]])
        alone = Hours(*(times * hours for hours in if_as_many_iterations))._replace(evaluating=evaluating)
        ahead = self.ahead(GPUS[kind], count, evaluating)
        return MachineEstimate(kind=kind, shard=shard, hours=hours, alone=alone, ahead=ahead)

    def ahead(self, gpu: Gpu, count: int, evaluating: float, writer: Role = "policy") -> Hours | None:
        """Return the fewest hours of a run that generates batches while it trains on earlier ones.

        Some GPUs generate and the others train; all splits are tried. If the policy generates, it is also tried with a
        small head that drafts for it. The GPUs that train must have room for weights, gradients and moments in float32;
        activations are not counted.

        Args:
            gpu: data sheet of the GPUs.
            count: number of GPUs.
            evaluating: hours of evaluations.
            writer: the model that generates everything. The policy is trained, and the rollout model too if it writes.

        Returns:
            The hours, whose `generation` is the time that the learner waits for batches; None where nothing fits.
        """
        engine, trained = self.needs["engine"], [*self._costs.values()]
        drafts_tried: list[Drafts | None] = [None]  # None: without drafts
        if writer == "policy":
            policy = self._costs["policy"]
            engine, trained = needs_of(self._config, "policy", self._config.engine, self._prompt), [policy]
            drafts_tried.append(Drafts(model=policy.drafting_head(), tokens=HEAD_DRAFTS, acceptance=HEAD_ACCEPTANCE))
        needs = without_learner({"engine": engine})
        # A parameter takes 4 bytes as a weight and, if it is trained, 12 more for gradient and moments.
        fewest_training = math.ceil(sum(4 * model.parameters + 12 * model.trained for model in trained) / gpu.memory)

        # Every split of the GPUs is tried: some generate, AT_ONCE batches together, and the others train. The learner
        # waits if generating takes longer than training.
        estimates: list[Hours] = []
        for generating in range(1, count - fewest_training + 1):
            if not degree(needs["engine"], gpu, generating):  # 0: the engine does not fit on so few GPUs
                continue

            # On the GPUs that train: all hours but those of generation. The field `rollout_model` of what `shares`
            # returns is the engine of `needs`, whichever model it holds.
            on_learner = self.shares(gpu, count - generating, needs)
            learner = on_learner.run(on_learner.work, on_learner.rollout_model, trained)._replace(evaluating=evaluating)

            # On the GPUs that generate: AT_ONCE batches at once, by the engine of `needs`.
            on_engines = self.shares(gpu, generating, needs)
            batches = replace(on_engines.work, sequences=AT_ONCE * on_engines.work.sequences)
            for drafts in drafts_tried:
                speed = replace(on_engines.rollout_model, drafts=drafts)
                # Divided by AT_ONCE, since `run` takes `batches` for the work of one iteration.
                generation = on_engines.run(batches, speed, ()).generation / AT_ONCE
                estimates.append(learner._replace(generation=max(0.0, generation - learner.training)))
        return min(estimates, key=lambda hours: hours.all, default=None)

    def flop_shares(self) -> FlopShares:
        """Return the run's FLOPs over those of an on-policy run, by the models' shapes and the assumed lengths.

        Reference and critic, which both runs have, are left out.
        """
        config, policy = self._config, self._costs["policy"]
        model = self._costs.get("rollout_model", policy)
        iterations = range(1, config.iterations + 1)

        # FLOPs of generating one response, averaged over the models; with drafts both models read every draft.
        by_policy, by_model = policy.forward(self.lengths), model.forward(self.lengths)
        share = 0.0 if config.rollout_model is None else fmean(map(config.rollout_model.share_at, iterations))
        generated = share * by_model + (1.0 - share) * by_policy
        if drafts := self.drafts:
            passes = (drafts.tokens + 1) / tokens_per_verification(drafts.acceptance, drafts.tokens)
            generated = passes * (by_model + by_policy)

        # FLOPs of training on one response, over all epochs; `trained_alone`: on-policy, one epoch, no extra passes.
        work = self.work()
        extra = work.extra / work.epochs  # forward passes without gradient in one epoch
        trained = work.epochs * policy.training(self.lengths, checkpoints=work.checkpoints, extra=extra)
        if "rollout_model" in self._costs:
            used = fmean(map(config.uses_rollout_model, iterations))
            trained += used * work.epochs * model.training(self.lengths, checkpoints=work.checkpoints, extra=extra)
        trained_alone = policy.training(self.lengths, checkpoints=work.checkpoints, extra=0.0)

        # FLOPs of all evaluations, divided by the number of responses that are trained on.
        evaluation = sum(self._costs[role].forward(self.lengths) * count for role, count in _evaluated(config))
        evaluated = self.evaluations * evaluation / (work.sequences * config.iterations)

        rollouts, rollouts_alone = work.generated * generated, work.generated * by_policy
        return FlopShares(
            rollouts=rollouts / rollouts_alone,
            all=(rollouts + trained + evaluated) / (rollouts_alone + trained_alone + evaluated),
        )

    def run_hours(self, shares: ShareHours) -> Hours:
        """Return the hours of all iterations of the run, without evaluations."""
        config, count = self._config, self._config.iterations
        model = config.rollout_model
        if model is None or not config.is_mixed:
            return shares.run(shares.work, shares.rollout_model, [*self._costs.values()])

        # Hours are averaged over iterations, and computed once for all iterations of the same share. Where the rollout
        # model is not used any more, the policy generates everything and is trained alone.
        iterations_alike = Counter(
            (model.share_at(iteration), config.uses_rollout_model(iteration)) for iteration in range(1, count + 1)
        )
        policy_alone = [self._costs["policy"]]
        weighted: list[list[float]] = []  # for each kind of iteration, hours by activity times the kind's share
        for (share, is_used), times in iterations_alike.items():
            if is_used:
                hours = shares.at(share, self.drafts)
            else:
                hours = shares.run(shares.work, shares.policy_beside, policy_alone)
            weighted.append([times / count * activity for activity in hours])
        return Hours(*map(sum, zip(*weighted, strict=True)))  # each activity summed over the kinds of iterations

    def evaluating(self, shares: ShareHours) -> float:
        """Return the hours of the run's evaluations."""
        engines = {"policy": replace(shares.policy_beside, drafts=self.drafts), "rollout_model": shares.rollout_model}
        sets = [(engines[role], answers) for role, answers in _evaluated(self._config)]
        return evaluation_hours(sets, self.evaluations, self.lengths, shares.gpu, shares.gpus)

    @property
    def evaluations(self) -> int:
        """Return the number of evaluations in the run, including the one before training."""
        return 1 + math.ceil(self._config.iterations / self._config.evaluation.every)

    @property
    def drafts(self) -> Drafts | None:
        """Return the drafts that the policy's engine verifies; None for a run without drafts."""
        if self._config.draft is None:
            return None
        tokens = DRAFTED if self._config.draft.tokens == "auto" else self._config.draft.tokens
        return Drafts(model=self._costs["rollout_model"], tokens=tokens, acceptance=ACCEPTANCE)

    def shares(self, gpu: Gpu, count: int, needs: Mapping[str, EngineNeeds] | None = None) -> ShareHours:
        """Return the run's hours on `count` GPUs, as a function of the share of rollouts by each model.

        Args:
            gpu: data sheet of the GPUs.
            count: number of GPUs.
            needs: the engines' needs of memory, by the keys `engine` and `evaluation.engine`; None: those of engines
                that share their GPUs with a learner.
        """
        needs = needs or self.needs
        # The policy's engine in a run without a rollout model; `policy_beside` is the one beside that model's engine.
        policy = needs_of(self._config, "policy", self._config.engine, self._prompt)

        return ShareHours(
            # Left open are the arguments `work`, `engine` and `models`.
            run=partial(
                run_hours,
                other_flops=self._other_flops,
                iterations=self._config.iterations,
                gpu=gpu,
                gpus=count,
                peak=_peak(self._config.compute_dtype, gpu),
                linear=_trained_linear(self._config, gpu),
            ),
            work=self.work(),
            policy=self._engine_speed(policy, gpu, count),
            policy_beside=self._engine_speed(needs.get("evaluation.engine", policy), gpu, count),
            rollout_model=self._engine_speed(needs["engine"], gpu, count),
            costs=self._costs,
            gpu=gpu,
            gpus=count,
        )

    def _engine_speed(self, engine: EngineNeeds, gpu: Gpu, gpus: int) -> EngineSpeed:
        """Return the speed of an engine, spread over the fewest of `gpus` GPUs that hold it, or over all if none do."""
        cost, settings = self._costs[engine.role], engine.settings
        spread = degree(engine, gpu, gpus) or gpus
        path = self._config.model_paths()[engine.role]
        # The greatest speed-up by FP8, for a mixture of experts or for a dense model.
        gain = MIXTURE_FP8_GAIN if getattr(outline(path).config, "num_experts_per_tok", None) else DENSE_FP8_GAIN

        return EngineSpeed(
            model=cost,
            weight_bytes=engine_weights(settings, path) / cost.parameters,
            number_bytes=cached_number_bytes(settings),
            max_num_seqs=settings.max_num_seqs,
            cache_bytes=cache_bytes(engine, spread, gpu),
            gpus=spread,
            peak=_peak(settings.dtype, gpu),
            linear=_engine_linear(settings, gpu),
            most_gain=gain if settings.quantization == "fp8" else None,
        )

    def work(self) -> Work:
        """Return the work of one iteration, as the settings and the assumed lengths define it."""
        config, batch = self._config, self._config.batch
        # The expected number of tokens that an optimizer step trains on.
        step_tokens = (batch.mini_batch_size or batch.rollouts) * (self.lengths.prompt + self.lengths.mean)
        return Work(
            sequences=batch.rollouts,
            steps=batch.steps_per_iteration,
            epochs=batch.ppo_epochs,
            micro_batches=math.ceil(step_tokens / batch.micro_batch_tokens),
            generated=DYNAMIC_ROUNDS if batch.filter_groups else 1.0,
            lengths=self.lengths,
            checkpoints=config.activation_checkpointing,
            extra=extra_passes(config),
        )


def _peak(dtype: str, gpu: Gpu) -> float:
    """Return the FLOP/s of a GPU's matrix products in a dtype."""
    return gpu.bf16 if dtype == "bf16" else gpu.fp32


def _engine_linear(settings: EngineConfig, gpu: Gpu) -> float:
    """Return the time of a FLOP in an engine's linear layers, relative to that of a FLOP in its other layers.

    It is below 1 where the engine multiplies in FP8 or INT8; an engine of transformers never multiplies in INT8.
    """
    in_int8 = settings.quantization == "int8_w8a8" and not isinstance(settings, TransformersEngineConfig)
    fast = gpu.fp8 if settings.quantization == "fp8" else gpu.int8 if in_int8 else None
    return min(1.0, _peak(settings.dtype, gpu) / fast) if fast else 1.0


def _trained_linear(config: Config, gpu: Gpu) -> Linear:
    """Return the time of a FLOP in training's linear layers, relative to other layers: below 1 if they run in FP8."""
    if config.trained_quantization != "fp8" or gpu.fp8 is None:
        return PLAIN
    return Linear(1 / FP8_TRAINING_GAIN, 1 / FP8_TRAINING_GAIN if config.fp8_backward == "fp8" else 1.0)


def extra_passes(config: Config) -> float:
    """Return the number of forward passes without gradient over a rollout batch.

    If an iteration has several optimizer steps, one pass is for the anchors, the policy's log-probs before the first
    step. One pass in every epoch is for kappa, if that is computed beforehand and the anchors do not give it; kappa is
    the factor of OBRS that scales estimates of Z to the mean acceptance.
    """
    steps, objective, correction = config.batch.steps_per_iteration, config.objective, config.objective.correction
    # The anchors, log-probs of the policy before the first step, give kappa if the correction's target is that policy.
    anchors_give_kappa = steps > 1 and getattr(correction, "target", "old") == "old"
    # With a regularized loss, `kappa: auto` needs the same forward pass as `kappa: prepass`.
    is_regularized = objective.entropy_coeff > 0.0 or bool(objective.reference and objective.reference.kl_loss_coef)
    beforehand = ("prepass", "auto") if is_regularized else ("prepass",)
    needs_pass = getattr(correction, "kappa", "none") in beforehand and not anchors_give_kappa
    return float(steps > 1) + (config.batch.ppo_epochs if needs_pass else 0)


def _evaluated(config: Config) -> list[tuple[Role, int]]:
    """Return (model, number of answers) for each set of problems in an evaluation.

    Both models answer the task's problems. The policy alone answers benchmarks; those of unknown size are left out.
    """
    settings = config.evaluation
    answers = [settings.problems * settings.k]
    for benchmark in settings.benchmarks:
        published = BENCHMARKS[benchmark.name].test if benchmark.name in BENCHMARKS else None
        # A benchmark without a published size is left out.
        answers += [published.size * (benchmark.k or settings.k)] if published else []
    sets: list[tuple[Role, int]] = [("policy", count) for count in answers]
    return sets if config.rollout_model is None else [*sets, ("rollout_model", settings.problems * settings.k)]


def _cost(model: PreTrainedModel, size: ModelSize) -> ModelCost:
    """Return the cost of a model: its size, and the FLOPs of its forward pass by part."""
    forward, head = forward_cost(model), head_cost(model)
    return ModelCost(
        parameters=size.parameters,
        trained=size.trained,
        body=forward.per_token - head,
        head=head,
        pair=forward.per_pair,
        cache=cached_numbers(model),
        layers=model.config.get_text_config().num_hidden_layers,
    )


def _other_flops(config: Config, lengths: Lengths, policy: ModelCost) -> float:
    """Return the FLOPs of reference and critic for one sequence in one epoch.

    The reference reads the sequence once. The critic is as large as the policy without an output layer, is trained on
    the sequence, and reads it once more for values in an iteration; that pass is spread over the epochs.
    """
    flops = policy.forward(lengths) if config.objective.reference else 0.0
    if config.critic:
        body = replace(policy, head=0, trained=policy.parameters)
        flops += body.training(lengths, checkpoints=config.activation_checkpointing, extra=1 / config.batch.ppo_epochs)
    return flops
