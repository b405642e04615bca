"""The engines of policy and rollout model as one rollout function of TRL's trainer.

Each generates with the weights that training holds: they are sent before, the digest of what arrived is compared, and
what the engine reports is checked as in a run of ours (`training.guards`).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
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
    """Gives engines and checks the models that a trainer of TRL's trains, as a learner of ours does (`Scorer`)."""

    def __init__(self, trainer: TwoModelTrainer) -> None:
        self._trainer = trainer

    @property
    def version(self) -> Version:
        return self._trainer.version

    @property
    def pads(self) -> bool:
        return not all(can_pack(self[role]) for role in ("policy", "rollout_model"))

    def __getitem__(self, role: Role) -> PreTrainedModel:
        trainer = self._trainer
        return trainer.rollout_model if role == "rollout_model" else plain_model(_unwrapped(trainer))

    def weights(self, role: Role, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a model, those of an adapter merged in."""
        return merged_weights(self[role], dtype)

    def keep_weights(self, role: Role) -> None:
        """Raises NotImplementedError: nothing is generated ahead."""
        raise NotImplementedError

    @torch.no_grad()
    def score(
        self, role: Role, batches: Sequence[TokenBatch], sampling: Sampling, from_copy: bool = False
    ) -> dict[str, Tensor]:
        """Compute log-probs as `Learner.score`, without dropout."""
        model, accelerator = self[role], self._trainer.accelerator
        with without_dropout(model), accelerator.autocast():
            on_device = (batch_to(batch, accelerator.device) for batch in batches)
            columns = [list_log_probs(model, batch, sampling) for batch in on_device]
        return column_on_host(list(zip(batches, columns, strict=True)))


class Writers:
    """Has the rollout model generate, and the policy its share of the rollouts and all evaluations.

    An engine that is not given is made from the settings when it is first needed. One that sleeps does so whenever it
    has generated.

    Args:
        config: the settings of the run, as of ours.
        engines: those that were given.
    """

    def __init__(self, config: Config, engines: Mapping[Role, Engine]) -> None:
        self._config, self._engines = config, dict(engines)
        self._may_draft = config.draft is not None or len(engines) == 2  # of those that were given nobody knows
        self._held: dict[Role, int] = {}  # optimizer steps of the weights in each engine
        self._checks: dict[Role, EngineCheck] = {}
        self._names = BatchNames()
        self.iteration = 0  # of the newest generation batch for training, from 1
        self.by_policy: list[bool] = []  # of each completion of it

    def is_exact(self, role: Role) -> bool:
        """Return whether a model in training has the distribution that its engine samples from, but for rounding."""
        if role not in self._engines:
            return False
        held, config = self._engines[role].capabilities, self._config
        is_same = held.dtype == DTYPES[config.precision]
        return is_same and not held.quantized and not config.sampling.truncated

    def forget(self) -> None:
        """Have every engine get its weights again, as these changed without an optimizer step."""
        self._held.clear()

    def __call__(self, prompts: list[Any], trainer: TwoModelTrainer) -> dict[str, Any]:
        """Return a completion for each prompt: a rollout function of TRL.

        Raises:
            EngineError: an engine holds other weights than it was sent, returns fewer top log-probs than it is asked
                for, reports what it does not sample from, or gave up a response.
        """
        size, (name, number) = len(prompts), self._names.next(trainer)
        roles: list[Role] = ["policy"] * size
        if trainer.model.training:
            args = trainer.args
            micro_batches = trainer.state.global_step * args.gradient_accumulation_steps
            self.iteration = -(-micro_batches // args.steps_per_generation) + number + 1
            roles = self._assign(name, size, trainer)
            self.by_policy = [role == "policy" for role in roles]
        wanted = requests(prompts, trainer, name, self._config.sampling.num_top_log_probs)
        return completions(self._generate(wanted, roles, trainer))

    def _assign(self, name: str, size: int, trainer: TwoModelTrainer) -> list[Role]:
        """Return the model of each completion of this process. The groups are those of the batch of all processes."""
        processes, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        group = self._config.batch.group_size
        uids = [f"{name}/{index // group}" for index in range(processes * size)]
        return assign_models(self._config, self.iteration, uids)[rank * size : (rank + 1) * size]

    def _generate(self, wanted: Sequence[Request], roles: Sequence[Role], trainer: TwoModelTrainer) -> list[Rollout]:
        """Have the engines generate, after they got the weights of training, and check what they report."""
        metrics, by_uid = trainer._metrics["train" if trainer.model.training else "eval"], {}
        drafts = "policy" in roles and self._may_draft
        used: list[Role] = [role for role in ("rollout_model", "policy") if role in roles or drafts]

        for role in used:
            self._send(role, trainer)

        for role in used:
            of_role = [request for request, writer in zip(wanted, roles, strict=True) if writer == role]
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
                del self._held[role]

        return [by_uid[request.uid] for request in wanted]

    def _send(self, role: Role, trainer: TwoModelTrainer) -> None:
        """Have an engine hold the weights that its model has in training."""
        engine, version = self._engine(role, trainer), trainer.version
        steps = getattr(version, role)
        if self._held.get(role) == steps:
            return
        if role == "policy":
            refuse_unmerged(_unwrapped(trainer))
        if engine.capabilities.sleeps and trainer.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
        send_weights(engine, TwoModels(trainer).weights(role, engine.capabilities.dtype), version)
        self._held[role] = steps

    def _engine(self, role: Role, trainer: TwoModelTrainer) -> Engine:
        config = self._config
        if role not in self._engines:
            drafter = self._engine("rollout_model", trainer) if role == "policy" and config.draft else None
            if not isinstance(drafter, TransformersEngine | None):
                raise ConfigError("only an engine of transformers drafts; leave draft out of the policy's engine")
            settings = (role == "policy" and config.evaluation.engine) or config.engine
            assert isinstance(settings, TransformersEngineConfig)  # `joint` takes no other settings
            self._engines[role] = make_engine(config.model_paths()[role], settings, trainer, drafter)
        return self._engines[role]

    def _check(self, role: Role, trainer: TwoModelTrainer) -> EngineCheck:
        """Return the check of an engine; it logs how far its log-probs were from those of training."""
        if role not in self._checks:

            def record(iteration: int, event: dict[str, Any]) -> None:
                if "mean_gap" in event:
                    trainer._metrics["train"][f"jackpot/mismatch/engine_gap_of_{role}"].append(event["mean_gap"])

            self._checks[role] = EngineCheck(self._config, TwoModels(trainer), role, record)
        return self._checks[role]


def _unwrapped(trainer: TwoModelTrainer) -> PreTrainedModel:
    return trainer.accelerator.unwrap_model(trainer.model)
