"""The engines of policy and rollout model as one rollout function of TRL's trainer.

Before each generation batch the engines get the current weights, and digests of the weights that arrived are compared
with those of the weights sent. What an engine reports is checked as in `jackpot train` (`training.guards`).
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.adapters.trl.base import TRLTrainer, plain_model, without_dropout
from jackpot.adapters.trl.refusals import refuse_unmerged
from jackpot.adapters.trl.rollouts import BatchNames, completions, make_engine, requests
from jackpot.config.config import Config
from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.core.errors import ConfigError
from jackpot.core.roles import Role
from jackpot.core.types import Rollout, TokenBatch, Version
from jackpot.models.forward import can_pack
from jackpot.models.load import DTYPES
from jackpot.models.lora import merged_weights
from jackpot.models.scoring import list_log_probs
from jackpot.rollout.engines.base import Engine, Request
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.rollout.sampler import assign_models
from jackpot.training.batching import batch_to
from jackpot.training.components import send_weights
from jackpot.training.guards import EngineCheck
from jackpot.training.old_policy import column_on_host

_log = logging.getLogger(__name__)


class TwoModelTrainer(TRLTrainer):
    """TRL's trainer of a policy, with a rollout model beside it."""

    rollout_model: PreTrainedModel
    version: Version


class TwoModels:
    """The two models of TRL's trainer, with the methods of a learner that `EngineCheck` calls (`Scorer`)."""

    def __init__(self, trainer: TwoModelTrainer) -> None:
        """Keep the trainer, whose models are looked up at each call."""
        self._trainer = trainer

    @property
    def version(self) -> Version:
        """Return the number of optimizer steps that each model has taken."""
        return self._trainer.version

    @property
    def pads(self) -> bool:
        """Return whether some model reads padding, so that padding counts as tokens of a micro-batch."""
        return not all(can_pack(self[role]) for role in ("policy", "rollout_model"))

    def __getitem__(self, role: Role) -> PreTrainedModel:
        """Return the transformers model of a role, which holds the layers of peft where TRL trains an adapter."""
        trainer = self._trainer
        return trainer.rollout_model if role == "rollout_model" else plain_model(_unwrapped(trainer))

    def keep_weights(self, role: Role) -> None:
        """Raise NotImplementedError: with TRL nothing is generated ahead, so no weights need to be kept."""
        raise NotImplementedError

    @torch.no_grad()
    def score(
        self, role: Role, batches: Sequence[TokenBatch], sampling: Sampling, from_copy: bool = False
    ) -> dict[str, Tensor]:
        """Compute a model's log-probs of the sampled and of the K listed tokens, [T, 1 + K] by rollout uid.

        It does what `Learner.score` does; dropout is off. `from_copy` is ignored, as there are no copies of older
        weights (`keep_weights`).
        """
        model, accelerator = self[role], self._trainer.accelerator
        with without_dropout(model), accelerator.autocast():
            on_device = (batch_to(batch, accelerator.device) for batch in batches)
            log_probs = [list_log_probs(model, batch, sampling) for batch in on_device]  # of each batch, [B, T, 1 + K]
        return column_on_host(list(zip(batches, log_probs, strict=True)))


class Writers:
    """A rollout function of TRL: the rollout model generates, and the policy its share of rollouts and all evaluations.

    An engine that the user has not given is made from the settings when it is first needed. An engine that can sleep
    does so after each generation batch.

    Args:
        config: settings of the run, in our terms.
        engines: the engines that the user has given, by model.
    """

    def __init__(self, config: Config, engines: Mapping[Role, Engine]) -> None:
        """Keep the user's engines; no other engine is made yet."""
        self._config = config
        self._engines = dict(engines)
        # Whether one engine may draft for the other: by the settings, or because the user has given both engines.
        self._may_draft = config.draft is not None or len(engines) == 2
        self._held_steps: dict[Role, int] = {}  # optimizer steps that the weights in each engine have taken
        self._checks: dict[Role, EngineCheck] = {}  # each is made at its first use (`_check`)
        self._names = BatchNames()  # names of generation batches, with which the uids of their rollouts begin
        self.iteration = 0  # number of the newest generation batch for training, from 1
        self.by_policy: list[bool] = []  # whether the policy generates, for each completion of that batch

    def is_exact(self, role: Role) -> bool:
        """Return whether a model's engine samples from the distribution that training computes, up to rounding.

        False before the engine is made.
        """
        if role not in self._engines:
            return False
        capabilities = self._engines[role].capabilities
        is_same = capabilities.dtype == DTYPES[self._config.precision]
        return is_same and not capabilities.quantized and not self._config.sampling.truncated

    def forget(self) -> None:
        """Have every engine get its weights anew before it generates: the weights changed without an optimizer step."""
        self._held_steps.clear()

    def __call__(self, prompts: list[Any], trainer: TwoModelTrainer) -> dict[str, Any]:
        """Return a completion for each prompt, in the form of `completions`.

        Raises:
            EngineError: an engine holds other weights than it was sent, returns fewer top log-probs than it is asked
                for, reports log-probs that it does not sample from, or gave up a response.
        """
        # The name of this generation batch, and its index among the batches since the last optimizer step.
        batch_name, batch_index = self._names.next(trainer)
        roles: list[Role] = ["policy"] * len(prompts)
        if trainer.model.training:
            micro_batches = trainer.state.global_step * trainer.args.gradient_accumulation_steps
            past_batches = math.ceil(micro_batches / trainer.args.steps_per_generation)  # that past steps used up
            self.iteration = past_batches + batch_index + 1
            roles = self._assign(batch_name, len(prompts), trainer)
            self.by_policy = [role == "policy" for role in roles]

        num_top = self._config.sampling.num_top_log_probs
        return completions(self._generate(requests(prompts, trainer, batch_name, num_top), roles, trainer))

    def _assign(self, name: str, size: int, trainer: TwoModelTrainer) -> list[Role]:
        """Return the model that generates each completion of this process.

        Groups are numbered over the batch of all processes, so that two processes that share a group agree about it.

        Args:
            name: name of the generation batch.
            size: number of completions of this process.
        """
        processes, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        group_size = self._config.batch.group_size
        uids = [f"{name}/{index // group_size}" for index in range(processes * size)]
        return assign_models(self._config, self.iteration, uids)[rank * size : (rank + 1) * size]

    def _generate(self, requests: Sequence[Request], roles: Sequence[Role], trainer: TwoModelTrainer) -> list[Rollout]:
        """Send the weights of training to the engines, have them generate, and check what they report.

        Args:
            roles: the model that generates, for each request.
        """
        metrics = trainer._metrics["train" if trainer.model.training else "eval"]  # TRL's log: lists by name
        by_uid: dict[str, Rollout] = {}
        drafts = "policy" in roles and self._may_draft
        # The rollout model is first, and used also where it only drafts: it must hold its new weights before it drafts.
        used: list[Role] = [role for role in ("rollout_model", "policy") if role in roles or drafts]

        for role in used:
            self._send(role, trainer)

        for role in used:
            of_role = [request for request, writer in zip(requests, roles, strict=True) if writer == role]
            engine = self._engines[role]
            rollouts = [replace(rollout, sampled_by=role) for rollout in engine.generate(of_role)]
            self._check(role, trainer).check_batch(engine, rollouts, self.iteration)
            by_uid |= {rollout.uid: rollout for rollout in rollouts}

            for key, value in engine.take_metrics().items():
                metrics[f"jackpot/{key}"].append(value)
            for event in engine.take_events():
                _log.info("the %s's engine: %s", role, event)

        for role in used:
            if self._engines[role].capabilities.sleeps:
                self._engines[role].sleep()
                del self._held_steps[role]  # an engine that slept gets its weights again

        return [by_uid[request.uid] for request in requests]

    def _send(self, role: Role, trainer: TwoModelTrainer) -> None:
        """Send an engine the weights that its model has in training, unless it holds them already."""
        engine = self._engine(role, trainer)
        version = trainer.version
        steps = getattr(version, role)
        if self._held_steps.get(role) == steps:
            return

        if role == "policy":
            refuse_unmerged(_unwrapped(trainer))
        if engine.capabilities.sleeps and trainer.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()  # an engine that wakes needs the memory that torch keeps cached
        send_weights(engine, merged_weights(TwoModels(trainer)[role], engine.capabilities.dtype), version)
        self._held_steps[role] = steps

    def _engine(self, role: Role, trainer: TwoModelTrainer) -> Engine:
        """Return the engine of a model; make it from the settings where there is none yet.

        With the setting `draft`, the rollout model's engine drafts for an engine of the policy that is made here.
        """
        config = self._config
        if role not in self._engines:
            drafter = self._engine("rollout_model", trainer) if role == "policy" and config.draft else None
            if not isinstance(drafter, TransformersEngine | None):
                raise ConfigError("only an engine of transformers drafts; leave draft out of the policy's engine")
            # `evaluation.engine` is the policy's; where it is not set, both models have the settings `engine`.
            settings = (role == "policy" and config.evaluation.engine) or config.engine
            assert isinstance(settings, TransformersEngineConfig)  # `joint._run_settings` refuses all other settings
            self._engines[role] = make_engine(config.model_paths()[role], settings, trainer, drafter)
        return self._engines[role]

    def _check(self, role: Role, trainer: TwoModelTrainer) -> EngineCheck:
        """Return the check of an engine, which logs how far the engine's log-probs are from those of training."""
        if role not in self._checks:

            def record(iteration: int, event: dict[str, Any]) -> None:
                """Log the mean gap of a check's event; events without one are ignored."""
                if "mean_gap" in event:
                    trainer._metrics["train"][f"jackpot/mismatch/engine_gap_of_{role}"].append(event["mean_gap"])

            self._checks[role] = EngineCheck(self._config, TwoModels(trainer), role, record)
        return self._checks[role]


def _unwrapped(trainer: TwoModelTrainer) -> PreTrainedModel:
    """Return the policy without the wrappers of accelerate."""
    return trainer.accelerator.unwrap_model(trainer.model)
