"""A run's learner on its own rollouts, in one process and sharded over two ranks."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from helpers.engines.reference import tiny_model
from helpers.learners import VOCAB, cut, write
from helpers.runs import small_config
from jackpot.config.config import Config
from jackpot.core.digest import weights_digest
from jackpot.core.shards import whole
from jackpot.core.types import ScoredRollout, TokenBatch, TrainingSample
from jackpot.launch.build import load_models, make_learner
from jackpot.models.parts import write_index
from jackpot.training.batching import deal, mini_batches, plain_batches
from jackpot.training.joint_learner import JointLearner

RANKS = 2


def save_models(folder: Path, dtype: torch.dtype = torch.float32, **changes: int) -> None:
    """Save two models with two layers each; the second one's head is its embedding."""
    for seed, role in enumerate(("policy", "rollout_model")):
        shape = dict(hidden_size=32, intermediate_size=48, tie_word_embeddings=role == "rollout_model")
        tiny_model(seed, VOCAB, **shape | changes).to(dtype).save_pretrained(folder / role)


def config_of(folder: Path, *overrides: str) -> Config:
    """Return settings of a run of these models whose AdamW steps are linear in the gradient."""
    models = [f"{role}.path={folder / role}" for role in ("policy", "rollout_model")]
    linear = [
        f"{role}.optimizer.{setting}"
        for role in ("policy", "rollout_model")
        for setting in ("eps=1.0", "learning_rate=0.5", "warmup_steps=0")
    ]
    return small_config(*models, *linear, "batch.prompts=4", "batch.group_size=3", *overrides)


def samples_of(folder: Path, lengths: Sequence[int] = ()) -> list[TrainingSample]:
    """Return twelve responses of the rollout model, the first ones cut to some lengths."""
    rollout_model = load_models(config_of(folder), None, torch.device("cpu"))["rollout_model"]
    items = write(rollout_model, num_top_log_probs=4)
    return [cut(item, length) for item, length in zip(items, lengths, strict=False)] + items[len(lengths) :]


def learner_of(config: Config, is_sharded: bool, checkpoint: Path | None = None) -> JointLearner:
    """Make the learner of a run, sharded over the ranks or not, from the start or from a checkpoint."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if is_sharded else None
    models = load_models(config, checkpoint, None if is_sharded else torch.device("cpu"))
    learner = make_learner(config, models, exact_engines=["rollout_model"], mesh=mesh)
    if checkpoint:
        learner.load(checkpoint, torch.load(checkpoint / "state.pt", weights_only=True))
    return learner


def save(learner: JointLearner, config: Config, folder: Path) -> dict[str, Any]:
    """Write what a learner continues from, and return the files of this rank; all ranks call it."""
    roles = ["policy", "rollout_model", *(["critic"] if config.critic else [])]
    files = learner.save(folder, roles)
    if dist.is_initialized():
        dist.barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(learner.state_dict(), folder / "state.pt")
        for role in roles if learner._gathered else ():
            write_index(folder / role, sorted((folder / role).glob("model-*.safetensors")))
    return files


def moments_of(learner: JointLearner) -> dict[str, torch.Tensor]:
    """Return the moments of all models, gathered from the shards; all ranks call it."""
    return {
        f"{role}/{name}": whole(moment).clone()
        for role, moments in learner._optimizer.moments()
        for name, moment in moments
    }


def compared(tensors: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """Return the largest relative difference of two tensors; log-probs of -inf are equal to others."""

    def finite(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double().nan_to_num(nan=torch.nan, neginf=-100.0)

    pairs = [(finite(tensor), finite(reference)) for tensor, reference in zip(tensors, expected, strict=True)]
    return max(((tensor - reference).norm() / reference.norm()).item() for tensor, reference in pairs)


def train(
    learner: JointLearner,
    config: Config,
    samples: Sequence[TrainingSample],
    budget: int,
    rank: int,
    ranks: int,
    pads: bool = False,
    rollout_batches: int = 2,
) -> dict[str, Any]:
    """Train on rollout batches of the same responses; return gradients of all steps, weights, scores and metrics."""
    optimizers, gradients = learner._optimizer._optimizers, []
    for optimizer in optimizers.values():
        optimizer.step = _recording_step(optimizer, gradients)
    scored_rollouts = [
        ScoredRollout(rollout=item.rollout, score=replace(item.score, reward=float(n % 3)))
        for n, item in enumerate(samples)
    ]

    def share(step: Sequence[TokenBatch]) -> list[TokenBatch]:
        batches = deal(step, ranks)[rank]
        return [replace(batch, packed=None) for batch in batches] if pads else batches

    metrics, traces = [], {}
    learner.keep_weights("policy")
    for _ in range(rollout_batches):
        items = learner.compute_advantages(scored_rollouts) if config.critic else samples
        batch = config.batch
        steps = mini_batches(
            items,
            mini_batch_size=batch.mini_batch_size or len(items),
            epochs=batch.ppo_epochs,
            micro_batch_tokens=budget,
            seed=0,
            pads=pads,
        )
        for result in learner.train([share(step) for step in steps], trace=True).steps:
            metrics.append({name: entry.value for name, entry in result.metrics.items() if "seconds" not in name})
            traces = result.traces
    plain = plain_batches([item.rollout for item in samples], budget, 0, pads)

    start_scores = learner.score("policy", share(plain), config.sampling, from_copy=True)
    weights = {
        f"{role}/{name}": tensor.clone()
        for role in ("policy", "rollout_model")
        for name, tensor in learner.weights(role)
    }
    scores = learner.score("policy", share(plain), config.sampling)
    return {
        "gradients": gradients,
        "weights": weights,
        "digests": {role: weights_digest(learner.weights(role), torch.float32) for role in ("policy", "rollout_model")},
        "scores": scores | {f"{uid}, kept": values for uid, values in start_scores.items()},
        "metrics": metrics,
        "micro_batches": len(plain),
        "traced": sorted(traces),
    }


def _recording_step(optimizer: Any, gradients: list[torch.Tensor]) -> Callable[..., None]:
    """Return a step of an optimizer that adds the gradients to a list before."""
    step = optimizer.step

    def recording_step(scale: float = 1.0) -> None:
        rows = [whole(parameter.grad).double().flatten() for parameter in optimizer.parameters]
        gradients.append(torch.cat(rows))
        step(scale)

    return recording_step


@contextmanager
def rank_of(rank: int, folder: Path, ranks: int):
    """Make this process a rank of gloo's group while the block runs."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_ranks(work: Callable[[int], Any], folder: Path, ranks: int = RANKS) -> list[Any]:
    """Do `work` on each rank, which is its argument, and return what it returned on each."""
    folder.mkdir(parents=True, exist_ok=True)
    mp.start_processes(_save, args=(work, folder, ranks), nprocs=ranks, start_method="fork")  # nothing imported again
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


def _save(rank: int, work: Callable[[int], Any], folder: Path, ranks: int) -> None:
    with rank_of(rank, folder, ranks):
        torch.save(work(rank), folder / f"rank{rank}.pt")
