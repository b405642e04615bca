"""Every setting of a training run, in the order of a recipe, with its default written once.

A recipe is the YAML form of `Config`, with `arms: {name: overrides}` added. Overrides are dotted keys with values.
"""

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from jackpot.config.base import (
    MAY_CHANGE,
    AnyNames,
    Bound,
    Count,
    Decay,
    Differences,
    Finite,
    Names,
    NonNegative,
    Strict,
)
from jackpot.config.batch import BatchConfig
from jackpot.config.corrections import RolloutModelCorrection, TISCorrection, ZCorrection
from jackpot.config.engines import (
    TRAINED_QUANTIZATION,
    DraftConfig,
    Dtype,
    EngineConfig,
    Quantization,
    TransformersEngineConfig,
    check_engine_processes,
    check_filters,
    check_sleep,
    check_trained_quantization,
    is_quantized,
    is_remote,
    number_formats,
    server_urls,
    sleeps,
)
from jackpot.config.objective import ObjectiveConfig
from jackpot.config.placement import PlacementConfig
from jackpot.config.safety import CheckpointConfig, GuardConfig, RolloutsConfig
from jackpot.config.tasks import ArithmeticConfig, TaskConfig
from jackpot.config.tracking import TrackingConfig
from jackpot.core.roles import Role, Writer
from jackpot.objectives.constants import HEAD_LOGITS_MEMORY, TEMPERATURE

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Sampling(Strict):
    """Settings of an engine's sampling. The engine's log-probs are of the distribution after all of these."""

    temperature: Finite = TEMPERATURE
    """Temperature of sampling. Every model's log-probs in training use the same one."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Probability mass of nucleus sampling; 1: off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Number of most probable tokens that are sampled from; 0: all. It is not `num_top_log_probs`."""
    max_new_tokens: Count = 256
    """Limit of a whole response, tokens, those of tools' replies included."""
    num_top_log_probs: Annotated[int, Field(ge=0)] = 20
    """Most probable tokens whose log-probs the engine returns at each position: the k of OBRS, which Z is summed
    over."""
    stop_token_ids: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Token ids that end a response, in addition to the end-of-sequence tokens that the model folder names."""

    @property
    def truncated(self) -> bool:
        """Return whether a filter gives probability zero to tokens that the model would sample."""
        return self.top_p < 1.0 or self.top_k > 0


class OptimizerConfig(Strict):
    """Settings of AdamW for one model."""

    learning_rate: Finite
    """Learning rate after warm-up."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.99)  # a list in YAML
    """Decay rates of AdamW's running means of the gradient and of its square."""
    eps: Finite = 1e-8
    """AdamW's epsilon, added to the root of the mean square."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Bound = 1.0
    """Largest norm of a step's gradient, which is scaled down to it; null or .inf: no limit."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up; linear and cosine fall to 0 at the run's last step."""
    weights_dtype: Literal["bf16"] | None = None
    """Number format that the trained weights are rounded to after every step, which loses steps below half a place of 8
    bits, as where master weights are bf16 (Jet-RL's); moments and memory stay those of fp32. null: fp32."""


ALL_LINEAR = "all-linear"


class LoraConfig(Strict):
    """Settings of a low-rank adapter, which is trained while the model's own weights are frozen.

    There is no dropout: equal weights must give equal log-probs, in training and in the engine.
    """

    rank: Count = 16
    """Rank of the two factors B A of each weight's change."""
    alpha: Count = 32
    """Scale of the change: alpha / rank * B A."""
    target_modules: Names = (ALL_LINEAR,)
    """Last parts of the names of the linear layers that get an adapter; all-linear: all but the output head."""


class PolicyConfig(Strict):
    """Settings of the policy, the model that is trained by reinforcement learning."""

    path: str
    """Folder, hub name, or starter:NAME of the model."""
    optimizer: OptimizerConfig
    """AdamW of the policy."""
    ess_scaling: Literal["response", "token"] | None = None
    """Multiply the learning rate of each step by sqrt(effective sample size / n): of its responses, weighted by the
    product of p_old / p_inf over each (response, VCPO's), or of its tokens, weighted by what the correction makes of
    them (token); null: no."""
    lora: LoraConfig | None = None
    """Train an adapter instead of all weights; null: all weights are trained."""


class DistillControlConfig(Strict):
    """Settings of a controller that adapts the weight of the distillation to hold a metric at a target.

    After every step of the rollout model the weight is multiplied by 1 + error / `horizon`. The error is how far the
    metric is from its target, relative to it, at most 0.2 (the adaptive KL coefficient of PPO, arXiv 1909.08593, 2.2).
    """

    metric: Literal["kl", "acceptance"] = "kl"
    """What is held: KL(policy || rollout model) in nats per token (kl), or the mean acceptance probability of the
    tokens that the rollout model sampled (acceptance), each over an optimizer step."""
    target: Finite
    """Value at which the metric is held. For `acceptance` below 1, and errors are relative to 1 - target."""
    horizon: Annotated[float, Field(ge=1.0, lt=float("inf"))] = 10.0
    """Steps of the rollout model over which an error is corrected; smaller reacts faster and swings more."""
    low: Finite = 0.01
    """Smallest weight."""
    high: Finite = 100.0
    """Largest weight, which a target that cannot be reached ends at."""

    @model_validator(mode="after")
    def _check(self) -> "DistillControlConfig":
        if self.low > self.high:
            raise ValueError(f"low is {self.low:g} and high is {self.high:g}; low must be at most high")
        return self


class ShareSchedule(Strict):
    """Settings of a share that changes once, or falls or rises over some iterations."""

    schedule: Literal["step", "linear", "cosine"]
    """Course of the share from `start` to `end`: at once, along a line, or along half a cosine wave."""
    start: Share = 1.0
    """Share in the iterations up to `hold`."""
    end: Share = 0.0
    """Share in the last iterations."""
    hold: Annotated[int, Field(ge=0)]
    """Last iteration with the share `start`."""
    until: Count | None = None
    """First iteration with the share `end`, of linear and cosine; step takes the one after `hold`."""

    @model_validator(mode="after")
    def _check(self) -> "ShareSchedule":
        if self.schedule == "step" and self.until is not None:
            raise ValueError(f"schedule step changes after iteration hold {self.hold}, so until must be left out")
        if self.schedule != "step" and (self.until is None or self.until <= self.hold):
            raise ValueError(
                f"schedule {self.schedule} needs until, the first iteration with the share `end`, above hold "
                f"{self.hold}; it is {self.until}"
            )
        return self

    def at(self, iteration: int) -> float:
        """Return the share of an iteration, counted from 1."""
        if iteration <= self.hold:
            return self.start
        last = self.hold + 1 if self.until is None else self.until
        if iteration >= last:
            return self.end
        done = (iteration - self.hold) / (last - self.hold)
        done = done if self.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * done)
        return self.start + (self.end - self.start) * done


class RolloutModelConfig(Strict):
    """Settings of the model that generates the rollouts, trained jointly with the policy (eqs. 6 to 8) or frozen."""

    path: str
    """Folder, hub name, or starter:NAME of the model."""
    share: Share | ShareSchedule = 1.0
    """Share of the rollouts that the rollout model generates, a number or a schedule; the policy generates the others.
    Once the schedule has ended at 0 for good, the rollout model is neither run nor trained any more."""
    split: Literal["prompt", "group"] = "prompt"
    """Which rollouts these are: all responses to a share of the prompts, or a share of the responses to each prompt."""
    optimizer: OptimizerConfig | None = None
    """AdamW of the rollout model; null: the rollout model is frozen."""
    update: Literal["step", "iteration"] = "step"
    """When the rollout model is trained: at every optimizer step of the policy, or once for each rollout batch."""
    lora: LoraConfig | None = None
    """Train an adapter instead of all weights; null: all weights are trained, unless the model is frozen."""
    correction: RolloutModelCorrection = TISCorrection()
    """Correction of the mismatch between the engine and the rollout model as training computes it (eq. 7's F)."""
    clip_low: NonNegative | None = 0.2
    """PPO's clip of the rollout model's ratio from below, at 1 - clip_low; null: no clip."""
    clip_high: NonNegative | None = 0.2
    """PPO's clip of the rollout model's ratio from above, at 1 + clip_high; null: no clip."""
    ppo_weight: NonNegative = 1.0
    """Weight of the rollout model's own PPO loss."""
    distill_weight: NonNegative = 1.0
    """Weight of the distillation from the policy, lambda_distill; with `distill_control` the first one."""
    distill_control: DistillControlConfig | None = None
    """Adapt the weight of the distillation so that the two models stay equally close; null: the weight is constant."""
    distill: Literal["forward", "reverse"] = "forward"
    """Direction of the distillation: forward is KL(policy || rollout model), reverse is KL(rollout model || policy)."""

    def share_at(self, iteration: int) -> float:
        """Return the share of the rollouts of an iteration, counted from 1, that the rollout model generates."""
        return self.share.at(iteration) if isinstance(self.share, ShareSchedule) else self.share

    def is_used(self, iteration: int) -> bool:
        """Return whether the rollout model generates rollouts in an iteration or in a later one."""
        end = self.share.end if isinstance(self.share, ShareSchedule) else self.share
        return end > 0.0 or self.share_at(iteration) > 0.0

    @property
    def is_mixed(self) -> bool:
        """Return whether the policy generates rollouts too in the course of the run."""
        return self.share != 1.0

    @model_validator(mode="after")
    def _check(self) -> "RolloutModelConfig":
        if self.lora is not None and self.optimizer is None:
            raise ValueError(
                f"lora of rank {self.lora.rank} was given for a frozen rollout model, which trains nothing; give it an "
                f"optimizer, or set lora: null"
            )
        if self.distill_control is not None:
            self._check_control(self.distill_control)
        return self

    def _check_control(self, control: DistillControlConfig) -> None:
        if self.optimizer is None:
            raise ValueError("distill_control was given for a frozen rollout model; give it an optimizer")
        if self.ppo_weight == 0.0:
            raise ValueError(
                "distill_control weighs the distillation against the rollout model's PPO loss, but ppo_weight is 0, "
                "and AdamW does not see the scale of a single loss; raise ppo_weight, or set distill_control: null"
            )
        if not control.low <= self.distill_weight <= control.high:
            raise ValueError(
                f"distill_weight {self.distill_weight:g} is not between distill_control.low {control.low:g} and high "
                f"{control.high:g}; the controller begins with it"
            )


class CriticConfig(Strict):
    """Settings of PPO's value model, for `objective.advantage: gae` (arXiv 1707.06347, 1506.02438)."""

    path: str | None = None
    """Folder or hub name of the critic's first weights; null: the policy's, with a value head of zeros."""
    optimizer: Annotated[OptimizerConfig, Differences("policy.optimizer", ("weights_dtype",))]
    """AdamW of the critic: what differs from `policy.optimizer`, such as {learning_rate: 1e-5}; it has its own
    weights_dtype."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Discount of rewards per token."""
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """lambda of generalized advantage estimation, not of OBRS."""
    clip: Bound = 0.5
    """Largest change of a value from its old one that the critic's loss rewards; null or .inf: no clip."""


class EvaluationConfig(Strict):
    """Settings of the evaluations of policy and rollout model during a run."""

    every: Annotated[Count, MAY_CHANGE] = 50
    """Iterations between two evaluations; there is also one before the first iteration and one after the last."""
    problems: Count = 512
    """Held-out problems of the task in each evaluation; all of them where there are fewer."""
    k: Count = 1
    """Responses to each problem."""
    benchmarks: AnyNames = ()
    """Names of further sets of problems that the policy answers, or paths of files with problems in the columns of
    `task.test`; all of their problems, k times each."""
    engine: Annotated[EngineConfig | None, Differences("engine")] = None
    """Engine of the policy where there is a rollout model, in evaluations and for its share of the rollouts: what
    differs from `engine`, or a whole engine where `name` is given; null: the same settings as `engine`."""


class Config(Strict):
    """All settings of one run of `jackpot train`."""

    description: Annotated[str, MAY_CHANGE] = ""
    """One line about the recipe, which `jackpot recipes` prints."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of every random number of the run."""
    iterations: Annotated[Count, MAY_CHANGE]
    """Rollout batches that the run trains on. A run that continues may have more of them, unless a learning rate falls
    towards the last one (`schedule: linear` or `cosine`), and fewer, but not fewer than are finished."""
    task: TaskConfig = ArithmeticConfig()
    """Problems that the models answer and how responses are rewarded."""
    policy: PolicyConfig
    """Model that is trained by reinforcement learning."""
    rollout_model: RolloutModelConfig | None
    """Model that generates the rollouts; null: the policy generates them itself."""
    critic: CriticConfig | None = None
    """Value model, for `objective.advantage: gae`; null: none."""
    engine: EngineConfig = TransformersEngineConfig()
    """Inference engine that generates the rollouts."""
    sampling: Sampling = Sampling()
    """How responses are sampled."""
    batch: BatchConfig
    """Sizes of batches."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The policy's loss."""
    precision: Literal["fp32", "bf16", "fp8", "int8"] = "fp32"
    """Number format of training's forward pass; weights and optimizer states are fp32. bf16: by autocast. fp8, int8:
    linear layers compute with the codes that the engine computes with (`quantization` fp8 or int8_w8a8), keys
    and values are rounded as its `kv_cache_dtype` says, and the rest is in its `dtype` (docs/precision.md). Status of
    fp8 and int8: experimental. They have run on CPUs only."""
    fp8_backward: Literal["dequantized", "fp8"] = "dequantized"
    """Products of the backward pass of `precision: fp8`: of gradients and the numbers that codes stand for, or of FP8
    codes too, gradients quantized by 1 x 128 (Jet-RL's)."""
    head_dtype: Literal["fp32"] | None = None
    """Number format in which training's output layers multiply; null: that of `precision`. The engine's own is
    `engine.head_dtype`."""
    head_kernel: Annotated[Literal["auto", "eager", "compile", "triton"], MAY_CHANGE] = "auto"
    """What reads the logits of training's output layers: torch's operators (eager), those through torch.compile, or
    Triton kernels; auto: Triton on a GPU where it is installed, else eager. It changes speed, and results only by
    rounding. Status of triton: never run on its target (a GPU). It has run in its interpreter."""
    tf32: bool = False
    """Round the factors of float32 products to 10 bits on a GPU, where they are several times faster (TF32). Status:
    never run on its target (a GPU)."""
    head_logits_memory: Annotated[int, Field(ge=0), MAY_CHANGE] = HEAD_LOGITS_MEMORY
    """MiB of logits that the forward pass of a micro-batch may keep for backward, of all models together. Where they do
    not all fit, none is kept, and backward computes them again: a third more products in the output layer."""
    activation_checkpointing: Annotated[bool, MAY_CHANGE] = False
    """Keep only each layer's input for the backward pass and compute the rest again, in all trained models: much less
    memory, a third more time."""
    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_CHANGE] = "auto"
    """Device of training and of the engine; auto: a GPU where there is one."""
    threads: Annotated[Count | Literal["auto"], MAY_CHANGE] = "auto"
    """CPU threads of torch; auto: the cores that are free when the run starts, shared by the ranks of a machine, with a
    warning where others are busy. A run that continues keeps the number that it began with, unless another one is
    given."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluations during the run."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints of the run."""
    guard: GuardConfig = GuardConfig()
    """Checks that stop a run which no longer trains."""
    rollouts: RolloutsConfig = RolloutsConfig()
    """Rollouts saved in the run folder."""
    tracking: TrackingConfig = TrackingConfig()
    """Services that get the run's metrics."""
    placement: PlacementConfig = PlacementConfig()
    """Processes of the run."""

    def writers(self, first: int, last: int | None = None) -> tuple[Writer, ...]:
        """Return the models that generate rollouts in an iteration, or in any of several up to `last`."""
        model = self.rollout_model
        if model is None:
            return ("policy",)
        shares = [model.share_at(iteration) for iteration in range(first, (last or first) + 1)]
        roles: dict[Writer, bool] = {"policy": min(shares) < 1.0, "rollout_model": max(shares) > 0.0}
        return tuple(role for role, writes in roles.items() if writes)

    @property
    def writing_engines(self) -> dict[str, EngineConfig]:
        """Return the engines that generate rollouts in the course of the run, by the settings that describe them."""
        engines = {"engine": self.engine, "evaluation.engine": self.evaluation.engine or self.engine}
        of_policy = "evaluation.engine" if self.rollout_model and self.evaluation.engine else "engine"
        writers = self.writers(1, self.iterations)
        return {key: engines[key] for key in (of_policy if role == "policy" else "engine" for role in writers)}

    @property
    def is_mixed(self) -> bool:
        """Return whether there is a rollout model and the policy generates rollouts too in the course of the run."""
        return self.rollout_model is not None and self.rollout_model.is_mixed

    def uses_rollout_model(self, iteration: int) -> bool:
        """Return whether there is a rollout model with anything left to do in an iteration."""
        return self.rollout_model is not None and (self.rollout_model.is_used(iteration) or self.draft is not None)

    def model_paths(self, checkpoint: Path | None = None) -> dict[Role, str]:
        """Return where each trained model is read from: the paths in the settings, or the folders of a checkpoint."""
        paths: dict[Role, str] = {"policy": self.policy.path}
        if self.rollout_model is not None:
            paths["rollout_model"] = self.rollout_model.path
        return {role: str(checkpoint / role) for role in paths} if checkpoint else paths

    @property
    def shares_gpus(self) -> bool:
        """Return whether engine processes are on the GPUs of the ranks, and sleep while these train."""
        placed = self.evaluation.engine if is_remote(self.engine) else self.engine
        return self.placement.engines > 0 and placed is not None and sleeps(placed)

    @property
    def compute_dtype(self) -> Dtype:
        """Return the number format of what training computes outside of quantized linear layers."""
        return self.engine.dtype if self.precision in ("fp8", "int8") else self.precision

    @property
    def trained_quantization(self) -> Quantization | None:
        """Return the quantization of the engine whose codes training computes with; None where it does not."""
        return self.engine.quantization if self.precision in TRAINED_QUANTIZATION else None

    @property
    def number_formats(self) -> str | None:
        """Name the number formats of linear layers and of keys and values in training; None where none is
        quantized."""
        return number_formats(self.engine) if self.trained_quantization else None

    @property
    def kl_metric(self) -> str:
        """Name the metric of KL(sampler || policy); from sampled tokens where an engine of the rollouts quantizes."""
        quantizes = any(map(is_quantized, self.writing_engines.values()))
        return "mismatch/kl_k3" if quantizes else "mismatch/kl_rollout_policy"

    @property
    def draft(self) -> DraftConfig | None:
        """Return how the rollout model drafts what the policy generates; None where it does not."""
        return getattr(self.evaluation.engine or self.engine, "draft", None) if self.rollout_model else None

    @model_validator(mode="after")
    def _check(self) -> "Config":
        self._check_top_k()
        self._check_fp8()
        if isinstance(self.objective.correction, ZCorrection):
            self._check_z(self.objective.correction)
        self._check_groups()
        self._check_engines()
        if self.objective.baseline == "model":
            self._check_baseline()
        control = self.rollout_model and self.rollout_model.distill_control
        if control and control.metric == "acceptance":
            self._check_acceptance(control.target)
        overlong = self.objective.overlong_buffer
        if overlong and overlong.len > self.sampling.max_new_tokens:
            raise ValueError(
                f"objective.overlong_buffer.len is {overlong.len}, more than sampling.max_new_tokens "
                f"{self.sampling.max_new_tokens}; it counts the last tokens before that limit"
            )
        return self

    def _check_groups(self) -> None:
        """Refuse groups and a critic of which the advantage makes nothing."""
        advantage = self.objective.advantage
        if self.batch.group_size == 1 and advantage not in ("gae", "reinforce_pp"):
            raise ValueError(
                f"batch.group_size is 1, so every advantage of {advantage!r} would be 0; use at least 2, or an "
                f"advantage without groups: gae or reinforce_pp"
            )
        if (advantage == "gae") != (self.critic is not None):
            given = "critic is null" if self.critic is None else "there is a critic"
            raise ValueError(
                f"objective.advantage is {advantage!r} and {given}; gae needs a critic (critic.optimizer at least) and "
                f"nothing else uses one"
            )
        if self.batch.group_size == 1 and self.batch.filter_groups:
            raise ValueError("batch.filter_groups replaces groups of equal rewards, as every group of 1 is; use null")

    def _check_engines(self) -> None:
        """Refuse engines that cannot serve both models, or not at once, or not where they are placed."""
        engines = [self.engine, self.evaluation.engine or self.engine]
        drafts = [getattr(engine, "draft", None) for engine in engines]
        if any(drafts) and not (self.is_mixed and drafts[1] and engines[0].name == engines[1].name):
            raise ValueError(
                "engine.draft has the rollout model draft the rollouts that the policy generates, which needs a "
                "rollout_model with a share below 1, and for both one kind of engine, transformers or vllm, the "
                "policy's with draft; set rollout_model.share=0.0, for all of them, or engine.draft=null"
            )
        check_filters(*engines, top_p=self.sampling.top_p, top_k=self.sampling.top_k)
        one_model = is_remote(self.engine) and self.evaluation.engine is None
        if one_model and self.rollout_model is not None:
            raise ValueError(
                "the servers of engine.urls hold the rollout model, so the policy needs an engine of its own to be "
                "evaluated with; set evaluation.engine=transformers, or to vllm_server or sglang_server with the "
                "urls of other servers"
            )
        if shared := server_urls(self.engine) & server_urls(self.evaluation.engine):
            raise ValueError(
                f"{', '.join(sorted(shared))} is a server of both engine and evaluation.engine, and one server serves "
                f"one engine at a time; set evaluation.engine.urls to other servers, or evaluation.engine=transformers"
            )
        check_engine_processes(*engines, number=self.placement.engines, ahead=self.batch.ahead)
        are_two = self.rollout_model is not None or self.evaluation.engine is not None
        check_sleep(*engines, are_two=are_two, draft=bool(self.draft))

    def _check_baseline(self) -> None:
        """Refuse to compare rewards within what each model generated of a group, where that would change nothing."""
        model, advantage, why = self.rollout_model, self.objective.advantage, None
        if advantage in ("gae", "reinforce_pp"):
            why = f"advantage {advantage!r} compares with no group; use another advantage"
        elif model is None:
            why = "without a rollout_model the policy generates all responses; give a rollout_model"
        elif model.split == "prompt":
            why = "with rollout_model.split 'prompt' one model generates all responses to a prompt; use split: group"
        elif not any(0.0 < model.share_at(number) < 1.0 for number in range(1, self.iterations + 1)):
            why = "rollout_model.share is 0 or 1 in every iteration; give one between, such as 0.5"
        if why:
            raise ValueError(
                f"objective.baseline 'model' compares the responses to a prompt that one of two models generated, but "
                f"{why}, or baseline: group"
            )

    def _check_acceptance(self, target: float) -> None:
        """Refuse to hold an acceptance that is constant, out of reach, or of no token in an iteration."""
        most = min(1.0, 1.0 / getattr(self.objective.correction, "lam", 1.0))
        if getattr(self.objective.correction, "budget", None):
            raise ValueError(
                "rollout_model.distill_control.metric is 'acceptance', which objective.correction.budget holds already "
                "however far apart the models are; use metric: kl"
            )
        if target >= most:
            raise ValueError(
                f"rollout_model.distill_control.target is {target:g}, and with lam "
                f"{1.0 / most:g} even equal models are accepted at {most:g}; give a target below that"
            )
        for number in range(1, self.iterations + 1):
            if self.uses_rollout_model(number) and "rollout_model" not in self.writers(number):
                raise ValueError(
                    f"rollout_model.distill_control.metric is 'acceptance', that of tokens which the rollout model "
                    f"generated, but at its share of 0 in iteration {number} it is trained and generates none; use "
                    f"metric: kl, which every token has, or a share above 0"
                )

    def _check_fp8(self) -> None:
        if self.precision != "fp8" and self.fp8_backward != "dequantized":
            raise ValueError(
                f"fp8_backward is {self.fp8_backward!r}, but precision is {self.precision!r}; set precision=fp8, "
                f"or leave fp8_backward out"
            )
        if self.precision not in TRAINED_QUANTIZATION:
            return
        for key, engine in ({"engine": self.engine} | self.writing_engines).items():
            check_trained_quantization(
                key, engine, self.precision, None if key == "engine" else self.engine.quantization
            )

    def _check_top_k(self) -> None:
        for key, instead in (("normalizer", "exact"), ("divergence", "binary")):
            if getattr(self.objective.correction, key, None) == "topk" and self.sampling.num_top_log_probs == 0:
                raise ValueError(
                    f"{key} 'topk' needs the engine's top-k, but sampling.num_top_log_probs is 0; set it (20 is usual) "
                    f"or use {key}: {instead}"
                )

    def _check_z(self, correction: ZCorrection) -> None:
        if correction.normalizer == "exact" and self.sampling.truncated:
            raise ValueError(
                f"normalizer 'exact' sums over the untruncated vocabulary, but the engine samples with top_p "
                f"{self.sampling.top_p} and top_k {self.sampling.top_k}; use top_p 1 and top_k 0, or normalizer: topk"
            )
        if correction.normalizer == "exact" and self.draft and self.draft.lam < 1.0:
            raise ValueError(
                f"normalizer 'exact' takes p_inf from training, but engine.draft.lam {self.draft.lam:g} samples from "
                f"another distribution; use lam 1, or normalizer: topk"
            )
        quantized = [key for key, engine in self.writing_engines.items() if is_quantized(engine)]
        if correction.normalizer == "exact" and quantized:
            raise ValueError(
                f"normalizer 'exact' takes p_inf from training, but {quantized[0]} samples from a quantized copy of "
                f"the model ({quantized[0]}.quantization, {quantized[0]}.kv_cache_dtype); use normalizer: topk, or an "
                f"engine without them"
            )
        model = self.rollout_model
        is_frozen = model is not None and model.optimizer is None and not model.is_mixed
        if correction.normalizer == "exact" and self.batch.ahead and not is_frozen:
            raise ValueError(
                f"normalizer 'exact' needs the weights that generated the batch, but with batch.ahead "
                f"{self.batch.ahead} they have moved on when it is trained on; use normalizer: topk, batch.ahead: 0, "
                f"or a frozen rollout model that generates all rollouts"
            )
        stays = is_frozen or (model is not None and model.update == "iteration" and not model.is_mixed)
        moves = self.batch.steps_per_iteration > 1 and not stays
        if correction.normalizer == "exact" and correction.target == "new" and moves:
            raise ValueError(
                f"normalizer 'exact' needs the weights that generated the batch, but with "
                f"{self.batch.steps_per_iteration} optimizer steps per iteration they have moved on when target 'new' "
                f"needs them; use target: old, normalizer: topk, or rollout_model.update: iteration"
            )
