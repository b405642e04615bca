"""`train` and `load_run` from Python: a run is trained and read, and what is no recipe or no run is refused."""

from pathlib import Path

import pytest

from helpers.runs import small_config
from jackpot import JackpotError, load_run, train


def test_a_run_is_trained_and_read(tmp_path: Path) -> None:
    config = small_config("iterations=1")
    lines = []

    run = train(config, folder=tmp_path / "run", on_metrics=lines.append)

    assert [line["iteration"] for line in lines] == [0, 1]
    assert [line["iteration"] for line in run.metrics] == [0, 1]
    rollout_count = config.batch.prompts * config.batch.group_size
    assert run.rollouts().num_rows == rollout_count
    assert run.rollouts(1).num_rows == rollout_count
    assert (Path(run.policy) / "config.json").is_file()
    assert run.events[0]["event"]
    assert load_run(str(tmp_path / "run")) == run

    with pytest.raises(JackpotError, match=r"has no rollouts of iteration=7; it has 1"):
        run.rollouts(7)
    with pytest.raises(JackpotError, match="is not a run folder"):
        load_run(tmp_path)


def test_train_refuses_what_is_no_recipe(tmp_path: Path) -> None:
    config = small_config("iterations=1")

    with pytest.raises(TypeError, match="overrides and arm belong to the name of a recipe"):
        train(config, "iterations=2", folder=tmp_path / "run")

    with pytest.raises(JackpotError, match="unknown recipe"):
        train("quickstrat", folder=tmp_path / "other")

    with pytest.raises(JackpotError, match="there is no file"):
        train(tmp_path / "mine.yaml", folder=tmp_path / "other")
