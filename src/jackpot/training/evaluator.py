"""The evaluator measures both models of a run between iterations: on held-out problems and on benchmarks."""

from collections.abc import Collection, Mapping

from jackpot.core.roles import Role
from jackpot.core.types import Prompt
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.evaluate import OWN_SET, Evaluation, evaluate
from jackpot.rollout.tasks.registry import set_name
from jackpot.training.components import RunComponents
from jackpot.training.guards import EngineCheck
from jackpot.training.run_folder.folder import RunFolder


class Evaluator:
    """An evaluator of both models on the task's held-out problems, and of the policy on every benchmark.

    Args:
        folder: run folder, which gets a file with every response of every evaluation.
        engine_checks: by model, the check that measures how far the engine's log-probs are from training's.
    """

    def __init__(self, components: RunComponents, folder: RunFolder, engine_checks: Mapping[Role, EngineCheck]) -> None:
        """Begin without problems: those of a set are read when it is first evaluated."""
        self._components = components
        self._folder = folder
        self._engine_checks = engine_checks
        self._prompts: dict[str, list[Prompt]] = {}  # the problems of each evaluation set, once it was evaluated

    def evaluate(self, iteration: int, current: Collection[Engine]) -> dict[str, float]:
        """Evaluate the weights after `iteration`, and return the metrics `eval/*` and `tokens/evaluate`.

        All evaluations of a run give both models equal problems and equal uniforms. A policy without a rollout model
        counts as its own rollout model: its numbers stand under both names.

        Args:
            current: engines that already hold these weights and keep them. Every other engine is sent the weights, and
                put to sleep afterwards.
        """
        components = self._components
        engines: dict[Role, Engine] = {"policy": components.policy_engine}
        if components.policy_engine is not components.engine:
            engines["rollout_model"] = components.engine

        # Engines that do not hold the weights of this iteration are sent them, and sleep again at the end.
        woken: dict[Role, Engine] = {role: engine for role, engine in engines.items() if engine not in current}
        for role, engine in woken.items():
            components.send_weights(engine, role)

        results = {role: self._run(engine, OWN_SET) for role, engine in engines.items()}
        values = {
            "tokens/evaluate": float(sum(result.tokens for result in results.values())),
            "eval/problems": float(len(self._prompts[OWN_SET])),
        }
        for role, result in results.items():
            self._folder.save_evaluation(iteration, role, result)

        # Report both models; where there is no rollout model, report the policy under both names. If a check of
        # an engine fails, an event of the next iteration records the error.
        for role in ("policy", "rollout_model"):
            result = results.get(role, results["policy"])
            engine = engines.get(role, components.engine)
            values |= {f"eval/{role}_{name}": value for name, value in result.role_metrics().items()}
            check = self._engine_checks.get(role, self._engine_checks["policy"])
            values[f"eval/{role}_engine_gap"] = check.gap(engine, result.rollouts, iteration + 1)

        for benchmark in components.benchmarks:
            result = self._run(components.policy_engine, benchmark)
            self._folder.save_evaluation(iteration, benchmark, result)
            values |= {f"eval/{benchmark}/{name}": value for name, value in result.set_metrics().items()}
            values["tokens/evaluate"] += result.tokens

        for engine in woken.values():
            engine.sleep()
        return values

    def _run(self, engine: Engine, name: str) -> Evaluation:
        """Evaluate on one set: on `evaluation.problems` held-out problems of the task, or on a whole benchmark."""
        config, components = self._components.config, self._components
        task = components.task if name == OWN_SET else components.benchmarks[name]

        # A benchmark is evaluated as a whole. Of the held-out problems, and of a benchmark that does not tell its size,
        # the first `evaluation.problems` are taken.
        if name not in self._prompts:
            size, problems = task.size("test"), config.evaluation.problems
            if name == OWN_SET or size is None:
                size = problems if size is None else min(problems, size)
            self._prompts[name] = [task.prompt("test", index) for index in range(size)]

        prompts, sampling = self._prompts[name], config.evaluation_sampling
        # The number of responses to each problem is the benchmark's own, if the settings give one.
        k_by_benchmark = {set_name(benchmark.name): benchmark.k for benchmark in config.evaluation.benchmarks}
        k = k_by_benchmark.get(name) or config.evaluation.k
        return evaluate(engine, task, components.tokenizer, prompts, sampling, config.seed, k=k, name=name)
