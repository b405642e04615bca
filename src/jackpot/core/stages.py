"""Says what a process does now, such as `stage("loading the policy")`; the command line shows it.

A stage is a message of the logger `jackpot.stages` at level INFO, which Python shows nowhere by default.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

_LOG = logging.getLogger("jackpot.stages")


def stage(text: str) -> None:
    """Say that `text` begins now, in words such as "loading the policy"."""
    _LOG.info("%s", text)


@contextmanager
def listening(show: Callable[[str], None]) -> Generator[None]:
    """Call `show` with every stage that begins meanwhile, from the thread in which it begins."""
    handler, level, propagate = _Handler(show), _LOG.level, _LOG.propagate
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    _LOG.propagate = False  # a handler of the root logger would print each stage again
    try:
        yield
    finally:
        _LOG.removeHandler(handler)
        _LOG.setLevel(level)
        _LOG.propagate = propagate


class _Handler(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())
