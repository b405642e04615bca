"""What a run folder still says after a kill."""

import contextlib
import json
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.folders import word_tokenizer
from helpers.kill_points import Kill
from helpers.runs import Killed, contents, small_config
from jackpot.core.errors import CheckpointError, ConfigError
from jackpot.core.package import version
from jackpot.core.types import Prompt, Rollout, Score, TrainingSample
from jackpot.training.run_folder.environment import Environment, commit
from jackpot.training.run_folder.folder import RunFolder, run_config
from jackpot.training.run_folder.rollouts import write_rollouts
from jackpot.training.run_folder.saved_rollouts import thin_rollouts


def opened(path: Path, iteration: int = -1) -> RunFolder:
    path.mkdir(exist_ok=True)
    folder = RunFolder(path)
    folder.rewind(iteration)
    return folder


def iterations(folder: RunFolder, name: str = "metrics.jsonl") -> list[int]:
    return [line["iteration"] for line in folder.read(name)]


def test_a_line_torn_at_the_end_is_left_out_and_forgotten(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for iteration in range(3):
        folder.report(iteration, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "loss": 1.0}')  # all but the end of the line
    assert iterations(folder) == [0, 1, 2]
    folder = opened(tmp_path, 2)
    folder.report(3, {"loss": 2.0})
    assert iterations(folder) == [0, 1, 2, 3] and folder.read("metrics.jsonl")[3]["loss"] == 2.0


def test_a_torn_line_costs_itself_only_and_is_named(tmp_path: Path, caplog) -> None:
    folder = opened(tmp_path)
    for iteration in range(4):
        folder.report(iteration, {"loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1][:10] + "\n", *lines[2:]]))
    assert iterations(folder) == [0, 2, 3]
    opened(tmp_path, 2)
    assert path.read_text() == lines[0] + lines[2]
    assert "metrics.jsonl: lines 2 cannot be read and are removed" in caplog.text


def test_rewinding_forgets_later_and_half_written_files(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for iteration in range(4):
        folder.event(iteration, {"event": "something"})
        folder.report(iteration, {"loss": 1.0})
    for name in ("rollouts/iteration-000002.parquet", "rollouts/iteration-000003.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "rollouts" / "iteration-000001.parquet.partial").touch()
    for _ in range(2):  # a kill on the way is made good by doing it again
        folder = opened(tmp_path, 2)
        assert iterations(folder) == iterations(folder, "events.jsonl") == [0, 1, 2]
        assert [path.name for path in folder.rollouts.iterdir()] == ["iteration-000002.parquet"]
    superseded = tmp_path / "superseded"
    assert [path.name for path in superseded.iterdir()] == ["1"]
    assert {path.name for path in (superseded / "1").rglob("*.*")} == {
        "metrics.jsonl",
        "events.jsonl",
        "iteration-000003.parquet",
    }
    assert json.loads((superseded / "1" / "metrics.jsonl").read_text())["iteration"] == 3


@pytest.mark.parametrize("iteration", [2, -1])
def test_a_kill_of_a_start_is_made_good_by_the_next(iteration: int, tmp_path: Path) -> None:
    """Where it continues, and where it begins anew: no line and no file is lost."""
    config = small_config("checkpoint.every=100")
    for at in range(1, 1000):
        path = tmp_path / str(at)
        folder = opened(path)
        folder.start(config, 1, -1)
        for number in range(4):
            folder.event(number, {"event": "something"})
            folder.report(number, {"loss": 1.0})
        folder.rollouts.mkdir()
        (folder.rollouts / "iteration-000003.parquet").write_bytes(b"rollouts")
        before = contents(path)
        with pytest.MonkeyPatch.context() as monkeypatch, contextlib.suppress(Killed):
            kill = Kill(monkeypatch, at)
            RunFolder(path).start(config, 1, iteration)
        folder = RunFolder(path)
        folder.check(config)
        folder.start(config, 1, iteration)
        assert iterations(folder) == iterations(folder, "events.jsonl") == list(range(iteration + 1))
        assert run_config(path) == config and not list(folder.rollouts.iterdir())
        after = contents(path)
        for name in ("metrics.jsonl", "events.jsonl"):
            lines = b"".join(content for one, content in after.items() if one.endswith(name)).splitlines()
            assert set(before.pop(name).splitlines()) <= set(lines)
        assert set(before.values()) - {before["environment.json"]} <= set(after.values())
        if kill.left > 0:
            break
    assert kill.left > 0 and at > 10


def test_tensorboard_shows_every_iteration_once_after_a_kill(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for iteration in range(4):
        folder.report(iteration, {"loss": float(iteration), "never": float("nan")})
    with next((tmp_path / "tensorboard").iterdir()).open("ab") as file:
        file.write(b"half a record")
    folder = opened(tmp_path, 2)
    folder.report(3, {"loss": 30.0})
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in shown.Scalars("loss")] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert "never" not in shown.Tags()["scalars"] and "checkpoint/failed" in shown.Tags()["scalars"]


def test_a_failed_file_is_counted_named_and_shown(tmp_path: Path, caplog) -> None:
    folder = opened(tmp_path)
    with folder.dispensable(3, "rollouts"):
        (tmp_path / "nowhere" / "file").touch()
    line = folder.report(3, {})
    assert line["files/failed"] == 1 and line["checkpoint/failed"] == 0
    [event] = folder.read("events.jsonl")
    assert event["event"] == "write_failed" and event["file"] == "rollouts" and "No such file" in event["why"]
    assert "iteration 3: write_failed: rollouts: [Errno 2]" in caplog.text


def test_a_run_with_a_checkpoint_has_trained(tmp_path: Path) -> None:
    """Lines may have waited in the memory of a process that was killed."""
    folder, other = opened(tmp_path), small_config("batch.prompts=8")
    folder.start(small_config(), 1, -1)
    folder.check(other)
    (tmp_path / "checkpoints" / "step-2").mkdir()
    with pytest.raises(CheckpointError, match=r"batch\.prompts: 4 in the folder, 8 now"):
        folder.check(other)


def test_a_continued_run_keeps_its_threads(tmp_path: Path) -> None:
    auto = small_config("threads=auto")
    assert opened(tmp_path).start(auto, 3, -1) == opened(tmp_path, 2).start(auto, 7, 2) == 3
    assert opened(tmp_path, 2).start(small_config("threads=5"), 5, 2) == 5
    assert Environment(tmp_path).threads == 5


def test_starts_are_recorded_and_other_packages_are_an_event(tmp_path: Path, caplog) -> None:
    opened(tmp_path).start(small_config(), 1, -1)
    [start] = json.loads((tmp_path / "environment.json").read_text())["starts"]
    assert start["jackpot"] == version() and start["torch"] == torch.__version__ and start["commit"] == commit()
    text = (tmp_path / "environment.json").read_text()
    (tmp_path / "environment.json").write_text(text.replace(torch.__version__, "1.0"))
    folder = opened(tmp_path, 2)
    folder.start(small_config(), 1, 2)
    starts = json.loads((tmp_path / "environment.json").read_text())["starts"]
    assert [(one["after_iteration"], one["torch"]) for one in starts] == [(-1, "1.0"), (2, torch.__version__)]
    [event] = folder.read("events.jsonl")
    assert event["event"] == "environment_changed" and event["torch"] == f"torch 1.0 -> {torch.__version__}"
    assert f"torch 1.0 -> {torch.__version__}" in caplog.text and "python" not in event
    opened(tmp_path, 2).start(small_config(), 1, 2)
    assert len(folder.read("events.jsonl")) == 1


def test_the_commit_is_that_of_the_files_and_their_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    known, unknown = tmp_path / "known.py", tmp_path / "unknown.py"
    for path in (known, unknown):
        path.touch()
    assert commit(str(known)) is None
    git("init")
    git("add", "known.py")
    git("commit", "-m", "first")
    commit.cache_clear()
    head = git("rev-parse", "HEAD").strip()
    assert commit(str(known)) == head and commit(str(unknown)) is None
    known.write_text("changed")
    commit.cache_clear()
    assert commit(str(known)) == f"{head}-dirty"


DAMAGE = {  # file: what it holds, and what the error says
    "cut": (
        "config.yaml",
        b"policy: {path: x\nbatch:\n  prompts: [1",
        r"config\.yaml, line 2 cannot be read: exp",
    ),
    "empty": ("config.yaml", b"", r"config\.yaml holds no settings: it is empty"),
    "text": ("config.yaml", b"hello", r"config\.yaml holds no settings: it is not a mapping"),
    "bytes": ("config.yaml", b"\xff\xfe\x00", r"config\.yaml cannot be read: 'utf-8' codec"),
    "cut json": ("environment.json", b'{"threads": 1,\n "tor', r"environment\.json cannot be read: .* line 2 column 2"),
    "empty json": ("environment.json", b"", r"environment\.json cannot be read: .* line 1 column 1"),
    "other json": ("environment.json", b"[1]", r"environment\.json is not the file that jackpot writes there"),
    "no starts": ("environment.json", b'{"threads": 1}', "threads or starts are missing"),
    "later": (
        "environment.json",
        b'{"format": 99, "starts": [{"jackpot": "9.1"}]}',
        r"format 99 of jackpot 9\.1, and this version \(.*\) knows formats up to \d; use that version",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_with_its_line(damage: str, tmp_path: Path) -> None:
    name, content, says = DAMAGE[damage]
    folder = opened(tmp_path)
    folder.start(small_config(), 1, -1)
    (tmp_path / name).write_bytes(content)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=says):
        folder.check(small_config())
    assert contents(tmp_path) == before


def test_a_clock_that_was_set_back_changes_no_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads its files in the order of the times in their names."""
    for start, hours in ((0, 0), (2, -1), (3, -2), (4, 5)):
        monkeypatch.setattr(time, "time", lambda hours=hours: 1_700_000_000.0 + 3600.0 * hours)
        folder = opened(tmp_path, start - 1)
        for iteration in (start, start + 1):
            folder.report(iteration, {"loss": 10.0 * start + iteration})
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(point.step, point.value) for point in shown] == [(0, 0), (1, 1), (2, 22), (3, 33), (4, 44), (5, 45)]


def test_first_and_newest_rollouts_stay_and_an_even_spread(tmp_path: Path) -> None:
    own = {tmp_path / "iteration-000020-mine.parquet", tmp_path / "notes.txt"}
    for path in own:
        path.touch()
    for iteration in [1, *range(10, 1010, 10)]:
        (tmp_path / f"iteration-{iteration:06d}.parquet").touch()
        thin_rollouts(tmp_path, 20)
    kept = sorted(int(path.stem.split("-")[1]) for path in set(tmp_path.iterdir()) - own)
    assert len(kept) == 20 and (kept[0], kept[-1]) == (1, 1000)
    assert max(after - before for before, after in pairwise(kept)) < 2 * 999 / 19
    thin_rollouts(tmp_path, 1)
    assert set(tmp_path.iterdir()) == own | {tmp_path / "iteration-001000.parquet"}


def test_the_rollouts_of_the_best_checkpoint_are_kept_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best").symlink_to("step-57")
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    for iteration in [1, *range(10, 1010, 10)]:
        (rollouts / f"iteration-{iteration:06d}.parquet").touch()
        thin_rollouts(rollouts, 4)
    kept = sorted(int(path.stem.split("-")[1]) for path in rollouts.iterdir())
    assert len(kept) == 4 and (kept[0], kept[1], kept[-1]) == (1, 50, 1000)
    thin_rollouts(rollouts, 2)
    assert len(list(rollouts.iterdir())) == 2


def test_saved_rollouts_hold_every_number_in_fixed_types(tmp_path: Path) -> None:
    prompt, schemas = Prompt(uid="p", text="2 √ 1", answer="3", token_ids=(1, 2)), []
    for top in (0, 2):
        samples = [
            TrainingSample(
                rollout=Rollout(
                    uid=f"{length}",
                    prompt=prompt,
                    finish="stop",
                    token_ids=torch.arange(length),
                    rollout_log_probs=-torch.rand(length),
                    sampled_mask=torch.arange(length) != 1,
                    top_ids=torch.randint(2, (length, top)),
                    top_log_probs=-torch.rand(length, top).log(),
                    versions=torch.arange(2 * length).view(length, 2),
                ),
                score=Score(reward=0.5 * length, correct=length > 1 if top else None),
                advantages=torch.rand(length),
            )
            for length in (3, 0, 1)
        ]
        traces = {one.rollout.uid: {"z": torch.rand(len(one.advantages))} for one in samples}
        path = write_rollouts(tmp_path / f"{top}", 7, samples, traces, word_tokenizer(["b"]), small_config())
        saved = pq.read_table(path)
        schemas.append(saved.schema.remove_metadata())
        for row, one in zip(saved.to_pylist(), samples, strict=True):
            rollout = one.rollout
            names = {"top_ids": "rollout_top_ids", "top_log_probs": "rollout_top_log_probs"}
            for name in ("token_ids", "rollout_log_probs", "sampled_mask", "top_ids", "top_log_probs", "versions"):
                assert row[names.get(name, name)] == getattr(rollout, name).tolist(), name
            assert row["z"] == traces[rollout.uid]["z"].tolist() and row["advantages"] == one.advantages.tolist()
            assert row["tokens"] == ["<unk>", "b", None][: len(rollout.token_ids)] and row["prompt_ids"] == [1, 2]
            assert (row["uid"], row["iteration"], row["reward"], row["correct"]) == (
                rollout.uid,
                7,
                one.score.reward,
                one.score.correct,
            )
            assert (row["prompt"], row["answer"], row["finish"]) == (prompt.text, "3", "stop")
    assert schemas[0] == schemas[1]


def test_settings_of_another_version_name_file_and_keys(tmp_path: Path) -> None:
    settings = small_config().model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    assert run_config(tmp_path) == small_config()
    settings["batch"]["epochs"] = settings["batch"].pop("ppo_epochs")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError) as error:
        run_config(tmp_path)
    first, *rest, advice = str(error.value).splitlines()
    assert first == f"{tmp_path / 'config.yaml'} does not fit this version ({version()}):"
    assert advice.startswith("Use the version that began the run, which environment.json names, or give another folder")
    assert len(rest) == 1 and rest[0].startswith("unknown setting 'batch.epochs'; did you mean 'batch.ppo_epochs'?")


@pytest.mark.parametrize(
    ("every", "evaluated", "finished", "is_refused"),
    [(3, (), 3, False), (3, (), 4, True), (9, (), 4, False), (9, (), 5, True), (9, (2,), 2, False), (9, (2,), 3, True)],
)
def test_a_missing_checkpoint_is_missed_once_one_was_due(
    every: int, evaluated: tuple[int, ...], finished: int, is_refused: bool, tmp_path: Path
) -> None:
    """After `checkpoint.every`, at the last iteration, which is the fourth, and at the first evaluation."""
    config = small_config(f"checkpoint.every={every}")
    folder = opened(tmp_path)
    folder.start(config, 1, -1)
    for iteration in range(finished + 1):
        folder.report(iteration, {"eval/policy_accuracy": 0.5} if iteration in (0, *evaluated) else {})

    with pytest.raises(CheckpointError, match=f"{finished} finished") if is_refused else contextlib.nullcontext():
        RunFolder(tmp_path).check(config)


def test_what_is_superseded_has_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "superseded" / "1").mkdir(parents=True)
    for number in (2, 3):
        (tmp_path / "mine").write_text(str(number))
        opened(tmp_path).supersede([tmp_path / "mine"])
        assert (tmp_path / "superseded" / str(number) / "mine").read_text() == str(number)
    assert not list((tmp_path / "superseded" / "1").iterdir())
