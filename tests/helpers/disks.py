"""Disks that are full, by the operating system's own word.

python disks.py FOLDER    trains there; the disk is full in iteration 2
"""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from helpers.runs import SHORT, small_config
from jackpot.launch.start import launch
from jackpot.training.trainer import MetricsLine

OVERRIDES = (SHORT, "iterations=4", "rollouts.every=1", "checkpoint.keep=1")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes: more is refused with EFBIG, at whatever level it is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill(ballast: Path) -> None:
    """Write into a file until there is no room for another page."""
    descriptor = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(descriptor, bytes(1 << 16)):
            pass
    except OSError as error:
        print(f"the disk is full: {error}")
    finally:
        os.close(descriptor)


def main(folder: Path) -> None:
    """Train in a folder; a file beside it fills the disk after iteration 1, and goes after iteration 2."""
    ballast = folder.with_name("ballast")

    def listen(line: MetricsLine) -> None:
        if line["iteration"] == 1:
            fill(ballast)
        if line["iteration"] == 2:
            ballast.unlink()

    with closing(launch(small_config(*OVERRIDES), folder, listen)) as trainer:
        trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
