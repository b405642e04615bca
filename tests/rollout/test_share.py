"""Which model generates which response: shares, their schedules, and how a batch is split between the models."""

from collections import Counter

import pytest

from helpers.runs import small_config
from jackpot.config.schedules import ShareSchedule
from jackpot.core.errors import ConfigError
from jackpot.rollout.sampler import assign_models

PROMPTS = [f"p{prompt}" for prompt in range(10) for _ in range(4)]  # ten groups of four, as `batch.group_size` says


def share_schedule(settings: str) -> ShareSchedule:
    """Return the schedule of the share that the settings describe."""
    return small_config(f"rollout_model.share={settings}").rollout_model.share


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ("{schedule: step, hold: 2}", [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
        ("{schedule: step, hold: 2, start: 0.5, end: 0.25}", [0.5, 0.5, 0.25, 0.25, 0.25, 0.25]),
        ("{schedule: linear, hold: 1, until: 5}", [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("{schedule: cosine, hold: 1, until: 5}", [1.0, 0.8535533905932737, 0.5, 0.14644660940672627, 0.0, 0.0]),
        ("{schedule: linear, hold: 1, until: 5, start: 0.0, end: 1.0}", [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]),
    ],
)
def test_a_schedule_goes_from_its_start_to_its_end(settings, shares):
    assert [share_schedule(settings).at(iteration) for iteration in range(1, 7)] == pytest.approx(shares, abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{schedule: step, hold: 2, until: 5}", "leave until out"),
        ("{schedule: linear, hold: 2}", "needs until"),
        ("{schedule: cosine, hold: 5, until: 5}", "above hold 5, and it is 5"),
        ("1.5", "less than or equal to 1"),
    ],
)
def test_a_schedule_that_says_nothing_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        small_config(f"rollout_model.share={settings}")


def test_a_rollout_model_is_used_until_its_share_is_0_for_good():
    annealed_config = small_config("rollout_model.share={schedule: linear, hold: 1, until: 4}")
    assert [annealed_config.uses_rollout_model(iteration) for iteration in range(1, 7)] == [True] * 3 + [False] * 3
    assert [annealed_config.writers(iteration) for iteration in (1, 2, 4)] == [
        ("rollout_model",),
        ("policy", "rollout_model"),
        ("policy",),
    ]
    assert annealed_config.writers(1, 2) == ("policy", "rollout_model")

    rising_config = small_config("rollout_model.share={schedule: step, hold: 2, start: 0.0, end: 1.0}")
    # it is distilled before its share is above 0
    assert [rising_config.uses_rollout_model(iteration) for iteration in (1, 2, 3)] == [True] * 3

    assert not small_config("rollout_model.share=0.0").uses_rollout_model(1)
    assert small_config(arm="on_policy").writers(1) == ("policy",)


@pytest.mark.parametrize("split", ["prompt", "group"])
def test_a_share_is_met_on_average_and_within_one_unit_each_time(split):
    config = small_config("rollout_model.share=0.33", f"rollout_model.split={split}")
    unit = 4 if split == "prompt" else 1

    counts = [assign_models(config, iteration, PROMPTS).count("rollout_model") / unit for iteration in range(1, 301)]
    exact_count = 0.33 * len(PROMPTS) / unit

    assert set(counts) == {int(exact_count), int(exact_count) + 1}
    assert abs(sum(counts) / len(counts) - exact_count) < 4 * 0.5 / len(counts) ** 0.5  # four standard deviations


def test_prompts_are_chosen_by_name_and_iteration_not_by_order():
    config = small_config("rollout_model.share=0.5")

    def prompts_of_the_rollout_model(iteration, prompts):
        return {
            uid
            for uid, role in zip(prompts, assign_models(config, iteration, prompts), strict=True)
            if role != "policy"
        }

    assert prompts_of_the_rollout_model(1, PROMPTS) == prompts_of_the_rollout_model(1, list(reversed(PROMPTS)))
    assert len(prompts_of_the_rollout_model(1, PROMPTS)) == 5
    assert prompts_of_the_rollout_model(1, PROMPTS) != prompts_of_the_rollout_model(2, PROMPTS)


def test_within_groups_every_prompt_has_responses_of_both():
    config = small_config("rollout_model.share=0.6", "rollout_model.split=group")
    counts_by_prompt = Counter(
        uid for uid, role in zip(PROMPTS, assign_models(config, 3, PROMPTS), strict=True) if role == "rollout_model"
    )
    assert sorted(counts_by_prompt.values()) == [2] * 6 + [3] * 4


@pytest.mark.parametrize("share", ["0.0", "1.0"])
def test_at_the_ends_one_model_generates_all(share):
    config = small_config(f"rollout_model.share={share}")
    assert set(assign_models(config, 1, PROMPTS)) == {"policy" if share == "0.0" else "rollout_model"}
