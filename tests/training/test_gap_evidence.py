"""Gaps between an engine and training that grow at some depth of responses stop a run; others are no evidence."""

import json
import math
from dataclasses import replace

import pytest
import torch

from helpers.engines.reference import rollout_of, tiny_prompt
from helpers.runs import SHORT, metrics, run, small_config
from jackpot.core.errors import EngineError
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.training import gap_evidence, guards, reported_lists
from jackpot.training.gap_evidence import DEPTHS, GapEvidence
from jackpot.training.gap_evidence import _means_by_depth as means_by_depth
from jackpot.training.run_folder.checkpoint import load_state

ALWAYS = 1e-3  # the gap that is always allowed
LENGTHS = (7, 20, 0, 1, 33, 20)  # tokens of responses


def batch(gap, lengths=LENGTHS, group=1):
    """Return rollouts of these lengths, `group` of them to a prompt, and their gaps by position from 1."""
    rollouts = [rollout_of(tiny_prompt(3, seed=index // group), [2] * length) for index, length in enumerate(lengths)]
    return rollouts, [gap(torch.arange(1.0, length + 1.0)) for length in lengths]


def constant(value):
    """Return the same gap at every depth."""
    return lambda depth: torch.full_like(depth, value)


def test_gaps_are_averaged_by_prompt_and_depth():
    rollouts, gaps = batch(lambda depth: depth / 100, (3, 5, 1), group=2)
    gaps[1][4] = torch.nan

    means = means_by_depth(rollouts, gaps)

    assert means.shape == (2, DEPTHS)
    assert means[0, :3].tolist() == pytest.approx([0.01, 0.025, 0.04])
    assert means[1, 0] == pytest.approx(0.01)
    assert means[1, 1:].isnan().all()
    assert means[0, 3:].isnan().all()


def test_each_depth_is_in_the_range_that_its_error_names():
    rollouts, gaps = batch(lambda depth: depth, (2**12,))

    (row,) = means_by_depth(rollouts, gaps)
    middles = [(2**exponent + 2 ** (exponent + 1) - 1) / 2 for exponent in range(12)]

    assert row[:12].tolist() == pytest.approx(middles)
    assert row[12] == 2**12  # its one token


def test_a_jump_at_some_depth_is_refused_and_named():
    evidence = GapEvidence()

    for _ in range(9):
        assert evidence.add(*batch(constant(2e-3)), ALWAYS) <= 0.0

    with pytest.raises(EngineError, match=r"at the tokens 16 to 31 .* by 0\.2 on average .* is allowed"):
        for _ in range(5):
            evidence.add(*batch(lambda depth: torch.where(depth >= 16, 0.2, 2e-3)), ALWAYS)


def test_only_the_first_two_batches_are_not_judged():
    evidence = GapEvidence()
    for _ in range(2):
        assert evidence.add(*batch(constant(0.1)), ALWAYS) == 0.0
    assert evidence.add(*batch(constant(1e-9)), ALWAYS) < 0.0


@pytest.mark.parametrize("group", [1, 3])
def test_what_is_always_allowed_is_no_evidence(group):
    evidence = GapEvidence()
    for batch_index in range(60):
        gap = constant(0.99e-3 if batch_index > 2 else 1e-9)
        assert evidence.add(*batch(gap, group=group), ALWAYS) <= 0.0


@pytest.mark.parametrize("growth", [1.0, 1.1])
def test_gaps_that_grow_slowly_are_never_refused(growth):
    evidence = GapEvidence()
    for batch_index in range(50):
        assert evidence.add(*batch(constant(2e-3 * growth**batch_index)), ALWAYS) <= 0.0


def test_depths_that_come_later_may_have_what_shallow_ones_have():
    evidence = GapEvidence()
    for batch_index in range(12):
        lengths = [2 ** min(batch_index + 1, 9)] * 6
        assert evidence.add(*batch(constant(0.004), lengths), ALWAYS) <= 0.0


def test_unknown_gaps_teach_nothing():
    evidence, fresh_evidence = GapEvidence(), GapEvidence()

    for _ in range(3):
        assert evidence.add(*batch(constant(torch.nan)), ALWAYS) == 0.0
        assert evidence.add(*batch(constant(0.1), (0, 0)), ALWAYS) == 0.0

    shares = [evidence.add(*batch(constant(5e-3)), ALWAYS) for _ in range(4)]
    assert shares == [fresh_evidence.add(*batch(constant(5e-3)), ALWAYS) for _ in range(4)]
    assert shares[-1] < 0.0


@pytest.mark.parametrize(("chance", "fewest", "most"), [(0.05, 0, 7), (0.3, 35, 40)])
def test_false_alarms_are_as_rare_as_promised(chance, fewest, most, monkeypatch):
    """Gaps are 1 for few prompts and 0 for the others, so that their mean is the limit (0.05), or more."""
    monkeypatch.setattr(reported_lists, "FALSE_ALARM", 0.1)
    monkeypatch.setattr(gap_evidence, "MAY_GROW", 0.0)
    refusals = 0

    for seed in range(40):
        random = torch.Generator().manual_seed(seed)
        evidence = GapEvidence()
        try:
            for batch_index in range(8):
                flags = torch.rand(20, generator=random) < (chance if batch_index > 1 else 0.0)
                rollouts, _ = batch(constant(0.0), [1] * 20)
                evidence.add(rollouts, [flag[None].float() for flag in flags], 0.05)
        except EngineError:
            refusals += 1

    assert fewest <= refusals <= most


def test_a_restart_does_not_learn_that_an_engine_is_wrong():
    """The gap is 0.3 from the first batch on, where 0.02 is the most that a first batch teaches."""
    evidence = GapEvidence()
    with pytest.raises(EngineError, match=r"0\.3 on average in this batch"):
        for _ in range(6):
            evidence.add(*batch(constant(0.3), [1] * 40), 0.005)


@pytest.mark.slow
def test_an_engine_that_breaks_late_and_deep_stops_the_run(tmp_path, monkeypatch):
    """From the fourth batch on, after the tokens that a quick check reads; the checkpoint before it stays the last."""
    monkeypatch.setattr(guards, "QUICK_TOKENS", 16)  # 4 tokens of 4 responses

    class Late(TransformersEngine):
        def collect(self, *arguments, **keywords):
            return [wrong(rollout) for rollout in super().collect(*arguments, **keywords)]

    def wrong(rollout):
        if "train" not in rollout.uid or rollout.versions[0, 1] < 3:
            return rollout
        factors = torch.where(torch.arange(len(rollout.token_ids)) < 4, 1.0, 1.02)
        return replace(rollout, rollout_log_probs=rollout.rollout_log_probs * factors)

    monkeypatch.setattr("jackpot.launch.engines.TransformersEngine", Late)
    overrides = (SHORT, "evaluation.every=9", "evaluation.problems=2", "checkpoint.every=1", "iterations=9")

    with pytest.raises(EngineError, match="moved away from training's: at the tokens 4 to 7 of responses"):
        run(small_config(*overrides), tmp_path)

    (stop_event,) = [
        event for event in map(json.loads, (tmp_path / "events.jsonl").open()) if event["event"] == "stopped"
    ]
    last_line = metrics(tmp_path)[-1]
    assert 4 <= stop_event["iteration"] <= 6
    assert stop_event["iteration"] == last_line["iteration"] + 1
    assert "No step on this batch" in stop_event["why"]
    assert load_state(tmp_path / "checkpoints" / "last")["iteration"] == last_line["iteration"]
    assert math.isfinite(last_line["mismatch/engine_gap"])
