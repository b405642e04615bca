"""Fixtures of the shared suite: models, references and engines. A class shares one engine, which may start slowly."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.engines.conformance import OLD
from helpers.engines.reference import Reference, save_tiny_model
from jackpot.rollout.engines.base import Engine


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the model that an engine starts with."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "old", seed=0)


@pytest.fixture(scope="session")
def new_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model of the same architecture with other weights."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "new", seed=1)


@pytest.fixture(scope="class")
def reference(request: pytest.FixtureRequest, folder: Path) -> Reference:
    return request.cls.make_reference(folder)


@pytest.fixture(scope="class")
def new_reference(request: pytest.FixtureRequest, new_folder: Path) -> Reference:
    return request.cls.make_reference(new_folder)


@pytest.fixture(scope="class")
def shared_engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    engine = request.cls.make_engine(folder, OLD)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """Give a test the engine of its class; collect afterwards what a failed test left in flight."""
    yield shared_engine
    shared_engine.collect(10_000)
