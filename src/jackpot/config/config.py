"""Every setting of a training run, in the order of a recipe, with its default written once.

A recipe is the YAML form of `Config`, with `arms: {name: overrides}` added. Overrides are dotted keys with values.
"""

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from jackpot.config.base import (
    MAY_CHANGE,
    Bound,
    Conflicts,
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
    is_quantized,
    is_remote,
    number_formats,
    server_urls,
    sleeps,
    trained_conflicts,
)
from jackpot.config.objective import ObjectiveConfig
from jackpot.config.placement import PlacementConfig
from jackpot.config.safety import CheckpointConfig, GuardConfig, RolloutsConfig
from jackpot.config.sampling import EvaluationConfig, Sampling
from jackpot.config.schedules import DistillControlConfig, Share, ShareSchedule
from jackpot.config.tasks import ArithmeticConfig, TaskConfig
from jackpot.config.tracking import TrackingConfig
from jackpot.core.roles import Role, Writer
from jackpot.objectives.constants import HEAD_LOGITS_MEMORY


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
    optimizer: OptimizerConfig | None
    """AdamW of the policy; null: the policy is frozen, and the rollout model alone is trained, to follow it."""
    ess_scaling: Literal["response", "token"] | None = None
    """Multiply the learning rate of each step by sqrt(effective sample size / n): of its responses, weighted by the
    product of p_old / p_inf over each (response, VCPO's), or of its tokens, weighted by what the correction makes of
    them (token); null: no."""
    lora: LoraConfig | None = None
    """Train an adapter instead of all weights; null: all weights are trained."""


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
    """Correction of the mismatch between the engine and the rollout model as training computes it (eq. 6's F)."""
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
        """Return the share of an iteration's rollouts that the rollout model generates. Iterations count from 1."""
        return self.share.at(iteration) if isinstance(self.share, ShareSchedule) else self.share

    def is_used(self, iteration: int) -> bool:
        """Return whether the rollout model generates rollouts in this iteration or in a later one."""
        end = self.share.end if isinstance(self.share, ShareSchedule) else self.share
        return end > 0.0 or self.share_at(iteration) > 0.0

    @property
    def is_mixed(self) -> bool:
        """Return whether, beside the rollout model, the policy generates rollouts in some iterations."""
        return self.share != 1.0

    def conflicts(self) -> Conflicts:
        """Refuse training of a frozen model, and `distill_control` without PPO loss or with a start out of bounds."""
        control = self.distill_control
        low, high = (control.low, control.high) if control else (0.0, math.inf)
        return [
            (
                self.lora and self.optimizer is None,
                f"lora of rank {self.lora and self.lora.rank} was given for a frozen rollout model, which trains "
                "nothing; give it an optimizer, or set lora: null",
            ),
            (
                control and self.optimizer is None,
                "distill_control was given for a frozen rollout model; give it an optimizer",
            ),
            (
                control and self.ppo_weight == 0.0,
                "distill_control weighs the distillation against the rollout model's PPO loss, but ppo_weight is 0, "
                "and AdamW does not see the scale of a single loss; raise ppo_weight, or set distill_control: null",
            ),
            (
                not low <= self.distill_weight <= high,
                f"distill_weight {self.distill_weight:g} is not between distill_control.low {low:g} and high "
                f"{high:g}; the controller begins with it",
            ),
        ]


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
    head_kernel: Annotated[Literal["auto", "eager", "triton"], MAY_CHANGE] = "auto"
    """What reads the logits of training's output layers: torch's operators (eager) or Triton kernels; auto: Triton
    on a GPU where it runs, else eager. It changes speed, and results only by rounding. Status of triton:
    experimental. It has run on one H200."""
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
        """Return the roles of models that generate rollouts in iterations `first` to `last`, or in `first` alone."""
        model = self.rollout_model
        if model is None:
            return ("policy",)
        shares = [model.share_at(iteration) for iteration in range(first, (last or first) + 1)]
        roles: dict[Writer, bool] = {"policy": min(shares) < 1.0, "rollout_model": max(shares) > 0.0}
        return tuple(role for role, writes in roles.items() if writes)

    @property
    def writing_engines(self) -> dict[str, EngineConfig]:
        """Return the settings of the engines that generate rollouts, by key: `engine`, `evaluation.engine` or both."""
        engines = {"engine": self.engine, "evaluation.engine": self.evaluation.engine or self.engine}
        of_policy = "evaluation.engine" if self.rollout_model and self.evaluation.engine else "engine"
        keys = [of_policy if role == "policy" else "engine" for role in self.writers(1, self.iterations)]
        return {key: engines[key] for key in keys}

    @property
    def evaluation_sampling(self) -> Sampling:
        """Return the sampling of evaluations: that of training with the changes of `evaluation.sampling`."""
        return self.sampling.model_copy(update=self.evaluation.sampling.model_dump(exclude_none=True))

    @property
    def is_mixed(self) -> bool:
        """Return whether the run has a rollout model, and the policy generates rollouts too in some iterations."""
        return self.rollout_model is not None and self.rollout_model.is_mixed

    def uses_rollout_model(self, iteration: int) -> bool:
        """Tell whether an iteration needs the rollout model: to generate now or later, draft, or train it alone."""
        model = self.rollout_model
        follows = self.policy.optimizer is None or self.draft is not None
        return model is not None and (follows or model.is_used(iteration))

    def model_paths(self, checkpoint: Path | None = None) -> dict[Role, str]:
        """Return the path of policy and rollout model by role: in the settings, or below the folder of a checkpoint."""
        paths: dict[Role, str] = {"policy": self.policy.path}
        if self.rollout_model is not None:
            paths["rollout_model"] = self.rollout_model.path
        return {role: str(checkpoint / role) for role in paths} if checkpoint else paths

    @property
    def shares_gpus(self) -> bool:
        """Return whether engine processes share the GPUs of the ranks and sleep while the ranks train."""
        placed = self.evaluation.engine if is_remote(self.engine) else self.engine
        return self.placement.engine_processes > 0 and placed is not None and sleeps(placed)

    @property
    def compute_dtype(self) -> Dtype:
        """Return the number format in which training computes everything but quantized linear layers."""
        return self.engine.dtype if self.precision in ("fp8", "int8") else self.precision

    @property
    def trained_quantization(self) -> Quantization | None:
        """Return the engine's quantization if training computes with the same quantized numbers, else None."""
        return self.engine.quantization if self.precision in TRAINED_QUANTIZATION else None

    @property
    def number_formats(self) -> str | None:
        """Name the number formats of linear layers and of keys and values in training; None without quantization."""
        return number_formats(self.engine) if self.trained_quantization else None

    @property
    def kl_metric(self) -> str:
        """Name the metric of KL(sampler || policy): estimated from sampled tokens if a rollout engine is quantized."""
        quantizes = any(map(is_quantized, self.writing_engines.values()))
        return "mismatch/kl_k3" if quantizes else "mismatch/kl_rollout_policy"

    @property
    def draft(self) -> DraftConfig | None:
        """Return the settings by which the rollout model drafts tokens for the policy; None where it drafts none."""
        return getattr(self.evaluation.engine or self.engine, "draft", None) if self.rollout_model else None

    def conflicts(self) -> Conflicts:
        """Collect the conflicts between blocks of settings, group by group."""
        overlong = self.objective.overlong_buffer
        return [
            *self._conflicts_of_top_k(),
            *self._conflicts_of_precision(),
            *self._conflicts_of_exact_z(),
            *self._conflicts_of_groups(),
            *self._conflicts_of_frozen_policy(),
            *self._conflicts_of_engines(),
            *self._conflicts_of_engine_processes(),
            *self._conflicts_of_baseline(),
            *self._conflicts_of_acceptance(),
            (
                overlong and overlong.len > self.sampling.max_new_tokens,
                f"objective.overlong_buffer.len is {overlong and overlong.len}, more than sampling.max_new_tokens "
                f"{self.sampling.max_new_tokens}; it counts the last tokens before that limit",
            ),
        ]

    def _conflicts_of_top_k(self) -> Conflicts:
        """Refuse corrections that read top-k lists where the engine returns none."""
        correction = self.objective.correction
        return [
            (
                getattr(correction, key, None) == "topk" and self.sampling.num_top_log_probs == 0,
                f"{key} 'topk' needs the engine's top-k, but sampling.num_top_log_probs is 0; set it (20 is usual) "
                f"or use {key}: {instead}",
            )
            for key, instead in (("normalizer", "exact"), ("divergence", "binary"))
        ]

    def _conflicts_of_precision(self) -> Conflicts:
        """Refuse engines that are quantized in another way than training is, at precision fp8 or int8."""
        engines = {"engine": self.engine} | self.writing_engines if self.precision in TRAINED_QUANTIZATION else {}
        conflicts = [
            (
                self.precision != "fp8" and self.fp8_backward != "dequantized",
                f"fp8_backward is {self.fp8_backward!r}, but precision is {self.precision!r}; set precision=fp8 and "
                "engine.quantization=fp8, or leave fp8_backward out",
            ),
        ]
        for key, engine in engines.items():
            # `engine` must have the quantization of the precision (None here), every other engine that of `engine`.
            quantization = None if key == "engine" else self.engine.quantization
            conflicts += trained_conflicts(key, engine, self.precision, quantization)
        return conflicts

    def _conflicts_of_exact_z(self) -> Conflicts:
        """Refuse `normalizer: exact` where training cannot compute the distribution that tokens were sampled from."""
        correction, model, steps = self.objective.correction, self.rollout_model, self.batch.steps_per_iteration
        if not isinstance(correction, ZCorrection) or correction.normalizer != "exact":
            return []

        lam = self.draft.lam if self.draft else 1.0
        verifying = "evaluation.engine" if self.evaluation.engine else "engine"  # setting of the policy's engine
        quantized = next((key for key, engine in self.writing_engines.items() if is_quantized(engine)), "")  # key or ""
        writes_all = model is not None and not model.is_mixed  # the rollout model generates all rollouts
        is_frozen = writes_all and model is not None and model.optimizer is None  # no step changes its weights
        stays = is_frozen or (writes_all and model is not None and model.update == "iteration")  # no change within it
        remedies = ["use target: old", "normalizer: topk", *(["rollout_model.update: iteration"] if writes_all else [])]

        return [
            (
                self.sampling.truncated,
                "normalizer 'exact' sums over the untruncated vocabulary, but the engine samples with top_p "
                f"{self.sampling.top_p} and top_k {self.sampling.top_k}; use top_p 1 and top_k 0, or normalizer: topk",
            ),
            (
                lam < 1.0,
                f"normalizer 'exact' takes p_inf from training, but {verifying}.draft.lam {lam:g} samples from another "
                f"distribution; use {verifying}.draft.lam=1, or normalizer: topk",
            ),
            (
                quantized,
                f"normalizer 'exact' takes p_inf from training, but {quantized} samples from a quantized copy of the "
                f"model; use normalizer: topk, or {quantized}.quantization=null and {quantized}.kv_cache_dtype=null",
            ),
            (
                self.batch.ahead and not is_frozen,
                "normalizer 'exact' needs the weights that generated the batch, but with batch.ahead "
                f"{self.batch.ahead} they have moved on when it is trained on; use normalizer: topk, batch.ahead: 0, "
                "or a frozen rollout model that generates all rollouts",
            ),
            (
                correction.target == "new" and steps > 1 and not stays,
                f"normalizer 'exact' needs the weights that generated the batch, but with {steps} optimizer steps "
                f"per iteration they have moved on when target 'new' needs them; {', or '.join(remedies)}",
            ),
        ]

    def _conflicts_of_groups(self) -> Conflicts:
        """Refuse groups of one response where groups are compared, and a critic that is missing or not used."""
        advantage, is_single = self.objective.advantage, self.batch.group_size == 1
        presence = "critic is null" if self.critic is None else "there is a critic"

        return [
            (
                is_single and advantage not in ("gae", "reinforce_pp"),
                f"batch.group_size is 1, so every advantage of {advantage!r} would be 0; use at least 2, or an "
                "advantage without groups: reinforce_pp, or gae with a critic",
            ),
            (
                (advantage == "gae") != (self.critic is not None),
                f"objective.advantage is {advantage!r} and {presence}; gae needs a critic (critic.optimizer at least) "
                "and nothing else uses one",
            ),
            (
                is_single and self.batch.filter_groups,
                "batch.filter_groups replaces groups of equal rewards, as every group of 1 is; use null",
            ),
        ]

    def _conflicts_of_frozen_policy(self) -> Conflicts:
        """Refuse a frozen policy where nothing else is trained, or where a setting is for training the policy."""
        is_frozen, correction = self.policy.optimizer is None, self.objective.correction.name
        frozen_but = "policy.optimizer is null, so the policy is frozen, but"
        return [
            (
                is_frozen and not (self.rollout_model and self.rollout_model.optimizer),
                f"{frozen_but} no rollout model is trained, so nothing would be; give rollout_model.optimizer",
            ),
            (
                is_frozen and correction != "none",
                f"{frozen_but} objective.correction {correction!r} weighs its gradient; set it to none",
            ),
            (
                is_frozen and (self.policy.lora or self.policy.ess_scaling or self.critic),
                f"{frozen_but} policy.lora, policy.ess_scaling and critic are for its training; set them to null",
            ),
        ]

    def _conflicts_of_engines(self) -> Conflicts:
        """Refuse engines that cannot serve both models, and drafts or sampling filters that an engine cannot have."""
        engine, evaluation_engine = engines = self.engine, self.evaluation.engine or self.engine
        drafts = [getattr(each, "draft", None) for each in engines]  # `draft` of each engine, twice for a single one
        fits = self.rollout_model and drafts[-1] and engine.name == evaluation_engine.name  # drafts are possible
        keys = ["engine", *(["evaluation.engine"] if self.evaluation.engine else [])]  # keys of the engines' settings
        remedy = " and ".join(f"{key}.draft=null" for key, draft in zip(keys, drafts, strict=False) if draft)
        sampling = "sampling" if self.sampling.truncated else "evaluation.sampling"  # key of `filtered`, below
        shared = server_urls(self.engine) & server_urls(self.evaluation.engine)
        filtered = next((kind for kind in (self.sampling, self.evaluation_sampling) if kind.truncated), None)

        return [
            (
                any(drafts) and not (fits and self.is_mixed),
                "engine.draft has the rollout model draft the rollouts that the policy generates, which needs a "
                "rollout_model with a share below 1, and for both one kind of engine, transformers or vllm, the "
                f"policy's with draft; set {'rollout_model.share=0.0, for all of them, or ' if fits else ''}{remedy}",
            ),
            (
                filtered and any(each.name == "sglang_server" for each in engines),
                f"answers are {filtered and filtered.described}, but sglang_server returns log-probs before these "
                f"filters; use {sampling}.top_p=1 and {sampling}.top_k=0, or vllm_server in its place",
            ),
            (
                is_remote(self.engine) and self.evaluation.engine is None and self.rollout_model,
                "the servers of engine.urls hold the rollout model, so the policy needs an engine of its own to be "
                "evaluated with; set evaluation.engine=transformers, or to vllm_server or sglang_server with the "
                "urls of other servers",
            ),
            (
                shared,
                f"{', '.join(sorted(shared))} is a server of both engine and evaluation.engine, and one server "
                "serves one engine at a time; set evaluation.engine.urls to other servers, or "
                "evaluation.engine=transformers",
            ),
        ]

    def _conflicts_of_engine_processes(self) -> Conflicts:
        """Refuse engines that cannot run where they are placed, or that sleep when they have to generate."""
        engines, processes = [self.engine, self.evaluation.engine or self.engine], self.placement.engine_processes
        has_two_engines = self.rollout_model is not None or self.evaluation.engine is not None

        return [
            (
                processes and all(map(is_remote, engines)),
                f"placement.engines is {processes}, but all engines are servers, which are started apart from the run; "
                "leave placement.engines out, or use engine=transformers",
            ),
            (
                processes and any(getattr(engine, "device", None) is not None for engine in engines),
                f"engine.device is for an engine in the process that trains, but placement.engines is {processes}; "
                "leave one of the two out",
            ),
            (
                processes and self.batch.ahead and sleeps(self.engine),
                "engine.enable_sleep_mode has engine processes sleep on the GPUs of ranks while these train, but "
                f"with batch.ahead {self.batch.ahead} they generate then; set engine.enable_sleep_mode=false, or "
                "batch.ahead=0",
            ),
            (
                self.draft and any(map(sleeps, engines)),
                "engine.draft has two engines generate together, and one that sleeps waits for weights of its own; "
                "set enable_sleep_mode=false for both, or engine.draft=null",
            ),
            (
                has_two_engines and all(engine.name == "vllm" and sleeps(engine) for engine in engines),
                "engine and evaluation.engine are both vllm with enable_sleep_mode, and vLLM has one engine that "
                "sleeps in a process; set evaluation.engine={name: transformers, enable_sleep_mode: true}, or "
                "evaluation.engine.enable_sleep_mode=false",
            ),
        ]

    def _conflicts_of_baseline(self) -> Conflicts:
        """Refuse `objective.baseline: model` where a baseline for each model's own responses would change nothing."""
        model, advantage = self.rollout_model, self.objective.advantage
        shares = [model.share_at(iteration) for iteration in range(1, self.iterations + 1)] if model else []

        reasons = [  # (condition, why the baseline would change nothing under it)
            (
                advantage in ("gae", "reinforce_pp"),
                f"advantage {advantage!r} compares with no group; use another advantage",
            ),
            (
                model is None,
                "without a rollout_model the policy generates all responses; give a rollout_model",
            ),
            (
                model and model.split == "prompt",
                "with rollout_model.split 'prompt' one model generates all responses to a prompt; use "
                "rollout_model.split: group",
            ),
            (
                not any(0.0 < share < 1.0 for share in shares),
                "rollout_model.share is 0 or 1 in every iteration; give one between, such as 0.5",
            ),
        ]

        return [
            (
                self.objective.baseline == "model" and is_conflict,
                "objective.baseline 'model' compares the responses to a prompt that one of two models generated, "
                f"but {reason}, or baseline: group",
            )
            for is_conflict, reason in reasons
        ]

    def _conflicts_of_acceptance(self) -> Conflicts:
        """Refuse `distill_control` of an acceptance that is constant, cannot reach its target, or is undefined."""
        control = self.rollout_model and self.rollout_model.distill_control
        if not control or control.metric != "acceptance":
            return []

        limit = min(1.0, 1.0 / getattr(self.objective.correction, "lam", 1.0))  # the acceptance of equal models
        iterations = range(1, self.iterations + 1)
        used = filter(self.uses_rollout_model, iterations)
        idle = [iteration for iteration in used if "rollout_model" not in self.writers(iteration)]  # it writes none

        return [
            (
                getattr(self.objective.correction, "budget", None),
                "rollout_model.distill_control.metric is 'acceptance', which objective.correction.budget holds "
                "already however far apart the models are; use metric: kl",
            ),
            (
                control.target >= limit,
                f"rollout_model.distill_control.target is {control.target:g}, and with lam {1.0 / limit:g} even equal "
                f"models are accepted at {limit:g}; give a target below that",
            ),
            (
                idle,
                "rollout_model.distill_control.metric is 'acceptance', that of tokens which the rollout model "
                f"generated, but at its share of 0 in iteration {next(iter(idle), 0)} it is trained and generates "
                "none; use metric: kl, which every token has, or a share above 0",
            ),
        ]
