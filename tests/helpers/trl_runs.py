"""Short runs of TRL's trainer on the starters, and our learner that walks beside one on the same tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jackpot.config.config import OptimizerConfig, RolloutModelConfig
from jackpot.config.objective import ObjectiveConfig
from jackpot.config.tasks import ArithmeticConfig
from jackpot.core.types import TokenBatch
from jackpot.models.hub import starter_path
from jackpot.models.load import load_model, load_tokenizer
from jackpot.rollout.tasks.registry import make_task
from jackpot.training.joint_learner import JointLearner
from jackpot.training.learner_options import LearnerOptions
from jackpot.training.objectives import policy_objective, rollout_model_objective
from jackpot.training.optimizer import ModelOptimizer

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import GRPOConfig

POLICY, ROLLOUT_MODEL = str(starter_path("policy")), "starter:rollout_model"
MAX_NEW = 24  # tokens of a completion
COMPLETIONS = {"completion_ids", "completion_mask", "sampling_per_token_logps", "jackpot_uniforms"}
COMPLETIONS |= {"jackpot_top_ids", "jackpot_top_log_probs"}  # TRL's columns and ours with an entry for every token
# An eps this large makes AdamW's step proportional to the gradient, so that equal weights mean equal gradients.
LINEAR = OptimizerConfig(learning_rate=0.1, eps=1.0, max_grad_norm=1e6)
ALIKE = {  # of TRL's arguments, what LINEAR is
    "learning_rate": LINEAR.learning_rate,
    "adam_epsilon": LINEAR.eps,
    "adam_beta1": LINEAR.betas[0],
    "adam_beta2": LINEAR.betas[1],
    "max_grad_norm": LINEAR.max_grad_norm,
    "lr_scheduler_type": "constant",
}


def data(rows: int = 64) -> Dataset:
    """Return problems of the quickstart's task."""
    from datasets import Dataset

    task = make_task(ArithmeticConfig(), load_tokenizer("starter:policy"))
    prompts = [task.prompt("train", index) for index in range(rows)]
    return Dataset.from_list([{"prompt": prompt.text, "answer": prompt.answer} for prompt in prompts])


def reward(completions: list[str], answer: list[str], **others: Any) -> list[float]:
    """Return 1 for the right answer, and a little for short completions, so that no group is equal throughout."""
    return [
        float(text.partition("#")[2] == right_answer) + 0.02 * (len(text) % 5)
        for text, right_answer in zip(completions, answer, strict=True)
    ]


ON_A_CPU: dict[str, Any] = dict(
    use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True
)


def config(folder: Path, **changes: Any) -> GRPOConfig:
    """Return the settings of a short run whose optimizer is `LINEAR`."""
    from trl import GRPOConfig

    settings = dict(
        output_dir=str(folder),
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=MAX_NEW,
        max_steps=3,
        logging_steps=1,
        beta=0.0,
        seed=3,
    )
    return GRPOConfig(**ON_A_CPU | settings | ALIKE | changes)


def arguments(folder: Path, rows: int = 64, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a trainer of TRL's kind."""
    return dict(
        model=POLICY,
        reward_funcs=reward,
        args=config(folder, **changes),
        train_dataset=data(rows),
        processing_class=load_tokenizer("starter:policy"),
    )


def token_batch(batch: dict[str, Any], name: str = "", version: tuple[int, int] = (-1, -1)) -> TokenBatch:
    """Return the tensors of one of TRL's micro-batches, by its name, as ours, with advantages before the correction.

    They were sampled by weights of `version`; those that are none of ours leave Z to the lists alone.
    """
    size, width = len(batch["completion_mask"]), int(batch["completion_mask"].sum(-1).max())  # of this micro-batch
    batch = {key: column[:, :width] if key in COMPLETIONS else column for key, column in batch.items()}
    exists, none = batch["completion_mask"].bool(), torch.zeros(size, width, 0)
    return TokenBatch(
        uids=tuple(f"{name}/{row}" for row in range(size)),
        prompt_ids=batch["prompt_ids"],
        prompt_mask=batch["prompt_mask"].bool(),
        prompt_index=torch.arange(size),
        response_ids=batch["completion_ids"],
        attention_mask=exists,
        response_mask=exists,
        response_index=exists.flatten().nonzero()[:, 0],
        rollout_log_probs=torch.where(exists, batch["sampling_per_token_logps"], 0.0),
        advantages=batch["jackpot_advantages"][:, None] * exists,
        uniforms=batch["jackpot_uniforms"],
        top_ids=batch.get("jackpot_top_ids", none.long()),
        top_log_probs=batch.get("jackpot_top_log_probs", none),
        versions=torch.tensor(version).expand(size, width, 2),
        by_policy=batch.get("jackpot_by_policy"),
    )


def learner_of(
    objective: ObjectiveConfig,
    rollout_model: RolloutModelConfig | None = None,
    on_support: bool = False,
    temperature: float = 1.0,
) -> JointLearner:
    """Make our learner, of the policy alone or of two models, from the start of the run."""
    paths = {"policy": "starter:policy"} | ({"rollout_model": rollout_model.path} if rollout_model else {})
    models = {role: load_model(path, torch.float32) for role, path in paths.items()}
    settings = {"policy": LINEAR} | ({"rollout_model": rollout_model.optimizer} if rollout_model else {})
    return JointLearner(
        models,
        {role: ModelOptimizer(model.parameters(), settings[role], 100) for role, model in models.items()},
        policy_objective(objective),
        rollout_model_objective(rollout_model, objective.loss_agg_mode) if rollout_model else None,
        LearnerOptions(
            temperature=temperature,
            num_top_log_probs=20,
            max_length=MAX_NEW,
            advantage="grpo",
            on_support=on_support,
            exact_engines=("policy", "rollout_model") if rollout_model and not on_support else (),
            is_mixed=bool(rollout_model and rollout_model.is_mixed),
            distill_control=rollout_model.distill_control if rollout_model else None,
        ),
    )


def walked_beside(trainer: type, learner: JointLearner, losses: list[tuple[float, float]], versioned: bool) -> type:
    """Return a class of trainers whose every step `learner` takes too, on TRL's tensors and its own weights, so what is
    apart stays so. `losses` gets TRL's policy loss and ours.

    Args:
        versioned: the tokens were sampled by the learner's weights.
    """

    class Compared(trainer):
        buffered = None  # TRL's inputs of the steps in hand
        steps, step_parts = [], []  # our micro-batches of these; (TRL's loss, our micro-batch) of the step so far
        ours = None  # metrics of our last step

        def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
            inputs = super()._prepare_inputs(generation_batch)
            if self._buffered_inputs is not self.buffered:
                self.buffered, size = self._buffered_inputs, self.args.gradient_accumulation_steps
                version = {"version": learner.version} if versioned else {}
                batches = [token_batch(each, str(index), **version) for index, each in enumerate(self.buffered)]
                steps = [batches[start : start + size] for start in range(0, len(batches), size)]
                self.steps = [micro for step in learner.compute_old_log_probs(steps) for micro in step]
            return inputs

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            loss = super()._compute_loss(model, inputs)
            self.step_parts.append((loss.detach(), self.steps[self._step % self.args.steps_per_generation]))
            if len(self.step_parts) == self.args.gradient_accumulation_steps:
                self.ours = learner.update([micro for _, micro in self.step_parts])[0].metrics
                trl_loss = float(sum(loss for loss, _ in self.step_parts))
                losses.append((trl_loss, float(self.ours["policy/loss"].value)))
                self.step_parts.clear()
            return loss

    return Compared


def movement(now: list[Tensor], other: list[Tensor], start: list[Tensor]) -> tuple[float, float]:
    """Return how far two models are apart, relative to how far the first has moved; and that."""

    def distance(first: list[Tensor], second: list[Tensor]) -> float:
        return math.sqrt(sum(float((a - b).detach().square().sum()) for a, b in zip(first, second, strict=True)))

    path_length = distance(now, start)
    return distance(now, other) / path_length, path_length
