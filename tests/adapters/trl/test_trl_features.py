"""What TRL's users have beside the loss goes on: resume, peft, several processes, evaluations, the model card."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from helpers.paths import TESTS
from helpers.trl_runs import ROLLOUT_MODEL, arguments
from jackpot.models.load import load_model

pytestmark = pytest.mark.trl
TRL_METRICS = {"eval_loss", "eval_reward", "eval_reward_std", "eval_entropy", "eval_completions/mean_length"}


def trainer_of(adapter: ModuleType, folder: Path, correction="obrs", **changes):
    """Make a trainer whose rollouts the small starter writes."""
    rollouts = adapter.EngineRollouts(ROLLOUT_MODEL)
    return adapter.CorrectedGRPOTrainer(**arguments(folder, **changes), rollout_func=rollouts, correction=correction)


def weights(trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def test_a_resumed_run_is_bit_equal_and_its_card_names_us(adapter: ModuleType, tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 16}
    uninterrupted = trainer_of(adapter, tmp_path, **settings)
    uninterrupted.train()
    again = trainer_of(adapter, tmp_path, **settings)

    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    assert all(torch.equal(*pair) for pair in zip(weights(uninterrupted), weights(again), strict=True))
    assert "jackpot" in (tmp_path / "README.md").read_text()
    assert load_model(tmp_path / "checkpoint-4", torch.float32).num_parameters() == uninterrupted.model.num_parameters()


def test_an_adapter_of_peft_is_read_and_trained(adapter: ModuleType, tmp_path):
    """The policy's log-probs are those of the model with its adapter, as TRL itself computes them."""
    peft = pytest.importorskip("peft")
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    trainer = adapter.CorrectedGRPOTrainer(
        **arguments(tmp_path, max_steps=2),
        peft_config=peft.LoraConfig(**lora, lora_dropout=0.5),  # training mode has other log-probs every time
        rollout_func=adapter.EngineRollouts(ROLLOUT_MODEL),
        correction={"name": "obrs", "proximal": "new"},
    )
    before = load_model(trainer.model.get_base_model().name_or_path, torch.float32)

    trainer.train()
    batch = trainer._buffered_inputs[0]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)

    trainer.model.eval()
    with torch.no_grad():
        width = batch["completion_ids"].shape[1]
        trl_log_probs = trainer._get_per_token_logps_and_entropies(trainer.model, ids, seen, width)[0]
        plain = before(ids, attention_mask=seen).logits[:, -width - 1 : -1].log_softmax(-1)
    mask = batch["completion_mask"].bool()

    our_log_probs = trainer._read(batch, with_z=True).old_log_probs

    torch.testing.assert_close(our_log_probs[mask], trl_log_probs[mask], atol=1e-5, rtol=1e-5)

    without = plain.gather(-1, batch["completion_ids"][..., None])[..., 0]
    assert (our_log_probs - without)[mask].abs().max() > 1e-2

    named = dict(trainer.model.named_parameters())
    frozen = [name for name, _ in before.named_parameters() if "lm_head" not in name and "q_proj" not in name]
    assert torch.equal(named["base_model.model." + frozen[0]], dict(before.named_parameters())[frozen[0]])


def test_an_evaluation_is_trls_own(adapter: ModuleType, tmp_path):
    """TRL's trainer with the same weights has the same metrics of the same completions, and none of ours."""
    from trl import GRPOTrainer

    rollouts = adapter.EngineRollouts(ROLLOUT_MODEL)

    def rollouts_without_lists(prompts: list, trainer: GRPOTrainer) -> dict:
        output = rollouts(prompts, trainer)
        return {name: output[name] for name in ("prompt_ids", "completion_ids", "logprobs")}

    settings = {"max_steps": 1, "per_device_eval_batch_size": 16}
    trainer = trainer_of(adapter, tmp_path, **settings)
    trainer.train()
    trl_trainer = GRPOTrainer(**arguments(tmp_path, **settings), rollout_func=rollouts_without_lists)
    trl_trainer.model.load_state_dict(trainer.model.state_dict())
    trl_trainer.state.global_step = trainer.state.global_step  # by which completions are drawn

    for evaluated_trainer in (trainer, trl_trainer):
        evaluated_trainer.evaluate(evaluated_trainer.train_dataset.select(range(2)))

    metrics, trl_metrics = (
        {name: value for name, value in each.state.log_history[-1].items() if name in TRL_METRICS or "jackpot" in name}
        for each in (trainer, trl_trainer)
    )
    assert metrics.keys() == TRL_METRICS
    assert metrics == trl_metrics


def test_what_counted_nothing_is_not_in_the_log(adapter: ModuleType, tmp_path):
    """All completions are cut short and masked. One NaN would spoil TRL's mean over steps."""
    trainer = trainer_of(adapter, tmp_path, max_steps=1, max_completion_length=1, mask_truncated_completions=True)
    trainer.train()
    logged = {name: value for line in trainer.state.log_history for name, value in line.items() if "jackpot/" in name}
    assert "jackpot/obrs/kappa" in logged and "jackpot/correction/weight_max" not in logged
    assert all(math.isfinite(value) for value in logged.values()), logged


@pytest.mark.sweep
def test_two_processes_take_the_steps_of_one(adapter: ModuleType, tmp_path):
    """With kappa of all that was generated, and the accept mask's mean: uniforms are hashed from the process too."""
    results = []

    for processes in (1, 2):
        folder = tmp_path / str(processes)
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        program = [str(TESTS / "helpers" / "trl_ranks.py"), str(folder), str(32 // processes)]
        done = subprocess.run([sys.executable, *launch, *program], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads((folder / "result.json").read_text()))

    alone, together = results
    assert alone["kappa"] == pytest.approx(together["kappa"], rel=1e-6)
    assert alone["moved"][0] > 1e-2
    torch.testing.assert_close(torch.tensor(alone["weights"]), torch.tensor(together["weights"]), atol=1e-5, rtol=1e-5)
