"""One iteration's rollout batch: which groups are kept, what they are worth, and what is counted of the rest."""

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

LENGTH = 6


class Numbered(Task):
    """Prompt number n of an endless split has the rewards that `rules[n]` gives to its members, in turn."""

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
        self.change, self.shuffle, self.requests, self.done, self.collected = change, lambda rollouts: None, [], [], []
        self.capabilities = SimpleNamespace(max_model_len=64)

    def submit(self, requests):
        self.requests += requests
        self.done += [self.change(answer(request)) for request in requests]
        self.shuffle(self.done)

    def collect(self, n, timeout=None, uids=None):
        taken, self.done = self.done[:n], self.done[n:]
        self.collected += [rollout.uid for rollout in taken]
        return taken

    def take_metrics(self):
        return {}


def answer(request):
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


def sampler_of(rules, *overrides, change=lambda rollout: rollout, task_class=Numbered, engine_class=ScriptedEngine):
    """A sampler of 4 prompts with 4 answers each, its prompt stream, its events, and its engine, which keeps what was
    checked."""
    config = small_config(*overrides)
    task, engine, events = task_class(rules), engine_class(change), []
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
            lambda n, event: events.append(event | {"iteration": n}),
            lambda n, rollouts: engine.checked.extend(rollouts),
        ),
        prompts,
        events,
        engine,
    )


def without_advantage(batch):
    """Share of the responses."""
    samples = response_advantages("grpo", batch.scored)
    return sum(not sample.advantages.any() for sample in samples) / len(samples)


def value(batch, name):
    return batch.sums[name].value.item()


def kept(batch):
    """The prompts that are trained on, in order."""
    return list(dict.fromkeys(int(item.rollout.prompt.uid) for item in batch.scored))


MIXED, RIGHT, WRONG = (1.0, 0.0, 0.0, 1.0), (1.0,) * 4, (0.0,) * 4
DYNAMIC = "batch.filter_groups.max_num_gen_batches=3"


def every_third(number):
    return MIXED if number % 3 == 0 else RIGHT if number % 3 == 1 else WRONG


@pytest.mark.parametrize("overrides", [(), (DYNAMIC,)])
def test_nothing_depends_on_the_order_in_which_the_responses_end(overrides):
    def spoil(rollout):
        return replace(rollout, finish="aborted") if rollout.uid.endswith("#2") else rollout

    def batch_of(shuffle):
        sampler, _, events, engine = sampler_of(lambda number: (number % 2, 1, 0), *overrides, change=spoil)
        engine.shuffle = shuffle
        return sampler.next_batch(1), events, engine

    (asked, events, first), (shuffled, events_again, engine) = (
        batch_of(lambda rollouts: None),
        batch_of(random.Random(0).shuffle),
    )
    assert engine.collected != [request.uid for request in engine.requests]
    assert [item.rollout.uid for item in shuffled.scored] == [item.rollout.uid for item in asked.scored]
    assert [item.score for item in shuffled.scored] == [item.score for item in asked.scored]
    assert [one.uid for one in engine.checked] == [one.uid for one in first.checked] != []
    assert events_again == events and 4 * len(events) == len(engine.requests)


def test_without_dynamic_sampling_every_group_is_kept():
    sampler, *_, engine = sampler_of(every_third)
    batch = sampler.next_batch(1)
    assert kept(batch) == [0, 1, 2, 3] and len(engine.requests) == len(batch.scored) == 16
    assert value(batch, "sampling/gen_batches") == 1.0 and value(batch, "sampling/groups_filtered") == 0.0
    assert value(batch, "reward/all_right") == 0.25 and value(batch, "reward/all_wrong") == 0.25
    assert without_advantage(batch) == 0.5


def test_dynamic_sampling_ends_with_enough_unequal_groups():
    sampler, _, _, engine = sampler_of(every_third, DYNAMIC)
    batch = sampler.next_batch(1)
    assert kept(batch) == [0, 3, 6, 9]
    assert value(batch, "sampling/gen_batches") == 3.0 and value(batch, "sampling/groups_filtered") == 8.0
    assert without_advantage(batch) == 0.0
    assert len(engine.requests) == len({request.uid for request in engine.requests}) == 48
    # the shares are of all that was written, what was left out too
    assert value(batch, "reward/all_right") == value(batch, "reward/all_wrong") == pytest.approx(1 / 3)
    assert value(batch, "reward/mean") == pytest.approx((4 * 2 + 4 * 4) / 48)
    assert value(batch, "tokens/rollout") == 48 * LENGTH


def test_rewards_that_differ_by_rounding_alone_are_equal():
    rounded = (0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2)
    sampler, *_ = sampler_of(lambda number: MIXED if number % 2 else rounded, DYNAMIC)
    batch = sampler.next_batch(1)
    assert kept(batch) == [1, 3, 5, 7] and without_advantage(batch) == 0.0


@pytest.mark.parametrize(("baseline", "wanted"), [("model", [1, 3, 5, 7]), ("group", [0, 1, 2, 3])])
def test_groups_are_filtered_by_what_the_baseline_compares(baseline, wanted):
    """The rollout model gives the first two responses, the policy the others."""
    own_equal, own_unequal = (1.0, 1.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0)
    shares = ("rollout_model.share=0.5", "rollout_model.split=group", f"objective.baseline={baseline}")
    sampler, *_ = sampler_of(lambda number: own_unequal if number % 2 else own_equal, DYNAMIC, *shares)
    batch = sampler.next_batch(1)
    assert kept(batch) == wanted
    samples = response_advantages("grpo", batch.scored, within_model=baseline == "model")
    assert {one.rollout.prompt.uid for one in samples if one.advantages.any()} == set(map(str, wanted))


def test_surplus_unequal_groups_are_left_out_and_counted():
    sampler, *_, engine = sampler_of(lambda number: RIGHT if number < 2 else MIXED, DYNAMIC)
    batch = sampler.next_batch(1)
    assert kept(batch) == [2, 3, 4, 5]
    assert [int(rollout.prompt.uid) for rollout in engine.checked[::4]] == [0, 1, 2, 3]
    assert value(batch, "sampling/gen_batches") == 2.0 and value(batch, "sampling/groups_filtered") == 4.0


def test_after_the_last_round_equal_groups_fill_what_is_missing():
    sampler, *_ = sampler_of(lambda number: MIXED if number == 7 else WRONG, DYNAMIC)
    batch = sampler.next_batch(1)
    assert kept(batch) == [7, 0, 1, 2]
    assert value(batch, "sampling/gen_batches") == 3.0 and value(batch, "sampling/groups_filtered") == 8.0
    assert without_advantage(batch) == 0.75
    found = torch.stack([sample.advantages for sample in response_advantages("grpo", batch.scored)])
    assert found[:4].abs().min() > 0.5 and not found[4:].any()


def test_the_prompts_go_on_where_the_last_round_ended():
    sampler, prompts, *_ = sampler_of(every_third, DYNAMIC)
    assert kept(sampler.next_batch(1)) == [0, 3, 6, 9] and prompts.state_dict()["position"] == 12
    assert kept(sampler.next_batch(2)) == [12, 15, 18, 21] and prompts.state_dict()["position"] == 24


# What a response is worth


@pytest.mark.parametrize(
    ("length", "wanted"), [(0, 0.0), (1, 0.0), (16, 0.0), (17, -0.125), (20, -0.5), (23, -0.875), (24, -1.0)]
)
def test_the_overlong_penalty_falls_evenly_to_the_limit(length, wanted):
    """DAPO eq. 13 with L_max 24 and L_cache 8: 0, then ((L_max - L_cache) - |y|) / L_cache, then -1."""
    assert overlong_penalty(length, 24, 8, 1.0) == wanted
    assert overlong_penalty(length, 24, 8, 0.5) == 0.5 * wanted


def test_the_penalty_changes_the_reward_and_not_the_verdict():
    config = small_config("objective.overlong_buffer.len=20", "objective.overlong_buffer.penalty_factor=2.0")
    prompt = Prompt(uid="0", text="", answer="", token_ids=(3,))
    rollout = answer(Request(uid="0#0", prompt=prompt, seed=0, sampling=config.sampling))
    score = shaped_score(config, len(rollout.token_ids), Score(reward=1.0, correct=True))
    assert score == Score(reward=1.0 - 2.0 * (LENGTH - 4) / 20, correct=True)
    assert shaped_score(small_config(), len(rollout.token_ids), score) is score


def test_dynamic_sampling_compares_rewards_without_penalties():
    def longer(rollout):
        if not rollout.uid.endswith("#1"):
            return rollout
        names = ("token_ids", "rollout_log_probs", "sampled_mask", "top_ids", "top_log_probs", "versions")
        return replace(rollout, **{name: torch.cat([getattr(rollout, name)] * 4) for name in names})

    sampler, *_ = sampler_of(lambda number: RIGHT, "objective.overlong_buffer.len=4", DYNAMIC, change=longer)
    batch = sampler.next_batch(1)
    assert value(batch, "sampling/gen_batches") == 3.0 and value(batch, "reward/mean") == pytest.approx(0.75)
    assert value(batch, "reward/all_right") == 1.0 and without_advantage(batch) == 0.0


# What cannot be used


@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_a_rollout_with_non_finite_log_probs_is_dropped(number):
    def spoil(rollout):
        if not rollout.uid.endswith("#2"):
            return rollout
        return replace(rollout, rollout_log_probs=torch.tensor([number] + [-1.0] * (LENGTH - 1)))

    sampler, _, events, _ = sampler_of(lambda number: MIXED, change=spoil)
    batch = sampler.next_batch(5)
    assert len(batch.scored) == 12 and not any(item.rollout.uid.endswith("#2") for item in batch.scored)
    assert value(batch, "response/non_finite") == 0.25 and value(batch, "response/aborted") == 0.0
    assert [event["event"] for event in events] == ["non_finite_rollout"] * 4
    assert events[0] == {"event": "non_finite_rollout", "uid": "5/0#2", "iteration": 5}


def test_what_a_tool_wrote_may_have_any_log_prob():
    def tool(rollout):
        logs = torch.tensor([math.nan] + [-1.0] * (LENGTH - 1))
        return replace(rollout, rollout_log_probs=logs, sampled_mask=torch.arange(LENGTH) > 0)

    sampler, _, events, _ = sampler_of(lambda number: MIXED, change=tool)
    batch = sampler.next_batch(1)
    assert len(batch.scored) == 16 and not events and value(batch, "response/tool_tokens") == 1.0


def test_whitened_advantages_count_sampled_tokens():
    def shorter(rollout):
        is_first = rollout.uid.endswith("#0")
        return replace(rollout, sampled_mask=torch.arange(LENGTH) < (2 if is_first else LENGTH))

    sampler, *_ = sampler_of(lambda number: (1.0, 0.0, 0.0, 0.0), change=shorter)
    samples = response_advantages("reinforce_pp", sampler.next_batch(1).scored)
    tokens = torch.tensor(4 * (2 * [1.0] + 3 * LENGTH * [0.0]), dtype=torch.float64)
    wanted = ((1.0 - tokens.mean()) / tokens.std()).item()
    assert samples[0].advantages.tolist() == pytest.approx([wanted] * LENGTH, rel=1e-6)


def test_what_could_not_be_scored_is_counted_by_its_cause():
    class Failing(Numbered):
        def scores(self, answers):
            scores = super().scores(answers)
            if answers[0].prompt.uid == "1":
                scores[2], scores[3] = (replace(scores[2], reward_error=why) for why in ("timeout", "crash"))
            return [replace(one, reward_error="timeout") if answers[0].prompt.uid == "3" else one for one in scores]

    sampler, _, events, _ = sampler_of(lambda number: MIXED, task_class=Failing)
    batch = sampler.next_batch(5)
    assert value(batch, "reward/timeouts") == 5 / 16 and value(batch, "reward/errors") == 1 / 16
    assert len(batch.scored) == 16  # with the reward that it has
    wanted = [("reward_timeout", "5/1#2"), ("reward_crash", "5/1#3")] + [
        ("reward_timeout", f"5/3#{n}") for n in range(4)
    ]
    assert events == [{"event": event, "uid": uid, "why": None, "iteration": 5} for event, uid in wanted]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("crash", "Mend it"),
        ("timeout", "Make it faster, or raise task.reward_timeout"),
        ("invalid", "Have it return a number"),
    ],
)
def test_a_reward_failing_for_the_whole_first_batch_ends_the_run(error, advice):
    class Failing(Numbered):
        def score(self, prompt, response, finished):
            text = f"mine:judge: no answer in group {prompt.uid}"
            return replace(super().score(prompt, response, finished), reward_error=error, error_text=text)

    sampler, _, events, _ = sampler_of(lambda number: MIXED, task_class=Failing)
    with pytest.raises(TrainingError, match=rf"all 16 .* 4 of them: mine:judge: no answer in group 0\. {advice}"):
        sampler.next_batch(1)
    whys = [f"mine:judge: no answer in group {number // 4}" for number in range(16)]
    assert [(event["event"], event["why"]) for event in events] == [(f"reward_{error}", why) for why in whys]


@pytest.mark.parametrize(("fails", "iteration"), [(15, 1), (16, 2)])
def test_with_one_reward_or_in_a_later_batch_the_run_goes_on(fails, iteration):
    class Failing(Numbered):
        left = fails

        def score(self, prompt, response, finished):
            self.left -= 1
            score = super().score(prompt, response, finished)
            return replace(score, reward_error="crash") if self.left >= 0 else score

    sampler, _, events, _ = sampler_of(lambda number: MIXED, task_class=Failing)
    assert len(sampler.next_batch(iteration).scored) == 16 and len(events) == fails


@pytest.mark.parametrize("reward", [1e39, -1e160, math.nan, math.inf])
def test_a_reward_beyond_float32_is_refused_and_counted(reward):
    sampler, _, events, _ = sampler_of(lambda number: (1.0, reward, 1.0, 0.5))
    batch = sampler.next_batch(5)
    assert [item.score.reward for item in batch.scored] == [1.0, 0.0, 1.0, 0.5] * 4
    assert value(batch, "reward/errors") == 0.25 and value(batch, "reward/correct") == 0.5
    why = f"the reward is {reward:g}; it must be a number from -1e30 to 1e30"
    assert events == [{"event": "reward_invalid", "uid": f"5/{n}#1", "why": why, "iteration": 5} for n in range(4)]


def test_without_a_verdict_there_is_no_share_of_right_ones():
    class Unjudged(Numbered):
        def score(self, prompt, response, finished):
            return replace(super().score(prompt, response, finished), correct=None)

    def spoil(rollout):
        return replace(rollout, finish="aborted") if rollout.uid.endswith("#2") else rollout

    batch = sampler_of(lambda number: MIXED, task_class=Unjudged, change=spoil)[0].next_batch(1)
    assert {item.score.correct for item in batch.scored} == {None} and value(batch, "reward/mean") == 1 / 3
    assert all(math.isnan(value(batch, f"reward/{name}")) for name in ("correct", "all_right", "all_wrong"))


def test_scoring_of_a_group_begins_when_it_is_complete():
    happened = []

    class Slow(Numbered):
        def start_scoring(self, answers):
            happened.append(("start", answers[0].prompt.uid, len(engine.collected)))
            scores = self.scores(answers)
            return lambda: happened.append(("wait", answers[0].prompt.uid, len(engine.collected))) or scores

    class OneByOne(ScriptedEngine):
        def collect(self, n, timeout=None, uids=None):
            return [] if timeout == 0.0 else super().collect(1, timeout, uids)

    sampler, *_, engine = sampler_of(lambda number: MIXED, task_class=Slow, engine_class=OneByOne)
    assert len(sampler.next_batch(1).scored) == 16
    starts, waits = [("start", str(n), 4 * (n + 1)) for n in range(4)], [("wait", str(n), 16) for n in range(4)]
    assert happened == starts + waits


def test_a_group_is_scored_at_once_with_what_a_task_needs():
    asked = []

    class Asked(Numbered):
        def scores(self, answers):
            asked.append(list(answers))
            return super().scores(answers)

    def cut(rollout):
        return replace(rollout, finish="length") if rollout.uid.endswith("#1") else rollout

    sampler_of(lambda number: MIXED, change=cut, task_class=Asked)[0].next_batch(1)
    assert [len(answers) for answers in asked] == [4] * 4
    assert [answer.finished for answer in asked[0]] == [True, False, True, True]
    assert {answer.prompt.uid for answer in asked[2]} == {"2"}
