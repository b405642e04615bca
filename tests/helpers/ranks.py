"""What each of two ranks does in tests/training/test_kappa.py: a step whose kappa is repaired on one rank alone."""

from pathlib import Path

import torch
import torch.distributed as dist

from helpers.learners import make_learner, policy_objective, smallest_model, write
from helpers.repairs import gradient_of_update, micro_batches_of
from jackpot.core.metrics import Mean


def run_repair_rank(rank: int, folder: Path) -> None:
    """One optimizer step of one pass on this rank's share of the same rollouts; a cap touches one token of the last."""
    torch.set_num_threads(1)
    models = smallest_model(0), smallest_model(1)
    items = write(models[1], num_top_log_probs=2)

    def learner(**numbers):
        objective = policy_objective(**numbers, kappa_tolerance=0.0)
        return make_learner(*models, objective=objective, exact_engines=())

    uncapped, _ = learner(kappa="prepass", c1=float("inf")).update(micro_batches_of(items))
    weights = {uid: trace["weights"] * trace["accept_mask"] for uid, trace in uncapped.traces.items()}
    items.sort(key=lambda item: weights[item.rollout.uid].max())
    largest, second_largest = torch.cat(list(weights.values())).topk(2).values.tolist()
    c1 = (largest * second_largest) ** 0.5  # between the two

    whole_gradient, result = gradient_of_update(learner(kappa="prepass", c1=c1), micro_batches_of(items))
    assert result.metrics["correction/clip_frac"].total >= 1.0

    rank_learner = learner(kappa="auto", c1=c1)
    old_kappa = 0.99 * result.metrics["obrs/kappa"].value.item()
    rank_learner._totals.keep({"obrs/acceptance": Mean.number(old_kappa), "obrs/z": Mean.number(1.0)})
    repaired_uids = []  # of each pass
    log_probs_of = rank_learner._repair._log_probs

    def recording_log_probs(batch):
        repaired_uids.append(batch.uids)
        return log_probs_of(batch)

    rank_learner._repair._log_probs = recording_log_probs

    share = items[: len(items) // 2] if rank == 0 else items[len(items) // 2 :]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    gradient, result = gradient_of_update(rank_learner, micro_batches_of(share))
    dist.destroy_process_group()
    saved = {
        "whole": whole_gradient,
        "gradient": gradient,
        "passes": len(repaired_uids),
        "own_repairs": sum(items[-1].rollout.uid in uids for uids in repaired_uids),
        "error": result.metrics["obrs/kappa_error"].value.item(),
    }
    torch.save(saved, folder / f"rank{rank}.pt")
