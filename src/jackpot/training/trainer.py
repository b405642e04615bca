"""The loop, on one screen. It is given its engine and learner; only `launch` makes them."""

import math
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from jackpot.config.run import Sampling
from jackpot.core.clock import Clock
from jackpot.core.digest import WeightsDigest
from jackpot.core.errors import CheckpointError, EngineError, JackpotError
from jackpot.core.metrics import Sums, Total, add_sums
from jackpot.core.prng import stream_key
from jackpot.core.types import Role, Rollout, Score, ScoredRollout, TokenBatch
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.evaluate import OWN_SET, Evaluation, evaluate
from jackpot.rollout.sampler import Sampler, mean, tokens_read, useless
from jackpot.rollout.tasks.base import PromptStream
from jackpot.training.batching import micro_batches, optimizer_steps
from jackpot.training.components import Parts
from jackpot.training.guards import (
    THOROUGH_CHECKS,
    NonFiniteGuard,
    check_engine,
    check_gap,
    engine_gap,
    glance,
    precision_of,
    some_rollouts,
)
from jackpot.training.learner import StepResult
from jackpot.training.run.checkpoint import Checkpoints
from jackpot.training.run.folder import WITH_STANDARD_ERROR, RunFolder, numbers
from jackpot.training.run.rollouts import write_rollouts

Line = dict[str, Any]
Listener = Callable[[Line], None]


class Trainer:
    """One run from where it stands to its last iteration.

    Args:
        parts: engine and learner hold the same weights.
        folder: opened and rewound to `state`.
        state: of the checkpoint to continue, None for a new run.
        listen: called with every line of metrics.jsonl as it is written.
    """

    def __init__(self, parts: Parts, folder: RunFolder, state: dict[str, Any] | None, listen: Listener) -> None:
        self._parts, self._folder, self._listen = parts, folder, listen
        self._config = parts.config
        self._clock = Clock()
        prompts = PromptStream(parts.task, "train", self._config.seed)
        self._sampler = Sampler(
            parts.config,
            parts.engine,
            parts.task,
            parts.tokenizer,
            parts.writer_cost,
            prompts,
            self._clock,
            folder.event,
        )
        self._checkpoints = Checkpoints(folder.checkpoints, self._config.checkpoint.keep)
        self._stopping = False
        self._non_finite = NonFiniteGuard(self._config.guard.max_non_finite_steps, state["non_finite"] if state else 0)
        self._thorough_checks = 0
        self.iteration = self._saved = -1  # finished iterations, and the newest with a checkpoint
        self._overdue = False  # the checkpoint that was last tried could not be written
        self._accuracy = -1.0  # the policy's after this iteration, where it was measured
        self._best: dict[str, float] | None = None  # {"iteration", "accuracy"} of the best checkpoint
        if state is not None:
            prompts.load_state_dict(state["prompts"])
            self.iteration = self._saved = state["iteration"]
            self._best = self._checkpoints.restore_links(state["best"])
            folder.failed.update(state.get("failed", {}))
            self._prune_checkpoints()

    def train(self) -> bool:
        """Run all iterations that are left; True when finished, False when a signal ended it after a checkpoint.

        Raises:
            CheckpointError: the last checkpoint could not be written. Others are tried again an iteration later.
        """
        config, parts = self._config, self._parts
        with self._interruptible():
            if self.iteration < 0:
                self._finish_iteration({})
            while self.iteration < config.iterations and not self._stopping:
                batch = self._sampler.next_batch(self.iteration + 1)
                self._check_engine(batch.first)
                with self._sampler.beside_training(self.iteration + 2), self._clock("train"):
                    scored = parts.learner.credit(batch.scored)
                    results = parts.learner.train(list(self._steps(scored)), self._traced)
                with self._clock("sync"):
                    self._send_weights(parts.engine, "rollout_model")
                self._save_rollouts(scored, results)
                self._watch(results)
                self._finish_iteration(batch.sums | _training_sums(scored, results, parts))
            if self.iteration > max(self._saved, 0):  # stopped, or the last one could not be written
                self._checkpoint(is_last=True)
        return self.iteration == config.iterations

    def close(self) -> None:
        """Free the engines and the task and flush what is being written; all of it, whatever fails on the way."""
        with ExitStack() as closing:
            closing.callback(self._folder.close)
            for task in self._parts.tasks:
                closing.callback(task.close)
            closing.callback(self._parts.policy_engine.close)
            closing.callback(self._parts.engine.close)
            self._tell_events()  # of an iteration that did not end: perhaps they say why

    def _finish_iteration(self, sums: Sums) -> None:
        """Evaluate, report and checkpoint when due."""
        self.iteration += 1
        config, last = self._config, self.iteration == self._config.iterations
        values = numbers(sums)
        if last or self.iteration % config.evaluation.every == 0:
            with self._clock("evaluate"):
                values |= self._evaluate()
        self._tell_events()
        values |= self._throughput(values)
        line = self._folder.report(self.iteration, values)
        self._accuracy = values.get("eval/policy_accuracy", -1.0)
        due = last or self._is_best or self._overdue or self.iteration % config.checkpoint.every == 0
        if due and self.iteration > 0:
            self._checkpoint()
        self._listen(line)

    @property
    def _is_best(self) -> bool:
        return self._accuracy > (self._best["accuracy"] if self._best else -1.0)

    def _steps(self, scored: Sequence[ScoredRollout]) -> Iterator[list[TokenBatch]]:
        batch = self._config.batch
        return optimizer_steps(
            scored,
            mini_batch_size=batch.mini_batch_size or batch.rollouts,
            epochs=batch.ppo_epochs,
            micro_batch_tokens=batch.micro_batch_tokens,
            seed=self._config.seed,
            shares_prompts=not self._config.activation_checkpointing,
        )

    def _send_weights(self, engine: Engine, role: Role) -> None:
        """Give the engine a model's weights and make sure that it holds just those."""
        learner = self._parts.learner
        digest = WeightsDigest(engine.capabilities.dtype)
        weights = digest.watch(learner.weights(role))
        held = engine.update_weights(weights, learner.version)
        deque(weights, maxlen=0)  # what the engine left counts as sent
        sent = digest.hexdigest()
        if held != sent:
            raise EngineError(
                f"after the weight update at {learner.version} the engine holds digest {held[:12]}, the learner sent "
                f"{sent[:12]}; training on what it writes would be training on unknown weights"
            )

    def _tell_events(self) -> None:
        """What tasks and engines have to say goes to events.jsonl, with the setting that the engine is of."""
        for event in (event for task in self._parts.tasks for event in task.take_events()):
            self._folder.event(self.iteration, event)
        for setting, engine in {"engine": self._parts.engine, "evaluation.engine": self._parts.policy_engine}.items():
            for event in engine.take_events():  # of an engine that is both, the second time is none
                self._folder.event(self.iteration, event | {"engine": setting})

    def _evaluate(self) -> dict[str, float]:
        """Both models on the same held-out problems with the same uniforms, and the policy on further sets."""
        parts = self._parts
        shared = parts.policy_engine is parts.engine
        if not shared:
            self._send_weights(parts.policy_engine, "policy")
        engines = {"policy": parts.policy_engine} | ({} if shared else {"rollout_model": parts.engine})
        results = {role: self._answered(engine, OWN_SET) for role, engine in engines.items()}
        values = {"tokens/evaluate": float(sum(result.tokens for result in results.values()))}
        for role, result in results.items():
            self._folder.save_evaluation(self.iteration, role, result)
        for role in ("policy", "rollout_model"):
            result = results.get(role, results["policy"])  # the policy is its own rollout model where it writes itself
            values |= {f"eval/{role}_{name}": value for name, value in result.role_metrics().items()}
            values[f"eval/{role}_engine_gap"] = self._engine_gap(role, engines.get(role, parts.engine), result.rollouts)
        for benchmark in parts.benchmarks:
            result = self._answered(parts.policy_engine, benchmark)
            self._folder.save_evaluation(self.iteration, benchmark, result)
            values |= {f"eval/{benchmark}/{name}": value for name, value in result.set_metrics().items()}
            values["tokens/evaluate"] += result.tokens
        if not shared:
            parts.policy_engine.sleep()
        return values

    def _answered(self, engine: Engine, name: str) -> Evaluation:
        """The task's own held-out problems, or all of a benchmark's."""
        config, parts = self._config, self._parts
        task = parts.task if name == OWN_SET else parts.benchmarks[name]
        size, wanted = task.size("test"), config.evaluation.problems
        count = wanted if size is None else size if name != OWN_SET else min(wanted, size)
        prompts = [task.prompt("test", index) for index in range(count)]
        k = config.evaluation.k
        return evaluate(engine, task, parts.tokenizer, prompts, config.sampling, config.seed, k=k, name=name)

    def _engine_gap(self, role: Role, engine: Engine, rollouts: Sequence[Rollout]) -> float:
        """Mean |p_engine - p_training| of tokens that the model's engine has just written; NaN where none can be used.

        Raises:
            EngineError: more than rounding, unless `guard.check_engine` is off.
        """
        usable = [one for one in rollouts if one.sampled_mask.any() and not useless(one)]
        config, some = self._config, some_rollouts(usable)
        if not some:
            return math.nan
        batches = self._plain_batches(some)

        def score(sampling: Sampling) -> dict[str, Tensor]:
            return self._parts.learner.score(role, batches, sampling)

        if not config.guard.check_engine:
            return engine_gap(some, score(config.sampling))
        with self._told_when_stopped():
            return check_gap(some, config.sampling, self._precisions(engine), score)

    def _precisions(self, engine: Engine) -> list[str]:
        return [precision_of(engine.capabilities), self._config.precision]

    def _checkpoint(self, is_last: bool = False) -> None:
        """Write one. A failure is counted, told and tried again an iteration later; that of the last one raises."""
        config = self._config
        has: dict[Role, Any] = {"policy": config.policy, "rollout_model": config.rollout_model, "critic": config.critic}
        roles = [role for role, settings in has.items() if settings is not None]
        learner, is_best = self._parts.learner, self._is_best
        best = {"iteration": self.iteration, "accuracy": self._accuracy} if is_best else self._best
        state = {
            "iteration": self.iteration,
            "best": best,
            "prompts": self._sampler.prompt_state,
            "version": list(learner.version),
            "non_finite": self._non_finite.count,
            "failed": self._folder.failed,
        }
        try:
            self._checkpoints.save(self.iteration, learner, roles, self._parts.tokenizer, state, is_best)
        except CheckpointError as error:
            self._overdue = True
            self._folder.failure(self.iteration, "checkpoint/failed", {"event": "checkpoint_failed", "why": str(error)})
            if is_last:
                raise CheckpointError(
                    f"{error}. Free space there and run the same command: it continues from iteration "
                    f"{max(self._saved, 0)}, the newest checkpoint"
                ) from error
        else:
            self._overdue, self._saved, self._best = False, self.iteration, best
            self._prune_checkpoints()

    def _prune_checkpoints(self) -> None:
        with self._folder.dispensable(self.iteration, "removal of old checkpoints"):
            self._checkpoints.prune()

    def _check_engine(self, rollouts: Sequence[Rollout]) -> None:
        """Are the log-probs of a rollout batch those of what it was sampled from? A few of them, after the first ones.

        Of what was written ahead nobody knows: the weights that wrote it are gone.
        """
        config, learner, number = self._config, self._parts.learner, self.iteration + 1
        if not config.guard.check_engine:
            return
        is_thorough = self._thorough_checks < THOROUGH_CHECKS
        some = some_rollouts(rollouts) if is_thorough else glance(rollouts, stream_key(config.seed, "glance", number))
        now = learner.version.rollout_model
        some = [one for one in some if one.sampled_mask.any() and bool((one.versions[:, 1] == now).all())]
        if not some:
            return
        batches = self._plain_batches(some)
        precisions = self._precisions(self._parts.engine)
        check = check_engine if is_thorough else check_gap
        with self._told_when_stopped():
            found = check(
                some, config.sampling, precisions, lambda sampling: learner.score("rollout_model", batches, sampling)
            )
        if is_thorough:
            self._thorough_checks += 1
            self._folder.event(number, found)

    def _plain_batches(self, rollouts: Sequence[Rollout]) -> list[TokenBatch]:
        """Micro-batches for `Learner.score`."""
        scored = [
            ScoredRollout(
                rollout=rollout,
                score=Score(reward=0.0, correct=False),
                advantages=torch.zeros(len(rollout.token_ids)),
            )
            for rollout in rollouts
        ]
        return micro_batches(scored, self._config.batch.micro_batch_tokens, self._config.seed, epoch=0)

    def _watch(self, results: Sequence[StepResult]) -> None:
        """Stop where too many optimizer steps in a row were not finite."""
        for result in results:
            with self._told_when_stopped():
                self._non_finite.see(bool(result.metrics["health/non_finite_steps"].value), self.iteration + 1)

    @contextmanager
    def _told_when_stopped(self) -> Iterator[None]:
        """A guard that stops the run says why in events.jsonl."""
        try:
            yield
        except JackpotError as error:
            self._folder.event(self.iteration + 1, {"event": "stopped", "why": str(error)})
            raise

    @property
    def _traced(self) -> bool:
        """Whether the rollouts of the iteration that is under way are saved."""
        done, config = self.iteration + 1, self._config
        return done in (1, config.iterations) or done % config.rollouts.every == 0

    def _save_rollouts(self, scored: Sequence[ScoredRollout], results: Sequence[StepResult]) -> None:
        """Events of every step, and the rollouts with what the first update on each made of its tokens."""
        for event in (event for result in results for event in result.events):
            self._folder.event(self.iteration + 1, event)
        if self._traced:
            done, config = self.iteration + 1, self._config
            traces = {uid: trace for result in reversed(results) for uid, trace in result.traces.items()}
            with self._folder.dispensable(done, "rollouts"):
                write_rollouts(self._folder.rollouts, done, scored, traces, self._parts.tokenizer, config)

    def _throughput(self, values: dict[str, float]) -> dict[str, float]:
        spent = self._clock.take()
        seconds = {phase: one.wall for phase, one in spent.items()}
        timings = {f"seconds/{phase}": value for phase, value in seconds.items()}
        timings |= {f"cpu_seconds/{phase}": one.processor for phase, one in spent.items()}
        tokens, busy = values.get("tokens/rollout"), seconds.get("rollout", 0.0) + seconds.get("train", 0.0)
        if tokens and busy:
            timings["speed/tokens_per_second"] = tokens / busy
        if tokens and not self._config.batch.ahead:  # else nobody knows how long it took
            timings["speed/rollout_tokens_per_second"] = tokens / seconds["rollout"]
        return timings

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends the run after this iteration, with a checkpoint; the second one at once.

        Only a main thread gets signals; elsewhere this does nothing. A process that a script starts in its background
        ignores SIGINT; here it counts all the same, the first one and the second.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def stop(signum: int, frame: Any) -> None:
            self._stopping = True
            restore()
            if before[signal.SIGINT] is signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.default_int_handler)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            restore()


def _training_sums(scored: Sequence[ScoredRollout], results: Sequence[StepResult], parts: Parts) -> Sums:
    """The sums of all optimizer steps of an iteration."""
    sums, epochs = _sum_of(results), parts.config.batch.ppo_epochs
    if sums:
        # a standard error must not count a token twice: the first epoch only
        first = _sum_of(results[: len(results) // epochs])
        sums |= {name: first[name] for name in WITH_STANDARD_ERROR}
    trained = epochs * sum(len(item.rollout.token_ids) for item in scored)
    flops = epochs * sum(parts.training_flops(tokens_read(item.rollout)) for item in scored)
    return sums | {
        "reward/frac_zero_std": mean([not item.advantages.any() for item in scored]),
        "tokens/train": Total.number(trained),
        "flops/train": Total.number(flops),
    }


def _sum_of(results: Sequence[StepResult]) -> Sums:
    sums: Sums = {}
    for result in results:
        sums = add_sums(sums, result.metrics)
    return sums
