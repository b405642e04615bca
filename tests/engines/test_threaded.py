"""The shared suite on an engine that writes by itself, with nothing to install: what `BackgroundEngine` promises."""

from pathlib import Path

import torch

from engines.conformance import EngineConformance
from engines.threaded import ThreadedEngine
from jackpot.engines.transformers import TransformersEngine
from jackpot.models.load import eos_token_ids, load_model
from jackpot.types import Version


class TestThreadedEngine(EngineConformance):
    @staticmethod
    def make_engine(folder: Path, version: Version) -> ThreadedEngine:
        model = load_model(folder, torch.float32)
        stops = eos_token_ids(model)
        return ThreadedEngine(TransformersEngine(model, eos_token_ids=stops, version=version, max_batch_size=32))
