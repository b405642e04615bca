"""What each rank does in test_ranks.py and test_kappa.py."""

from pathlib import Path

import torch
import torch.distributed as dist

from helpers.learners import make_learner, policy_objective, smallest_model, write
from helpers.repairs import gradient_of_update, micro_batches_of
from jackpot.config.config import Config
from jackpot.core.clock import Clock
from jackpot.core.metrics import Mean
from jackpot.core.types import TrainingSample
from jackpot.launch.build import make_components
from jackpot.rollout.sampler import Sampler
from jackpot.rollout.tasks.base import PromptStream
from jackpot.training.batching import collate
from jackpot.training.old_policy import MicroBatch


def step(config: Config, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Two optimizer steps on this rank's share of the same rollouts, cut unevenly into micro-batches.

    Of two ranks the first has one micro-batch, so that alone it would know kappa for nothing.
    """
    torch.set_num_threads(1)
    parts = make_components(config)
    prompts = PromptStream(parts.task, "train", config.seed)
    made_of = (config, parts.writers, parts.task, parts.tokenizer, parts.costs, prompts, Clock())
    batch = Sampler(*made_of, lambda iteration, event: None).next_batch(1)
    samples = parts.learner.compute_advantages(batch.scored)
    assert any(sample.advantages.any() for sample in samples)
    mine: list[TrainingSample] = samples[rank::ranks]
    pieces = [mine] if rank < ranks - 1 else [mine[:5], mine[5:]]
    for _ in range(2):
        parts.learner.update([MicroBatch(tokens=collate(piece, 0, 0), old=None) for piece in pieces])
    weights = {
        f"{role}/{name}": w.clone() for role in ("policy", "rollout_model") for name, w in parts.learner.weights(role)
    }
    return weights | {"distill_weight": torch.tensor(parts.learner.state_dict()["distill_weight"])}


def run_repair_rank(rank: int, folder: Path) -> None:
    """One optimizer step of one pass on this rank's share of the same rollouts; a cap touches one token of the last."""
    torch.set_num_threads(1)
    models = smallest_model(0), smallest_model(1)
    items = write(models[1], num_top_log_probs=2)

    def learner(**numbers):
        objective = policy_objective(**numbers, kappa_tolerance=0.0)
        return make_learner(*models, objective=objective, exact_engines=())

    free = learner(kappa="prepass", c1=float("inf")).update(micro_batches_of(items))
    weights = {uid: trace["weights"] * trace["accept_mask"] for uid, trace in free.traces.items()}
    items.sort(key=lambda item: weights[item.rollout.uid].max())
    first, second = torch.cat(list(weights.values())).topk(2).values.tolist()
    c1 = (first * second) ** 0.5
    whole, result = gradient_of_update(learner(kappa="prepass", c1=c1), micro_batches_of(items))
    assert result.metrics["correction/clip_frac"].total >= 1.0
    mine = learner(kappa="auto", c1=c1)
    before = 0.99 * result.metrics["obrs/kappa"].value.item()
    mine._totals.keep({"obrs/acceptance": Mean.number(before), "obrs/z": Mean.number(1.0)})
    passes = []
    forward = mine._repair._log_probs
    mine._repair._log_probs = lambda batch: passes.append(batch.uids) or forward(batch)
    share = items[: len(items) // 2] if rank == 0 else items[len(items) // 2 :]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    gradient, result = gradient_of_update(mine, micro_batches_of(share))
    dist.destroy_process_group()
    saved = {
        "whole": whole,
        "gradient": gradient,
        "passes": len(passes),
        "own_repairs": sum(items[-1].rollout.uid in uids for uids in passes),
        "error": result.metrics["obrs/kappa_error"].value.item(),
    }
    torch.save(saved, folder / f"rank{rank}.pt")


def run_rank(rank: int, config: Config, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(step(config, rank, 2), folder / f"rank{rank}.pt")
    dist.destroy_process_group()
