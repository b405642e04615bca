"""Several sources of training problems: shares, order, ids, and a resume at the same prompt."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.texts import text_tokenizer, write_problems
from jackpot.config.tasks import MathConfig
from jackpot.core.errors import DataError
from jackpot.rollout.tasks.base import PromptStream
from jackpot.rollout.tasks.math import Math

TOKENIZER = text_tokenizer()


def make_sources(folder: Path, *changes: dict) -> list[dict]:
    """Return sources of 50, 30 and 20 problems, whose weights are 5, 3 and 2; the last two files have the same name."""
    for name in ("b", "c"):
        (folder / name).mkdir(exist_ok=True)

    paths = [folder / "a.jsonl", folder / "b" / "train.jsonl", folder / "c" / "train.jsonl"]
    answers = [range(50), range(100, 130), range(200, 220)]
    files = [write_problems(path, list(source_answers)) for path, source_answers in zip(paths, answers, strict=True)]

    all_changes = [*changes, {}, {}, {}]
    return [
        {"source": str(path), "weight": weight} | change
        for path, weight, change in zip(files, (5, 3, 2), all_changes, strict=False)
    ]


def task_of(train: list[dict]) -> Math:
    """Return the task of these sources; the test problems are those of the first one."""
    config = MathConfig.model_validate(
        {"train": train, "test": train[0]["source"], "instruction": "", "template": "plain"}
    )
    return Math(TOKENIZER, config)


def test_each_source_gives_its_share_and_each_problem_once(tmp_path: Path) -> None:
    stream = PromptStream(task_of(make_sources(tmp_path)), "train", 0)

    prompts = [prompt for _ in range(100) for prompt in stream.next(20)]

    names = [prompt.uid.split("/")[0] for prompt in prompts]
    counts = Counter(names)
    assert counts.keys() == {"a", "train-2", "train-3"}

    for name, weight in (("a", 0.5), ("train-2", 0.3), ("train-3", 0.2)):
        assert abs(counts[name] / 2000 - weight) < 4 * (weight * (1 - weight) / 2000) ** 0.5  # four standard deviations

    assert len({prompt.uid for prompt in prompts}) == 2000

    answers_of_a = [prompt.answer for prompt, name in zip(prompts, names, strict=True) if name == "a"]
    for start in range(0, len(answers_of_a) - 49, 50):
        assert sorted(map(int, answers_of_a[start : start + 50])) == list(range(50))
    assert answers_of_a[:50] != answers_of_a[50:100]


def test_neighbours_are_independent_and_seeds_draw_other_prompts(tmp_path: Path) -> None:
    task = task_of(make_sources(tmp_path))
    seed_0_prompts, repeated_prompts, seed_1_prompts = (
        PromptStream(task, "train", seed).next(400) for seed in (0, 0, 1)
    )
    assert repeated_prompts == seed_0_prompts

    names, other_names = (
        [prompt.uid.split("/")[0] for prompt in prompts] for prompts in (seed_0_prompts, seed_1_prompts)
    )
    assert names != other_names
    assert [prompt.uid for prompt in seed_0_prompts[:20]] != [prompt.uid for prompt in seed_1_prompts[:20]]

    # two neighbours are of the same source by chance: the sum of the squared shares
    equal_share = sum(name == next_name for name, next_name in pairwise(names)) / 399
    assert abs(equal_share - (0.25 + 0.09 + 0.04)) < 0.1


def test_a_resumed_mix_goes_on_with_the_same_prompts(tmp_path: Path) -> None:
    sources = make_sources(tmp_path)
    uninterrupted_prompts = PromptStream(task_of(sources), "train", 3).next(300)

    stream = PromptStream(task_of(sources), "train", 3)
    stream.next(137)

    resumed_stream = PromptStream(task_of(sources), "train", 3)
    resumed_stream.load_state_dict(stream.state_dict())

    assert resumed_stream.next(163) == uninterrupted_prompts[137:]


@pytest.mark.parametrize("has_several_sources", [True, False])
def test_problems_that_have_changed_are_refused_at_a_resume(has_several_sources: bool, tmp_path: Path) -> None:
    sources = make_sources(tmp_path)[: 3 if has_several_sources else 1]
    state = PromptStream(task_of(sources), "train", 3).state_dict()
    write_problems(tmp_path / "a.jsonl", range(49))
    with pytest.raises(DataError, match=r"the problems of the task have changed: there were \[50.*now there are \[49"):
        PromptStream(task_of(sources), "train", 3).load_state_dict(state)


def test_sources_are_reported_apart_and_addressed_in_order(tmp_path: Path) -> None:
    task = task_of(make_sources(tmp_path))
    assert task.size("train") == 100
    assert task.size("test") == 50
    assert [task.prompt("train", index).answer for index in (0, 49, 50, 79, 80, 99)] == [
        *("0", "49", "100", "129", "200", "219")
    ]

    row_counts = {(event["split"], event["source"]): event["rows"] for event in task.take_events()}
    assert row_counts == {("train", "a"): 50, ("train", "train-2"): 30, ("train", "train-3"): 20, ("test", "a"): 50}

    with pytest.raises(DataError, match="they go from 0 to 99"):
        task.prompt("train", 100)
