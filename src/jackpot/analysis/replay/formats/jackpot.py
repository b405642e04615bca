"""The format of Jackpot's own run folders, and of single files from them, each of which has the run's settings."""

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from jackpot.analysis.replay.formats.base import DumpFormat
from jackpot.analysis.replay.formats.jsonl import COLUMNS
from jackpot.analysis.replay.formats.records import DumpRecord, Warn, parquet_rows
from jackpot.analysis.replay.responses import NEEDED
from jackpot.config.arms import build_config
from jackpot.config.config import Config
from jackpot.core.foreign import check_foreign, parse_json
from jackpot.training.run_folder.folder import run_config
from jackpot.training.run_folder.saved_rollouts import UnreadableRollouts, open_rollout_file

HOW = "A run saves rollouts every rollouts.every iterations and keeps rollouts.keep of them."
_NAMES = "iteration-*.parquet"
_COLUMNS = ("iteration", "sampled_by", *COLUMNS)


def files(path: Path) -> list[Path]:
    """Find the files of saved iterations, in their order; the path is a run folder, a folder of files, or one file."""
    if path.is_file():
        return [path] if path.match(_NAMES) else []
    return sorted((path / "rollouts").glob(_NAMES)) or sorted(path.glob(_NAMES))


def config_of(path: Path) -> Config:
    """Return the settings of a run folder, or else the settings in the first file of saved rollouts.

    Raises:
        CheckpointError: a run folder with a damaged config.yaml.
        ConfigError: settings that do not fit this version.
        DataError: a damaged file.
    """
    if (path / "config.yaml").is_file():
        return run_config(path)

    file = files(path)[0]
    open_rollout_file(file)  # raises if the file is damaged or of another schema version
    # `check_foreign` returns the file's path, or raises for a file that is no regular one.
    return build_config(parse_json(pq.read_schema(check_foreign(file)).metadata[b"config"]))


def records(path: Path, warn: Warn) -> Iterator[tuple[int, DumpRecord]]:
    """Yield (index, record) of every response in a file, and warn if the file's footer or end is damaged."""
    try:
        open_rollout_file(path)
    except UnreadableRollouts as error:
        warn(str(error))
        return
    yield from parquet_rows(path, warn, _COLUMNS)


FORMAT = DumpFormat(
    name="jackpot",
    files=files,
    records=records,
    marks=(),
    needed=(*NEEDED, "old_log_probs"),
    how=HOW,
    where=lambda path: re.sub(r"-0*(?=\d)", " ", path.stem),
)
