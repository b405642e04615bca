"""Places engines in processes of their own on this machine (`placement.engines`): both ends of it.

The process that leads a run makes an `EnginePool`; every other one is started with `ENTRY` and runs `main`. A process
reads the models that the run began with, and gets the newest weights before it generates anything. So it can be started
again at any time, whatever checkpoints there are by then.

Status: experimental.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from jackpot.config.arms import build_config
from jackpot.config.config import Config
from jackpot.core.parent import end_with_parent
from jackpot.core.process_rank import process_rank
from jackpot.core.roles import Role
from jackpot.core.types import Version
from jackpot.launch.engines import EnginePart, engine_parts, make_each
from jackpot.models.load import DTYPES, load_model
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.engines.hosted import EnginePool, Link
from jackpot.rollout.engines.process import ProcessLink, make_starter, serve

ENTRY = "from jackpot.launch.engine_processes import main; main()"
_GPUS = "CUDA_VISIBLE_DEVICES"
MakeLinks = Callable[[Config, dict[str, Any]], Mapping[str, Link]]


def engine_pool(
    config: Config,
    parts: Mapping[str, EnginePart],
    fresh: Mapping[Role, str],
    device: torch.device,
    version: Version,
    links: MakeLinks,
) -> EnginePool:
    """Start the processes of `placement.engines`, and send them the weights of `parts`.

    Args:
        parts: the engines, of `engine_parts`, with the paths of the models that the run continues with.
        fresh: paths of the models that the run began with.
        links: makes the connections to hosts by name, from the settings and the setup of each host.

    Raises:
        EngineError: no engine could be started; their own errors stand above.
        ModelError: as `load_model`.
    """
    setup = {
        "config": config.model_dump_json(),
        "paths": dict(fresh),
        "engines": list(parts),
        "device": device.type,
        "threads": 1 if config.threads == "auto" else config.threads,
    }

    weights = {}
    for name, part in parts.items():
        dtype = DTYPES[part.settings.dtype]
        weights[name] = list(load_model(part.path, dtype, "cpu").named_parameters()), dtype

    chunk, groups = config.placement.chunk, -(-config.batch.prompts // config.placement.engine_processes)
    if chunk == "auto":
        chunk = min(groups * config.batch.group_size, *(part.settings.max_num_seqs for part in parts.values()))

    return EnginePool(
        links(config, setup),
        weights,
        version,
        chunk=chunk,
        patience=config.placement.timeout,
    )


def process_links(config: Config, setup: dict[str, Any]) -> dict[str, ProcessLink]:
    """Return connections to processes of this machine, which are started when they are opened."""
    links = {}
    for number in range(config.placement.engine_processes):
        start = make_starter(ENTRY, own_gpu(number, config.shares_gpus) if setup["device"] == "cuda" else {})
        links[f"engine process {number + 1}"] = ProcessLink(start, setup, config.placement.timeout)
    return links


def own_gpu(number: int, shares: bool) -> dict[str, str]:
    """Return what gives an engine a GPU: a rank's where it `shares`, else one without, as far as there are enough."""
    given = os.environ.get(_GPUS)
    gpus = given.split(",") if given else [str(one) for one in range(torch.cuda.device_count())]
    return {_GPUS: gpus[(number if shares else process_rank().local_size + number) % len(gpus)]}


def main() -> None:
    """Generate in this process what the process asks for that has started it, and end with it."""
    end_with_parent()
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        serve(ours, make_hosted)
    os._exit(0)  # what engines keep open ends with the process


def make_hosted(setup: dict[str, Any]) -> dict[str, Engine]:
    """Make the engines of a host, by the setting that describes each, from what `engine_pool` sends."""
    config = build_config(json.loads(setup["config"]))
    torch.set_num_threads(setup["threads"])
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    parts = {name: part for name, part in engine_parts(config, setup["paths"]).items() if name in setup["engines"]}
    return make_each(parts, torch.device(setup["device"]), Version(-1, -1), bool(config.draft), ExitStack())
