"""A machine without the hub and without anything downloaded from it, whatever this one has."""

from pathlib import Path

import pytest

from jackpot.models.hub import hub_answers


def without_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The libraries' own switch for machines that are offline; `cache` is an empty folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    hub_answers.cache_clear()
    monkeypatch.setattr("jackpot.models.hub.hub_answers", hub_answers.__wrapped__)  # asked anew, and never remembered
