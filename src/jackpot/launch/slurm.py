"""Writes the batch script of `jackpot launch --slurm`: torchrun on some nodes, vLLM servers on others. No torch.

Status: never run on its target (a SLURM cluster).
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from jackpot.config.base import Strict
from jackpot.config.config import Config
from jackpot.config.engines import EngineConfig, TransformersEngineConfig, VLLMEngineConfig, VLLMServerEngineConfig
from jackpot.core.errors import ConfigError

NOTICE = 300  # seconds before the end of a job's time at which SLURM says so, for a last checkpoint
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Holds the machines of a batch job."""

    name: str
    nodes: int  # that train
    servers: int  # further nodes, whose GPUs have a vLLM server each
    gpus: int  # of every node; 0: the job has none
    ranks: int  # on every node that trains
    time: str  # limit of the job, as SLURM takes it: hours:minutes:seconds


def script(config: Config, job: Job, command: list[str], run: str) -> str:
    """Return the text of a bash script for `sbatch`, which trains a run, or continues it.

    Args:
        command: the words of `jackpot train`, without the run folder and settings of servers.
        run: the run folder, on a disk that all nodes see.

    Raises:
        ConfigError: servers that the script cannot start as the settings need them.
    """
    gpus = f"#SBATCH --gpus-per-node={job.gpus}\n" if job.gpus else ""
    lines = [_HEAD.format(name=job.name, nodes=job.nodes + job.servers, gpus=gpus, time=job.time, notice=NOTICE)]
    lines.append(f"run=$(realpath -m {shlex.quote(run)})\n")
    words = shlex.join(command) + ' --run "$run"'
    if job.servers:
        lines.append(_SERVERS.format(serve=_serve(config, job), gpus=job.gpus, first=job.nodes))
        words += (
            f' {shlex.join(server_settings(config, job))} "engine.urls=[$urls]" "engine.weights_folder=$run.weights"'
        )
    shutdown = NOTICE - 30
    return "".join([*lines, _TRAIN.format(nodes=job.nodes, ranks=job.ranks, shutdown=shutdown, words=words)])


def server_settings(config: Config, job: Job) -> list[str]:
    """Return the settings, but for addresses and folder, that have a run generate with the servers of its job.

    vLLM that evaluates stays what it is, in processes of their own, one for each rank of the first node.
    """
    settings = ["engine=vllm_server", *_kept("engine", config.engine, VLLMServerEngineConfig)]
    evaluates = config.evaluation.engine or (config.engine if config.rollout_model else None)
    if isinstance(evaluates, VLLMEngineConfig):
        settings += ["evaluation.engine=vllm", *_kept("evaluation.engine", evaluates, VLLMEngineConfig)]
    elif config.rollout_model and not config.evaluation.engine:
        settings += ["evaluation.engine=transformers"]
        settings += _kept("evaluation.engine", config.engine, TransformersEngineConfig)
    return settings


def without_replaced(config: Config, job: Job, overrides: Sequence[str]) -> list[str]:
    """Return the user's settings but for those of the engines that `server_settings` replaces, and which it keeps."""
    replaced = {setting.partition("=")[0] for setting in server_settings(config, job)} & {"engine", "evaluation.engine"}
    if isinstance(config.engine, VLLMServerEngineConfig):
        replaced -= {"engine"}
    blocks = tuple(f"{key}." for key in replaced)
    return [setting for setting in overrides if not f"{setting.partition('=')[0]}.".startswith(blocks)]


def _kept(key: str, engine: EngineConfig, kind: type[Strict]) -> list[str]:
    """Return what an engine of a kind, at `key`, is to have of this one: settings that both have."""
    names = [name for name in kind.model_fields if name != "name" and name in type(engine).model_fields]
    values = {name: getattr(engine, name) for name in names if name not in ("urls", "weights_folder")}
    return [f"{key}.{name}={value}" for name, value in values.items() if value != kind.model_fields[name].get_default()]


def _serve(config: Config, job: Job) -> str:
    """Return the command of one server."""
    path = (config.rollout_model or config.policy).path

    if config.draft:
        _refuse("a server's draft model would keep the weights that it started with; set engine.draft=null")
    if not job.gpus:
        _refuse("servers need GPUs here (docs/vllm.md says how to start one on a CPU); give --gpus")
    if path.startswith("starter:"):
        _refuse(f"vLLM serves a folder or a model of the hub, and not {path}; save it to a folder first")
    if config.engine.quantization:
        _refuse(
            f"servers with quantization {config.engine.quantization} serve a copy of the model in that format "
            f"(docs/vllm.md); start them yourself and give engine.urls"
        )

    words = ["vllm", "serve", path, "--dtype", _DTYPES[config.engine.dtype]]
    words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    words += ["--generation-config", "vllm", "--skip-tokenizer-init"]

    if config.engine.kv_cache_dtype:
        words += ["--kv-cache-dtype", config.engine.kv_cache_dtype]
    if config.engine.head_dtype:
        words += ["--hf-overrides", json.dumps({"head_dtype": _DTYPES[config.engine.head_dtype]})]
    if length := getattr(config.engine, "max_model_len", None):
        words += ["--max-model-len", str(length)]

    return shlex.join(words)


def _refuse(why: str) -> NoReturn:
    raise ConfigError(f"--servers: {why}")


_HEAD = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{gpus}#SBATCH --time={time}
#SBATCH --signal=B:TERM@{notice}
#SBATCH --requeue
#SBATCH --output=%x-%j.out
# Status: never run on its target (a SLURM cluster).
set -euo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
"""

_SERVERS = """
# One vLLM server for each GPU of the nodes that do not train. One that ends is started again; the run takes it back.
VLLM_API_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export VLLM_API_KEY
serve() {{
    local gpu
    for ((gpu = 0; gpu < {gpus}; gpu++)); do
        while true; do
            CUDA_VISIBLE_DEVICES=$gpu VLLM_SERVER_DEV_MODE=1 {serve} --host "$(hostname)" --port $((8000 + gpu)) || true
            sleep 5
        done &
    done
    wait
}}
export -f serve
urls=""
for node in "${{nodes[@]:{first}}}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$node" bash -c serve &
    for ((gpu = 0; gpu < {gpus}; gpu++)); do
        urls+="${{urls:+,}}http://$node:$((8000 + gpu))"
    done
done
"""

_TRAIN = """
# SIGTERM, also that before the end of the job's time, ends the run after its iteration, with a checkpoint.
srun --nodes={nodes} --ntasks={nodes} --nodelist="$(IFS=,; echo "${{nodes[*]:0:{nodes}}}")" \\
    torchrun --nnodes={nodes} --nproc-per-node={ranks} --max-restarts=3 --shutdown-timeout={shutdown} \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="${{nodes[0]}}:$((20000 + SLURM_JOB_ID % 10000))" \\
    -m -- jackpot train {words} &
training=$!
stopped=""
trap 'stopped=yes; kill -TERM "$training"' TERM
until wait "$training"; do
    code=$?
    kill -0 "$training" 2>/dev/null && continue
    [[ -n "$stopped" ]] && exit 0 # torchrun's own code is 1 after a signal
    exit "$code"
done
"""
