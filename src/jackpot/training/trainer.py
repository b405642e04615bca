"""The trainer, which is the loop of a run.

Status: supported.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from jackpot.core.clock import Clock
from jackpot.core.errors import WeightsError
from jackpot.core.metrics import Sums, add_sums
from jackpot.core.roles import Role
from jackpot.core.types import Rollout, TokenBatch, TrainingSample, Version
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.sampler import Sampler
from jackpot.rollout.tasks.base import PromptStream
from jackpot.training.batching import mini_batches
from jackpot.training.components import RunComponents
from jackpot.training.evaluator import Evaluator
from jackpot.training.guards import EngineCheck, NonFiniteGuard, stop_recorded
from jackpot.training.interrupt import StopSignal
from jackpot.training.iteration_metrics import lag_sums, metric_values, throughput, training_sums
from jackpot.training.learner import StepResult
from jackpot.training.run_folder.checkpoint import Checkpointer
from jackpot.training.run_folder.folder import RunFolder, measure_of
from jackpot.training.run_folder.rollouts import write_rollouts

MetricsLine = dict[str, Any]  # one line of metrics.jsonl
OnMetrics = Callable[[MetricsLine], None]


class Trainer:
    """The loop that trains a run from its newest checkpoint, or from the start, to its last iteration.

    One iteration: next batch -> check the engine -> advantages -> optimizer steps -> check every token -> send weights
    -> save, evaluate, checkpoint.

    The loop runs in one thread and waits at four places:
    - the sampler: consumes prompts and the weights in the engine, produces a rollout batch. Waits until the engine has
      generated the batch; with `batch.ahead` the batch was begun while an earlier one was trained on.
    - the learner: consumes the rollout batch, produces new weights.
    - the weight update: consumes the learner's weights; waits until the engine holds them. With `batch.ahead` it comes
      only when about half of the batches begun ahead are left to train on (`batches_in_reserve`), and first waits until
      the old weights have generated these. So no batch mixes two versions, and no batch is trained on more than `ahead`
      iterations after the iteration of its weights.
    - evaluation: waits until every batch that was begun is complete, and then until both engines have answered.
      Meanwhile nothing is generated for training.

    Args:
        components: task, engines and learner of the run; engines and learner hold equal weights.
        folder: the run folder, opened and rewound to `state`.
        state: content of the checkpoint to continue from; None for a new run.
        on_metrics: called with every line of metrics.jsonl once it is written.
    """

    def __init__(
        self, components: RunComponents, folder: RunFolder, state: dict[str, Any] | None, on_metrics: OnMetrics
    ) -> None:
        """Build the parts of the loop, and give them their state after the iteration of `state`, or before training."""
        config = components.config
        self._components = components
        self._config = config
        self._folder = folder
        self._on_metrics = on_metrics
        self._clock = Clock()

        # Of the components, `writers` are the engines that may generate rollouts, by model.
        self._sampler = Sampler(
            config,
            engines=components.writers,
            task=components.task,
            tokenizer=components.tokenizer,
            costs=components.costs,
            prompts=PromptStream(components.task, "train", config.seed),
            clock=self._clock,
            event=folder.event,
            check=self._check_engines,
        )

        self._engine_checks: dict[Role, EngineCheck] = {
            role: EngineCheck(config, components.learner, role, folder.event) for role in components.writers
        }

        count = state["non_finite"] if state else 0  # optimizer steps in a row with a non-finite gradient
        self._non_finite = NonFiniteGuard(config.guard.max_non_finite_steps, folder.event, count)
        self._evaluator = Evaluator(components, folder, self._engine_checks)
        self._checkpointer = Checkpointer(components, folder, state)

        self.iteration = -1  # newest finished iteration; 0 is the evaluation before training
        # Versions of the weights at the start of the newest iterations, oldest first: so many that a lag of a token
        # (`lag_sums`) above `batch.ahead` iterations, the most that it should be, is seen too.
        self._versions: deque[Version] = deque(maxlen=config.batch.ahead + 2)

        if state is not None:
            self._sampler.load_state_dict(state)
            self._versions.extend(Version(*version) for version in state["versions"])
            self.iteration = state["iteration"]

    def train(self) -> bool:
        """Run the iterations that are left; return False if a signal ended the run early, after a checkpoint.

        Raises:
            CheckpointError: the last checkpoint cannot be written, or the run folder was removed or replaced. An
                earlier checkpoint that fails is tried again an iteration later.
            TrainingError: a guard stops the run.
            WeightsError: an engine holds other weights than the learner sent.
        """
        config, components = self._config, self._components
        with StopSignal() as stop, _old_objects_frozen():
            if self.iteration < 0:
                self._finish_iteration({})  # iteration 0: the evaluation before training
            else:
                self._put_idle_engines_to_sleep()

            while self.iteration < config.iterations and not stop.requested:
                iteration = self.iteration + 1
                batch = self._sampler.next_batch(iteration)

                # If later batches were begun with these weights, keep a copy to check those batches with.
                self._versions.append(components.learner.version)
                if self._sampler.begin_ahead(iteration):
                    with self._clock("check"):
                        for check in self._engine_checks.values():
                            check.keep_weights()

                with self._clock("train"):
                    samples = components.learner.compute_advantages(batch.scored)
                    mini_batches = list(self._mini_batches(samples))
                    # `trace`: whether the learner also returns the per-token columns of saved rollouts.
                    trace, uses_rollout_model = self._saves_rollouts(iteration), config.uses_rollout_model(iteration)
                    steps, gaps = components.learner.train(mini_batches, trace, uses_rollout_model)

                self._check_gaps(iteration, samples, gaps)  # |p_engine - p_training| of each token

                # Send the new weights to the writers, the engines that generate the next rollouts, once they have
                # generated all batches that were begun with the old weights.
                writers = self._next_writers(iteration)
                if writers:
                    self._sampler.finish()
                with self._clock("sync"), stop_recorded(self._folder.event, iteration, WeightsError):
                    sent = [components.send_weights(engine, role) for role, engine in writers.items()]  # metrics
                with self._clock("save"):
                    self._save(iteration, samples, steps)

                sums = (
                    batch.sums
                    | training_sums(samples, steps, components, iteration)
                    | lag_sums(samples, self._versions)
                    | add_sums(*sent)
                )
                self._non_finite.check(steps, iteration)
                self._finish_iteration(sums)

            self._checkpointer.save_last(self.iteration, self._state)
        return self.iteration == config.iterations

    def close(self) -> None:
        """Record the last events, free engines and tasks and close the run folder, each even if another fails."""
        with ExitStack() as closing:
            closing.callback(self._folder.close)
            closing.callback(self._components.close)
            self._record_events()  # events of an unfinished iteration may say why it did not finish

    def _check_engines(self, iteration: int, rollouts: Sequence[Rollout]) -> None:
        """Check token ids, log-probs and weight versions of the batch, engine by engine, before training on it."""
        with self._clock("check"):
            for role, check in self._engine_checks.items():
                sampled = [rollout for rollout in rollouts if rollout.sampled_by == role]
                check.check_batch(self._components.writers[role], sampled, iteration)

    def _check_gaps(self, iteration: int, samples: Sequence[TrainingSample], gaps: Mapping[str, Tensor]) -> None:
        """Check every token of `iteration` by its gap, |p_engine - p_training|, before the new weights are used."""
        with self._clock("check"):
            for role, check in self._engine_checks.items():
                sampled = [sample.rollout for sample in samples if sample.rollout.sampled_by == role]
                check.check_gaps(self._components.writers[role], sampled, gaps, iteration)

    def _put_idle_engines_to_sleep(self) -> None:
        """When a run continues, put those engines to sleep that do not generate the next rollouts."""
        waiting = {self._components.engine, self._components.policy_engine}
        for engine in waiting.difference(self._next_writers(self.iteration).values()):
            engine.sleep()

    def _next_writers(self, iteration: int) -> dict[Role, Engine]:
        """Return the engines to send the weights after `iteration` now, by model; none while enough batches wait."""
        return self._components.next_writers(iteration) if self._sampler.takes_weights else {}

    def _finish_iteration(self, sums: Sums) -> None:
        """Evaluate when due, report the metrics of the iteration, and write a checkpoint when due.

        Args:
            sums: the metrics of the iteration's training and rollouts, as sums and counts; empty before training.
        """
        self.iteration += 1
        values, batch = metric_values(sums), self._config.batch

        if self._is_last(self.iteration) or self.iteration % self._config.evaluation.every == 0:
            self._sampler.finish()  # the engines that evaluate may still generate rollouts for training
            # This iteration is finished, so an error is an event of the next one. `current`: engines with new weights.
            with self._clock("evaluate"), stop_recorded(self._folder.event, self.iteration + 1, WeightsError):
                values |= self._evaluator.evaluate(self.iteration, current=self._next_writers(self.iteration).values())

        self._folder.check_in_place()
        self._record_events()
        values |= throughput(self._clock.take(), values.get("tokens/rollout"), overlaps=bool(batch.ahead))

        with self._clock("save"):  # the seconds of this block appear in the next line of metrics.jsonl
            line = self._folder.report(self.iteration, values)
            # The policy's accuracy or mean reward; None if this iteration was not evaluated.
            value = values.get(f"eval/policy_{measure_of(values)}")
            self._checkpointer.save_if_due(self.iteration, self._state, value)
        self._on_metrics(line)

    def _mini_batches(self, samples: Sequence[TrainingSample]) -> Iterator[list[TokenBatch]]:
        """Yield the micro-batches of each optimizer step on the rollout batch, divided as the settings say."""
        batch = self._config.batch
        return mini_batches(
            samples,
            mini_batch_size=batch.mini_batch_size or batch.rollouts,
            epochs=batch.ppo_epochs,
            micro_batch_tokens=batch.micro_batch_tokens,
            seed=self._config.seed,
            pads=self._components.learner.pads,  # whether padding counts as tokens
        )

    def _save(self, iteration: int, samples: Sequence[TrainingSample], steps: Sequence[StepResult]) -> None:
        """Record the events of every optimizer step, and write the rollouts of `iteration` if that is due.

        Per-token log-probs, acceptance and weights in the file are those of the first update on each rollout.
        """
        self._folder.check_in_place()
        for step in steps:
            for event in step.events:
                self._folder.event(iteration, event)

        if samples and self._saves_rollouts(iteration):
            # Steps are read newest first, so that each rollout keeps the columns of its first update.
            traces = {uid: row for step in reversed(steps) for uid, row in step.traces.items()}
            with self._folder.dispensable(iteration, "rollouts"):
                folder, tokenizer = self._folder.rollouts, self._components.tokenizer
                write_rollouts(folder, iteration, samples, traces, tokenizer, self._config)

    def _saves_rollouts(self, iteration: int) -> bool:
        """Tell whether the rollouts of an iteration are written to a file."""
        return iteration == 1 or self._is_last(iteration) or iteration % self._config.rollouts.every == 0

    def _is_last(self, iteration: int) -> bool:
        """Tell whether an iteration is the last one of the run."""
        return iteration == self._config.iterations

    def _state(self) -> dict[str, Any]:
        """Wait until every batch begun ahead is complete; return what the loop needs to continue after this iteration.

        The checkpointer adds the rest of the state.
        """
        return {
            "non_finite": self._non_finite.count,
            "versions": [list(version) for version in self._versions],
            **self._sampler.state_dict(),  # waits for the batches begun ahead
        }

    def _record_events(self) -> None:
        """Append to events.jsonl what has happened in tasks and engines since the last call of this method."""
        for event in self._components.take_events():
            self._folder.event(self.iteration, event)


@contextmanager
def _old_objects_frozen() -> Iterator[None]:
    """Keep Python's garbage collector from searching objects that exist now, such as imported modules.

    This saves 2.5 % of the quickstart's time.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
