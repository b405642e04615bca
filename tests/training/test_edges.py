"""A run stays exact at the edges: truncated sampling, fewer tokens than the top k, rewards that are all equal."""

import math
from pathlib import Path

import pytest
import torch

from helpers.runs import metrics, run, small_config
from helpers.ten_tokens import TOKENS, settings
from jackpot.analysis.replay.replay import replay
from jackpot.analysis.simulate.candidates import simulate_candidates
from jackpot.core.errors import ConfigError
from jackpot.models.load import load_model
from jackpot.training.run_folder.folder import RunFolder


def flat_weights(path: Path) -> torch.Tensor:
    """Return all parameters of a model in one row."""
    return torch.cat([parameter.detach().flatten() for parameter in load_model(str(path), torch.float32).parameters()])


def test_a_truncated_sampler_and_its_models_have_one_support(tmp_path: Path) -> None:
    run(small_config("sampling.top_k=5", "iterations=2"), tmp_path)

    for line in metrics(tmp_path)[1:]:
        assert line["mismatch/kept_mass"] == pytest.approx(1.0, abs=1e-5)
        assert line["mismatch/engine_gap_max"] < 1e-5
        assert line["obrs/z_bound_width"] < 1e-5
        assert line["obrs/rollout_mass"] > 1.0 - 1e-5


def test_all_tokens_give_the_exact_z_and_more_are_refused(tmp_path: Path) -> None:
    ten_token_settings = settings(tmp_path)

    assert small_config(*ten_token_settings).sampling.num_top_log_probs == 20
    with pytest.raises(ConfigError, match=r"sampling.num_top_log_probs is 20, .* at most 10.*; lower it"):
        run(small_config(*ten_token_settings, "iterations=1"), tmp_path / "refused")

    all_tokens = (f"sampling.num_top_log_probs={len(TOKENS)}", "sampling.top_k=20")
    run(small_config(*ten_token_settings, "iterations=1", *all_tokens), tmp_path / "run")
    for line in metrics(tmp_path / "run")[1:]:
        assert line["obrs/rollout_mass"] == pytest.approx(1.0, abs=1e-5)
        assert line["obrs/z_bound_width"] < 1e-5
        assert abs(line["obrs/acceptance_minus_z"]) < 5 * line["obrs/acceptance_minus_z_stderr"]

    candidates = simulate_candidates(
        small_config(*ten_token_settings), [str(tmp_path / "rollout_model")], prompts=4, seed=0
    )
    assert [candidate.name for candidate in candidates] == [str(tmp_path / "rollout_model")]

    replay_result = replay(tmp_path / "run")
    assert replay_result.unreadable == 0
    assert float(replay_result.run["responses"].value) > 0


@pytest.mark.parametrize(
    "iterations", [6, pytest.param(100, marks=pytest.mark.slow)], ids=lambda count: f"{count} iterations"
)
def test_equal_rewards_leave_the_policy_to_distillation(iterations: int, tmp_path: Path) -> None:
    equal_rewards = settings(tmp_path, reward=0.1 + 0.2)
    cadence = (f"iterations={iterations}", "evaluation.every=1000", "checkpoint.every=1000", "rollouts.every=1000")
    small_batches = ("batch.prompts=2", "batch.group_size=3", "sampling.max_new_tokens=3") if iterations > 6 else ()

    run(small_config(*equal_rewards, "sampling.num_top_log_probs=10", *small_batches, *cadence), tmp_path / "run")

    _, *lines = metrics(tmp_path / "run")
    assert len(lines) == iterations

    checkpoint = tmp_path / "run" / "checkpoints" / "last"
    assert flat_weights(checkpoint / "policy").equal(flat_weights(tmp_path / "policy"))
    assert not flat_weights(checkpoint / "rollout_model").equal(flat_weights(tmp_path / "rollout_model"))
    assert lines[-1]["mismatch/kl_policy_rollout"] < lines[0]["mismatch/kl_policy_rollout"]

    for line in lines:
        assert line["policy/skipped_steps"] == 1.0
        assert line["reward/frac_zero_std"] == 1.0
        assert line["rollout_model/skipped_steps"] == 0.0
        assert line["health/non_finite_steps"] == 0.0
    for name in ("policy/loss", "rollout_model/loss", "policy/grad_norm", "rollout_model/grad_norm", "obrs/kappa"):
        assert all(line[name] is not None and math.isfinite(line[name]) for line in lines), name

    skip_events = [
        event for event in RunFolder(tmp_path / "run").read("events.jsonl") if event["event"] == "skipped_step"
    ]
    assert [event["why"] for event in skip_events] == ["all groups have equal rewards"] * iterations
