"""The labels of overrides in the name of a run's folder: short, and never the same for different overrides."""

import pytest

from jackpot.config.names import LONGEST, override_labels

LABELS = {  # by override
    "objective.correction.lam=2.0": "lam2.0",
    "critic.lam=2.0": "critic.lam2.0",
    "objective.correction.c1=3.0": "c1=3.0",
    "policy.optimizer.learning_rate=1e-5": "learning_rate1e-5",
    "rollout_model.optimizer.learning_rate=1e-5": "rollout_model.optimizer.learning_rate1e-5",
    "objective.correction=tis": "correction=tis",
    "engine=vllm": "engine=vllm",
    "evaluation.engine=vllm": "evaluation.engine=vllm",
    "evaluation.every=3": "evaluation.every3",
    "rollouts.every=3": "rollouts.every3",
    "iterations=40": "iterations40",
    "task.kwargs.words=3": "task.kwargs.words3",
}


def test_settings_are_short_and_unmistakable() -> None:
    assert {text: override_labels([text]) for text in LABELS} == {text: [label] for text, label in LABELS.items()}


def test_the_last_of_a_key_counts_and_the_order_does_not() -> None:
    both = ["batch.prompts=8", "objective.correction.lam=2.0"]
    assert override_labels(both) == override_labels(both[::-1]) == ["prompts8", "lam2.0"]
    assert override_labels(["batch.prompts=4", *both, "seed=3"], ["seed"]) == ["prompts8", "lam2.0"]
    assert override_labels([]) == []


@pytest.mark.parametrize("texts", [["policy.path=a/b"], ["policy.path=a-b"], ["description=a b"], ["policy.path=ä:b"]])
def test_what_cannot_be_written_out_has_a_hash(texts: list[str]) -> None:
    labels = override_labels(["batch.prompts=8", *texts])
    assert labels[0] == "prompts8" and "/" not in "".join(labels) and " " not in "".join(labels)
    assert labels != override_labels(["batch.prompts=8", f"{texts[0]}c"])


def test_many_overrides_are_cut_and_have_a_hash() -> None:
    many = [f"task.kwargs.word{index}=1" for index in range(20)]
    labels = override_labels(many)
    assert labels[0] == "task.kwargs.word0=1" and len("-".join(labels)) <= LONGEST + 11
    assert labels != override_labels([*many[:-1], "task.kwargs.word19=2"])
