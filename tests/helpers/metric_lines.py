"""Lines of metrics.jsonl of a healthy run, and of runs with changes, for rules that read them."""

import math
from typing import Any

ITERATIONS, BROKEN_FROM = 100, 60  # changes hold from iteration 60
HEALTHY = {
    "checkpoint/failed": 0,
    "correction/accepted": 0.92,
    "correction/clip_frac": 0.001,
    "correction/clip_frac_c2": 0.0,
    "correction/ess": 0.91,
    "critic/explained_variance": 0.4,
    "critic/skipped_steps": 0.0,
    "files/failed": 0,
    "health/non_finite_steps": 0,
    "health/non_finite_tokens": 0,
    "mismatch/engine_gap": 1e-7,
    "mismatch/ess": 0.85,
    "mismatch/kept_mass": 1.0,
    "mismatch/kl_k1": 0.1,
    "mismatch/kl_policy_rollout": 0.09,
    "mismatch/kl_rollout_policy": 0.11,
    "mismatch/prefix_ess_at_0": 1.0,
    "mismatch/prefix_ess_at_1-3": 0.6,
    "mismatch/prefix_ess_at_4-15": 0.5,
    "mismatch/ratio": 0.99,
    "mismatch/ratio_max": 9.0,
    "mismatch/ratio_p1": 0.05,
    "mismatch/ratio_stderr": 0.005,
    "obrs/acceptance": 0.93,
    "obrs/acceptance_minus_z": 0.002,
    "obrs/acceptance_minus_z_stderr": 0.004,
    "obrs/kappa": 1.0,
    "obrs/kappa_z_above_1": 0.2,
    "obrs/z_bound_width": 4e-5,
    "policy/clip_frac": 0.0,
    "policy/entropy": 0.3,
    "policy/grad_norm": 0.4,
    "policy/skipped_steps": 0.0,
    "response/aborted": 0.0,
    "response/non_finite": 0.0,
    "response/tokens": 9.0,
    "response/truncated": 0.01,
    "reward/all_right": 0.1,
    "reward/all_wrong": 0.2,
    "reward/errors": 0.0,
    "reward/frac_zero_std": 0.3,
    "reward/mean": 0.4,
    "reward/timeouts": 0.0,
    "rollout_model/clip_frac": 0.0,
    "rollout_model/distill_grad_norm": 0.7,
    "rollout_model/entropy": 0.4,
    "rollout_model/grad_cosine": 0.5,
    "rollout_model/grad_norm": 0.9,
    "rollout_model/ppo_grad_norm": 0.5,
    "rollout_model/skipped_steps": 0.0,
    "rollout_model/weight": 1.0,
    "sampling/gen_batches": 2.0,
    "saved/ambiguous_prompts": 0.0,
    "saved/commonest": 0.1,
    "saved/end_inside": 0.0,
    "saved/ended_by_stop_ids": 0.0,
    "saved/held_out": 0.0,
    "saved/repeated_prompts": 0.05,
    "saved/right_earn": 1.0,
    "seconds/rollout": 2.0,
    "seconds/train": 1.0,
}
EVALUATED = {
    "eval/policy_accuracy": 0.5,
    "eval/policy_accuracy_stderr": 0.02,
    "eval/policy_engine_gap": 1e-7,
    "eval/policy_reward": -0.3,
    "eval/policy_reward_stderr": 0.01,
    "eval/rollout_model_accuracy": 0.25,
    "eval/rollout_model_engine_gap": 1e-7,
}
BEFORE = {"eval/policy_accuracy": 0.4, "eval/policy_reward": -0.4}  # training


def history(
    changes: dict[str, float] | None = None, since: int = BROKEN_FROM, until: int = 10**6
) -> list[dict[str, Any]]:
    """Return a healthy run with small waves and one wild iteration; `changes` hold from `since` to `until`."""
    lines: list[dict[str, Any]] = [{"iteration": 0, "time": 0.0} | EVALUATED | BEFORE]
    for iteration in range(1, ITERATIONS + 1):
        wave = 1.0 + 0.02 * math.sin(iteration)
        line = {name: value * wave if isinstance(value, float) else value for name, value in HEALTHY.items()}
        line |= EVALUATED if iteration % 10 == 0 else {}
        if iteration == 30:
            line |= {"mismatch/ratio_max": 1e5, "mismatch/ess": 0.01, "mismatch/kl_rollout_policy": 3.0}
        if since <= iteration <= until:
            is_evaluated = iteration % 10 == 0
            changed = changes or {}
            line |= {name: changed[name] for name in changed if is_evaluated or not name.startswith("eval/")}
        if iteration > 1:  # totals over the run stay what they were
            line |= {name: max(line[name], lines[-1][name]) for name in ("checkpoint/failed", "files/failed")}
        lines.append({"iteration": iteration, "time": float(iteration)} | line)
    for name in ("checkpoint/failed", "files/failed"):  # every iteration fails anew
        if name in (changes or {}):
            for line in lines[since : min(until, ITERATIONS) + 1]:
                line[name] = line["iteration"] - since + 1
    return lines


LEARNING = {"eval/policy_accuracy", "eval/policy_reward", "eval/rollout_model_accuracy", "reward/mean"}


def evaluated(*accuracies: float, error: float = 0.02, every: int = 10, measure: str = "accuracy") -> list[dict]:
    """Return a healthy run with these evaluations, the first one before training."""
    lines = [
        {"iteration": iteration} | {name: value for name, value in line.items() if name not in LEARNING}
        for iteration, line in enumerate(history()[: every * (len(accuracies) - 1) + 1])
    ]
    evaluated_lines = lines[::every]
    for line, value in zip(evaluated_lines, accuracies, strict=True):
        line |= {f"eval/policy_{measure}": value, f"eval/policy_{measure}_stderr": error}
    return lines
