"""Places engines in processes of their own, on this machine (`placement.engines`) or where Ray has placed them.

The process that leads a run makes an `EnginePool`; the engine processes are started with `ENTRY` and run `main`. An
engine process reads the models that the run began with, and gets the newest weights before it generates anything, so it
can be started again at any time.

Status: experimental.
"""

import json
import math
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from jackpot.config.arms import build_config
from jackpot.config.config import Config
from jackpot.core.parent import end_with_parent
from jackpot.core.process_rank import process_rank
from jackpot.core.types import Version
from jackpot.launch.engines import EngineSpec, engine_specs, make_each
from jackpot.launch.ray import ray_links
from jackpot.models.load import DTYPES, load_model
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.engines.hosted import EnginePool
from jackpot.rollout.engines.process import ProcessLink, make_starter, serve

ENTRY = "from jackpot.launch.engine_processes import main; main()"
_GPUS = "CUDA_VISIBLE_DEVICES"


def engine_pool(config: Config, specs: Mapping[str, EngineSpec], device: torch.device, version: Version) -> EnginePool:
    """Start the processes of `placement.engines`, or reach those that Ray has placed; send weights, return the pool.

    Args:
        specs: the engines (`engine_specs`), with the paths of the models that the run continues with.
        device: the learner's device.
        version: version of the weights in `specs`.

    Raises:
        EngineError: no engine could be started. The output has the errors of the engines above this error.
        ModelError: a model cannot be loaded.
    """
    setup = {
        "config": config.model_dump_json(),
        "paths": config.model_paths(),  # of the models that the run began with
        "engines": list(specs),
        "device": device.type,
        "threads": 1 if config.threads == "auto" else config.threads,
    }

    weights = {}  # (named parameters of the model, their dtype) by the engine's key
    for name, spec in specs.items():
        dtype = DTYPES[spec.settings.dtype]
        weights[name] = list(load_model(spec.path, dtype, "cpu").named_parameters()), dtype

    # The number of responses that a process is asked for at once; auto: its share of a rollout batch, in whole groups,
    # and at most what every engine generates at once.
    chunk = config.placement.chunk
    if chunk == "auto":
        groups = math.ceil(config.batch.prompts / config.placement.engine_processes)
        chunk = min(groups * config.batch.group_size, *(spec.settings.max_num_seqs for spec in specs.values()))

    make_links = ray_links if config.placement.launcher == "ray" else process_links
    return EnginePool(
        make_links(config, setup),
        weights,
        version,
        chunk=chunk,
        patience=config.placement.timeout,
    )


def process_links(config: Config, setup: dict[str, Any]) -> dict[str, ProcessLink]:
    """Return connections to engine processes on this machine, by name; opening a connection starts its process."""
    links = {}
    for index in range(config.placement.engine_processes):
        start = make_starter(ENTRY, engine_gpu(index, config.shares_gpus) if setup["device"] == "cuda" else {})
        links[f"engine process {index + 1}"] = ProcessLink(start, setup, config.placement.timeout)
    return links


def engine_gpu(index: int, shares: bool) -> dict[str, str]:
    """Return the variable CUDA_VISIBLE_DEVICES by which an engine process sees its GPU and no other.

    Args:
        index: index of the engine process, from 0.
        shares: whether the process shares the GPU of a rank; else it gets one that no rank has, if there are enough.
    """
    visible = os.environ.get(_GPUS)
    gpus = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    first = 0 if shares else process_rank().local_size  # ranks have the GPUs before that index
    return {_GPUS: gpus[(first + index) % len(gpus)]}  # processes share GPUs in turn where there are too few


def main() -> None:
    """Run an engine process: answer the process that started this one, and end when that process ends."""
    end_with_parent()
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        serve(parent, make_hosted)
    os._exit(0)  # without waiting for threads and processes of engines, which end with this process


def make_hosted(setup: dict[str, Any]) -> dict[str, Engine]:
    """Make the engines of an engine process or an actor of Ray, by the key of their settings, such as `engine`.

    Args:
        setup: the setup that `engine_pool` sends.
    """
    config = build_config(json.loads(setup["config"]))
    torch.set_num_threads(setup["threads"])
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    specs = {name: spec for name, spec in engine_specs(config, setup["paths"]).items() if name in setup["engines"]}
    # Version -1: the models are those that the run began with, and newer weights come before the first request. Nothing
    # closes the engines, which end with their process, so the ExitStack is dropped.
    return make_each(specs, torch.device(setup["device"]), Version(-1, -1), bool(config.draft), undo=ExitStack())
