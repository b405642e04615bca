"""What each rank does in test_ranks.py."""

from pathlib import Path

import torch
import torch.distributed as dist

from jackpot.config.run import Config
from jackpot.core.clock import Clock
from jackpot.core.types import TrainingSample
from jackpot.launch.local import make_components
from jackpot.rollout.sampler import Sampler
from jackpot.rollout.tasks.base import PromptStream
from jackpot.training.batching import collate
from jackpot.training.old_policy import MicroBatch


def step(config: Config, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Two optimizer steps on this rank's share of the same rollouts, cut unevenly into micro-batches.

    Of two ranks the first has one micro-batch, so that alone it would know kappa for nothing.
    """
    torch.set_num_threads(1)
    parts = make_components(config, None, None)
    prompts = PromptStream(parts.task, "train", config.seed)
    made_of = (config, parts.engine, parts.task, parts.tokenizer, parts.rollout_cost, prompts, Clock())
    batch = Sampler(*made_of, lambda iteration, event: None).next_batch(1)
    samples = parts.learner.compute_advantages(batch.scored)
    assert any(sample.advantages.any() for sample in samples)
    mine: list[TrainingSample] = samples[rank::ranks]
    pieces = [mine] if rank < ranks - 1 else [mine[:5], mine[5:]]
    for _ in range(2):
        parts.learner.update([MicroBatch(tokens=collate(piece, 0, 0), old=None) for piece in pieces])
    return {
        f"{role}/{name}": w.clone() for role in ("policy", "rollout_model") for name, w in parts.learner.weights(role)
    }


def run_rank(rank: int, config: Config, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(step(config, rank, 2), folder / f"rank{rank}.pt")
    dist.destroy_process_group()
