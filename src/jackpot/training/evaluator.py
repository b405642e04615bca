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
        self._components, self._folder, self._engine_checks = components, folder, engine_checks
        self._prompts: dict[str, list[Prompt]] = {}  # of each evaluation set, once it was evaluated

    def evaluate(self, iteration: int, current: Collection[Engine]) -> dict[str, float]:
        """Evaluate the weights after `iteration`, and return the metrics `eval/*` and `tokens/evaluate`.

        All evaluations of a run give both models equal problems and equal uniforms. A policy without a rollout model
        counts as its own rollout model: its numbers stand under both names.

        Args:
            current: engines that already hold these weights and keep them. Other engines are sent the weights, and
                sleep afterwards.
        """
        parts = self._components
        engines: dict[Role, Engine] = {"policy": parts.policy_engine}
        engines |= {} if parts.policy_engine is parts.engine else {"rollout_model": parts.engine}

        others: dict[Role, Engine] = {role: engine for role, engine in engines.items() if engine not in current}
        for role, engine in others.items():
            parts.send_weights(engine, role)

        results = {role: self._run(engine, OWN_SET) for role, engine in engines.items()}
        values = {"tokens/evaluate": float(sum(result.tokens for result in results.values()))}
        values["eval/problems"] = float(len(self._prompts[OWN_SET]))
        for role, result in results.items():
            self._folder.save_evaluation(iteration, role, result)

        for role in ("policy", "rollout_model"):
            result = results.get(role, results["policy"])
            engine = engines.get(role, parts.engine)
            values |= {f"eval/{role}_{name}": value for name, value in result.role_metrics().items()}
            check = self._engine_checks.get(role, self._engine_checks["policy"])
            values[f"eval/{role}_engine_gap"] = check.gap(engine, result.rollouts, iteration + 1)

        for benchmark in parts.benchmarks:
            result = self._run(parts.policy_engine, benchmark)
            self._folder.save_evaluation(iteration, benchmark, result)
            values |= {f"eval/{benchmark}/{name}": value for name, value in result.set_metrics().items()}
            values["tokens/evaluate"] += result.tokens

        for engine in others.values():
            engine.sleep()
        return values

    def _run(self, engine: Engine, name: str) -> Evaluation:
        """Evaluate on one set: on `evaluation.problems` held-out problems of the task, or on a whole benchmark."""
        config, parts = self._components.config, self._components
        task = parts.task if name == OWN_SET else parts.benchmarks[name]
        if name not in self._prompts:
            size, wanted = task.size("test"), config.evaluation.problems
            count = wanted if size is None else size if name != OWN_SET else min(wanted, size)
            self._prompts[name] = [task.prompt("test", index) for index in range(count)]
        prompts, sampling = self._prompts[name], config.evaluation_sampling
        k = {set_name(one.name): one.k for one in config.evaluation.benchmarks}.get(name) or config.evaluation.k
        return evaluate(engine, task, parts.tokenizer, prompts, sampling, config.seed, k=k, name=name)
