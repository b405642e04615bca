"""Which correction `jackpot replay` advises on runs of known mismatch, and what it says where it cannot tell."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.synthetic_rollouts import discovered, noise, records, write
from jackpot.analysis.advice.rule import choose, relative_worth
from jackpot.analysis.replay.gradient import exact_numbers
from jackpot.analysis.replay.replay import ReplayResult, replay
from jackpot.analysis.replay.results import correction_result
from jackpot.analysis.replay.settings import settings_of
from jackpot.core.errors import ConfigError, DataError
from jackpot.objectives.corrections import CORRECTIONS
from jackpot.ui.views.replay import corrections, facts

# Corrections to judge.
SIMPLE = ("none", "tis")  # enough where what is asked does not depend on the other corrections
WITH_MASK = (*SIMPLE, "obrs")
BY_TOKEN = sorted({setting.name for setting in settings_of(None, ()) if not setting.weighs_whole_responses})


def replay_synthetic(tmp_path: Path, *arguments, names=(), **settings) -> ReplayResult:
    """Replay synthetic rollouts, made with these arguments and settings."""
    return replay(write(tmp_path / "synthetic.jsonl", records(*arguments, **settings)), names=names)


def replayed(tmp_path: Path, lines, **settings) -> ReplayResult:
    """Replay these saved lines."""
    return replay(write(tmp_path / "synthetic.jsonl", iter(lines)), **settings)


@pytest.fixture(scope="module")
def mild(tmp_path_factory: pytest.TempPathFactory) -> ReplayResult:
    """All corrections of a mild gap."""
    return replay_synthetic(tmp_path_factory.mktemp("mild"), noise(0.3))


def candidate_of(result: ReplayResult, label: str):
    """Find the candidate with this label."""
    return next(candidate for candidate in result.answer.candidates if candidate.label == label)


def test_on_practically_on_policy_text_no_correction_is_needed(tmp_path):
    result = replay_synthetic(tmp_path, noise(0.02), names=WITH_MASK)
    assert (result.answer.verdict, result.answer.correction) == ("none needed", "none")
    assert result.answer.lines["Use"].startswith("no correction is needed; a rollout is then worth 0.9")
    assert result.answer.lines["Judged on"].startswith("1,200 tokens")


def test_of_one_distribution_no_variation_is_left(tmp_path):
    result = replay_synthetic(tmp_path, noise(0.0), responses=20)
    for candidate in result.answer.candidates:
        assert candidate.tv_after_correction.value == pytest.approx(0.0, abs=1e-9)
        assert candidate.effective.value == pytest.approx(1.0)


def test_a_mild_gap_needs_tis_and_nothing_more(mild):
    assert mild.answer.settings == {"name": "tis"}
    none, tis = candidate_of(mild, "none"), candidate_of(mild, "tis")
    assert none.tv_after_correction.value > 0.05 > 100 * tis.tv_after_correction.value
    assert relative_worth(none, tis).value < 0.9


def test_weights_of_a_heavy_tail_cost_more_than_they_correct(tmp_path):
    result = replay_synthetic(tmp_path, discovered(share=0.1, lift=8.0), names=[*SIMPLE, "is", "f_tis", "obrs"])
    assert result.answer.settings == {"name": "tis"}

    variation_left = {
        name: candidate_of(result, name).tv_after_correction.value for name in ("none", "tis", "obrs expected")
    }
    assert variation_left["none"] > 2 * variation_left["tis"] > 4 * variation_left["obrs expected"]
    assert candidate_of(result, "is").effective.value < 0.1  # the weights of a tail eat the batch

    sampled = candidate_of(result, "f_tis")  # which reads whole responses, and misses a tail that was not sampled
    assert sampled.known == 0.0 and sampled.tv_after_correction.value < 0.001 and not sampled.advisable


def test_the_sampled_mask_of_obrs_is_never_recommended(tmp_path):
    result = replay_synthetic(tmp_path, noise(0.8), names=WITH_MASK)
    sampled, expected = candidate_of(result, "obrs"), candidate_of(result, "obrs expected")

    assert sampled.tv_after_correction.value == pytest.approx(expected.tv_after_correction.value)
    assert sampled.effective.value < 0.95 * expected.effective.value

    for ratio in (1.0, 0.5):  # also where the mask makes no difference
        tie = replace(sampled, groups=sampled.groups.clone())
        tie.groups[:, 2] = expected.groups[:, 2] * ratio
        assert choose([tie, replace(expected, groups=tie.groups)]).label == "obrs expected"


def test_a_tail_without_lists_is_not_wrong_log_probs_alone(tmp_path):
    """Without the lists a tail that was not sampled looks like log-probs that do not fit: both are named."""
    result = replay_synthetic(tmp_path, discovered(share=0.1, lift=8.0), lists=False, names=SIMPLE)
    assert result.answer.verdict == "cannot tell" and result.answer.correction is None
    assert "must be 1" in result.answer.sentence and "hardly ever samples" in result.answer.sentence


def test_long_responses_are_warned_of_weights_of_whole_responses(tmp_path):
    result = replay_synthetic(tmp_path, noise(0.3), names=[*SIMPLE, "is"], responses=10, length=600, lists=False)
    assert result.answer.settings["name"] == "tis"
    assert "Do not weigh whole responses: over 600 tokens" in result.answer.sentence

    short = replay_synthetic(tmp_path, noise(0.3), responses=250, length=4, names=SIMPLE, lists=False)
    assert "whole responses" not in short.answer.sentence


def test_stale_text_needs_a_correction_to_the_new_policy(tmp_path):
    result = replay_synthetic(tmp_path, noise(0.4), names=WITH_MASK, stale=True)
    assert result.answer.settings == {"name": "tis", "proximal": "new"}
    heavy = replay_synthetic(tmp_path, discovered(share=0.1, lift=8.0), names=SIMPLE, stale=True)
    assert heavy.answer.settings == {"name": "tis", "proximal": "new"}

    # by PPO's clip, for its ratio is p_new / p_old already
    assert candidate_of(result, "none").tv_after_correction.value > 0.05


def test_slightly_stale_text_is_what_ppos_own_clip_is_for(tmp_path):
    result = replay_synthetic(tmp_path, noise(0.05), names=SIMPLE, stale=True)
    assert result.answer.verdict == "none needed"


def test_no_correction_closes_the_gap_of_far_models(tmp_path):
    result = replay_synthetic(tmp_path, noise(5.0), names=[*WITH_MASK, "prefix"])
    assert (result.answer.verdict, result.answer.correction) == ("too far", None)
    assert "closer rollout model" in result.answer.sentence


def test_too_few_tokens_give_no_answer(tmp_path):
    result = replay_synthetic(tmp_path, noise(0.3), responses=10, names=SIMPLE)
    assert result.answer.verdict == "cannot tell" and "200 sampled tokens and 1,000" in result.answer.sentence


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
    result = replay(write(tmp_path / "a.jsonl", truncated(records(noise(0.0)), lists=False)), names=SIMPLE)
    assert result.answer.verdict == "cannot tell" and "top-p" in result.answer.sentence


def test_lists_that_do_not_fit_the_sampled_tokens_are_found_out(tmp_path):
    result = replay(write(tmp_path / "a.jsonl", truncated(records(noise(0.0)), lists=True)), names=SIMPLE)
    assert result.answer.verdict == "cannot tell" and "than the top-k lists allow" in result.answer.sentence


def cut(lines):
    """The writer's lists end where its top-k sampling ends."""
    for line in lines:
        rows = torch.tensor(line["rollout_top_log_probs"])
        rows.scatter_(1, rows.topk(2, largest=False).indices, -torch.inf)
        line["rollout_top_log_probs"] = rows.log_softmax(-1).tolist()
        yield line


def test_probability_that_the_writer_cannot_reach_is_named(tmp_path):
    result = replay(write(tmp_path / "a.jsonl", cut(records(discovered(share=1.0, lift=6.0)))), names=["is"])
    assert result.answer.verdict == "cannot tell" and "could not sample" in result.answer.sentence

    variation = candidate_of(result, "is").tv_after_correction.value
    assert 0.01 < variation < 1.0  # what cannot be written no weight brings back


def test_what_needs_lists_is_left_out_without_them(mild, tmp_path):
    assert {judged.setting.name for judged in mild.corrections} == set(CORRECTIONS)
    assert mild.left_out == ()

    bare = replay_synthetic(tmp_path, noise(0.3), lists=False)
    assert set(CORRECTIONS) - {judged.setting.name for judged in bare.corrections} == {
        "obrs",
        "reweight_only",
        "z_only",
    }
    assert any("obrs" in text and "top-k lists" in text for text in bare.left_out)
    assert "It is estimated from the sampled tokens" in bare.answer.sentence


@pytest.mark.parametrize("size", [0.3, 1.0])
def test_the_sampled_variation_is_never_far_too_small(tmp_path, size):
    """Exact where nothing is capped; where caps take more in some states than in others it may be up to twice it."""
    result = replay_synthetic(tmp_path, noise(size), names=BY_TOKEN, responses=20, length=150)

    for judged in result.corrections:
        label = judged.setting.label
        means = {name: float(entry.value) for name, entry in judged.sums.items()}
        if size == 0.3:
            assert means["factor"] == pytest.approx(means["state"], abs=0.015), label
            assert means["square"] == pytest.approx(means["state square"], rel=0.05), label
        if label == "none proximal=rollout" or judged.setting.name in ("reweight_only", "dppo", "ipo"):
            continue  # never advised

        exact = exact_numbers(judged.sums)["tv_after_correction"]
        sampled = correction_result(judged).sampled_tv_after_correction
        assert 0.9 * exact - 0.002 <= sampled <= 1.8 * exact + 0.005, label
        if judged.setting.name in ("none", "z_only", "mask_only", "is"):
            assert sampled == pytest.approx(exact, rel=0.05, abs=0.001), label


def partly_known(lists_hold: float):
    """`lists_hold` of the states are certain and the same in both models; the others are wide, far apart, and 20 tokens
    are not nearly all of them."""
    generator = torch.Generator().manual_seed(0)
    for index in range(50):
        logits = torch.randn(40, 200, generator=generator, dtype=torch.float64)
        certain = torch.rand(40, generator=generator) < lists_hold
        logits[certain, 0] += 16.0
        policy = logits.clone()
        policy[~certain] += 0.8 * torch.randn(200, generator=generator, dtype=torch.float64)

        writer, policy = logits.log_softmax(-1), policy.log_softmax(-1)
        ids = torch.multinomial(writer.exp(), 1, generator=generator)
        top, policy_top = writer.topk(20), policy.topk(20)

        yield (
            {
                "uid": str(index),
                "token_ids": ids[:, 0].tolist(),
                "rollout_log_probs": writer.gather(1, ids)[:, 0].tolist(),
                "old_log_probs": policy.gather(1, ids)[:, 0].tolist(),
                "rollout_top_ids": top.indices.tolist(),
                "rollout_top_log_probs": top.values.tolist(),
                "policy_top_ids": policy_top.indices.tolist(),
                "policy_top_log_probs": policy_top.values.tolist(),
            },
            float((writer.exp() - policy.exp()).abs().sum(-1).mean() / 2.0),
        )


def test_tokens_whose_lists_hold_little_count_as_others_do(tmp_path):
    lines = list(partly_known(0.6))
    result = replay(write(tmp_path / "a.jsonl", (line for line, _ in lines)), names=SIMPLE)
    gap = sum(apart for _, apart in lines) / len(lines)

    none = candidate_of(result, "none")
    assert 0.5 < none.known < 0.7
    assert gap > 0.1 and none.tv_after_correction.value == pytest.approx(gap, rel=0.08)
    assert result.answer.verdict == "correct"
    assert "and estimated from the sampled tokens elsewhere" in result.answer.sentence


def test_wrong_log_probs_are_noticed_beside_lists_that_hold_most(tmp_path):
    lines = [line for line, _ in partly_known(0.6)]
    for line in lines:
        wide = [min(row) > -6.0 for row in line["rollout_top_log_probs"]]
        pairs = zip(line["rollout_log_probs"], wide, strict=True)
        line["rollout_log_probs"] = [value / 1.5 if is_wide else value for value, is_wide in pairs]

    result = replayed(tmp_path, lines, names=SIMPLE)
    assert result.answer.verdict == "cannot tell" and "must be 1" in result.answer.sentence


def test_corrections_are_compared_on_the_same_tokens(tmp_path, monkeypatch):
    """In half of the responses the policy had moved, and Z of the old policy is not known there."""
    monkeypatch.setattr("jackpot.analysis.replay.responses.BATCH_TOKENS", 1_200)
    fresh = list(records(noise(0.3)))
    stale = list(records(noise(0.3), seed=1))
    for line in stale:
        line["uid"] += " stale"
        line["old_log_probs"] = [value - 0.05 for value in line["log_probs"]]

    result = replayed(tmp_path, fresh + stale, names=WITH_MASK)
    labels = {candidate.label for candidate in result.answer.candidates}

    assert "obrs expected" not in labels and {"none", "tis", "obrs new expected"} <= labels
    assert candidate_of(result, "tis").known == pytest.approx(0.5) and candidate_of(result, "tis new").known == 1.0
    assert any("obrs expected" in text and "1,200 of 2,400 tokens" in text for text in result.left_out)


def test_the_stale_variation_is_between_old_and_new_policy(tmp_path):
    """Of three distributions: text of the first, and |p_old - p_new| / 2 summed over the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    apart, lines = [], []
    for index in range(300):
        first, second, third = (torch.randn(3, 20, 12, generator=generator, dtype=torch.float64)).unbind()
        writer, old = (2.0 * first).log_softmax(-1), (2.0 * first + 1.5 * second).log_softmax(-1)
        new = (old + 0.5 * third).log_softmax(-1)

        ids = torch.multinomial(writer.exp(), 1, generator=generator)
        names = ("rollout_log_probs", "old_log_probs", "log_probs")
        columns = {
            name: rows.gather(1, ids)[:, 0].tolist() for name, rows in zip(names, (writer, old, new), strict=True)
        }
        lines.append({"uid": str(index), "token_ids": ids[:, 0].tolist(), **columns})
        apart.append((old.exp() - new.exp()).abs().sum(-1).mean() / 2.0)

    result = replay(write(tmp_path / "a.jsonl", iter(lines)), names=["none"])
    assert float(result.run["total_variation_stale"].value) == pytest.approx(float(torch.stack(apart).mean()), rel=0.06)


def test_one_pass_in_small_batches_gives_what_large_ones_give(tmp_path, monkeypatch):
    path = write(tmp_path / "synthetic.jsonl", records(noise(0.3)))
    large = replay(path, names=["tis", "is"])

    monkeypatch.setattr("jackpot.analysis.replay.responses.BATCH_TOKENS", 400)
    small = replay(path, names=["tis", "is"])

    for in_large, in_small in zip(large.answer.candidates, small.answer.candidates, strict=True):
        assert in_small.tv_after_correction.value == pytest.approx(in_large.tv_after_correction.value, abs=1e-9)
        assert in_small.effective.value == pytest.approx(in_large.effective.value)


def test_the_gaps_of_the_first_and_the_last_file_are_given(tmp_path):
    for step, size in ((1, 0.0), (2, 3.0), (10, 0.3)):
        write(tmp_path / f"{step}.jsonl", records(noise(size), seed=step, lists=False))

    result = dict(replay(tmp_path, names=["none"]).ends)
    alone = replay(tmp_path / "10.jsonl", names=["none"])
    assert result == {"1.jsonl": 0.0, "10.jsonl": pytest.approx(float(alone.run["total_variation"].value))}
    assert len(alone.ends) == 1


def test_a_copy_of_the_engines_log_probs_is_no_policy(tmp_path):
    lines = list(records(noise(0.3), lists=False))
    for line in lines:
        del line["log_probs"]
        line["old_log_probs"] = list(line["rollout_log_probs"])

    result = replayed(tmp_path, lines, names=SIMPLE)
    assert result.answer.verdict == "cannot tell" and "copy of the engine's" in result.answer.sentence

    lines[7]["old_log_probs"][3] -= 1e-6
    assert replayed(tmp_path, lines, names=SIMPLE).answer.verdict == "none needed"


def test_a_list_that_no_distribution_has_costs_its_response(tmp_path):
    lines = list(records(noise(0.3), responses=10))
    lines[3:6] = [json.loads(json.dumps(line)) for line in lines[3:6]]  # records share their lists of ids
    twice, too_much, short = lines[3:6]
    ids, log_probs = twice["rollout_top_ids"][5], twice["rollout_top_log_probs"][5]
    ids[1], log_probs[1] = ids[0], -30.0  # as a top 20 of a vocabulary of 10
    held = too_much["rollout_top_log_probs"][5]
    held[:] = [math.log(1.5 / len(held))] * len(held)
    short["rollout_top_log_probs"] = [row[:2] for row in short["rollout_top_log_probs"]]

    result = replayed(tmp_path, lines, names=["none"])
    assert result.unreadable == 3 and float(result.run["responses"].value) == 7

    for why in ("name a token twice", "hold 1.5 of all", "not of the same shape"):
        assert any(why in problem for problem in result.problems), why

    log_probs[1] = -math.inf  # padding
    assert replayed(tmp_path, lines, names=["none"]).unreadable == 2


NO_NUMBERS = {"old_log_probs": -math.inf, "advantages": math.nan, "rollout_log_probs": -9999.0, "log_probs": math.nan}


def test_values_that_are_no_numbers_decide_nothing(tmp_path):
    lines = list(records(noise(0.3), lists=False))
    without = replayed(tmp_path, lines[4:], names=SIMPLE)
    for line, (column, value) in zip(lines, NO_NUMBERS.items(), strict=False):
        line |= {"advantages": [1.0] * 20, "log_probs": list(line["log_probs"])}
        line[column][5] = value

    result = replayed(tmp_path, lines, names=SIMPLE)
    assert result.unreadable == 4 and result.answer.sentence == without.answer.sentence
    for response, (column, value) in enumerate(NO_NUMBERS.items(), start=1):
        [problem] = [text for text in result.problems if f"{column} has {value:g}" in text]
        assert f"response {response}: " in problem and "sampled_mask" in problem

    for line in lines[:4]:
        line["sampled_mask"] = [position != 5 for position in range(20)]
    assert replayed(tmp_path, lines, names=["none"]).unreadable == 0


def test_numbers_that_overflow_give_no_answer(tmp_path):
    lines = list(records(noise(0.3), lists=False))
    lines[3]["rollout_log_probs"][5] = -720.0

    result = replayed(tmp_path, lines, names=[*SIMPLE, "is"])
    assert result.answer.verdict == "cannot tell" and "not a finite number" in result.answer.sentence


def test_what_has_no_sampled_token_or_is_no_object_is_counted(tmp_path):
    lines = list(records(noise(0.3)))
    for line in lines[:40]:
        line["sampled_mask"] = [False] * 20
    path = write(tmp_path / "synthetic.jsonl", iter(lines))
    path.write_text(path.read_text() + "[1, 2]\n" * 30 + "null\n\n")

    result = replay(path, names=["none"])
    assert float(result.run["responses"].value) == 20 and any("40 responses" in text for text in result.left_out)
    assert result.unreadable == 31 and "line 61 is no JSON object" in result.problems[0]

    with pytest.raises(DataError, match="40 responses: they have no sampled token"):
        replayed(tmp_path, lines[:40])


def test_the_run_has_tables_without_any_correction(tmp_path):
    result = replayed(tmp_path, records(noise(0.3), lists=False), names=["obrs"])
    assert result.answer.verdict == "cannot tell" and result.corrections == ()
    assert any(name == "mean of rho, must be 1" for name, _ in facts(result).rows) and corrections(result).items


def test_positions_without_a_correction_are_empty(tmp_path):
    long = list(records(noise(0.5), responses=30, length=100, seed=1, lists=False))
    for line in long:
        line["uid"] += " long"

    result = replayed(tmp_path, [*records(noise(0.5)), *long], names=["obrs", "icepop"])
    tables = {item.title: item for item in corrections(result).items}
    by_band = tables["Rejected, by position and by the policy's entropy (H, nats)"]
    column = by_band.columns.index("at 64-255")
    shown = {row[0].split(",")[0]: row[column] for row in by_band.rows}
    assert shown["obrs"] == "" and shown["icepop"].endswith("%")


def test_one_response_without_lists_leaves_the_others_their_sums(tmp_path):
    lines = list(records(noise(0.3)))
    for name in [name for name in lines[0] if "top" in name]:
        del lines[0][name]

    result = replayed(tmp_path, lines, names=WITH_MASK)
    assert candidate_of(result, "tis").known == pytest.approx(59 / 60) and result.answer.correction == "tis"
    assert any("obrs" in text and "1,180 of 1,200 tokens" in text for text in result.left_out)


def test_names_that_do_not_exist_are_refused(tmp_path):
    path = write(tmp_path / "synthetic.jsonl", records(noise(0.3), responses=1))

    with pytest.raises(ConfigError, match="unknown correction 'tiss'; did you mean 'tis'"):
        replay(path, names=["tiss"])
    with pytest.raises(ConfigError, match="unknown format 'verll'"):
        replay(path, "verll")
    with pytest.raises(DataError, match="there is no"):
        replay(tmp_path / "nowhere")
