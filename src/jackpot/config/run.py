"""Every setting of a run, with its default written once. Pydantic only; frozen, unknown keys refused.

A recipe is the YAML form of `Config`, with `arms: {name: overrides}` beside it. Overrides are dotted keys with values.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jackpot.config.base import AnyNames, Count, Decay, Finite, Names, NonNegative, Positive, Strict
from jackpot.config.corrections import (
    OBRSCorrection,
    PolicyCorrection,
    RolloutModelCorrection,
    TISCorrection,
    ZCorrection,
)
from jackpot.config.engines import EngineConfig, TransformersEngineConfig, VLLMServerEngineConfig, is_quantised
from jackpot.config.tasks import ArithmeticConfig, TaskConfig


class Sampling(Strict):
    """How an engine samples. `rollout_log_probs` and the top-k describe the distribution after all of this."""

    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0  # 0: off. This is the sampling filter, not num_top_log_probs.
    max_new_tokens: Annotated[int, Field(ge=1)] = 256  # of the whole response, what a tool wrote in it included
    num_top_log_probs: Annotated[int, Field(ge=0)] = 20  # K, captured for the normaliser
    stop_token_ids: Annotated[
        tuple[int, ...], Field(strict=False)
    ] = ()  # beside the end-of-sequence tokens that the model folder names

    @property
    def truncated(self) -> bool:
        """True where some tokens have probability zero by a filter and not by the model."""
        return self.top_p < 1.0 or self.top_k > 0


class ReferenceConfig(Strict):
    """A frozen model that the policy is held near by kl_loss_coef * KL(policy || reference), a term of the loss."""

    path: str | None = None  # null: the policy as it was at the start
    kl_loss_coef: Positive = 0.001
    kl_loss_type: Literal["exact", "k2", "k3"] = "exact"  # exact: over the vocabulary; k3: GRPO's


class OverlongBufferConfig(Strict):
    """DAPO's soft punishment of length (arXiv 2503.14476 eq. 13): from 0 to -penalty_factor over the last tokens."""

    len: Count  # response tokens before sampling.max_new_tokens over which it falls
    penalty_factor: Positive = 1.0


class ObjectiveConfig(Strict):
    """The policy's loss."""

    correction: PolicyCorrection = OBRSCorrection()
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"] = "grpo"
    clip_low: NonNegative | None = 0.2  # null: no clip
    clip_high: NonNegative | None = 0.2
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    count: Literal["proposed", "accepted"] = "proposed"
    entropy_coeff: NonNegative = 0.0  # a bonus, nats; exact entropy of every response token's state
    reference: ReferenceConfig | None = None
    overlong_buffer: OverlongBufferConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> "ObjectiveConfig":
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and self.count == "accepted":
            raise ValueError(
                "loss_agg_mode 'seq-mean-token-sum-norm' divides by sequences x max_new_tokens whatever is accepted; "
                "use count: proposed, or loss_agg_mode: token-mean or seq-mean-token-mean"
            )
        if self.count == "accepted" and (self.entropy_coeff or self.reference):
            raise ValueError(
                "count 'accepted' divides by the tokens that were kept, but entropy_coeff and reference act on all "
                "response tokens; use count: proposed with them"
            )
        return self


class OptimizerConfig(Strict):
    """AdamW for one model. Steps are optimizer steps."""

    learning_rate: Finite
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.99)  # a list in YAML
    eps: Finite = 1e-8
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after warm-up, down to 0 at the last step


ALL_LINEAR = "all-linear"


class LoraConfig(Strict):
    """An adapter beside frozen weights, and only it is trained (models/lora.py).

    There is no dropout: log-probs of equal weights must be equal, the old and the current ones, the engine's and ours.
    """

    rank: Count = 16
    alpha: Count = 32  # the weights change by alpha / rank * B A
    target_modules: Names = (ALL_LINEAR,)  # last parts of the names of linear layers; all-linear: all but the head


class PolicyConfig(Strict):
    path: str  # a folder, a hub name, or starter:NAME
    optimizer: OptimizerConfig
    lora: LoraConfig | None = None  # null: all weights are trained


class RolloutModelConfig(Strict):
    """The model that writes, trained jointly (eqs. 6 to 8) unless frozen."""

    path: str
    optimizer: OptimizerConfig | None = None  # null: frozen
    update: Literal["step", "iteration"] = "step"  # with the policy, or once for each rollout batch
    lora: LoraConfig | None = None  # null: all weights are trained, unless frozen
    correction: RolloutModelCorrection = TISCorrection()
    clip_low: NonNegative | None = 0.2
    clip_high: NonNegative | None = 0.2
    ppo_weight: NonNegative = 1.0
    distill_weight: NonNegative = 1.0  # lambda_distill
    distill: Literal["forward", "reverse"] = "forward"

    @model_validator(mode="after")
    def _check(self) -> "RolloutModelConfig":
        if self.lora is not None and self.optimizer is None:
            raise ValueError(
                f"lora of rank {self.lora.rank} was given for a frozen rollout model, which trains nothing; give it an "
                f"optimizer, or set lora: null"
            )
        return self


class CriticConfig(Strict):
    """The value model of PPO, for `objective.advantage: gae` (arXiv 1707.06347, 1506.02438)."""

    path: str | None = None  # null: begins as the policy does, with a value head of zeros
    optimizer: OptimizerConfig
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95  # of GAE, not of OBRS
    clip: Positive = 0.5  # of the value around the old one


class FilterGroupsConfig(Strict):
    """DAPO: sample further prompts until no group of the rollout batch has equal rewards (arXiv 2503.14476, 3.2)."""

    max_num_gen_batches: Annotated[int, Field(ge=2)] = (
        10  # of `prompts` prompts each; then equal groups fill what is missing
    )


class BatchConfig(Strict):
    """Batches count sequences. prompts x group_size of them are one iteration's rollout batch."""

    prompts: Count
    group_size: Count
    mini_batch_size: Count | None = None  # sequences per optimizer step; null: the whole rollout batch
    ppo_epochs: Count = 1  # passes over one rollout batch
    micro_batch_tokens: Count = 16_384  # padded tokens in one forward pass
    filter_groups: FilterGroupsConfig | None = None  # null: every group is trained on
    ahead: Annotated[int, Field(ge=0)] = 0  # rollout batches that the engine writes while the learner trains: 0 or 1

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group_size

    @property
    def steps_per_iteration(self) -> int:
        return self.rollouts // (self.mini_batch_size or self.rollouts) * self.ppo_epochs

    @model_validator(mode="after")
    def _check(self) -> "BatchConfig":
        if self.ahead > 1:
            raise ValueError(
                f"ahead is {self.ahead}, allowed are 0 and 1: engines take new weights only when nothing is being "
                f"written, so every batch that was begun ends before each weight update, and a second one would only "
                f"be an iteration older; use ahead: 1"
            )
        step = self.mini_batch_size or self.rollouts
        if self.rollouts % step:
            raise ValueError(
                f"prompts {self.prompts} x group_size {self.group_size} = {self.rollouts} sequences do not divide into "
                f"optimizer steps of mini_batch_size {step}; choose a mini_batch_size that divides {self.rollouts}, or "
                f"other prompts or group_size"
            )
        return self


class EvaluationConfig(Strict):
    every: Count = 50  # iterations; before the first and after the last one too
    problems: Count = 512  # held out, of the task
    k: Count = 1  # sampled answers to each problem
    benchmarks: AnyNames = ()  # further sets that the policy answers, k times each; all of their problems
    engine: EngineConfig | None = None  # of the policy where another model writes; null: one with engine's settings


class CheckpointConfig(Strict):
    every: Count = 100  # iterations; after the last one too
    keep: Count = 2  # the newest ones, beside the best; 1 leaves no other to fall back on


class GuardConfig(Strict):
    """When to stop a run that only looks as if it trained."""

    # Every evaluation, and every rollout batch before it is trained on, against the model that wrote it. With
    # batch.ahead and a rollout model that is trained, of the batches only the first one after a start.
    check_engine: bool = True
    max_non_finite_steps: Count = 10  # in a row; each is skipped and counted


class RolloutsConfig(Strict):
    every: Count = 10  # iterations between saved rollout batches
    keep: Count = 20  # the newest files


class Config(Strict):
    """A whole run."""

    description: str = ""
    seed: Annotated[int, Field(ge=0)] = 0
    iterations: Count
    task: TaskConfig = ArithmeticConfig()
    policy: PolicyConfig
    rollout_model: RolloutModelConfig | None  # null: the policy writes for itself
    critic: CriticConfig | None = None
    engine: EngineConfig = TransformersEngineConfig()
    sampling: Sampling = Sampling()
    batch: BatchConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    precision: Literal["fp32", "bf16"] = "fp32"  # of the training forward pass; weights and optimizer are fp32
    # Keep of every layer its input alone and compute the rest again in backward, in all models that are trained: much
    # less memory, a third more time, and a group's prompt is then read with each of its responses.
    activation_checkpointing: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Count | Literal["auto"] = "auto"  # auto: the cores that are free when the run starts
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    rollouts: RolloutsConfig = RolloutsConfig()

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if isinstance(self.objective.correction, ZCorrection):
            self._check_z(self.objective.correction)
        advantage, overlong = self.objective.advantage, self.objective.overlong_buffer
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
            raise ValueError("batch.filter_groups drops groups of equal rewards, and a group of 1 is one; use null")
        one_model = isinstance(self.engine, VLLMServerEngineConfig) and self.evaluation.engine is None
        if one_model and self.rollout_model is not None:
            raise ValueError(
                "the servers of engine.urls hold the rollout model, so the policy needs an engine of its own to be "
                "evaluated with; set evaluation.engine=transformers, or to vllm_server with the urls of other servers"
            )
        if overlong and overlong.len > self.sampling.max_new_tokens:
            raise ValueError(
                f"objective.overlong_buffer.len is {overlong.len}, more than sampling.max_new_tokens "
                f"{self.sampling.max_new_tokens}; it counts the last tokens before that limit"
            )
        return self

    def _check_z(self, correction: ZCorrection) -> None:
        if correction.normalizer == "topk" and self.sampling.num_top_log_probs == 0:
            raise ValueError(
                "normalizer 'topk' needs the engine's top-k, but sampling.num_top_log_probs is 0; set it (20 is usual) "
                "or use normalizer: exact"
            )
        if correction.normalizer == "exact" and self.sampling.truncated:
            raise ValueError(
                f"normalizer 'exact' sums over the untruncated vocabulary, but the engine samples with top_p "
                f"{self.sampling.top_p} and top_k {self.sampling.top_k}; use top_p 1 and top_k 0, or normalizer: topk"
            )
        if correction.normalizer == "exact" and is_quantised(self.engine):
            raise ValueError(
                "normalizer 'exact' takes p_inf from training, but the engine samples from a quantised copy of the "
                "model (engine.quantization, engine.kv_cache_dtype); use normalizer: topk, or an engine without them"
            )
        writer = self.rollout_model
        if correction.normalizer == "exact" and self.batch.ahead and (writer is None or writer.optimizer):
            raise ValueError(
                f"normalizer 'exact' needs the weights that wrote the batch, but with batch.ahead {self.batch.ahead} "
                f"they have moved on when it is trained on; use normalizer: topk, batch.ahead: 0, or a frozen rollout "
                f"model"
            )
        stays = writer is not None and (writer.optimizer is None or writer.update == "iteration")
        moves = self.batch.steps_per_iteration > 1 and not stays
        if correction.normalizer == "exact" and correction.target == "new" and moves:
            raise ValueError(
                f"normalizer 'exact' needs the weights that wrote the batch, but with {self.batch.steps_per_iteration} "
                f"optimizer steps per iteration they have moved on when target 'new' asks; use target: old, "
                f"normalizer: topk, or rollout_model.update: iteration"
            )
