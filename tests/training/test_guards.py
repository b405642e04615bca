"""Checks stop a run which only looks as if it trained: each passes a real engine and refuses one that lies."""

import copy
import json
import math
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from helpers.engines.reference import EOS, VOCAB_SIZE
from helpers.learners import make_learner, scored, smallest_model
from helpers.runs import SHORT, metrics, run, small_config
from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.core.digest import weights_digest
from jackpot.core.errors import EngineError, TrainingError
from jackpot.core.metrics import Sum
from jackpot.core.types import Prompt, Version
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.training import advantages, reported_lists
from jackpot.training.batching import micro_batches
from jackpot.training.guards import (
    EngineCheck,
    NonFiniteGuard,
    check_gap,
    engine_gap,
    first_rollouts,
    list_gap,
    sample_rollouts,
)
from jackpot.training.learner import StepResult
from jackpot.training.limits import CPU_FP32, precisions
from jackpot.training.reported_lists import FALSE_ALARM, ReportedLists, SamplingEvidence, check_ids, check_lists
from jackpot.training.run_folder.checkpoint import load_state

MODEL = smallest_model(1)
LEARNER = make_learner(smallest_model(0), MODEL)
FILTERED = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=16, num_top_log_probs=4)
PLAIN = Sampling(max_new_tokens=16, num_top_log_probs=4)


def requests(sampling, count=150):
    """Return a request for each of as many prompts."""
    prompts = [
        Prompt(uid=str(index), text="", answer="", token_ids=(2 + index % 17, 3 + index % 11)) for index in range(count)
    ]
    return [
        Request(uid=f"{prompt.uid}#", prompt=prompt, seed=index, sampling=sampling)
        for index, prompt in enumerate(prompts)
    ]


@cache
def rollouts_written_by(engine_class, sampling):
    """Return what an engine of a class generates."""
    engine = engine_class(
        copy.deepcopy(MODEL), TransformersEngineConfig(max_num_seqs=64), eos_token_ids=(EOS,), version=Version(0, 0)
    )
    return engine.generate(requests(sampling))


def scorer(rollouts):
    """Return what scores rollouts as training does: `Learner.score` of the model that wrote."""
    batches = micro_batches([scored(rollout, 0.0) for rollout in rollouts], 4096, seed=0, epoch=0)
    return lambda sampling: LEARNER.score("rollout_model", batches, sampling)


class RawEngine(TransformersEngine):
    """Samples as asked and reports what the model says before temperature, top-p and top-k, as some servers do."""

    def collect(self, n, timeout=None, uids=None):
        rollouts = super().collect(n, timeout, uids)
        raw_log_probs = self.score(rollouts, 1.0)
        return [replace(rollout, rollout_log_probs=logs) for rollout, logs in zip(rollouts, raw_log_probs, strict=True)]


class HotterEngine(TransformersEngine):
    """Reports the distribution that it was asked for, and samples from a hotter one."""

    def generate(self, requests):
        asked_sampling = requests[0].sampling
        hot_sampling = asked_sampling.model_copy(update={"temperature": 2.0 * asked_sampling.temperature})
        rollouts = super().generate([replace(request, sampling=hot_sampling) for request in requests])
        rows = [self._columns_as_asked(rollout, asked_sampling) for rollout in rollouts]
        return [replace(rollout, **row) for rollout, row in zip(rollouts, rows, strict=True)]

    @torch.no_grad()
    def _columns_as_asked(self, rollout, sampling):
        prompt = rollout.prompt.token_ids
        ids = torch.tensor([[*prompt, *rollout.token_ids.tolist()]])
        logits = self._weights.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        logs = torch.log_softmax(logits / sampling.temperature, -1)
        top = logs.topk(sampling.num_top_log_probs)
        sampled_log_probs = logs.gather(1, rollout.token_ids[:, None])[:, 0]
        return {"rollout_log_probs": sampled_log_probs, "top_ids": top.indices, "top_log_probs": top.values}


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED, PLAIN.model_copy(update={"temperature": 1.6})])
def test_an_honest_engine_passes_whatever_it_filters(sampling):
    rollouts = rollouts_written_by(TransformersEngine, sampling)

    result = check_gap(rollouts, sampling, [CPU_FP32], scorer(rollouts))

    assert result["mean_gap"] < 1e-6
    assert result["list_gap"] < 2e-6
    assert result["allowed"] == 1e-5

    lists = ReportedLists.of(rollouts)
    assert len(lists.token_ids) == sum(len(rollout.token_ids) for rollout in rollouts)
    assert len(lists.token_ids) > 500
    check_lists(lists)
    assert SamplingEvidence().add(lists) < 0.3


@pytest.mark.parametrize(
    ("sampling", "explanation"),
    [
        (FILTERED, "before temperature, top_p and top_k"),
        (PLAIN.model_copy(update={"temperature": 0.7}), "before temperature, top_p and top_k|before the temperature"),
        (PLAIN.model_copy(update={"top_p": 0.6}), "before top_p and top_k|before temperature, top_p and top_k"),
    ],
)
def test_raw_log_probs_are_refused_and_named(sampling, explanation):
    rollouts = rollouts_written_by(RawEngine, sampling)

    with pytest.raises(
        EngineError, match=rf"They are the log-probs of the model ({explanation}); have the engine return"
    ):
        check_gap(rollouts, sampling, ["fp32", "fp32"], scorer(rollouts))


def test_an_engine_sampling_at_another_temperature_is_refused():
    rollouts = rollouts_written_by(HotterEngine, PLAIN)

    assert engine_gap(rollouts, scorer(rollouts)(PLAIN)) < 1e-5
    check_gap(rollouts, PLAIN, [CPU_FP32], scorer(rollouts))

    with pytest.raises(EngineError, match=r"samples from another: over \d+ tokens .* log-prob of -\d\.\d+ on average"):
        SamplingEvidence().add(ReportedLists.of(rollouts))


def test_other_weights_are_refused_and_the_likely_cause_named():
    rollouts = rollouts_written_by(TransformersEngine, PLAIN)
    other_learner = make_learner(smallest_model(0), smallest_model(5))
    batches = micro_batches([scored(rollout, 0.0) for rollout in rollouts], 4096, seed=0, epoch=0)

    with pytest.raises(EngineError, match="Likely causes: other weights, or another tokenizer"):
        check_gap(rollouts, PLAIN, ["fp32"], lambda sampling: other_learner.score("rollout_model", batches, sampling))


def shifted(rollout):
    """Return a rollout whose log-probs are those of the token before."""
    log_probs = torch.cat([rollout.rollout_log_probs[:1], rollout.rollout_log_probs[:-1]])
    return replace(rollout, rollout_log_probs=log_probs)


def rounded(rollout):
    return replace(rollout, rollout_log_probs=rollout.rollout_log_probs.bfloat16().float())


@pytest.mark.parametrize(
    ("temperature", "change", "why"),
    [
        (1.0, shifted, "They are off by one: those of the token next to it"),
        (1.0, rounded, "They are rounded to bf16"),
        (0.6, replace, "They are the log-probs of temperature 0.6"),
    ],
)
def test_what_wrong_log_probs_are_is_named(temperature, change, why):
    rollouts = list(
        map(change, rollouts_written_by(TransformersEngine, PLAIN.model_copy(update={"temperature": temperature})))
    )

    with pytest.raises(EngineError, match=why):
        check_gap(rollouts, PLAIN, [CPU_FP32], scorer(rollouts))


def test_the_coarsest_precision_rules_what_is_rounding():
    rollouts = rollouts_written_by(TransformersEngine, PLAIN)
    rollouts_two_percent_off = [
        replace(rollout, rollout_log_probs=(rollout.rollout_log_probs.exp() * 0.98).log()) for rollout in rollouts
    ]

    assert 1e-3 < engine_gap(rollouts_two_percent_off, scorer(rollouts)(PLAIN)) < 2e-2
    check_gap(rollouts_two_percent_off, PLAIN, ["fp32", "bf16"], scorer(rollouts))
    with pytest.raises(EngineError, match=r"at most 0\.001 is allowed in fp32\."):
        check_gap(rollouts_two_percent_off, PLAIN, ["fp32", "fp32"], scorer(rollouts))


def test_gaps_that_are_not_a_number_are_refused():
    rollouts = rollouts_written_by(TransformersEngine, PLAIN)
    broken_rollouts = [
        replace(rollout, rollout_log_probs=rollout.rollout_log_probs * torch.nan) for rollout in rollouts
    ]

    with pytest.raises(EngineError, match="differ from training's by nan"):
        check_gap(broken_rollouts, PLAIN, ["fp32"], scorer(rollouts))


def test_the_gap_of_no_rollouts_is_not_a_number():
    assert math.isnan(engine_gap([], {}))


@pytest.mark.parametrize(
    ("engine", "training", "device", "sampling", "keys"),
    [
        ("fp32", "fp32", "cpu", PLAIN, [CPU_FP32]),
        ("fp32", "fp32", "cpu", FILTERED, ["fp32", "fp32"]),
        ("fp32", "fp32", "cuda", PLAIN, ["fp32", "fp32"]),
        ("fp32", "bf16", "cpu", PLAIN, ["fp32", "bf16"]),
        ("quantized", "fp32", "cpu", PLAIN, ["quantized", "fp32"]),
    ],
)
def test_only_untruncated_fp32_on_a_cpu_is_held_to_its_rounding(engine, training, device, sampling, keys):
    assert precisions(engine, training, device, sampling) == keys


# What an engine reports, by itself


def lists_of(rows, drawn_tokens):
    """Return reported lists [N, K] of probabilities of the ids 0, 1, ..., with the tokens drawn."""
    probs = torch.tensor(rows, dtype=torch.float64)
    return ReportedLists(torch.tensor(drawn_tokens), torch.arange(probs.shape[1]).expand(probs.shape), probs.log())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda rollout: {"top_ids": rollout.top_ids[:, :1].expand(-1, 4)},
            "name a token twice; the prob.* sum to [23]",
        ),
        (lambda rollout: {"top_log_probs": rollout.top_log_probs + 3.0}, r"the probabilities of one sum to \d+\."),
        (lambda rollout: {"top_log_probs": rollout.top_log_probs * torch.nan}, "the probabilities of one sum to nan"),
    ],
)
def test_lists_that_no_distribution_has_are_refused(change, why):
    rollouts = [replace(rollout, **change(rollout)) for rollout in rollouts_written_by(TransformersEngine, PLAIN)]
    if "twice" in why:
        rollouts = [replace(rollout, top_log_probs=rollout.top_log_probs[:, :1].expand(-1, 4)) for rollout in rollouts]

    with pytest.raises(EngineError, match=f"top-k lists are no part of a distribution: .*{why}"):
        check_lists(ReportedLists.of(rollouts))


@pytest.mark.parametrize(
    "change",
    [
        lambda rollout: {"top_log_probs": rollout.top_log_probs.roll(1, 0)},
        lambda rollout: {"top_ids": rollout.top_ids.roll(1, 0)},
        lambda rollout: {"top_log_probs": rollout.top_log_probs - 1e-3},
        lambda rollout: {
            "top_log_probs": torch.cat(
                [rollout.top_log_probs[:, :3], torch.full_like(rollout.top_log_probs[:, 3:], -torch.inf)], 1
            )
        },
    ],
    ids=["log-probs of the token before", "ids of the token before", "a little off", "the last one dropped"],
)
def test_wrong_lists_are_refused_though_sampled_tokens_agree(change):
    rollouts = rollouts_written_by(TransformersEngine, PLAIN)
    check_gap(rollouts, PLAIN, [CPU_FP32], scorer(rollouts))

    rollouts = [replace(rollout, **change(rollout)) for rollout in rollouts]

    with pytest.raises(EngineError, match=r"top-k lists are not those of .* tokens by \d\S*e-\d+; at most 3e-05"):
        check_gap(rollouts, PLAIN, [CPU_FP32], scorer(rollouts))


def test_the_gap_of_lists_is_a_total_variation():
    rollouts = rollouts_written_by(TransformersEngine, PLAIN)[:5]
    rollouts = [replace(rollout, sampled_mask=torch.arange(len(rollout.token_ids)) % 3 != 1) for rollout in rollouts]
    generator = torch.Generator().manual_seed(0)
    scores = {rollout.uid: torch.rand(len(rollout.token_ids), 5, generator=generator).log() for rollout in rollouts}

    expected_distances = [
        sum(abs(scores[rollout.uid][t, 1 + k].exp() - rollout.top_log_probs[t, k].exp()).item() for k in range(4)) / 2
        for rollout in rollouts
        for t in range(len(rollout.token_ids))
        if t % 3 != 1
    ]

    assert list_gap(rollouts, scores) == pytest.approx(np.mean(expected_distances), rel=1e-6)
    assert math.isnan(list_gap([], {}))


def test_evidence_of_honest_draws_has_mean_one_at_most(monkeypatch):
    """By enumeration of three draws, the last token of each row outside its list of two."""
    rows = [[0.6, 0.3], [0.5, 0.2], [0.97, 0.02999]]

    for slack, low, high in ((0.0, 1.0 - 1e-12, 1.0 + 1e-12), (reported_lists.ROUNDING, 0.9995, 1.0)):
        monkeypatch.setattr(reported_lists, "ROUNDING", slack)
        mean = 0.0
        for drawn_tokens in product(range(3), repeat=3):
            evidence = SamplingEvidence()
            chance = math.prod([*row, 1.0 - sum(row)][token] for row, token in zip(rows, drawn_tokens, strict=True))
            shares = [evidence.add(lists_of([row], [token])) for row, token in zip(rows, drawn_tokens, strict=True)]
            mean += chance * (math.exp(-math.log(FALSE_ALARM) * shares[-1]) + 0.1 / 3.0)  # the rest has not begun
        assert low <= mean <= high


def simulated(temperature, seed, batches, tokens=200):
    """Yield batches drawn at a temperature from random distributions over 12 tokens, 8 of them reported, as at 1."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        logits = 2.5 * torch.randn(tokens, 12, generator=random, dtype=torch.float64)
        drawn_tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)[:, 0]
        top = logits.log_softmax(-1).topk(8)
        yield ReportedLists(drawn_tokens, top.indices, top.values)


def test_false_alarms_are_as_rare_as_promised(monkeypatch):
    monkeypatch.setattr(reported_lists, "FALSE_ALARM", 0.1)
    refusals = 0

    for seed in range(60):
        evidence = SamplingEvidence()
        try:
            for lists in simulated(1.0, seed, batches=6, tokens=100):
                evidence.add(lists)
        except EngineError:
            refusals += 1

    assert refusals <= 6  # a tenth of 60


@pytest.mark.parametrize(("temperature", "tokens"), [(1.1, 12_000), (1.3, 1_600), (0.9, 12_000), (0.7, 1_600)])
@pytest.mark.parametrize("honest_batches", [0, 20])
def test_another_temperature_is_noticed_early(temperature, tokens, honest_batches):
    evidence = SamplingEvidence()
    for lists in simulated(1.0, seed=1, batches=honest_batches):
        evidence.add(lists)

    with pytest.raises(EngineError, match="samples from another"):
        for lists in simulated(temperature, seed=2, batches=tokens // 200):
            evidence.add(lists)


@pytest.mark.parametrize(("bias", "direction"), [(0.7, "more often"), (-0.7, "less often")])
def test_a_bias_on_one_token_is_named_in_time(bias, direction):
    """By twice the tokens that the likelihood ratio of the bias itself would need on average."""
    random = torch.Generator().manual_seed(3)
    evidence = SamplingEvidence()
    tokens, expected_tokens = 0, 0.0

    with pytest.raises(EngineError, match=f"the token 7 is drawn {direction} than by its reported probability"):
        while tokens == 0 or tokens <= 2.0 * expected_tokens:
            logits = 2.0 * torch.randn(200, 24, generator=random, dtype=torch.float64)
            logits[:, 7] += 2.0
            reported_log_probs = logits.log_softmax(-1)
            sampled_log_probs = (logits + bias * (torch.arange(24) == 7)).log_softmax(-1)
            drawn_tokens = torch.multinomial(sampled_log_probs.exp(), 1, generator=random)[:, 0]
            top = reported_log_probs.topk(12)
            tokens += len(drawn_tokens)
            expected_tokens = -math.log(FALSE_ALARM) / float(
                (sampled_log_probs.exp() * (sampled_log_probs - reported_log_probs)).sum(-1).mean()
            )
            evidence.add(ReportedLists(drawn_tokens, top.indices, top.values))


def grouped(rollouts, copied):
    """Return groups of 4 to a prompt; in `copied` of them all responses are the first one."""
    groups = [rollouts[first : first + 4] for first in range(0, len(rollouts) - 3, 4)]
    return [
        replace(rollout if group_index >= copied else group[0], uid=f"{group_index}/{index}", prompt=group[0].prompt)
        for group_index, group in enumerate(groups)
        for index, rollout in enumerate(group)
    ]


def test_equal_responses_are_named_where_they_are_no_chance():
    rollouts = [rollout for rollout in rollouts_written_by(TransformersEngine, PLAIN) if len(rollout.token_ids) > 4]
    lists = ReportedLists.of(rollouts)

    assert SamplingEvidence().add(lists, grouped(rollouts, copied=0)) < 0.3
    with pytest.raises(EngineError, match=r"responses to one prompt are equal far more often .* one seed"):
        SamplingEvidence().add(lists, grouped(rollouts, copied=3))


def test_responses_that_are_nearly_certain_may_be_equal():
    rollouts = rollouts_written_by(TransformersEngine, PLAIN)
    certain_rollouts = [
        replace(rollout, rollout_log_probs=torch.full_like(rollout.rollout_log_probs, -1e-4)) for rollout in rollouts
    ]
    assert SamplingEvidence().add(ReportedLists.of(rollouts), grouped(certain_rollouts, copied=99)) < 0.3


def test_tool_tokens_and_empty_lists_are_no_evidence():
    rollouts = rollouts_written_by(TransformersEngine, PLAIN)[:9]
    masked_rollouts = [replace(rollout, sampled_mask=torch.arange(len(rollout.token_ids)) < 2) for rollout in rollouts]
    cut_rollouts = [
        replace(
            rollout,
            **{name: getattr(rollout, name)[:2] for name in ("token_ids", "sampled_mask", "top_ids", "top_log_probs")},
        )
        for rollout in rollouts
    ]

    share = SamplingEvidence().add(ReportedLists.of(masked_rollouts))
    assert share == SamplingEvidence().add(ReportedLists.of(cut_rollouts))
    assert share != 0.0

    rollouts_without_lists = [
        replace(rollout, top_ids=rollout.top_ids[:, :0], top_log_probs=rollout.top_log_probs[:, :0])
        for rollout in rollouts
    ]
    check_lists(ReportedLists.of(rollouts_without_lists))
    assert SamplingEvidence().add(ReportedLists.of(rollouts_without_lists)) == 0.0


def test_lists_of_very_many_tokens_are_read_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(reported_lists, "LISTED_TOKENS", 40)
    lists = ReportedLists.of(rollouts_written_by(TransformersEngine, PLAIN))
    assert 40 <= len(lists.token_ids) < 40 + 16  # up to the end of a response, of 16 tokens at most


# Versions


@pytest.fixture(scope="module")
def engine():
    """An honest engine of `MODEL`, with the version 0."""
    return TransformersEngine(
        copy.deepcopy(MODEL), TransformersEngineConfig(max_num_seqs=64), eos_token_ids=(EOS,), version=Version(0, 0)
    )


@pytest.mark.parametrize("version_offset", [1, -1])
def test_a_batch_of_weights_never_sent_is_refused(engine, version_offset):
    events = []
    check = EngineCheck(small_config(), LEARNER, "rollout_model", lambda iteration, event: events.append(event))
    rollouts = engine.generate(requests(PLAIN, count=20))
    wrong_rollouts = [replace(rollout, versions=rollout.versions + version_offset) for rollout in rollouts]

    with pytest.raises(
        EngineError, match=f"none of the 20 rollouts of iteration 7 .*: 0 optimizer.*carry {version_offset}"
    ):
        check.check_batch(engine, wrong_rollouts, 7)

    check.check_batch(engine, rollouts[:3] + wrong_rollouts[3:], 9)
    assert [event["event"] for event in events] == ["stopped", "engine_check"]


def test_a_batch_of_weights_that_were_kept_is_scored_by_them(engine):
    """Half of the weights have changed, so that the learner's own would refuse it; afterwards they are its own."""
    learner = make_learner(smallest_model(0), copy.deepcopy(MODEL))
    check = EngineCheck(small_config(), learner, "rollout_model", lambda iteration, event: None)
    check.keep_weights()
    with torch.no_grad():
        for _, weight in list(learner.weights("rollout_model"))[::2]:  # every second one
            weight.add_(0.1)
    learner._optimizer._optimizers["rollout_model"].steps = 1
    changed_weights = {name: weight.clone() for name, weight in learner.weights("rollout_model")}
    rollouts = engine.generate(requests(PLAIN, count=20))

    check.check_batch(engine, rollouts, 7)

    assert all(torch.equal(weight, changed_weights[name]) for name, weight in learner.weights("rollout_model"))

    newer_rollouts = [replace(rollout, versions=rollout.versions + 1) for rollout in rollouts]
    with pytest.raises(EngineError, match="other weights"):
        check.check_batch(engine, newer_rollouts, 8)


def test_first_rollouts_are_whole_up_to_a_count_of_tokens():
    rollouts = rollouts_written_by(TransformersEngine, PLAIN)
    many_rollouts = rollouts * 8

    checked_rollouts = first_rollouts(many_rollouts)

    assert checked_rollouts == many_rollouts[: len(checked_rollouts)]

    tokens = sum(len(rollout.token_ids) for rollout in checked_rollouts)
    next_rollout = many_rollouts[len(checked_rollouts)]
    assert tokens <= 4096
    assert tokens + len(next_rollout.token_ids) > 4096
    assert first_rollouts([]) == []


# Gradients that are not finite


def steps(*are_bad):
    """Return results of optimizer steps whose gradients were not finite where True."""
    return [
        StepResult(metrics={"health/non_finite_steps": Sum.number(float(bad))}, events=(), traces={}) for bad in are_bad
    ]


def test_the_guard_counts_bad_steps_in_a_row():
    records = []
    guard = NonFiniteGuard(3, lambda iteration, event: records.append((iteration, event)))

    for step_iteration, are_bad, count in ((5, (True,), 1), (6, (True, False), 0), (7, (True, True), 2)):
        guard.check(steps(*are_bad), step_iteration)
        assert guard.count == count
    assert not records

    with pytest.raises(TrainingError, match=r"last 3 optimizer steps, up to iteration 9.*max_non_finite_steps is 3"):
        guard.check(steps(True), 9)

    [(iteration, event)] = records
    assert iteration == 9
    assert event["event"] == "stopped"
    assert "last 3 optimizer steps" in event["why"]

    continued_guard = NonFiniteGuard(3, lambda iteration, event: None, count=2)
    with pytest.raises(TrainingError):
        continued_guard.check(steps(True), 6)


def events_of(folder):
    """Return the events of a run."""
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def poison_advantages(monkeypatch, first):
    """Make every second advantage NaN from iteration `first` on."""
    compute, calls = advantages.compute_advantages, []

    def compute_with_nan(name, **columns):
        calls.append(name)
        values = compute(name, **columns)
        return torch.where(torch.arange(len(values)) % 2 == 1, torch.nan, values) if len(calls) >= first else values

    monkeypatch.setattr(advantages, "compute_advantages", compute_with_nan)


POISONED_SETTINGS = (
    *(SHORT, "evaluation.every=9", "evaluation.problems=2", "checkpoint.every=1", "guard.max_non_finite_steps=2"),
    "objective.advantage=reinforce_pp",
)


def test_gradients_that_are_not_finite_skip_and_stop_a_run(tmp_path, monkeypatch):
    poison_advantages(monkeypatch, first=2)

    with pytest.raises(TrainingError, match="last 2 optimizer steps, up to iteration 3"):
        run(small_config(*POISONED_SETTINGS), tmp_path)

    skip_events = [event for event in events_of(tmp_path) if event["event"] == "skipped_step"]
    bad_steps = [(event["model"], event["iteration"]) for event in skip_events if event["why"] == "non-finite gradient"]
    assert set(bad_steps) == {(role, iteration) for role in ("policy", "rollout_model") for iteration in (2, 3)}

    lines = {line["iteration"]: line for line in metrics(tmp_path)}
    assert [lines[iteration]["health/non_finite_steps"] for iteration in (1, 2)] == [0.0, 1.0]

    (stop_event,) = [event for event in events_of(tmp_path) if event["event"] == "stopped"]
    assert stop_event["iteration"] == 3
    assert "non-finite" in stop_event["why"]

    for role in ("policy", "rollout_model"):
        first_weights, last_weights = (
            tmp_path / "checkpoints" / step / role / "model.safetensors" for step in ("step-1", "step-2")
        )
        assert first_weights.read_bytes() == last_weights.read_bytes()

    state = load_state(tmp_path / "checkpoints" / "last")
    assert state["iteration"] == 2
    assert state["non_finite"] == 1
    assert pq.read_table(tmp_path / "rollouts" / "iteration-000001.parquet").num_rows == 16


def test_the_count_of_bad_steps_survives_a_restart(tmp_path, monkeypatch):
    poison_advantages(monkeypatch, first=1)

    run(small_config(*POISONED_SETTINGS), tmp_path, kill_after=1)

    state = load_state(tmp_path / "checkpoints" / "last")
    assert state["non_finite"] == 1
    with pytest.raises(TrainingError, match="last 2 optimizer steps, up to iteration 2"):
        run(small_config(*POISONED_SETTINGS), tmp_path)


def test_raw_log_probs_stop_a_run_before_it_trains(tmp_path, monkeypatch):
    monkeypatch.setattr("jackpot.launch.engines.TransformersEngine", RawEngine)

    with pytest.raises(EngineError, match="before temperature, top_p and top_k"):
        run(small_config(SHORT, "sampling.temperature=0.6", "iterations=1"), tmp_path)

    assert [event["event"] for event in events_of(tmp_path)] == ["stopped"]  # by the first evaluation
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_first_checks_of_a_start_are_events(finished_run, tmp_path):
    finished_run.copy(tmp_path, kill_after=3)  # the checkpoint is that of iteration 2

    checks = [event for event in events_of(tmp_path) if event["event"] == "engine_check"]
    assert [event["iteration"] for event in checks] == [1, 2]
    for event in checks:
        assert event["tokens"] > 50
        assert event["mean_gap"] < 1e-6
        assert event["list_gap"] < 2e-6
        assert event["allowed"] == 1e-5
        assert event["sampling_evidence"] < 0.5

    run(small_config(), tmp_path)
    assert [event["iteration"] for event in events_of(tmp_path) if event["event"] == "engine_check"] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["token_ids", "top_ids"])
@pytest.mark.parametrize("unknown_id", [-1, VOCAB_SIZE])
def test_unknown_ids_are_refused_wherever_they_stand(unknown_id, name):
    *other_rollouts, last_rollout = rollouts_written_by(TransformersEngine, PLAIN)

    check_ids([*other_rollouts, last_rollout], VOCAB_SIZE)  # passes

    ids = getattr(last_rollout, name).clone()
    ids[-1] = unknown_id

    with pytest.raises(EngineError, match=rf"{name} go from -?\d+ to \d+, and the model knows 0 to {VOCAB_SIZE - 1}"):
        check_ids([*other_rollouts, replace(last_rollout, **{name: ids})], VOCAB_SIZE)


def test_unknown_ids_stop_a_run_whose_engine_is_not_checked(tmp_path, monkeypatch):
    class Lost(TransformersEngine):
        def collect(self, *arguments, **keywords):
            return [
                replace(rollout, top_ids=rollout.top_ids - 99) for rollout in super().collect(*arguments, **keywords)
            ]

    monkeypatch.setattr("jackpot.launch.engines.TransformersEngine", Lost)

    with pytest.raises(EngineError, match="top_ids go from -99"):
        run(small_config(SHORT, "iterations=1", "guard.check_engine=false"), tmp_path)


# what an engine changes of a rollout
LIES = {
    "lists of the token before": lambda rollout: {"top_log_probs": rollout.top_log_probs.roll(1, 0)},
    "one id in all places": lambda rollout: {
        "top_ids": rollout.top_ids[:, :1].expand(-1, rollout.top_ids.shape[1]).contiguous()
    },
    "versions of weights that were never sent": lambda rollout: {"versions": rollout.versions + 1},
}


@pytest.mark.parametrize("name", LIES)
def test_wrong_lists_or_versions_stop_a_run_at_its_first_batch(name, tmp_path, monkeypatch):
    class Lying(TransformersEngine):
        def collect(self, *arguments, **keywords):
            return [replace(rollout, **LIES[name](rollout)) for rollout in super().collect(*arguments, **keywords)]

    monkeypatch.setattr("jackpot.launch.engines.TransformersEngine", Lying)

    with pytest.raises(EngineError, match=r"top-k lists are|carries the version"):
        run(small_config(SHORT, "iterations=1"), tmp_path)

    (stop_event,) = [event for event in events_of(tmp_path) if event["event"] == "stopped"]
    assert stop_event["iteration"] == 1
    assert metrics(tmp_path)[-1]["iteration"] == 0


# Weight updates that do not arrive


def engine_that_loses(update, names):
    """Return an engine that loses the tensors whose names contain `names`, from its weight update number `update` on.

    It says that it took over all that it was sent.
    """

    class Losing(TransformersEngine):
        updates = 0

        def update_weights(self, named_tensors, version):
            self.updates += 1
            new_tensors, old_tensors = dict(named_tensors), dict(self._weights.model.named_parameters())
            lost_tensors = {
                name: old_tensors[name].clone() for name in old_tensors if names in name and self.updates >= update
            }
            super().update_weights((new_tensors | lost_tensors).items(), version)
            return weights_digest(new_tensors.items(), self.capabilities.dtype)

    return Losing


FAST = (
    *(SHORT, "rollout_model.optimizer.learning_rate=5e-3", "evaluation.every=8", "evaluation.problems=2"),
    "checkpoint.every=1",
)


# 64 numbers are the least; the third update and later ones are checked by fewer tokens
@pytest.mark.parametrize(("update", "names"), [(1, "model.norm"), (3, "embed_tokens"), (3, "model.norm")])
def test_a_weight_update_that_does_not_arrive_stops_the_run(update, names, tmp_path, monkeypatch):
    monkeypatch.setattr("jackpot.launch.engines.TransformersEngine", engine_that_loses(update, names))

    with pytest.raises(EngineError, match=r"not those of the distribution.*Likely causes: other weights"):
        run(small_config(*FAST), tmp_path)

    assert metrics(tmp_path)[-1]["iteration"] == update  # the last one whose batch was written with the right weights
    assert load_state(tmp_path / "checkpoints" / "last")["iteration"] == update

    (stop_event,) = [event for event in events_of(tmp_path) if event["event"] == "stopped"]
    assert stop_event["iteration"] == update + 1
    assert "other weights" in stop_event["why"]


def test_a_run_without_engine_checks_trains_on_a_lying_engine(tmp_path, monkeypatch):
    monkeypatch.setattr("jackpot.launch.engines.TransformersEngine", engine_that_loses(1, ""))

    run(small_config(*FAST, "iterations=2", "guard.check_engine=false"), tmp_path)

    lines = metrics(tmp_path)
    assert lines[-1]["iteration"] == 2
    assert lines[-1]["mismatch/engine_gap"] > 1e-3


def test_a_quick_check_reads_from_all_over_the_batch():
    rollouts = [
        replace(rollout, uid=f"{index}")
        for index, rollout in enumerate((rollouts_written_by(TransformersEngine, PLAIN) * 2)[:288])
    ]

    sampled_rollouts = sample_rollouts(rollouts, seed=5)

    sampled_indices = [int(rollout.uid) for rollout in sampled_rollouts]
    assert [index // 18 for index in sampled_indices] == list(range(16))  # 288 rollouts in 16 parts of 18
    assert len({index % 4 for index in sampled_indices}) == 4  # whichever of four servers takes turns
    assert sampled_indices != [int(rollout.uid) for rollout in sample_rollouts(rollouts, seed=6)]

    names = ("token_ids", "rollout_log_probs", "sampled_mask", "top_ids", "top_log_probs", "versions")
    for rollout in sampled_rollouts:
        whole_rollout = rollouts[int(rollout.uid)]
        assert all(torch.equal(getattr(rollout, name), getattr(whole_rollout, name)[:16]) for name in names)


@pytest.mark.parametrize(("size", "count"), [(3, 3), (64, 4), (96, 6), (256, 16), (640, 16)])
def test_a_quick_check_scores_a_sixteenth_and_at_least_four(size, count):
    first_rollout = rollouts_written_by(TransformersEngine, PLAIN)[0]
    sampled_rollouts = sample_rollouts([replace(first_rollout, uid=f"{index}") for index in range(size)], seed=5)
    assert [int(rollout.uid) * count // size for rollout in sampled_rollouts] == list(range(count))


def test_a_quick_check_of_few_rollouts_reads_more_of_each():
    rollouts = [
        replace(rollout, uid=f"{index}")
        for index, rollout in enumerate(rollouts_written_by(TransformersEngine, PLAIN)[:3])
    ]

    assert [sample.uid for sample in sample_rollouts(rollouts, seed=0)] == ["0", "1", "2"]
    for sample, rollout in zip(sample_rollouts(rollouts, seed=0), rollouts, strict=True):
        assert torch.equal(sample.token_ids, rollout.token_ids)
    assert sample_rollouts([], seed=0) == []
