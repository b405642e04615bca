"""Kills at every call that changes the disk, one after the other."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.runs import Killed


class Kill:
    """Dies instead of the n-th call that changes something on the disk."""

    CALLS = ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "symlink_to"), (shutil, "rmtree"))
    CALLS += ((Path, "unlink"), (os, "unlink"), (os, "truncate"), (torch, "save"))

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.left = at  # calls until the one that dies
        for owner, name in self.CALLS:
            monkeypatch.setattr(owner, name, self._or_die(getattr(owner, name)))

    def _or_die(self, call: Callable) -> Callable:
        """Return a call that counts, and that dies in place of the n-th one."""

        def counting_call(*arguments, **keywords):
            self.left -= 1
            if self.left == 0:
                raise Killed
            return call(*arguments, **keywords)

        return counting_call
