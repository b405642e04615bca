"""A run folder keeps its metrics, events, settings and rollouts through kills, damage and changed versions."""

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


def rewound_folder(path: Path, iteration: int = -1) -> RunFolder:
    """Return the run folder at a path, made if it is not there, as a start after that iteration opens it."""
    path.mkdir(exist_ok=True)
    folder = RunFolder(path)
    folder.rewind(iteration)
    return folder


def iterations_of(folder: RunFolder, name: str = "metrics.jsonl") -> list[int]:
    """Return the iterations of the lines of a file."""
    return [line["iteration"] for line in folder.read(name)]


def test_a_line_torn_at_the_end_is_left_out_and_forgotten(tmp_path: Path) -> None:
    folder = rewound_folder(tmp_path)
    for iteration in range(3):
        folder.report(iteration, {"loss": 1.0})

    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "loss": 1.0}')  # all but the end of the line

    assert iterations_of(folder) == [0, 1, 2]

    folder = rewound_folder(tmp_path, iteration=2)
    folder.report(3, {"loss": 2.0})

    assert iterations_of(folder) == [0, 1, 2, 3]
    assert folder.read("metrics.jsonl")[3]["loss"] == 2.0


def test_a_torn_line_costs_itself_only_and_is_named(tmp_path: Path, caplog) -> None:
    folder = rewound_folder(tmp_path)
    for iteration in range(4):
        folder.report(iteration, {"loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    torn_line = lines[1][:10] + "\n"

    path.write_text("".join([lines[0], torn_line, *lines[2:]]))

    assert iterations_of(folder) == [0, 2, 3]

    rewound_folder(tmp_path, iteration=2)
    assert path.read_text() == lines[0] + lines[2]
    assert "metrics.jsonl: lines 2 cannot be read and are removed" in caplog.text


def test_rewinding_forgets_later_and_half_written_files(tmp_path: Path) -> None:
    folder = rewound_folder(tmp_path)
    for iteration in range(4):
        folder.event(iteration, {"event": "something"})
        folder.report(iteration, {"loss": 1.0})
    for name in ("rollouts/iteration-000002.parquet", "rollouts/iteration-000003.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "rollouts" / "iteration-000001.parquet.partial").touch()

    for _ in range(2):  # a kill on the way is made good by doing it again
        folder = rewound_folder(tmp_path, iteration=2)
        assert iterations_of(folder) == [0, 1, 2]
        assert iterations_of(folder, "events.jsonl") == [0, 1, 2]
        assert [path.name for path in folder.rollouts.iterdir()] == ["iteration-000002.parquet"]

    superseded = tmp_path / "superseded"
    assert [path.name for path in superseded.iterdir()] == ["1"]
    assert {path.name for path in (superseded / "1").rglob("*.*")} == {
        "metrics.jsonl",
        "events.jsonl",
        "iteration-000003.parquet",
    }
    assert json.loads((superseded / "1" / "metrics.jsonl").read_text())["iteration"] == 3


@pytest.mark.parametrize("newest_checkpoint", [2, -1])
def test_a_kill_of_a_start_is_made_good_by_the_next(newest_checkpoint: int, tmp_path: Path) -> None:
    """Where it continues, and where it begins anew: no line and no file is lost."""
    config = small_config("checkpoint.every=100")

    for call_index in range(1, 1000):
        path = tmp_path / str(call_index)
        folder = rewound_folder(path)
        folder.start(config, threads=1, iteration=-1)
        for iteration in range(4):
            folder.event(iteration, {"event": "something"})
            folder.report(iteration, {"loss": 1.0})
        folder.rollouts.mkdir()
        (folder.rollouts / "iteration-000003.parquet").write_bytes(b"rollouts")
        files_before = contents(path)

        with pytest.MonkeyPatch.context() as monkeypatch, contextlib.suppress(Killed):
            kill = Kill(monkeypatch, call_index)
            RunFolder(path).start(config, threads=1, iteration=newest_checkpoint)

        folder = RunFolder(path)
        folder.check(config)
        folder.start(config, threads=1, iteration=newest_checkpoint)

        expected_iterations = list(range(newest_checkpoint + 1))
        assert iterations_of(folder) == expected_iterations
        assert iterations_of(folder, "events.jsonl") == expected_iterations
        assert run_config(path) == config
        assert not list(folder.rollouts.iterdir())

        files_after = contents(path)
        for name in ("metrics.jsonl", "events.jsonl"):
            lines = b"".join(
                content for path_name, content in files_after.items() if path_name.endswith(name)
            ).splitlines()
            assert set(files_before.pop(name).splitlines()) <= set(lines)
        assert set(files_before.values()) - {files_before["environment.json"]} <= set(files_after.values())

        if kill.left > 0:
            break

    assert kill.left > 0  # the last kill came after every call
    assert call_index > 10  # calls were tried


def test_tensorboard_shows_every_iteration_once_after_a_kill(tmp_path: Path) -> None:
    folder = rewound_folder(tmp_path)
    for iteration in range(4):
        folder.report(iteration, {"loss": float(iteration), "never": float("nan")})
    with next((tmp_path / "tensorboard").iterdir()).open("ab") as file:
        file.write(b"half a record")
    folder = rewound_folder(tmp_path, iteration=2)
    folder.report(3, {"loss": 30.0})

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()

    assert [(point.step, point.value) for point in events.Scalars("loss")] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert "never" not in events.Tags()["scalars"]
    assert "checkpoint/failed" in events.Tags()["scalars"]


def test_a_failed_file_is_counted_named_and_shown(tmp_path: Path, caplog) -> None:
    folder = rewound_folder(tmp_path)
    with folder.dispensable(3, "rollouts"):
        (tmp_path / "nowhere" / "file").touch()

    line = folder.report(3, {})

    assert line["files/failed"] == 1
    assert line["checkpoint/failed"] == 0

    [event] = folder.read("events.jsonl")
    assert event["event"] == "write_failed"
    assert event["file"] == "rollouts"
    assert "No such file" in event["why"]
    assert "iteration 3: write_failed: rollouts: [Errno 2]" in caplog.text


def test_a_run_with_a_checkpoint_and_no_line_keeps_its_settings(tmp_path: Path) -> None:
    """Lines may have waited in the memory of a process that was killed."""
    folder = rewound_folder(tmp_path)
    other_config = small_config("batch.prompts=8")
    folder.start(small_config(), threads=1, iteration=-1)
    folder.check(other_config)  # allowed before there is a checkpoint
    (tmp_path / "checkpoints" / "step-2").mkdir()

    with pytest.raises(CheckpointError, match=r"batch\.prompts: 4 in the folder, 8 now"):
        folder.check(other_config)


def test_a_continued_run_keeps_its_threads(tmp_path: Path) -> None:
    auto = small_config("threads=auto")

    assert rewound_folder(tmp_path).start(auto, threads=3, iteration=-1) == 3
    assert rewound_folder(tmp_path, iteration=2).start(auto, threads=7, iteration=2) == 3
    assert rewound_folder(tmp_path, iteration=2).start(small_config("threads=5"), threads=5, iteration=2) == 5
    assert Environment(tmp_path).threads == 5


def test_starts_are_recorded_and_other_packages_are_an_event(tmp_path: Path, caplog) -> None:
    rewound_folder(tmp_path).start(small_config(), threads=1, iteration=-1)

    [start] = json.loads((tmp_path / "environment.json").read_text())["starts"]
    assert start["jackpot"] == version()
    assert start["torch"] == torch.__version__
    assert start["commit"] == commit()

    text = (tmp_path / "environment.json").read_text()
    (tmp_path / "environment.json").write_text(text.replace(torch.__version__, "1.0"))
    folder = rewound_folder(tmp_path, iteration=2)
    folder.start(small_config(), threads=1, iteration=2)

    starts = json.loads((tmp_path / "environment.json").read_text())["starts"]
    assert [(record["after_iteration"], record["torch"]) for record in starts] == [(-1, "1.0"), (2, torch.__version__)]

    [event] = folder.read("events.jsonl")
    assert event["event"] == "environment_changed"
    assert event["torch"] == f"torch 1.0 -> {torch.__version__}"
    assert f"torch 1.0 -> {torch.__version__}" in caplog.text
    assert "python" not in event

    rewound_folder(tmp_path, iteration=2).start(small_config(), threads=1, iteration=2)
    assert len(folder.read("events.jsonl")) == 1


def test_the_commit_is_that_of_the_files_and_their_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    tracked_file, untracked_file = tmp_path / "known.py", tmp_path / "unknown.py"
    for path in (tracked_file, untracked_file):
        path.touch()

    assert commit(str(tracked_file)) is None

    git("init")
    git("add", "known.py")
    git("commit", "-m", "first")
    commit.cache_clear()

    head = git("rev-parse", "HEAD").strip()
    assert commit(str(tracked_file)) == head
    assert commit(str(untracked_file)) is None

    tracked_file.write_text("changed")
    commit.cache_clear()
    assert commit(str(tracked_file)) == f"{head}-dirty"


DAMAGED_FILES = {  # file: what it holds, and what the error says
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


@pytest.mark.parametrize("damage", DAMAGED_FILES)
def test_a_damaged_file_is_named_with_its_line(damage: str, tmp_path: Path) -> None:
    name, content, message = DAMAGED_FILES[damage]
    folder = rewound_folder(tmp_path)
    folder.start(small_config(), threads=1, iteration=-1)
    (tmp_path / name).write_bytes(content)
    expected_files = contents(tmp_path)

    with pytest.raises(CheckpointError, match=message):
        folder.check(small_config())

    assert contents(tmp_path) == expected_files


def test_a_clock_that_was_set_back_changes_no_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads its files in the order of the times in their names."""
    for start_iteration, hours in ((0, 0), (2, -1), (3, -2), (4, 5)):  # hours by which the clock is off
        monkeypatch.setattr(time, "time", lambda hours=hours: 1_700_000_000.0 + 3600.0 * hours)
        folder = rewound_folder(tmp_path, iteration=start_iteration - 1)
        for iteration in (start_iteration, start_iteration + 1):
            folder.report(iteration, {"loss": 10.0 * start_iteration + iteration})

    points = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")

    assert [(point.step, point.value) for point in points] == [(0, 0), (1, 1), (2, 22), (3, 33), (4, 44), (5, 45)]


def test_first_and_newest_rollouts_stay_and_an_even_spread(tmp_path: Path) -> None:
    other_files = {tmp_path / "iteration-000020-mine.parquet", tmp_path / "notes.txt"}
    for path in other_files:
        path.touch()

    for iteration in [1, *range(10, 1010, 10)]:
        (tmp_path / f"iteration-{iteration:06d}.parquet").touch()
        thin_rollouts(tmp_path, 20)

    kept_iterations = sorted(int(path.stem.split("-")[1]) for path in set(tmp_path.iterdir()) - other_files)

    assert len(kept_iterations) == 20
    assert kept_iterations[0] == 1
    assert kept_iterations[-1] == 1000
    even_distance = 999 / 19
    assert max(upper - lower for lower, upper in pairwise(kept_iterations)) < 2 * even_distance

    thin_rollouts(tmp_path, 1)
    assert set(tmp_path.iterdir()) == other_files | {tmp_path / "iteration-001000.parquet"}


def test_the_rollouts_of_the_best_checkpoint_are_kept_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best").symlink_to("step-57")
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()

    for iteration in [1, *range(10, 1010, 10)]:
        (rollouts / f"iteration-{iteration:06d}.parquet").touch()
        thin_rollouts(rollouts, 4)

    kept_iterations = sorted(int(path.stem.split("-")[1]) for path in rollouts.iterdir())

    assert len(kept_iterations) == 4
    assert kept_iterations[0] == 1
    assert kept_iterations[1] == 50  # the newest at or before step 57
    assert kept_iterations[-1] == 1000

    thin_rollouts(rollouts, 2)
    assert len(list(rollouts.iterdir())) == 2


def test_saved_rollouts_hold_every_number_in_fixed_types(tmp_path: Path) -> None:
    prompt = Prompt(uid="p", text="2 √ 1", answer="3", token_ids=(1, 2))
    schemas = []

    for top_count in (0, 2):
        samples = [
            TrainingSample(
                rollout=Rollout(
                    uid=f"{length}",
                    prompt=prompt,
                    finish="stop",
                    token_ids=torch.arange(length),
                    rollout_log_probs=-torch.rand(length),
                    sampled_mask=torch.arange(length) != 1,
                    top_ids=torch.randint(2, (length, top_count)),
                    top_log_probs=-torch.rand(length, top_count).log(),
                    versions=torch.arange(2 * length).view(length, 2),
                ),
                score=Score(reward=0.5 * length, correct=length > 1 if top_count else None),
                advantages=torch.rand(length),
            )
            for length in (3, 0, 1)
        ]
        traces = {sample.rollout.uid: {"z": torch.rand(len(sample.advantages))} for sample in samples}
        path = write_rollouts(tmp_path / f"{top_count}", 7, samples, traces, word_tokenizer(["b"]), small_config())
        table = pq.read_table(path)
        schemas.append(table.schema.remove_metadata())

        for row, sample in zip(table.to_pylist(), samples, strict=True):
            rollout = sample.rollout
            names = {"top_ids": "rollout_top_ids", "top_log_probs": "rollout_top_log_probs"}
            for name in ("token_ids", "rollout_log_probs", "sampled_mask", "top_ids", "top_log_probs", "versions"):
                assert row[names.get(name, name)] == getattr(rollout, name).tolist(), name
            assert row["z"] == traces[rollout.uid]["z"].tolist()
            assert row["advantages"] == sample.advantages.tolist()
            assert row["tokens"] == ["<unk>", "b", None][: len(rollout.token_ids)]
            assert row["prompt_ids"] == [1, 2]
            assert row["uid"] == rollout.uid
            assert row["iteration"] == 7
            assert row["reward"] == sample.score.reward
            assert row["correct"] == sample.score.correct
            assert row["prompt"] == prompt.text
            assert row["answer"] == "3"
            assert row["finish"] == "stop"

    assert schemas[0] == schemas[1]


def test_settings_of_another_version_name_file_and_keys(tmp_path: Path) -> None:
    settings = small_config().model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))

    assert run_config(tmp_path) == small_config()

    settings["batch"]["epochs"] = settings["batch"].pop("ppo_epochs")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))

    with pytest.raises(ConfigError) as error:
        run_config(tmp_path)
    headline, *details, advice = str(error.value).splitlines()
    assert headline == f"{tmp_path / 'config.yaml'} does not fit this version ({version()}):"
    assert advice.startswith("Use the version that began the run, which environment.json names, or give another folder")
    assert len(details) == 1
    assert details[0].startswith("unknown setting 'batch.epochs'; did you mean 'batch.ppo_epochs'?")


@pytest.mark.parametrize(
    ("every", "evaluated", "finished", "is_refused"),
    [(3, (), 3, False), (3, (), 4, True), (9, (), 4, False), (9, (), 5, True), (9, (2,), 2, False), (9, (2,), 3, True)],
)
def test_a_missing_checkpoint_is_missed_once_one_was_due(
    every: int, evaluated: tuple[int, ...], finished: int, is_refused: bool, tmp_path: Path
) -> None:
    """After `checkpoint.every`, at the last iteration, which is the fourth, and at the first evaluation."""
    config = small_config(f"checkpoint.every={every}")
    folder = rewound_folder(tmp_path)
    folder.start(config, threads=1, iteration=-1)
    for iteration in range(finished + 1):
        folder.report(iteration, {"eval/policy_accuracy": 0.5} if iteration in (0, *evaluated) else {})

    with pytest.raises(CheckpointError, match=f"{finished} finished") if is_refused else contextlib.nullcontext():
        RunFolder(tmp_path).check(config)


def test_each_superseding_has_a_numbered_folder(tmp_path: Path) -> None:
    (tmp_path / "superseded" / "1").mkdir(parents=True)

    for index in (2, 3):
        (tmp_path / "mine").write_text(str(index))
        rewound_folder(tmp_path).supersede([tmp_path / "mine"])
        assert (tmp_path / "superseded" / str(index) / "mine").read_text() == str(index)

    assert not list((tmp_path / "superseded" / "1").iterdir())
