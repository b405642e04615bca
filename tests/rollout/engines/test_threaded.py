"""The shared suite on an engine that generates in the background, with nothing to install (`BackgroundEngine`)."""

from pathlib import Path

import pytest
import torch

from helpers.engines.conformance import OLD, QueueConformance
from helpers.engines.reference import tiny_request
from helpers.engines.threaded import ThreadedEngine
from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.errors import EngineError
from jackpot.core.types import Version
from jackpot.models.load import eos_token_ids, load_model
from jackpot.rollout.engines.transformers.engine import TransformersEngine


class TestThreadedEngine(QueueConformance):
    @staticmethod
    def make_engine(folder: Path, version: Version) -> ThreadedEngine:
        model = load_model(folder, torch.float32)
        settings, stops = TransformersEngineConfig(max_num_seqs=32), eos_token_ids(model)
        return ThreadedEngine(TransformersEngine(model, settings, eos_token_ids=stops, version=version))


def test_generate_raises_a_failure_though_some_had_finished(folder: Path) -> None:
    def break_down() -> None:
        if engine.finished:
            raise RuntimeError("out of memory")

    engine = TestThreadedEngine.make_engine(folder, OLD)
    engine._before_step = break_down

    with pytest.raises(EngineError, match="the engine's thread cannot go on: RuntimeError: out of memory"):
        engine.generate([tiny_request(f"{length}", max_new_tokens=length) for length in (1, 20)])
    assert engine.finished == 1

    engine.close()
