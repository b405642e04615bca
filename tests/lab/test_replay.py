"""Which correction `jackpot replay` advises on runs of known mismatch, and what it says where it cannot tell."""

from pathlib import Path

import pytest
import torch

from jackpot.errors import ConfigError, DataError
from jackpot.lab.replay.replay import Replay, replay
from jackpot.objectives.corrections import CORRECTIONS
from made_up_rollouts import discovered, noise, records, write


def of(tmp_path: Path, *arguments, **settings) -> Replay:
    return replay(write(tmp_path / "made_up.jsonl", records(*arguments, **settings)))


def judged(found: Replay, label: str):
    return next(one for one in found.answer.judged if one.setting.label == label)


def test_on_practically_on_policy_text_no_correction_is_needed(tmp_path):
    found = of(tmp_path, noise(0.02))
    assert (found.answer.verdict, found.answer.correction) == ("none needed", "none")
    assert (
        "No correction is needed" in found.answer.sentence and "total variation, 4,000 tokens" in found.answer.sentence
    )


def test_of_one_distribution_nothing_is_misplaced_and_every_token_counts(tmp_path):
    found = of(tmp_path, noise(0.0))
    for one in found.answer.judged:
        assert one.misplaced == pytest.approx(0.0, abs=1e-9)
        assert one.effective == pytest.approx(1.0)


def test_a_mild_gap_needs_truncated_importance_sampling_and_nothing_more(tmp_path):
    found = of(tmp_path, noise(0.3))
    assert found.answer.settings == {"name": "tis"}
    assert judged(found, "none").misplaced > 0.05 > 100 * judged(found, "tis").misplaced
    assert found.answer.halves_agree


def test_a_heavy_tail_needs_obrs_without_its_coin(tmp_path):
    found = of(tmp_path, discovered(share=0.1, lift=8.0))
    assert found.answer.settings == {"name": "obrs", "mask": "expected"}
    assert judged(found, "tis").misplaced > 2 * judged(found, "obrs expected").misplaced
    assert judged(found, "is").effective < 0.1  # the weights of a tail eat the batch


def test_a_tail_without_top_k_lists_is_not_taken_for_wrong_log_probs_alone(tmp_path):
    """Without the lists a tail that was not sampled looks like log-probs that do not fit: both are named."""
    found = of(tmp_path, discovered(share=0.1, lift=8.0), lists=False)
    assert found.answer.verdict == "cannot tell" and found.answer.correction is None
    assert "must be 1" in found.answer.sentence and "hardly ever writes" in found.answer.sentence


def test_long_responses_are_warned_of_weights_of_whole_responses(tmp_path):
    found = of(tmp_path, noise(0.3), responses=10, length=600)
    assert found.answer.settings["name"] == "tis"
    assert "Nothing that weighs whole responses: over 600 tokens" in found.answer.sentence
    short = of(tmp_path, noise(0.3), responses=1000, length=1)
    assert "whole responses" not in short.answer.sentence


def test_stale_text_needs_a_correction_towards_the_policy_that_is_updated(tmp_path):
    found = of(tmp_path, noise(0.4), stale=True)
    assert found.answer.settings == {"name": "tis_adjusted"}
    heavy = of(tmp_path, discovered(share=0.1, lift=8.0), stale=True)
    assert heavy.answer.settings == {"name": "obrs", "mask": "expected", "target": "new", "proximal": "new"}
    assert judged(found, "none").misplaced > 0.05  # by PPO's clip, for its ratio is p_new / p_old already


def test_slightly_stale_text_is_what_ppos_own_clip_is_for(tmp_path):
    found = of(tmp_path, noise(0.05), stale=True)
    assert found.answer.verdict == "none needed" and "PPO's clip" in found.answer.sentence


def test_no_correction_is_advised_for_models_that_have_little_in_common(tmp_path):
    found = of(tmp_path, noise(5.0))
    assert (found.answer.verdict, found.answer.correction) == ("too far", None)
    assert "closer writer" in found.answer.sentence


def test_too_few_tokens_give_no_answer(tmp_path):
    found = of(tmp_path, noise(0.3), responses=10)
    assert found.answer.verdict == "cannot tell" and "200 sampled tokens and 1,000" in found.answer.sentence


def truncated(lines, lists: bool):
    """A writer with top-p: what it leaves out has probability 0 in it, and the rest more."""
    for line in lines:
        line["rollout_log_probs"] = [value + 0.105 for value in line["old_log_probs"]]  # 10 % were left out
        line["rollout_log_probs"] = [min(value, 0.0) for value in line["rollout_log_probs"]]
        if not lists:
            for name in [name for name in line if "top" in name]:
                del line[name]
        yield line


def test_log_probs_of_truncated_sampling_are_found_out(tmp_path):
    found = replay(write(tmp_path / "a.jsonl", truncated(records(noise(0.0)), lists=False)))
    assert found.answer.verdict == "cannot tell" and "top-p" in found.answer.sentence


def test_lists_that_do_not_fit_the_sampled_tokens_are_found_out(tmp_path):
    found = replay(write(tmp_path / "a.jsonl", truncated(records(noise(0.0)), lists=True)))
    assert found.answer.verdict == "cannot tell" and "than the top-k lists allow" in found.answer.sentence


def cut(lines):
    """The writer's lists end where its top-k sampling ends."""
    for line in lines:
        rows = torch.tensor(line["rollout_top_log_probs"])
        rows.scatter_(1, rows.topk(2, largest=False).indices, -torch.inf)
        line["rollout_top_log_probs"] = rows.log_softmax(-1).tolist()
        yield line


def test_probability_that_the_writer_cannot_reach_is_named(tmp_path):
    found = replay(write(tmp_path / "a.jsonl", cut(records(discovered(share=1.0, lift=6.0)))))
    assert found.answer.verdict == "cannot tell" and "could not sample" in found.answer.sentence
    assert 0.01 < judged(found, "is").misplaced < 1.0  # what cannot be written no weight brings back


def test_halves_that_disagree_are_told(tmp_path):
    def mixed():
        quiet, loud = records(noise(0.0)), records(discovered(share=0.1, lift=8.0))
        for number, pair in enumerate(zip(quiet, loud, strict=True)):
            yield pair[number % 2]

    found = replay(write(tmp_path / "a.jsonl", mixed()))
    assert not found.answer.halves_agree
    assert "Not sure: of the two halves" in found.answer.sentence and "none" in found.answer.sentence


def test_every_correction_is_replayed_and_what_needs_lists_is_left_out_without_them(tmp_path):
    found = of(tmp_path, noise(0.3))
    assert {one.setting.name for one in found.corrections} == set(CORRECTIONS)
    assert found.left_out == ()
    bare = of(tmp_path, noise(0.3), lists=False)
    assert set(CORRECTIONS) - {one.setting.name for one in bare.corrections} == {"obrs", "reweight_only", "z_only"}
    assert any("obrs" in text and "top-k lists" in text for text in bare.left_out)
    assert "Sampled, not summed" in bare.answer.sentence


def test_sums_over_the_vocabulary_and_over_the_sampled_tokens_agree(tmp_path):
    found = of(tmp_path, noise(0.3), responses=400)
    for one in found.corrections:
        if one.setting.is_of_whole_responses:
            continue
        sums, states = one.whole.sums, one.whole.states
        assert float(sums["factor"].value) == pytest.approx(float(states.mean.value), abs=0.015), one.setting.label
        assert float(sums["square"].value) == pytest.approx(float(states.square.value), rel=0.05), one.setting.label
    none = next(one for one in found.corrections if one.setting.label == "none")
    assert float(none.whole.sums["apart"].value) == pytest.approx(none.whole.states.misplaced_share, rel=0.05)


def test_one_pass_in_small_batches_gives_what_large_ones_give(tmp_path, monkeypatch):
    path = write(tmp_path / "made_up.jsonl", records(noise(0.3)))
    whole = replay(path, names=["tis", "icepop", "is"])
    monkeypatch.setattr("jackpot.lab.replay.responses.BATCH_TOKENS", 400)
    small = replay(path, names=["tis", "icepop", "is"])
    for one, other in zip(whole.answer.judged, small.answer.judged, strict=True):
        assert other.misplaced == pytest.approx(one.misplaced, abs=1e-9)
        assert other.effective == pytest.approx(one.effective)


def test_the_gap_of_the_first_and_of_the_last_file_stand_beside_each_other(tmp_path):
    for step, size in ((1, 0.0), (2, 3.0), (10, 0.3)):
        write(tmp_path / f"{step}.jsonl", records(noise(size), responses=60, seed=step))
    found = dict(replay(tmp_path, names=["none"]).ends)
    alone = replay(tmp_path / "10.jsonl", names=["none"])
    assert found == {"1.jsonl": 0.0, "10.jsonl": pytest.approx(float(alone.run["apart"].value))}
    assert len(alone.ends) == 1


def test_names_that_do_not_exist_are_refused(tmp_path):
    path = write(tmp_path / "made_up.jsonl", records(noise(0.3), responses=1))
    with pytest.raises(ConfigError, match="unknown correction 'tiss'; did you mean 'tis'"):
        replay(path, names=["tiss"])
    with pytest.raises(ConfigError, match="unknown format 'verll'"):
        replay(path, "verll")
    with pytest.raises(DataError, match="there is no"):
        replay(tmp_path / "nowhere")
