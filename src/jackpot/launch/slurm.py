"""Writes the batch script of `jackpot launch --slurm`, which starts torchrun on every node of a job.

Status: never run on its target (a SLURM cluster).
"""

import shlex

NOTICE = 300  # seconds before the job's time limit at which SLURM signals the run, for a last checkpoint


def script(command: list[str], run: str, *, name: str, nodes: int, gpus: int, ranks: int, time: str) -> str:
    """Return the text of a bash script for `sbatch` that trains a run, or continues it.

    Args:
        command: the words of `jackpot train`, without the run folder.
        run: the run folder, on a disk that all nodes see.
        name: name of the batch job.
        gpus: GPUs of each node; 0: the job has none.
        ranks: processes that train on each node.
        time: time limit of the job, hours:minutes:seconds.
    """
    gpu_line = f"#SBATCH --gpus-per-node={gpus}\n" if gpus else ""
    head = _HEAD.format(name=name, nodes=nodes, gpus=gpu_line, time=time, notice=NOTICE)
    words = shlex.join(command) + ' --run "$run"'
    # SLURM signals NOTICE seconds before the end of the job; 30 seconds before it torchrun kills ranks that still run.
    train = _TRAIN.format(nodes=nodes, ranks=ranks, shutdown=NOTICE - 30, words=words)
    return f"{head}run=$(realpath -m {shlex.quote(run)})\n{train}"


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

_TRAIN = """
# SIGTERM, also that before the end of the job's time, ends the run after its iteration, with a checkpoint.
srun --nodes={nodes} --ntasks={nodes} \\
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
