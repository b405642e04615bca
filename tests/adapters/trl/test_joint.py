"""TRL trains two models as our learner does: losses and weights of both, and what TRL's users have beside."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.engines.reference import save_longer
from helpers.paths import TESTS
from helpers.trl_runs import LINEAR, ROLLOUT_MODEL, arguments, learner_of, movement, walked_beside
from jackpot.config.build import validated
from jackpot.config.config import RolloutModelConfig
from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.objective import ObjectiveConfig
from jackpot.core.errors import CheckpointError, ConfigError, EngineError, ModelError
from jackpot.core.types import Version
from jackpot.models.load import eos_token_ids, load_model
from jackpot.rollout.engines.transformers.engine import TransformersEngine

pytestmark = pytest.mark.trl
OBRS = {"name": "obrs", "lam": 0.9, "c1": 1.5}
FREE = OBRS | {"kappa": "none"}
OPTIMIZER = {"learning_rate": 0.2 * LINEAR.learning_rate, "eps": LINEAR.eps, "max_grad_norm": LINEAR.max_grad_norm}
AGG = {"grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm", "dapo": "token-mean"}
MISALIGNED = {"steps_per_generation": 2, "per_device_train_batch_size": 16, "max_steps": 4}
TWO_PARTS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16}
HELD = {"metric": "kl", "target": 0.01, "horizon": 2}
CASES = [
    ("dapo", OBRS, {}, {"gradient_checkpointing": True}),
    ("grpo", "tis", {"distill": "reverse", "distill_weight": 0.5}, TWO_PARTS),
    ("dr_grpo", OBRS, {"share": 0.5, "split": "group", "distill_control": HELD}, {}),
    ("grpo", FREE, {"share": 0.5}, MISALIGNED),
    ("grpo", FREE | {"target": "new", "proximal": "new"}, {}, MISALIGNED),
    ("dapo", OBRS, {"share": 0.5}, {"top_k": 5}),  # a truncated sampler
]


def settings(**changes: Any) -> dict[str, Any]:
    """Settings of a rollout model that is trained."""
    return {"path": ROLLOUT_MODEL, "optimizer": OPTIMIZER} | changes


def trainer_of(adapter: ModuleType, folder: Path, rollout_model: dict[str, Any], correction=OBRS, **changes):
    """Make a trainer of two models; changes are TRL's arguments, and engines of ours."""
    engines = {name: changes.pop(name) for name in ("engine", "policy_engine") if name in changes}
    return adapter.JackpotGRPOTrainer(
        **arguments(folder, **changes), rollout_model=rollout_model, correction=correction, **engines
    )


def weights(trainer) -> list[torch.Tensor]:
    return [
        parameter.detach().clone()
        for model in (trainer.model, trainer.rollout_model)
        for parameter in model.parameters()
    ]


@pytest.mark.parametrize(("loss_type", "correction", "rollout_settings", "changes"), CASES)
def test_both_models_walk_with_our_learner(
    adapter: ModuleType, tmp_path, loss_type, correction, rollout_settings, changes
):
    rollout_model = validated(RolloutModelConfig, settings(**rollout_settings))
    objective = ObjectiveConfig(correction=correction, loss_agg_mode=AGG[loss_type])
    learner = learner_of(objective, rollout_model, on_support="top_k" in changes)
    losses: list[tuple[float, float]] = []

    class Compared(walked_beside(adapter.JackpotGRPOTrainer, learner, losses, versioned=True)):
        def _step_rollout_model(self) -> None:
            super()._step_rollout_model()
            for name in ("loss", "ppo_loss", "distill_loss", "distill_weight", "weight", "grad_norm"):
                logged = self._metrics["train"][f"jackpot/rollout_model/{name}"][-1]
                losses.append((logged, float(self.ours[f"rollout_model/{name}"].value)))

    trainer = Compared(
        **arguments(tmp_path, loss_type=loss_type, **changes),
        rollout_model=settings(**rollout_settings),
        correction=correction,
    )

    trainer.train()

    assert len(losses) == 7 * trainer.state.global_step == 7 * learner.version.rollout_model
    for theirs, ours in losses:
        assert theirs == pytest.approx(ours, abs=3e-6, rel=1e-5)

    for role, trained in (("policy", trainer.model), ("rollout_model", trainer.rollout_model)):
        start = load_model(f"starter:{role}", torch.float32)
        models = (learner.models[role], trained, start)
        apart, moved = movement(*(list(model.parameters()) for model in models))
        assert moved > 1e-2
        assert apart < 1e-4, role


def test_a_resumed_run_is_bit_equal_in_both_models(adapter: ModuleType, tmp_path):
    rollout_settings = settings(share={"schedule": "step", "start": 1.0, "end": 0.5, "hold": 1}, distill_control=HELD)
    rollout_settings |= {"optimizer": OPTIMIZER | {"schedule": "linear"}}
    settings_of_trl = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 16}
    uninterrupted = trainer_of(adapter, tmp_path, rollout_settings, **settings_of_trl)
    uninterrupted.train()
    shares = [
        line["jackpot/sampling/rollout_model_share"] for line in uninterrupted.state.log_history if "loss" in line
    ]

    assert shares == [1.0, 0.5, 0.5]

    again = trainer_of(adapter, tmp_path, rollout_settings, **settings_of_trl)
    checkpoint = tmp_path / "checkpoint-2"
    again.train(resume_from_checkpoint=str(checkpoint))

    assert all(torch.equal(*pair) for pair in zip(weights(uninterrupted), weights(again), strict=True))
    assert again.version == Version(3, 3)
    assert load_model(checkpoint / "rollout_model", torch.float32).dtype == torch.float32

    state = torch.load(checkpoint / "rollout_model_optimizer" / "state.pt", weights_only=True)
    torch.save(state | {"step": 1}, checkpoint / "rollout_model_optimizer" / "state.pt")
    with pytest.raises(CheckpointError, match="after 2 optimizer steps and the rollout model's optimizer after 1"):
        trainer_of(adapter, tmp_path, rollout_settings, **settings_of_trl).train(resume_from_checkpoint=str(checkpoint))

    (checkpoint / "rollout_model_optimizer" / "state.pt").unlink()
    with pytest.raises(CheckpointError, match="has no rollout model with its optimizer"):
        trainer_of(adapter, tmp_path, rollout_settings, **settings_of_trl).train(resume_from_checkpoint=str(checkpoint))


def test_a_policy_with_an_adapter_writes_with_drafts(adapter: ModuleType, tmp_path):
    """Its engine has the merged weights, by the digest and by the check of its log-probs; so has its drafter."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = adapter.JackpotGRPOTrainer(
        **arguments(tmp_path, max_steps=2, per_device_train_batch_size=16, per_device_eval_batch_size=16),
        peft_config=lora,
        rollout_model=settings(share=0.0),
        engine={"draft": {"tokens": 3}},
    )

    trainer.train()
    trainer.evaluate(trainer.train_dataset.select(range(2)))
    log = trainer.state.log_history

    assert any("eval_reward" in line and "eval_jackpot/draft/acceptance" in line for line in log)
    gaps = [line.get("jackpot/mismatch/engine_gap_of_policy") for line in log if "loss" in line]
    assert all(0.0 < gap < 1e-5 for gap in gaps)
    assert {line["jackpot/draft/acceptance"] > 0.3 for line in log if "loss" in line} == {True}
    assert trainer.version == Version(2, 2)  # the model that only drafts is trained all the same


def test_a_longer_rollout_model_is_cut_a_longer_policy_refused(adapter: ModuleType, tmp_path):
    """Both models generate."""
    size = save_longer(ROLLOUT_MODEL, tmp_path / "long")
    longer, trained = str(tmp_path / "long"), []

    for path in (longer, ROLLOUT_MODEL):
        changes = {"max_steps": 2, "per_device_train_batch_size": 16}
        trainer = trainer_of(adapter, tmp_path, settings(path=path, share=0.5), **changes)
        trainer.train()
        trained.append(weights(trainer))

    for longer_weight, shorter_weight in zip(*trained, strict=True):
        torch.testing.assert_close(longer_weight[: len(shorter_weight)], shorter_weight, rtol=1e-5, atol=1e-6)

    policy = arguments(tmp_path) | {"model": longer}
    with pytest.raises(ModelError, match=rf"reads all {size + 7} rows .* has {size}; .*_embeddings\({size}\)"):
        adapter.JackpotGRPOTrainer(**policy, rollout_model=settings())


def test_engines_get_weights_that_changed_without_a_step(adapter: ModuleType, tmp_path):
    """A second run counts from 0 again, and the best policy of a run is brought back when it ends; what an engine then
    says is checked against training as ever."""
    plain = {"max_steps": 1, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 16}
    twice = trainer_of(adapter, tmp_path / "twice", settings(share=0.5), **plain)
    twice.train()
    twice.train()

    best = {"load_best_model_at_end": True, "metric_for_best_model": "reward", "greater_is_better": True}
    each = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    run_arguments = arguments(tmp_path / "best", **plain | best | each | {"max_steps": 2})
    rewards = iter([1.0, 0.0, 0.0])

    class Scored(adapter.JackpotGRPOTrainer):
        def evaluation_loop(self, *args, **kwargs):
            done = super().evaluation_loop(*args, **kwargs)
            done.metrics["eval_reward"] = next(rewards)
            return done

    trainer = Scored(
        **run_arguments, eval_dataset=run_arguments["train_dataset"].select(range(2)), rollout_model=settings()
    )

    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    trainer.evaluate()


def test_a_schedule_counts_generation_batches(adapter: ModuleType, tmp_path):
    rollout_settings = settings(share={"schedule": "step", "start": 1.0, "end": 0.5, "hold": 2})
    changes = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 3, "steps_per_generation": 2}
    trainer, counted = trainer_of(adapter, tmp_path, rollout_settings, **changes, max_steps=2), []
    generate = trainer._generate_and_score_completions

    def counting(inputs: Any) -> Any:
        generated = generate(inputs)
        counted.append(trainer._writers.iteration)
        return generated

    trainer._generate_and_score_completions = counting
    trainer.train()

    assert counted == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "with use_dora, which cannot be merged"),
        ({"modules_to_save": ["norm"]}, "with modules_to_save, which"),
        ({"target_modules": ["embed_tokens"]}, "with an embedding in target_modules"),
    ],
)
def test_a_writing_policy_needs_an_adapter_that_merges(adapter: ModuleType, tmp_path, changes, named):
    peft = pytest.importorskip("peft")
    lora = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False} | changes
    trainer_arguments = arguments(tmp_path, max_steps=1, per_device_train_batch_size=16)
    trainer_arguments |= {"peft_config": peft.LoraConfig(**lora), "rollout_model": settings(share=0.5)}

    with pytest.raises(ConfigError, match=named):
        adapter.JackpotGRPOTrainer(**trainer_arguments)

    trainer = adapter.JackpotGRPOTrainer(**trainer_arguments | {"rollout_model": settings()})
    with pytest.raises(ConfigError, match=named):
        trainer.evaluate(trainer.train_dataset.select(range(2)))


class Engine(TransformersEngine):
    """An engine with a fault: it tells another digest, other log-probs, or gives every response up."""

    def __init__(self, fault: str) -> None:
        model = load_model(ROLLOUT_MODEL, torch.float32)
        self.fault, ends = fault, eos_token_ids(model)
        super().__init__(model, TransformersEngineConfig(), eos_token_ids=ends, version=Version(0, 0))

    def update_weights(self, named_tensors, version):
        digest = super().update_weights(named_tensors, version)
        return "0" * len(digest) if self.fault == "digest" else digest

    def generate(self, requests):
        rollouts = super().generate(requests)
        if self.fault == "log-probs":
            return [replace(rollout, rollout_log_probs=rollout.rollout_log_probs / 2) for rollout in rollouts]
        return [replace(rollout, finish="aborted") if self.fault == "aborted" else rollout for rollout in rollouts]


def test_a_response_that_was_given_up_ends_a_run(adapter: ModuleType, tmp_path):
    rollouts = adapter.EngineRollouts(Engine("aborted"))
    trainer_arguments = arguments(tmp_path, max_steps=1, per_device_train_batch_size=16)
    with pytest.raises(EngineError, match="gave up 16 of 16 responses"):
        adapter.CorrectedGRPOTrainer(**trainer_arguments, rollout_func=rollouts).train()


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("digest", "the engine holds weights of digest 000000000000"),
        ("log-probs", "the engine's log-probs are not those of the distribution"),
        ("aborted", "gave up 16 of 16 responses"),
    ],
)
def test_an_engine_with_a_fault_ends_the_run(adapter: ModuleType, tmp_path, fault, named):
    changes = {"max_steps": 1, "per_device_train_batch_size": 16}
    trainer = trainer_of(adapter, tmp_path, settings(), engine=Engine(fault), **changes)
    with pytest.raises(EngineError, match=named):
        trainer.train()


def test_a_frozen_model_stays_and_an_unused_one_is_not_run(adapter: ModuleType, tmp_path):
    start = list(load_model(ROLLOUT_MODEL, torch.float32).parameters())
    frozen = trainer_of(adapter, tmp_path, {"path": ROLLOUT_MODEL}, max_steps=1, per_device_train_batch_size=16)
    frozen.train()

    assert all(torch.equal(*pair) for pair in zip(start, frozen.rollout_model.parameters(), strict=True))

    ends = settings(share={"schedule": "step", "hold": 1})
    trainer = trainer_of(adapter, tmp_path, ends, max_steps=2, per_device_train_batch_size=16)
    trainer.rollout_model.register_forward_hook(lambda *_: pytest.fail("it reads logits that nobody needs"))

    trainer.train()

    assert trainer.version == Version(2, 1)


def test_two_processes_train_both_models_as_one_does(adapter: ModuleType, tmp_path):
    """Groups are dealt out between the models over the batch of all processes, and kappa and gradients cover it."""
    results = []

    for processes in (1, 2):
        folder = tmp_path / str(processes)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if processes == 2 else []
        program = [str(TESTS / "helpers" / "trl_ranks.py"), str(folder), str(32 // processes), "two models"]
        done = subprocess.run([sys.executable, *launch, *program], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads((folder / "result.json").read_text()))

    alone, together = results
    assert alone["share"] == together["share"] == [0.5, 0.5]
    assert min(alone["moved"]) > 1e-2
    torch.testing.assert_close(torch.tensor(alone["weights"]), torch.tensor(together["weights"]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("setup", "named"),
    [
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=1)}, "DeepSpeed is on"),
        ({"mixed_precision": "bf16"}, "in mixed precision 'bf16'"),
        ({"n_gpu": 2}, "trains on 2 GPUs by DataParallel"),
    ],
)
def test_what_accelerate_sets_up_is_refused_by_name(adapter: ModuleType, setup, named):
    from jackpot.adapters.trl.refusals import refuse_processes

    state = SimpleNamespace(deepspeed_plugin=setup.get("deepspeed_plugin"))
    accelerator = SimpleNamespace(state=state, mixed_precision=setup.get("mixed_precision", "no"))
    args = SimpleNamespace(bf16=False, n_gpu=setup.get("n_gpu", 1))

    with pytest.raises(ConfigError, match=named):
        refuse_processes(SimpleNamespace(accelerator=accelerator, args=args))


@pytest.mark.parametrize(
    ("extra", "changes", "named"),
    [
        ({}, {"use_vllm": True}, "TRL's vLLM has no rollout model"),
        ({"rollout_func": len}, {}, "rollout_func was given"),
        ({}, {"num_iterations": 2}, "num_iterations is 2"),
        ({"tools": [len]}, {}, "tools or environment_factory"),
        ({}, {"loss_type": "luspo"}, "loss_type is 'luspo'"),
        ({}, {"use_liger_kernel": True}, "use_liger_kernel is True"),
        ({}, {"min_p": 0.1}, r"min_p is 0\.1"),
        ({"correction": {"name": "obrs", "normalizer": "exact"}}, {}, "normalizer 'exact'"),
        ({"engine": {"draft": {}}}, {}, r"set rollout_model\.share=0\.0"),
        ({"engine": {"name": "vllm"}}, {}, "Make the engine, such as VLLMEngine"),
        ({"rollout_model": settings(shore=0.5)}, {}, "did you mean 'rollout_model.share'"),
        ({"rollout_model": settings(update="iteration")}, {}, "rollout_model.update"),
        ({"rollout_model": settings(lora={})}, {}, "rollout_model.lora"),
    ],
)
def test_what_two_models_cannot_have_is_refused_by_name(adapter: ModuleType, tmp_path, extra, changes, named):
    with pytest.raises(ConfigError, match=named):
        adapter.JackpotGRPOTrainer(**arguments(tmp_path, **changes), **{"rollout_model": settings()} | extra)
