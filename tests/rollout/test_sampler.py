"""One iteration's rollout batch: which groups are kept, what a response is worth, what is left out and counted."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers.runs import COST, small_config
from jackpot.core.clock import Clock
from jackpot.core.errors import TrainingError
from jackpot.core.types import Prompt, Rollout, Score
from jackpot.models.load import load_tokenizer
from jackpot.rollout.engines.base import Request
from jackpot.rollout.rewards.rewards import overlong_penalty
from jackpot.rollout.sampler import Sampler, shaped_score
from jackpot.rollout.tasks.base import PromptStream, Task
from jackpot.training.advantages import response_advantages

LENGTH = 6  # tokens of every response


class NumberedTask(Task):
    """Prompt n of an endless split has the rewards that `rules[n]` gives to its members, in turn."""

    def __init__(self, rules):
        self.rules, self.first = rules, None

    def size(self, split):
        return None

    def prompt(self, split, index):
        self.first = index if self.first is None else self.first
        return Prompt(uid=str(index - self.first), text="", answer="", token_ids=(3, 4))

    def score(self, prompt, response, finished):
        self.asked = getattr(self, "asked", {})
        member = self.asked[prompt.uid] = self.asked.get(prompt.uid, -1) + 1
        reward = self.rules(int(prompt.uid))[member]
        return Score(reward=reward, correct=reward > 0.5)


class ScriptedEngine:
    """Answers every request with `LENGTH` tokens; what `change` makes of each rollout is handed over."""

    def __init__(self, change=lambda rollout: rollout):
        self.change, self.shuffle = change, lambda rollouts: None
        self.requests, self.done = [], []
        self.collected = []  # uids, in the order in which they were handed over
        self.capabilities = SimpleNamespace(max_model_len=64)

    def submit(self, requests):
        self.requests += requests
        self.done += [self.change(make_rollout(request)) for request in requests]
        self.shuffle(self.done)

    def collect(self, n, timeout=None, uids=None):
        rollouts, self.done = self.done[:n], self.done[n:]
        self.collected += [rollout.uid for rollout in rollouts]
        return rollouts

    def take_metrics(self):
        return {}


def make_rollout(request):
    """Return a finished rollout of the request."""
    return Rollout(
        uid=request.uid,
        prompt=request.prompt,
        finish="stop",
        token_ids=torch.full((LENGTH,), 5),
        rollout_log_probs=torch.full((LENGTH,), -1.0),
        sampled_mask=torch.ones(LENGTH, dtype=torch.bool),
        top_ids=torch.zeros(LENGTH, 0, dtype=torch.int64),
        top_log_probs=torch.zeros(LENGTH, 0),
        versions=torch.zeros(LENGTH, 2, dtype=torch.int64),
    )


def sampler_of(rules, *overrides, change=lambda rollout: rollout, task_class=NumberedTask, engine_class=ScriptedEngine):
    """Return a sampler of 4 prompts with 4 answers each, its prompt stream, its events, and its engine.

    The engine keeps the rollouts that were checked.
    """
    config = small_config(*overrides)
    task, engine = task_class(rules), engine_class(change)
    events = []
    engine.checked = []
    tokenizer = load_tokenizer("starter:policy")
    prompts = PromptStream(task, "train", 0)
    return (
        Sampler(
            config,
            {"rollout_model": engine} | ({"policy": engine_class(change)} if config.is_mixed else {}),
            task,
            tokenizer,
            {"rollout_model": COST, "policy": COST},
            prompts,
            Clock(),
            lambda iteration, event: events.append(event | {"iteration": iteration}),
            lambda iteration, rollouts: engine.checked.extend(rollouts),
        ),
        prompts,
        events,
        engine,
    )


def share_without_advantage(batch):
    """Return the share of the responses whose advantages are all zero."""
    samples = response_advantages("grpo", batch.scored)
    return sum(not sample.advantages.any() for sample in samples) / len(samples)


def metric_of(batch, name):
    """Return a metric of the batch."""
    return batch.sums[name].value.item()


def kept_prompts(batch):
    """Return the prompts that are trained on, in order."""
    return list(dict.fromkeys(int(item.rollout.prompt.uid) for item in batch.scored))


MIXED, RIGHT, WRONG = (1.0, 0.0, 0.0, 1.0), (1.0,) * 4, (0.0,) * 4
DYNAMIC = "batch.filter_groups.max_num_gen_batches=3"


def every_third(index):
    """Return unequal rewards for every third prompt, and equal ones for the two after it."""
    return MIXED if index % 3 == 0 else RIGHT if index % 3 == 1 else WRONG


@pytest.mark.parametrize("overrides", [(), (DYNAMIC,)])
def test_nothing_depends_on_the_order_in_which_the_responses_end(overrides):
    def spoil(rollout):
        return replace(rollout, finish="aborted") if rollout.uid.endswith("#2") else rollout

    def batch_of(shuffle):
        sampler, _, events, engine = sampler_of(lambda index: (index % 2, 1, 0), *overrides, change=spoil)
        engine.shuffle = shuffle
        return sampler.next_batch(1), events, engine

    batch, events, engine = batch_of(lambda rollouts: None)
    shuffled_batch, shuffled_events, shuffled_engine = batch_of(random.Random(0).shuffle)

    assert shuffled_engine.collected != [request.uid for request in shuffled_engine.requests]
    assert [item.rollout.uid for item in shuffled_batch.scored] == [item.rollout.uid for item in batch.scored]
    assert [item.score for item in shuffled_batch.scored] == [item.score for item in batch.scored]
    assert engine.checked != []
    assert [rollout.uid for rollout in shuffled_engine.checked] == [rollout.uid for rollout in engine.checked]
    assert shuffled_events == events
    assert 4 * len(events) == len(engine.requests)  # one response in four is aborted


def test_without_dynamic_sampling_every_group_is_kept():
    sampler, *_, engine = sampler_of(every_third)
    batch = sampler.next_batch(1)

    assert kept_prompts(batch) == [0, 1, 2, 3]
    assert len(engine.requests) == 16
    assert len(batch.scored) == 16
    assert metric_of(batch, "sampling/gen_batches") == 1.0
    assert metric_of(batch, "sampling/groups_filtered") == 0.0
    assert metric_of(batch, "reward/all_right") == 0.25
    assert metric_of(batch, "reward/all_wrong") == 0.25
    assert share_without_advantage(batch) == 0.5


def test_dynamic_sampling_ends_with_enough_unequal_groups():
    sampler, _, _, engine = sampler_of(every_third, DYNAMIC)
    batch = sampler.next_batch(1)

    assert kept_prompts(batch) == [0, 3, 6, 9]
    assert metric_of(batch, "sampling/gen_batches") == 3.0
    assert metric_of(batch, "sampling/groups_filtered") == 8.0
    assert share_without_advantage(batch) == 0.0
    assert len(engine.requests) == 48
    assert len({request.uid for request in engine.requests}) == 48

    # the shares are of all that was written, what was left out too
    assert metric_of(batch, "reward/all_right") == pytest.approx(1 / 3)
    assert metric_of(batch, "reward/all_wrong") == pytest.approx(1 / 3)
    # four mixed groups of two right ones, and four right groups
    assert metric_of(batch, "reward/mean") == pytest.approx((4 * 2 + 4 * 4) / 48)
    assert metric_of(batch, "tokens/rollout") == 48 * LENGTH


def test_rewards_that_differ_by_rounding_alone_are_equal():
    rounded_rewards = (0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2)
    sampler, *_ = sampler_of(lambda index: MIXED if index % 2 else rounded_rewards, DYNAMIC)
    batch = sampler.next_batch(1)
    assert kept_prompts(batch) == [1, 3, 5, 7]
    assert share_without_advantage(batch) == 0.0


@pytest.mark.parametrize(("baseline", "expected_prompts"), [("model", [1, 3, 5, 7]), ("group", [0, 1, 2, 3])])
def test_groups_are_filtered_by_what_the_baseline_compares(baseline, expected_prompts):
    """The rollout model gives the first two responses, the policy the others."""
    equal_in_models, unequal_in_models = (1.0, 1.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0)
    shares = ("rollout_model.share=0.5", "rollout_model.split=group", f"objective.baseline={baseline}")

    sampler, *_ = sampler_of(lambda index: unequal_in_models if index % 2 else equal_in_models, DYNAMIC, *shares)
    batch = sampler.next_batch(1)

    assert kept_prompts(batch) == expected_prompts
    samples = response_advantages("grpo", batch.scored, within_model=baseline == "model")
    unequal_uids = {sample.rollout.prompt.uid for sample in samples if sample.advantages.any()}
    assert unequal_uids == set(map(str, expected_prompts))


def test_surplus_unequal_groups_are_left_out_and_counted():
    sampler, *_, engine = sampler_of(lambda index: RIGHT if index < 2 else MIXED, DYNAMIC)
    batch = sampler.next_batch(1)

    assert kept_prompts(batch) == [2, 3, 4, 5]
    assert [int(rollout.prompt.uid) for rollout in engine.checked[::4]] == [0, 1, 2, 3]  # the first of each group
    assert metric_of(batch, "sampling/gen_batches") == 2.0
    assert metric_of(batch, "sampling/groups_filtered") == 4.0


def test_after_the_last_round_equal_groups_fill_what_is_missing():
    sampler, *_ = sampler_of(lambda index: MIXED if index == 7 else WRONG, DYNAMIC)
    batch = sampler.next_batch(1)

    assert kept_prompts(batch) == [7, 0, 1, 2]
    assert metric_of(batch, "sampling/gen_batches") == 3.0
    assert metric_of(batch, "sampling/groups_filtered") == 8.0
    assert share_without_advantage(batch) == 0.75

    advantages = torch.stack([sample.advantages for sample in response_advantages("grpo", batch.scored)])
    assert advantages[:4].abs().min() > 0.5
    assert not advantages[4:].any()


def test_the_prompts_go_on_where_the_last_round_ended():
    sampler, prompts, *_ = sampler_of(every_third, DYNAMIC)

    assert kept_prompts(sampler.next_batch(1)) == [0, 3, 6, 9]
    assert prompts.state_dict()["position"] == 12

    assert kept_prompts(sampler.next_batch(2)) == [12, 15, 18, 21]
    assert prompts.state_dict()["position"] == 24


# What a response is worth


@pytest.mark.parametrize(
    ("length", "expected_penalty"), [(0, 0.0), (1, 0.0), (16, 0.0), (17, -0.125), (20, -0.5), (23, -0.875), (24, -1.0)]
)
def test_the_overlong_penalty_falls_evenly_to_the_limit(length, expected_penalty):
    """DAPO eq. 13 with L_max 24 and L_cache 8: 0, then ((L_max - L_cache) - |y|) / L_cache, then -1."""
    assert overlong_penalty(length, limit=24, buffer=8, penalty=1.0) == expected_penalty
    assert overlong_penalty(length, limit=24, buffer=8, penalty=0.5) == 0.5 * expected_penalty


def test_the_penalty_changes_the_reward_and_not_the_verdict():
    config = small_config("objective.overlong_buffer.len=20", "objective.overlong_buffer.penalty_factor=2.0")
    prompt = Prompt(uid="0", text="", answer="", token_ids=(3,))
    rollout = make_rollout(Request(uid="0#0", prompt=prompt, seed=0, sampling=config.sampling))

    score = shaped_score(config, len(rollout.token_ids), Score(reward=1.0, correct=True))

    assert score == Score(reward=1.0 - 2.0 * (LENGTH - 4) / 20, correct=True)
    assert shaped_score(small_config(), len(rollout.token_ids), score) is score


def test_dynamic_sampling_compares_rewards_without_penalties():
    def longer(rollout):
        if not rollout.uid.endswith("#1"):
            return rollout
        names = ("token_ids", "rollout_log_probs", "sampled_mask", "top_ids", "top_log_probs", "versions")
        return replace(rollout, **{name: torch.cat([getattr(rollout, name)] * 4) for name in names})

    sampler, *_ = sampler_of(lambda index: RIGHT, "objective.overlong_buffer.len=4", DYNAMIC, change=longer)
    batch = sampler.next_batch(1)

    assert metric_of(batch, "sampling/gen_batches") == 3.0
    assert metric_of(batch, "reward/mean") == pytest.approx(0.75)
    assert metric_of(batch, "reward/all_right") == 1.0
    assert share_without_advantage(batch) == 0.0


# What cannot be used


@pytest.mark.parametrize("bad_log_prob", [math.nan, -math.inf])
def test_a_rollout_with_non_finite_log_probs_is_dropped(bad_log_prob):
    def spoil(rollout):
        if not rollout.uid.endswith("#2"):
            return rollout
        return replace(rollout, rollout_log_probs=torch.tensor([bad_log_prob] + [-1.0] * (LENGTH - 1)))

    sampler, _, events, _ = sampler_of(lambda index: MIXED, change=spoil)
    batch = sampler.next_batch(5)

    assert len(batch.scored) == 12
    assert not any(item.rollout.uid.endswith("#2") for item in batch.scored)

    assert metric_of(batch, "response/non_finite") == 0.25
    assert metric_of(batch, "response/aborted") == 0.0

    assert [event["event"] for event in events] == ["non_finite_rollout"] * 4
    assert events[0] == {"event": "non_finite_rollout", "uid": "5/0#2", "iteration": 5}


def test_what_a_tool_wrote_may_have_any_log_prob():
    def change_first_token(rollout):
        log_probs = torch.tensor([math.nan] + [-1.0] * (LENGTH - 1))
        return replace(rollout, rollout_log_probs=log_probs, sampled_mask=torch.arange(LENGTH) > 0)

    sampler, _, events, _ = sampler_of(lambda index: MIXED, change=change_first_token)
    batch = sampler.next_batch(1)

    assert len(batch.scored) == 16
    assert not events
    assert metric_of(batch, "response/tool_tokens") == 1.0


def test_whitened_advantages_count_sampled_tokens():
    def shorter(rollout):
        is_first = rollout.uid.endswith("#0")
        return replace(rollout, sampled_mask=torch.arange(LENGTH) < (2 if is_first else LENGTH))

    sampler, *_ = sampler_of(lambda index: (1.0, 0.0, 0.0, 0.0), change=shorter)
    samples = response_advantages("reinforce_pp", sampler.next_batch(1).scored)

    token_advantages = torch.tensor(4 * (2 * [1.0] + 3 * LENGTH * [0.0]), dtype=torch.float64)
    whitened_advantage = ((1.0 - token_advantages.mean()) / token_advantages.std()).item()

    assert samples[0].advantages.tolist() == pytest.approx([whitened_advantage] * LENGTH, rel=1e-6)


def test_what_could_not_be_scored_is_counted_by_its_cause():
    class Failing(NumberedTask):
        def scores(self, answers):
            scores = super().scores(answers)
            if answers[0].prompt.uid == "1":
                scores[2], scores[3] = (replace(scores[2], reward_error=error) for error in ("timeout", "crash"))
            if answers[0].prompt.uid == "3":
                scores = [replace(score, reward_error="timeout") for score in scores]
            return scores

    sampler, _, events, _ = sampler_of(lambda index: MIXED, task_class=Failing)
    batch = sampler.next_batch(5)

    assert metric_of(batch, "reward/timeouts") == 5 / 16
    assert metric_of(batch, "reward/errors") == 1 / 16
    assert len(batch.scored) == 16  # with the reward that it has

    expected_events = [("reward_timeout", "5/1#2"), ("reward_crash", "5/1#3")] + [
        ("reward_timeout", f"5/3#{member}") for member in range(4)
    ]
    assert events == [{"event": event, "uid": uid, "why": None, "iteration": 5} for event, uid in expected_events]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("crash", "Mend it"),
        ("timeout", "Make it faster, or raise task.reward_timeout"),
        ("invalid", "Have it return a number"),
    ],
)
def test_a_reward_failing_for_the_whole_first_batch_ends_the_run(error, advice):
    class Failing(NumberedTask):
        def score(self, prompt, response, finished):
            text = f"mine:judge: no answer in group {prompt.uid}"
            return replace(super().score(prompt, response, finished), reward_error=error, error_text=text)

    sampler, _, events, _ = sampler_of(lambda index: MIXED, task_class=Failing)

    with pytest.raises(TrainingError, match=rf"all 16 .* 4 of them: mine:judge: no answer in group 0\. {advice}"):
        sampler.next_batch(1)

    expected_texts = [f"mine:judge: no answer in group {index // 4}" for index in range(16)]
    assert [(event["event"], event["why"]) for event in events] == [
        (f"reward_{error}", text) for text in expected_texts
    ]


@pytest.mark.parametrize(("failure_count", "iteration"), [(15, 1), (16, 2)])
def test_a_run_goes_on_unless_the_whole_first_batch_fails(failure_count, iteration):
    class Failing(NumberedTask):
        remaining_failures = failure_count

        def score(self, prompt, response, finished):
            self.remaining_failures -= 1
            score = super().score(prompt, response, finished)
            return replace(score, reward_error="crash") if self.remaining_failures >= 0 else score

    sampler, _, events, _ = sampler_of(lambda index: MIXED, task_class=Failing)
    assert len(sampler.next_batch(iteration).scored) == 16
    assert len(events) == failure_count


@pytest.mark.parametrize("reward", [1e39, -1e160, math.nan, math.inf])
def test_a_reward_beyond_float32_is_refused_and_counted(reward):
    sampler, _, events, _ = sampler_of(lambda index: (1.0, reward, 1.0, 0.5))
    batch = sampler.next_batch(5)

    assert [item.score.reward for item in batch.scored] == [1.0, 0.0, 1.0, 0.5] * 4
    assert metric_of(batch, "reward/errors") == 0.25
    assert metric_of(batch, "reward/correct") == 0.5

    text = f"the reward is {reward:g}; it must be a number from -1e30 to 1e30"
    assert events == [
        {"event": "reward_invalid", "uid": f"5/{group}#1", "why": text, "iteration": 5} for group in range(4)
    ]


def test_without_a_verdict_there_is_no_share_of_right_ones():
    class Unjudged(NumberedTask):
        def score(self, prompt, response, finished):
            return replace(super().score(prompt, response, finished), correct=None)

    def spoil(rollout):
        return replace(rollout, finish="aborted") if rollout.uid.endswith("#2") else rollout

    batch = sampler_of(lambda index: MIXED, task_class=Unjudged, change=spoil)[0].next_batch(1)

    assert {item.score.correct for item in batch.scored} == {None}
    assert metric_of(batch, "reward/mean") == 1 / 3
    assert all(math.isnan(metric_of(batch, f"reward/{name}")) for name in ("correct", "all_right", "all_wrong"))


def test_scoring_of_a_group_begins_when_it_is_complete():
    calls = []  # step, group, responses collected until then

    class Slow(NumberedTask):
        def start_scoring(self, answers):
            calls.append(("start", answers[0].prompt.uid, len(engine.collected)))
            scores = self.scores(answers)
            return lambda: calls.append(("wait", answers[0].prompt.uid, len(engine.collected))) or scores

    class SingleResponseEngine(ScriptedEngine):
        def collect(self, n, timeout=None, uids=None):
            return [] if timeout == 0.0 else super().collect(1, timeout, uids)

    sampler, *_, engine = sampler_of(lambda index: MIXED, task_class=Slow, engine_class=SingleResponseEngine)
    assert len(sampler.next_batch(1).scored) == 16

    starts = [("start", str(group), 4 * (group + 1)) for group in range(4)]
    waits = [("wait", str(group), 16) for group in range(4)]
    assert calls == starts + waits


def test_a_group_is_scored_at_once_with_what_a_task_needs():
    score_calls = []

    class NotingTask(NumberedTask):
        def scores(self, answers):
            score_calls.append(list(answers))
            return super().scores(answers)

    def cut(rollout):
        return replace(rollout, finish="length") if rollout.uid.endswith("#1") else rollout

    sampler_of(lambda index: MIXED, change=cut, task_class=NotingTask)[0].next_batch(1)

    assert [len(answers) for answers in score_calls] == [4] * 4
    assert [response.finished for response in score_calls[0]] == [True, False, True, True]
    assert {response.prompt.uid for response in score_calls[2]} == {"2"}
