"""The loop, on one screen. Layer 5. It is given its engine and learner; only `launch` makes them."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from jackpot.batching import optimizer_steps
from jackpot.checkpoint import Checkpoints
from jackpot.config import Config
from jackpot.conversation import write
from jackpot.engines.base import Engine, weights_digest
from jackpot.errors import EngineError
from jackpot.evaluate import evaluate, score_rollouts
from jackpot.learner import Learner, StepResult
from jackpot.ops.reduce import Mean, Sums, add_sums
from jackpot.ops.uniforms import stream_key
from jackpot.rollout_files import write_rollouts
from jackpot.tasks.base import PromptStream, Task
from jackpot.telemetry import WITH_STANDARD_ERROR, RunFolder, numbers
from jackpot.types import Prompt, Request, Role, Rollout, ScoredRollout, TokenBatch

Line = dict[str, Any]
Listener = Callable[[Line], None]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of."""

    config: Config
    task: Task
    tokenizer: PreTrainedTokenizerBase
    engine: Engine  # writes the rollouts
    policy_engine: Engine  # answers for the policy in evaluations; `engine` itself where the policy writes
    learner: Learner


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
        self._prompts = PromptStream(parts.task, "train", self._config.seed)
        self._checkpoints = Checkpoints(folder.checkpoints, self._config.checkpoint.keep)
        self._stopping = False
        self._seconds: dict[str, float] = {}
        self.iteration = self._saved = -1  # finished iterations, and the newest with a checkpoint
        self._best: dict[str, float] | None = None  # {"iteration", "accuracy"} of the best checkpoint
        if state is not None:
            self._prompts.load_state_dict(state["prompts"])
            self.iteration = self._saved = state["iteration"]
            self._best = state["best"]
            self._checkpoints.restore_links(self._best and int(self._best["iteration"]))

    def train(self) -> bool:
        """Run all iterations that are left; True when finished, False when Ctrl-C ended it after a checkpoint."""
        config, parts = self._config, self._parts
        with self._interruptible():
            if self.iteration < 0:
                self._finish_iteration({})
            while self.iteration < config.iterations and not self._stopping:
                with self._clock("rollout"):
                    requests = self._requests(self._prompts.next(config.batch.prompts))
                    rollouts = write(parts.engine, parts.task, parts.tokenizer, requests)
                with self._clock("score"):
                    whole = self._without_aborted(rollouts)
                    scored = score_rollouts(whole, parts.task, parts.tokenizer, config.objective.advantage)
                with self._clock("train"):
                    steps = parts.learner.anchor(list(self._steps(scored)))
                    results = [parts.learner.update(micro_batches, self._traced) for micro_batches in steps]
                with self._clock("sync"):
                    self._send_weights(parts.engine, "rollout_model")
                self._save_rollouts(scored, results)
                self._finish_iteration(_summary(rollouts, scored, results, config.batch.epochs))
            if self.iteration > max(self._saved, 0):  # Ctrl-C
                self._checkpoint(is_best=False)
        return self.iteration == config.iterations

    def close(self) -> None:
        """Free the engines and flush what is being written."""
        self._parts.engine.close()
        self._parts.policy_engine.close()
        self._folder.close()

    def _finish_iteration(self, sums: Sums) -> None:
        """Evaluate, report and checkpoint when due."""
        self.iteration += 1
        config, last = self._config, self.iteration == self._config.iterations
        values = numbers(sums)
        if last or self.iteration % config.evaluation.every == 0:
            with self._clock("evaluate"):
                values |= self._evaluate()
        values |= self._throughput(values)
        line = self._folder.report(self.iteration, values)
        accuracy = values.get("eval/policy_accuracy", -1.0)
        is_best = self.iteration > 0 and accuracy > (self._best["accuracy"] if self._best else -1.0)
        if is_best:
            self._best = {"iteration": self.iteration, "accuracy": accuracy}
        if is_best or last or (self.iteration and self.iteration % config.checkpoint.every == 0):
            self._checkpoint(is_best)
        self._listen(line)

    def _requests(self, prompts: Sequence[Prompt]) -> list[Request]:
        """A group of requests for each prompt; the seed of each is hashed from its uid."""
        uids = [
            (f"{self.iteration + 1}/{prompt.uid}#{member}", prompt)
            for prompt in prompts
            for member in range(self._config.batch.group_size)
        ]
        seed, sampling = self._config.seed, self._config.sampling
        return [
            Request(uid=uid, prompt=prompt, seed=stream_key(seed, "sample", uid), sampling=sampling)
            for uid, prompt in uids
        ]

    def _steps(self, scored: Sequence[ScoredRollout]) -> Iterator[list[TokenBatch]]:
        batch = self._config.batch
        return optimizer_steps(
            scored,
            step_size=batch.step_size or batch.rollouts,
            epochs=batch.epochs,
            micro_batch_tokens=batch.micro_batch_tokens,
            seed=self._config.seed,
        )

    def _send_weights(self, engine: Engine, role: Role) -> None:
        """Give the engine a model's weights and make sure that it holds just those."""
        learner = self._parts.learner
        held = engine.update_weights(learner.weights(role), learner.version)
        sent = weights_digest(learner.weights(role), engine.capabilities.dtype)
        if held != sent:
            raise EngineError(
                f"after the weight update at {learner.version} the engine holds digest {held[:12]}, the learner sent "
                f"{sent[:12]}; training on what it writes would be training on unknown weights"
            )

    def _evaluate(self) -> dict[str, float]:
        """Both models on the same held-out problems with the same uniforms."""
        config, parts = self._config, self._parts
        shared = parts.policy_engine is parts.engine
        if not shared:
            self._send_weights(parts.policy_engine, "policy")
        engines = {"policy": parts.policy_engine} | ({} if shared else {"rollout_model": parts.engine})
        results = {
            role: evaluate(engine, parts.task, parts.tokenizer, self._test_prompts, config.sampling, config.seed)
            for role, engine in engines.items()
        }
        for role, result in results.items():
            self._folder.save_evaluation(self.iteration, role, result)
        values: dict[str, float] = {}
        for role in ("policy", "rollout_model"):
            result = results.get(role, results["policy"])  # the policy is its own rollout model where it writes itself
            values[f"eval/{role}_accuracy"] = result.accuracy
            values[f"eval/{role}_tokens"] = result.mean_tokens
            values[f"eval/{role}_truncated"] = result.truncated
        return values

    @cached_property
    def _test_prompts(self) -> list[Prompt]:
        wanted, size = self._config.evaluation.problems, self._parts.task.size("test")
        count = wanted if size is None else min(wanted, size)
        return [self._parts.task.prompt("test", index) for index in range(count)]

    def _checkpoint(self, is_best: bool) -> None:
        roles: list[Role] = ["policy"] if self._config.rollout_model is None else ["policy", "rollout_model"]
        learner = self._parts.learner
        state = {
            "iteration": self.iteration,
            "best": self._best,
            "prompts": self._prompts.state_dict(),
            "version": list(learner.version),
        }
        self._checkpoints.save(self.iteration, learner, roles, self._parts.tokenizer, state, is_best)
        self._saved = self.iteration

    def _without_aborted(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Those that ended by themselves or at the limit. An aborted one is counted, and not a reward of 0."""
        for rollout in rollouts:
            if rollout.finish == "aborted":
                self._folder.event(self.iteration + 1, {"event": "aborted_rollout", "uid": rollout.uid})
        return [rollout for rollout in rollouts if rollout.finish != "aborted"]

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
            write_rollouts(self._folder.rollouts, done, scored, traces, self._parts.tokenizer, config)

    def _throughput(self, values: dict[str, float]) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        timings = {f"seconds/{name}": value for name, value in seconds.items()}
        tokens, busy = values.get("rollout/tokens"), seconds.get("rollout", 0.0) + seconds.get("train", 0.0)
        if tokens and busy:
            timings |= {
                "speed/tokens_per_second": tokens / busy,
                "speed/rollout_tokens_per_second": tokens / seconds["rollout"],
            }
        return timings

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C ends the run after this iteration, with a checkpoint; the second one at once.

        Only a main thread gets signals; elsewhere this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(signum: int, frame: Any) -> None:
            self._stopping = True
            signal.signal(signal.SIGINT, before)

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _summary(
    rollouts: Sequence[Rollout], scored: Sequence[ScoredRollout], results: Sequence[StepResult], epochs: int
) -> Sums:
    """The sums of all optimizer steps and of the rollouts themselves."""
    sums = _sum_of(results)
    if sums:
        sums["seconds/prepass"] = _mean([float(sums["seconds/prepass"].total)])
        # a standard error must not count a token twice: the first epoch only
        first = _sum_of(results[: len(results) // epochs])
        sums |= {name: first[name] for name in WITH_STANDARD_ERROR}
    lengths = [len(item.rollout.token_ids) for item in scored]
    return sums | {
        "reward/mean": _mean([item.score.reward for item in scored]),
        "reward/correct": _mean([item.score.correct for item in scored]),
        "reward/zero_advantage": _mean([not item.advantages.any() for item in scored]),
        "response/tokens": _mean(lengths),
        "response/tool_tokens": _mean([int((~item.rollout.sampled_mask).sum()) for item in scored]),
        "response/truncated": _mean([item.rollout.finish == "length" for item in scored]),
        "response/aborted": _mean([rollout.finish == "aborted" for rollout in rollouts]),
        "rollout/tokens": _mean([sum(lengths)]),
    }


def _sum_of(results: Sequence[StepResult]) -> Sums:
    sums: Sums = {}
    for result in results:
        sums = add_sums(sums, result.metrics)
    return sums


def _mean(values: Sequence[float]) -> Mean:
    tensor = torch.tensor(values, dtype=torch.float64)
    return Mean.of(tensor, torch.ones_like(tensor, dtype=torch.bool))
