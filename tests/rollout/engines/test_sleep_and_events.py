"""What the trainer asks of engines besides rollouts: to sleep when there is nothing to generate, and their events."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import Killed, run, small_config
from jackpot.core.errors import EngineError
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.training.joint_learner import JointLearner

SHORT = ("iterations=2", "batch.prompts=2", "batch.group_size=2", "sampling.max_new_tokens=8", "evaluation.problems=2")
MADE_ENGINES: list["Sleeper"] = []


class Sleeper(TransformersEngine):
    """Drops its weights when it sleeps, as vLLM may, and counts how often. Every update is an event."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.is_asleep, self.num_sleeps, self.events = False, 0, []
        MADE_ENGINES.append(self)

    def sleep(self) -> None:
        self._in_flight.check_empty()
        self.is_asleep, self.num_sleeps = True, self.num_sleeps + 1

    def submit(self, requests: Sequence[Any]) -> None:
        if self.is_asleep:
            raise EngineError("asleep")
        super().submit(requests)

    def update_weights(self, named_tensors: Any, version: Any) -> str:
        self.is_asleep = False
        self.events.append({"event": "updated", "version": list(version)})
        return super().update_weights(named_tensors, version)

    def take_events(self) -> list[dict[str, Any]]:
        events, self.events = self.events, []
        return events


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Sleeper]:
    """Collects the engines that the next run makes; the rollout engine is the first."""
    MADE_ENGINES.clear()
    monkeypatch.setattr("jackpot.launch.engines.TransformersEngine", Sleeper)
    return MADE_ENGINES


def logged_events(folder: Path) -> list[dict[str, Any]]:
    """Return iteration, version and engine of the events that name an engine."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [{key: event[key] for key in ("iteration", "version", "engine")} for event in events if "engine" in event]


@pytest.mark.parametrize(
    ("overrides", "num_sleeps"),
    [
        # sleeps of the rollout engine and of that of evaluation; the first generates ahead in the first iteration
        (("batch.ahead=1",), [1, 2]),
        (("rollout_model.optimizer=null",), [2, 2]),
        (("rollout_model=null", "objective.correction=none"), [2]),
    ],
)
def test_engines_sleep_when_there_is_nothing_to_generate(
    overrides, num_sleeps, engines, tmp_path: Path, monkeypatch
) -> None:
    states_at_training = []
    train = JointLearner.train

    def train_recording_states(learner: JointLearner, *arguments: Any, **settings: Any) -> Any:
        states_at_training.append([engine.is_asleep for engine in engines])
        return train(learner, *arguments, **settings)

    monkeypatch.setattr(JointLearner, "train", train_recording_states)

    run(small_config(*SHORT, *overrides), tmp_path)

    assert [engine.num_sleeps for engine in engines] == num_sleeps

    other_engines = [True] * (len(num_sleeps) - 1)
    generates_ahead = num_sleeps[0] == 1
    assert states_at_training == [[not generates_ahead, *other_engines], [True, *other_engines]]


def test_events_of_engines_are_logged_once_with_their_iteration(engines, tmp_path: Path) -> None:
    run(small_config(*SHORT), tmp_path)

    assert [engine.num_sleeps for engine in engines] == [2, 2]

    updates = [event for event in logged_events(tmp_path) if event["engine"] == "engine"]
    assert [(event["iteration"], event["version"][1]) for event in updates] == [(n, n) for n in range(1, 3)]

    evaluation_iterations = [
        event["iteration"] for event in logged_events(tmp_path) if event["engine"] == "evaluation.engine"
    ]

    assert evaluation_iterations == [0, 2]


def test_events_before_the_run_broke_are_logged(engines, tmp_path: Path, monkeypatch) -> None:
    def breaking_train(learner: JointLearner, *arguments: Any, **settings: Any) -> Any:
        engines[0].events.append({"event": "server lost", "version": [0, 0]})
        raise Killed

    monkeypatch.setattr(JointLearner, "train", breaking_train)

    run(small_config(*SHORT), tmp_path)

    assert logged_events(tmp_path)[-1] == {"iteration": 0, "version": [0, 0], "engine": "engine"}
