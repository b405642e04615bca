"""Which runs of a comparison are taken for finished, and which are continued."""

from pathlib import Path

from helpers.runs import FinishedRuns, small_config
from jackpot.analysis.compare.process import ArmRun
from jackpot.analysis.compare.scheduler import _is_done, _read


def test_a_run_killed_in_its_last_checkpoint_is_not_done(finished_run: FinishedRuns, tmp_path: Path) -> None:
    """As the kill leaves it: all lines, an older checkpoint, and the last one under another name."""
    run = ArmRun(arm="a", seed=0, folder=finished_run.copy(tmp_path), log=tmp_path / "a.log", config=small_config())

    assert _is_done(run, *_read(run), lambda *_: None) == "done before"

    (tmp_path / "checkpoints" / "step-4").rename(tmp_path / "checkpoints" / "step-4.partial")
    (tmp_path / "checkpoints" / "last").unlink()
    (tmp_path / "checkpoints" / "last").symlink_to("step-2")

    assert _is_done(run, *_read(run), lambda *_: None) is None
