"""TRL's `GRPOTrainer` trains the policy while a smaller model generates and is trained along (docs/trl.md).

The policy's loss stays TRL's, with a correction of this package (`corrected`). The rollout model's, eqs. 6 and 7, is
ours, and so is its optimizer: it reads each micro-batch after the policy, whose states are caught in TRL's own forward
pass, and steps with the policy.

Shapes: `B` sequences of a micro-batch, `T` completion tokens, `N` of them that the loss has, `H` hidden size; nats.
"""

from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jackpot.adapters.trl.base import (
    Batch,
    TRLTrainer,
    caught_states,
    completion_states,
    plain_model,
    token_batch,
    usable_mask,
)
from jackpot.adapters.trl.corrected import CorrectedGRPOTrainer
from jackpot.adapters.trl.refusals import refuse_processes, refuse_unmerged, refuse_with_two_models
from jackpot.adapters.trl.rollouts import NUM_TOP, sampling_of
from jackpot.adapters.trl.writers import TwoModelTrainer, Writers
from jackpot.config.build import validated
from jackpot.config.config import Config, RolloutModelConfig
from jackpot.core.errors import CheckpointError, ConfigError, ModelError
from jackpot.core.foreign import check_foreign
from jackpot.core.metrics import Mean, Sums, add_sums, all_reduce_sums
from jackpot.core.roles import Role
from jackpot.core.types import TokenBatch, Version
from jackpot.models.forward import (
    checkpoint_activations,
    cut_head,
    logit_softcap,
    output_layer,
    response_hidden,
)
from jackpot.models.load import check_same_tokenizer, load_model, load_tokenizer
from jackpot.models.parts import WHOLE, write_part
from jackpot.objectives.corrections.base import split_by_model
from jackpot.objectives.joint import OldLogProbs, RolloutModelObjective, TokenScores, rollout_model_loss, token_scores
from jackpot.objectives.kernels.linear_head import LinearHead, head_of, joint_linear_head
from jackpot.objectives.obrs import acceptance
from jackpot.rollout.engines.base import Engine
from jackpot.training.joint_optimizer import JointOptimizer, next_distill_weight
from jackpot.training.objectives import rollout_model_objective
from jackpot.training.optimizer import ModelOptimizer

_FOLDER, _STATE = "rollout_model", "rollout_model_optimizer"  # in a checkpoint of TRL's
_CHECKED_AT_ONCE = 2**20  # tokens: all that a check of an engine reads
LOSSES = {  # TRL's loss_type: how the rollout model's loss is averaged
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "vespo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


class JackpotGRPOTrainer(CorrectedGRPOTrainer, TwoModelTrainer):
    """Is TRL's `GRPOTrainer` of a policy whose rollouts a smaller model generates, which is trained along with it.

    One of our engines generates, in this process, and gets the weights of training before each generation batch. The
    rollout model has our losses, eqs. 6 and 7, and AdamW of its own; both are saved and resumed with TRL's checkpoints,
    in `rollout_model/` and `rollout_model_optimizer/`. Evaluations are the policy's.

    Args:
        args, kwargs: of TRL's trainer, without `rollout_func`.
        rollout_model: settings of `rollout_model` in a recipe, such as `{"path": "Qwen/Qwen3-0.6B", "optimizer":
            {"learning_rate": 1e-6}, "share": 0.75}` (docs/settings.md). Without `optimizer` the model is frozen. A
            schedule of the share counts generation batches, and that of a learning rate ends at TRL's last step.
        engine: that generates with the rollout model: an engine of ours, or the settings of one of transformers.
        policy_engine: the same of the policy, for its share of the rollouts and for evaluations; None: as `engine`
            where that is settings. With `draft` in these the rollout model drafts for the policy.
        correction: of the policy's mismatch, as in `CorrectedGRPOTrainer`.
        num_top_log_probs: K that the engines are asked for.

    Raises:
        ConfigError: a feature of TRL that two models cannot be combined with (docs/trl.md), or settings that do not fit
            each other.
        DataError: the models have different tokenizers.
        ModelError: a model that cannot be loaded, or whose output layer is not supported.
    """

    def __init__(
        self,
        *args: Any,
        rollout_model: Mapping[str, Any],
        engine: Engine | Mapping[str, Any] | None = None,
        policy_engine: Engine | Mapping[str, Any] | None = None,
        correction: str | Mapping[str, Any] = "obrs",
        num_top_log_probs: int = NUM_TOP,
        **kwargs: Any,
    ) -> None:
        arguments = signature(TRLTrainer.__init__).bind(self, *args, **kwargs).arguments
        del arguments["self"]
        engines: dict[Role, Engine | Mapping[str, Any] | None] = {"rollout_model": engine, "policy": policy_engine}
        refuse_with_two_models(arguments)
        self._config, self._settings = _settings(arguments, rollout_model, engines, correction, num_top_log_probs)
        made: dict[Role, Engine] = {role: engine for role, engine in engines.items() if isinstance(engine, Engine)}
        self._writers = Writers(self._config, made)
        self._rollout_optimizer: JointOptimizer | None = None
        self._parts: list[Sums] = []  # of the micro-batches of the optimizer step in progress
        self._read_by_policy: tuple[Batch, Tensor] | None = None  # the last micro-batch, and its states [B, T, H]
        self._generated_by = Version(0, 0)
        super().__init__(**arguments, rollout_func=self._writers, correction=correction)
        refuse_processes(self)
        if self._config.is_mixed or self.args.eval_strategy != "no":
            refuse_unmerged(self.accelerator.unwrap_model(self.model))

        path = self._settings.path
        check_same_tokenizer(self.processing_class, load_tokenizer(path))
        self.rollout_model = load_model(path, torch.float32, self.accelerator.device)
        cut_head(self.rollout_model, self._head.policy.out_features)
        if (rows := output_layer(self.rollout_model).out_features) < self._head.policy.out_features:
            raise ModelError(
                f"TRL's loss reads all {self._head.policy.out_features} rows of the policy's output layer, and that of "
                f"the rollout model has {rows}; give TRL a policy that model.resize_token_embeddings({rows}) has cut"
            )
        self._distill_weight = self._settings.distill_weight
        self._rollout_objective = None
        if self._settings.optimizer:
            self._rollout_objective = rollout_model_objective(self._settings, LOSSES[self.loss_type])
            if self.args.gradient_checkpointing and self.rollout_model.supports_gradient_checkpointing:
                checkpoint_activations(self.rollout_model)
        self.rollout_model.requires_grad_(self._rollout_objective is not None)
        self._head = LinearHead(
            self._head.policy,
            output_layer(self.rollout_model),
            policy_soft_cap=self._head.policy_soft_cap,
            rollout_model_soft_cap=logit_softcap(self.rollout_model),
        )

    @property
    def version(self) -> Version:
        """Return the number of optimizer steps that each model has taken."""
        steps = self._rollout_optimizer.steps("rollout_model") if self._rollout_optimizer else 0
        return Version(self.state.global_step, steps)

    @property
    def _runs_both(self) -> bool:
        """Whether the rollout model has anything left to do."""
        return self._config.uses_rollout_model(max(self._writers.iteration, 1))

    def _generate_and_score_completions(self, inputs: list[Batch]) -> Batch:
        if self.model.training:
            self._generated_by = self.version
        return super()._generate_and_score_completions(inputs)

    def _columns(self, batch: Batch, lists: Any) -> dict[str, Tensor]:
        made = super()._columns(batch, lists)
        if not self._config.is_mixed:
            return made
        by_policy = torch.tensor(self._writers.by_policy, device=batch["completion_ids"].device)
        shares = self.accelerator.gather((~by_policy).float())
        self._log_metrics({"sampling/rollout_model_share": shares.mean()})  # pyright: ignore[reportAttributeAccessIssue] (of a mapping, which it is not)
        return made | {"jackpot_by_policy": by_policy}

    def _kept(self, scores: OldLogProbs) -> dict[str, Tensor]:
        return super()._kept(scores) | {"jackpot_rollout_model_old": scores.rollout_model_old_log_probs}

    def _rollout_model_hidden(self, tokens: TokenBatch) -> Tensor | None:
        """Return the states of the rollout model, [N, H], while it has anything left to do.

        Where its weights are still those that sampled a token, it completes the top-k that Z is estimated from.
        """
        return response_hidden(self.rollout_model, tokens) if self._runs_both else None

    def _is_current(self, tokens: TokenBatch) -> Tensor:
        generated_by, version = self._generated_by._asdict(), self.version._asdict()
        is_current = {
            role: self._writers.is_exact(role) and generated_by[role] == version[role]
            for role in ("policy", "rollout_model")
        }
        by_policy = tokens.by_policy
        if by_policy is None:
            return torch.full_like(tokens.response_mask, is_current["rollout_model"])
        of_row = torch.where(by_policy, is_current["policy"], is_current["rollout_model"])
        return of_row[:, None].expand_as(tokens.response_mask)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does, with engines that get the weights anew: a second run counts its steps from 0 again."""
        self._writers.forget()
        return super().train(*args, **kwargs)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._writers.forget()

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Do TRL's forward and backward pass of the policy, and then those of the rollout model; step that where TRL is
        about to step the policy."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        objective, read, self._read_by_policy = self._rollout_objective, self._read_by_policy, None
        if objective is None or read is None:
            return loss

        objective = replace(objective, distill_weight=self._distill_weight)
        self._parts.append(self._rollout_model_backward(objective, *read))
        if self.accelerator.sync_gradients:
            self._step_rollout_model()
        return loss

    def _compute_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        if not (self.model.training and self._rollout_objective and self._runs_both):
            return super()._compute_loss(model, inputs)

        with caught_states(self.accelerator.unwrap_model(model)) as caught:
            loss = super()._compute_loss(model, inputs)

        self._read_by_policy = inputs, completion_states(inputs, caught[0].detach())
        return loss

    def _rollout_model_backward(self, objective: RolloutModelObjective, batch: Batch, states: Tensor) -> Sums:
        """Add up the rollout model's gradient on a micro-batch, and return its metrics.

        Args:
            states: of the policy, detached.
        """
        tokens = token_batch(batch, usable_mask(batch), with_lists=self._lists_support(batch))
        with self.compute_loss_context_manager():
            policy = head_of(self._head.policy, tokens.at_sampled(states), self._head.policy_soft_cap)
            bias = None if policy.bias is None else policy.bias.detach()
            hidden = response_hidden(self.rollout_model, tokens)
            heads = (
                replace(policy, weight=policy.weight.detach(), bias=bias),
                head_of(output_layer(self.rollout_model), hidden, logit_softcap(self.rollout_model)),
            )
            ids = tokens.at_sampled(tokens.response_ids)
            head = self._on_support(joint_linear_head(*heads, ids, temperature=self.temperature), heads, batch, tokens)

        nothing = torch.zeros_like(tokens.response_mask)
        scores = token_scores(head, tokens, nothing, self._objective.correction.lam, "topk", objective.distill)
        old = OldLogProbs(
            old_log_probs=scores.log_probs.detach(),
            rollout_model_old_log_probs=batch["jackpot_rollout_model_old"],
            z=scores.z,
        )
        ppo, distill, metrics = rollout_model_loss(objective, tokens, scores, old, self.max_completion_length)
        (ppo + distill).backward()
        return metrics | self._distances(tokens, scores)

    def _distances(self, tokens: TokenBatch, scores: TokenScores) -> Sums:
        """Measure how far apart the models are, as they are now."""
        mask = tokens.response_mask
        accepted = acceptance(tokens.rollout_log_probs, scores.log_probs.detach(), self._objective.correction.lam)
        return {
            "mismatch/kl_rollout_policy": Mean.of(scores.kl_rollout_policy, mask),
            "mismatch/kl_policy_rollout": Mean.of(scores.kl_policy_rollout, mask),
            "rollout_model/acceptance": Mean.of(
                accepted, split_by_model(mask, tokens.by_policy).get("_by_rollout_model", mask)
            ),
            "rollout_model/entropy": Mean.of(scores.rollout_model_entropy, mask),
        }

    def _step_rollout_model(self) -> None:
        """Step the rollout model on the gradient of all micro-batches and processes, and log what that was."""
        assert self._rollout_optimizer is not None  # TRL makes the schedules before the first step
        sums, self._parts = all_reduce_sums(add_sums(*self._parts)), []
        divergence = sums["mismatch/kl_policy_rollout"]
        assert isinstance(divergence, Mean)  # of `_distances`

        metrics, _ = self._rollout_optimizer.step(sums, sampled_tokens=divergence.count, steps_rollout_model=True)
        metrics["rollout_model/distill_weight"] = Mean.number(self._distill_weight)
        if control := self._settings.distill_control:
            self._distill_weight = next_distill_weight(
                control,
                self._distill_weight,
                kl=metrics["mismatch/kl_policy_rollout"].value.item(),
                acceptance=metrics["rollout_model/acceptance"].value.item(),
            )

        self._log_metrics({name: entry.value for name, entry in metrics.items()})

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make TRL's schedule, and the rollout model's optimizer, whose schedule ends at the same step."""
        if settings := self._settings.optimizer:
            of_model = ModelOptimizer(self.rollout_model.parameters(), settings, num_training_steps)
            self._rollout_optimizer = JointOptimizer(
                {"rollout_model": of_model}, regularized=False, rollout_model_each_step=True
            )
        return super().create_scheduler(num_training_steps, optimizer)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy as TRL does, and the rollout model in `rollout_model/`."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir) / _FOLDER
            self.rollout_model.save_pretrained(folder)
            self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if not (self.args.should_save and self._rollout_optimizer):
            return
        folder = Path(output_dir) / _STATE
        folder.mkdir(parents=True, exist_ok=True)
        for role, moments in self._rollout_optimizer.moments():
            write_part(WHOLE.path(folder, role), {name: moment.cpu() for name, moment in moments})
        state = {"step": self.state.global_step, "distill_weight": self._distill_weight}
        torch.save(state | {"optimizer": self._rollout_optimizer.state_dict()}, folder / "state.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return

        model, folder = Path(checkpoint) / _FOLDER, Path(checkpoint) / _STATE
        if not model.is_dir() or (self._rollout_optimizer and not (folder / "state.pt").is_file()):
            raise CheckpointError(
                f"{checkpoint} has no rollout model with its optimizer: {_FOLDER}/ and {_STATE}/state.pt must be in "
                f"it; continue from a checkpoint of JackpotGRPOTrainer, saved with save_only_model=False"
            )

        saved = load_model(model, torch.float32, self.accelerator.device)
        self.rollout_model.load_state_dict(saved.state_dict())
        if not self._rollout_optimizer:
            return

        state = torch.load(check_foreign(folder / "state.pt", inside=folder), weights_only=True)
        if state["step"] != self.state.global_step:
            raise CheckpointError(
                f"{checkpoint} holds the policy after {self.state.global_step} optimizer steps and the rollout model's "
                f"optimizer after {state['step']}; continue from another checkpoint"
            )

        self._distill_weight = state["distill_weight"]
        self._rollout_optimizer.load_state_dict(state["optimizer"], folder)


def _settings(
    arguments: Mapping[str, Any],
    rollout_model: Mapping[str, Any],
    engines: Mapping[Role, Engine | Mapping[str, Any] | None],
    correction: str | Mapping[str, Any],
    num_top_log_probs: int,
) -> tuple[Config, RolloutModelConfig]:
    """Write the settings of TRL's trainer as those of a run of ours, as far as engines and checks read them, and return
    those of the rollout model too.

    Raises:
        ConfigError: some do not fit.
    """
    args, model = arguments["args"], arguments["model"]
    path = model if isinstance(model, str) else getattr(plain_model(model), "name_or_path", "")
    of = {
        role: {"name": "transformers"} | dict(engine) for role, engine in engines.items() if isinstance(engine, Mapping)
    }
    for role, engine in of.items():
        if engine["name"] != "transformers":
            raise ConfigError(
                f"settings of the engine {engine['name']!r} were given for the {role}; only one of transformers is "
                f"made here. Make the engine, such as VLLMEngine(path, settings, ...), and give that"
            )

    run = {
        "seed": args.seed,
        "iterations": 1,
        "policy": {"path": path, "optimizer": {"learning_rate": args.learning_rate}},
        "rollout_model": dict(rollout_model),
        "sampling": sampling_of(args, num_top_log_probs).model_dump(),
        "batch": {"prompts": 1, "group_size": args.num_generations, "micro_batch_tokens": _CHECKED_AT_ONCE},
        "objective": {"correction": correction},
        "precision": "bf16" if args.bf16 else "fp32",
    }
    run |= {"engine": of["rollout_model"]} if "rollout_model" in of else {}
    run |= {"evaluation": {"engine": of["policy"]}} if "policy" in of else {}
    config = validated(Config, run)
    settings = config.rollout_model
    assert settings is not None  # they are in `run`

    for name, plain in (("update", "step"), ("lora", None)):
        if (value := getattr(settings, name)) != plain:
            raise ConfigError(
                f"rollout_model.{name} is {value!r}, which is not supported inside TRL; leave it out, or train with "
                f"`jackpot train`"
            )
    return config, settings
