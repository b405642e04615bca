"""The table of all formats of saved rollouts, by name, and the search for the format of given files."""

from pathlib import Path

from jackpot.analysis.replay.formats import areal, jsonl, openrlhf, prime_rl, skyrl, slime, trl, verl
from jackpot.analysis.replay.formats import jackpot as ours
from jackpot.analysis.replay.formats.base import DumpFormat
from jackpot.core.errors import ConfigError, DataError, unknown_name

AUTO = "auto"
# Formats are tried in this order, those that are cheap to recognize first.
_MODULES = (ours, verl, trl, prime_rl, areal, jsonl, openrlhf, slime, skyrl)
FORMATS = {module.FORMAT.name: module.FORMAT for module in _MODULES}
WRITABLE = {name: dump.writer for name, dump in FORMATS.items() if dump.writer}
MOST_FILES = 8  # files whose columns are compared with `DumpFormat.marks`, the columns that identify a format


def find_format(path: Path, name: str) -> tuple[DumpFormat, list[Path]]:
    """Find the format of saved rollouts, and all their files, damaged ones included.

    Args:
        path: a run folder, or a file or folder of saved rollouts.
        name: name of the format, or `auto`.

    Raises:
        ConfigError: an unknown format.
        DataError: the path does not exist, or has no file of the named format, or of any format.
    """
    if name != AUTO and name not in FORMATS:
        raise ConfigError(unknown_name("format", name, [AUTO, *FORMATS]))
    if not path.exists():
        raise DataError(f"there is no {path}; give the folder of a run, or a file or folder of saved rollouts")

    if name != AUTO:
        dump = FORMATS[name]
        if not (files := dump.files(path)):
            raise DataError(f"{path} has no saved rollouts of {name}.\n{dump.how}")
        return dump, files

    if (path / "config.yaml").is_file() and not ours.files(path):
        raise DataError(f"{path} is a run that has saved no rollouts yet. {ours.HOW}")

    problems: list[str] = []
    for dump in FORMATS.values():
        files = dump.files(path)
        if any(dump.recognizes(file, problems.append) for file in files[:MOST_FILES]):  # the first few suffice
            return dump, files

    damaged = "".join(f"{problem}\n" for problem in list(dict.fromkeys(problems))[:MOST_FILES])
    raise DataError(
        f"{damaged}{path} has no rollouts in a format that is known: {', '.join(FORMATS)}. If it is a dump of one of "
        f"them, --format says what is missing.\nEvery trainer can write bare JSONL. {jsonl.HOW}"
    )
