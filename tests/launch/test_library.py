"""Training from Python, and what a run's folder is read as."""

from pathlib import Path

import pytest

from helpers.runs import small_config
from jackpot import JackpotError, load_run, train


def test_a_run_is_trained_continued_and_read(tmp_path: Path) -> None:
    lines = []
    config = small_config("iterations=1")
    run = train(config, folder=tmp_path / "run", on_metrics=lines.append)
    assert [line["iteration"] for line in run.metrics] == [line["iteration"] for line in lines] == [0, 1]
    assert run.rollouts().num_rows == run.rollouts(1).num_rows == config.batch.prompts * config.batch.group_size
    assert (Path(run.policy) / "config.json").is_file() and run.events[0]["event"]
    assert load_run(str(tmp_path / "run")) == run
    with pytest.raises(JackpotError, match=r"has no rollouts of iteration=7; it has 1"):
        run.rollouts(7)
    with pytest.raises(JackpotError, match="is not a run folder"):
        load_run(tmp_path)
    with pytest.raises(TypeError, match="overrides and arm belong to the name of a recipe"):
        train(config, "iterations=2", folder=tmp_path / "run")
    with pytest.raises(JackpotError, match="unknown recipe"):
        train("quickstrat", folder=tmp_path / "other")
    with pytest.raises(JackpotError, match="there is no file"):
        train(tmp_path / "mine.yaml", folder=tmp_path / "other")
