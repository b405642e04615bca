"""Messages about what a process does now, such as `stage("loading the policy")`, for the command line to show.

A stage is a message of the logger `jackpot.stages` at level INFO, which Python shows nowhere by default.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

_LOG = logging.getLogger("jackpot.stages")


def stage(text: str) -> None:
    """Log what this process begins now, in words such as "loading the policy"."""
    _LOG.info("%s", text)


@contextmanager
def listening(show: Callable[[str], None]) -> Generator[None]:
    """Call `show` with the text of every stage that begins within the block, in the thread that begins the stage."""

    def show_message(record: logging.LogRecord) -> bool:
        """Show the text of a logged stage; return True, by which a filter of `logging` lets a message pass."""
        show(record.getMessage())
        return True  # this filter drops no message: others listen too

    level, propagate = _LOG.level, _LOG.propagate
    _LOG.addFilter(show_message)
    _LOG.setLevel(logging.INFO)
    _LOG.propagate = False  # a handler of the root logger would print each stage again
    try:
        yield
    finally:
        _LOG.removeFilter(show_message)
        _LOG.setLevel(level)
        _LOG.propagate = propagate
