"""TRL with a correction of ours takes the steps that our learner takes: losses and weights, for every loss."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch

from helpers.trl_runs import ROLLOUT_MODEL, arguments, learner_of, movement, walked_beside
from jackpot.config.objective import ObjectiveConfig
from jackpot.core.errors import ConfigError
from jackpot.models.load import load_model

pytestmark = pytest.mark.trl
OBRS = {"name": "obrs", "lam": 0.9, "c1": 1.5}
LOSSES = {  # TRL's loss_type: what it is among our settings
    "grpo": {"loss_agg_mode": "seq-mean-token-mean"},
    "bnpo": {"loss_agg_mode": "token-mean"},  # with one micro-batch a step
    "dr_grpo": {"loss_agg_mode": "seq-mean-token-sum-norm"},
    "dapo": {"loss_agg_mode": "token-mean"},
    "cispo": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0},  # TRL bounds r from above, by epsilon_high
}
MISALIGNED = {"steps_per_generation": 2, "num_iterations": 2, "per_device_train_batch_size": 16, "max_steps": 5}
STEPS_OF_TWO = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 1}
CASES = [
    ("dapo", OBRS, {}),
    ("grpo", OBRS, {}),
    ("bnpo", OBRS | {"mask": "expected"}, {}),
    ("dr_grpo", OBRS | {"kappa": "none", "beyond_c1": "drop"}, {}),
    ("cispo", OBRS, {}),
    ("dapo", "none", {}),
    ("dapo", {"name": "tis", "cap": 1.3}, {}),
    ("dapo", {"name": "none", "proximal": "rollout"}, {}),
    ("dapo", {"name": "custom", "import_path": "helpers.own_correction:Plain", "kwargs": {"cap": 1.3}}, {}),
    ("grpo", {"name": "icepop", "low": 0.7, "high": 1.5}, {}),
    ("dapo", {"name": "seq_mask", "high": 2.0}, {}),
    ("dapo", {"name": "dppo", "divergence": "topk", "max_tv": 0.05}, {}),
    ("dapo", {"name": "f_tis", "max_kl": 0.1}, {}),
    ("dapo", {"name": "prefix", "low": 0.5, "high": 0.5}, {}),
    ("dapo", "mask_only", {}),
    ("dapo", "reweight_only", {}),
    # several micro-batches a step; a step is one generation batch
    ("dapo", OBRS, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16}),
    ("grpo", "tis", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16}),
    # several steps on a generation batch, twice: the policy moves away from the one that is called old
    ("grpo", {"name": "tis", "cap": 1.3}, MISALIGNED),
    ("grpo", OBRS | {"kappa": "none"}, MISALIGNED),
    ("grpo", OBRS | {"kappa": "none", "target": "new", "proximal": "new"}, MISALIGNED),
    ("grpo", OBRS | {"kappa": "none", "target": "new"}, MISALIGNED),
    ("grpo", OBRS | {"kappa": "none", "proximal": "new"}, MISALIGNED),
    ("grpo", OBRS | {"kappa": "none", "proximal": "rollout"}, MISALIGNED),
    ("grpo", {"name": "tis", "proximal": "new"}, MISALIGNED),
    # and of several micro-batches each: all of a step are read again
    ("grpo", OBRS | {"kappa": "none", "target": "new", "proximal": "new"}, MISALIGNED | STEPS_OF_TWO),
    # a truncated sampler, whose lists name all that it kept
    ("dapo", OBRS, {"top_k": 5}),
    ("grpo", {"name": "tis", "cap": 1.3}, MISALIGNED | {"top_k": 3, "temperature": 0.8}),
    ("grpo", OBRS | {"kappa": "none", "target": "new", "proximal": "new"}, MISALIGNED | {"top_k": 20, "top_p": 0.9}),
]


@pytest.mark.parametrize(("loss_type", "correction", "changes"), CASES)
def test_losses_and_weights_are_those_of_our_learner(adapter: ModuleType, tmp_path, loss_type, correction, changes):
    objective = ObjectiveConfig(correction=correction, **LOSSES[loss_type])
    learner = learner_of(objective, on_support="top_k" in changes, temperature=changes.get("temperature", 1.0))
    start = load_model("starter:policy", torch.float32)
    losses: list[tuple[float, float]] = []
    extra = {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    trainer = walked_beside(adapter.CorrectedGRPOTrainer, learner, losses, versioned=False)(
        **arguments(tmp_path, loss_type=loss_type, **extra | changes),
        rollout_func=adapter.EngineRollouts(ROLLOUT_MODEL),
        correction=correction,
    )

    trainer.train()

    assert len(losses) == trainer.state.global_step >= 1
    for theirs, ours in losses:
        assert theirs == pytest.approx(ours, abs=3e-6, rel=1e-5)

    learned = list(learner.models["policy"].parameters())
    apart, moved = movement(learned, list(trainer.model.parameters()), list(start.parameters()))
    assert moved > 1e-2
    assert apart < 1e-4


def test_kappa_is_that_of_the_whole_generation_batch(adapter: ModuleType, tmp_path):
    """Several optimizer steps share it: sum a / sum Z over what was generated, not over a step."""
    trainer = adapter.CorrectedGRPOTrainer(
        **arguments(tmp_path, **MISALIGNED | {"max_steps": 1}),
        rollout_func=adapter.EngineRollouts(ROLLOUT_MODEL),
        correction=OBRS | {"mask": "expected", "c1": math.inf},
    )
    batches: list[dict[str, Any]] = []
    prepare = trainer._prepare_inputs

    def recorded(batch: Any) -> Any:
        prepared = prepare(batch)
        batches.extend(trainer._buffered_inputs)
        return prepared

    trainer._prepare_inputs = recorded
    trainer.train()

    policy = load_model("starter:policy", torch.float32).double()
    accepted = normalizers = 0.0
    parts = []
    for batch in batches:
        mask, width = batch["completion_mask"].bool(), batch["completion_ids"].shape[1]
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        with torch.no_grad():
            distributions = policy(ids, attention_mask=seen).logits[:, -width - 1 : -1].log_softmax(-1)
        at = distributions.gather(-1, batch["completion_ids"][..., None])[..., 0]
        ratio = (at - batch["sampling_per_token_logps"].double()).exp()
        known = torch.minimum(
            batch["jackpot_top_log_probs"].double(), distributions.gather(-1, batch["jackpot_top_ids"]) - math.log(0.9)
        )
        z, a = known.exp().sum(-1), (ratio / 0.9).clamp(max=1.0)
        accepted, normalizers = accepted + float(a[mask].sum()), normalizers + float(z[mask].sum())
        parts.append((batch, mask, a * z * ratio.clamp(min=0.9)))

    for batch, mask, weight in parts:
        expected = batch["jackpot_advantages"][:, None] * weight * accepted / normalizers
        torch.testing.assert_close(batch["advantages"][mask].double(), expected[mask], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("correction", ["obrs", "tis"])
def test_a_policy_is_compared_on_what_it_kept_of_itself(adapter: ModuleType, tmp_path, correction):
    """On the five tokens that it samples from, the policy is who sampled: no ratio is apart from 1, and Z is 1."""
    trainer = adapter.CorrectedGRPOTrainer(
        **arguments(tmp_path, top_k=5, max_steps=1),
        rollout_func=adapter.EngineRollouts("starter:policy"),
        correction=correction,
    )

    trainer.train()
    logged = trainer.state.log_history[0]

    assert logged["jackpot/mismatch/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert logged["jackpot/mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    if correction == "obrs":
        assert logged["jackpot/obrs/z"] == pytest.approx(1.0, abs=1e-5)


def test_a_reference_kl_is_refused_beside_top_k(adapter: ModuleType, tmp_path):
    trainer = adapter.CorrectedGRPOTrainer(
        **arguments(tmp_path, top_k=5, max_steps=1, beta=0.1),
        rollout_func=adapter.EngineRollouts(ROLLOUT_MODEL),
    )

    with pytest.raises(ConfigError, match=r"beta is 0.1 with top_k 5.*use beta=0.0, or top_k=0"):
        trainer.train()
