"""The published sets (GSM8K, MATH, AMC, AIME), which are not part of the project."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from helpers.paths import ROOT

FOLDERS = (ROOT / "shared" / "data", ROOT.parent / "shared" / "data")
SETS = ("gsm8k_train", "gsm8k_test", "math_train", "math500", "amc22_23", "aime24")


def data_folder() -> Path:
    """Return the folder that JACKPOT_DATA names, or shared/data in the repository or beside it; else skip the test."""
    chosen_folder = os.environ.get("JACKPOT_DATA")
    folders = (Path(chosen_folder),) if chosen_folder else FOLDERS
    for folder in folders:
        if folder.is_dir():
            return folder
    listed = " or ".join(map(str, folders))
    pytest.skip(f"the published sets are not in {listed}; set JACKPOT_DATA to the folder that holds them")


def rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of one of `SETS`."""
    lines = (data_folder() / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
