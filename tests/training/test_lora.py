"""Real runs in which adapters are trained: what moves, what the engines hold, what is written down."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.engines.reference import rollout_of
from helpers.learners import sampled_log_probs
from helpers.runs import SHORT, FinishedRuns, metrics, run, small_config, weights
from jackpot.analysis.plan.sizes import model_sizes
from jackpot.config.config import Config
from jackpot.core.errors import CheckpointError, EngineError
from jackpot.core.roles import Role
from jackpot.core.types import Version
from jackpot.launch.build import load_trained, make_components, make_learner
from jackpot.launch.engines import make_engine
from jackpot.launch.start import launch
from jackpot.models.fused import fuse
from jackpot.models.hub import starter_path
from jackpot.models.load import load_model
from jackpot.rollout.engines.base import Engine
from jackpot.training.components import RunComponents
from jackpot.training.run_folder.folder import RunFolder
from jackpot.training.trainer import Trainer

POLICY = ("policy.lora.rank=4", "policy.optimizer.learning_rate=3e-3")
BOTH = (*POLICY, "rollout_model.lora.rank=2", "rollout_model.optimizer.learning_rate=3e-3")
REGIMES: dict[str, tuple[tuple[str, ...], list[Role]]] = {  # settings, and the roles with an adapter
    "policy": (POLICY, ["policy"]),
    "both": (BOTH, ["policy", "rollout_model"]),
}


class FinishedRun(NamedTuple):
    """A run that was trained to its end."""

    config: Config
    adapted: list[Role]
    folder: Path
    parts: RunComponents
    models: dict[Role, PreTrainedModel]  # that it trained


@pytest.fixture(scope="module", params=REGIMES)
def adapter_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run of three iterations that trains an adapter of the policy, or one of both models."""
    settings, adapted = REGIMES[request.param]
    config, folder = small_config("iterations=3", "evaluation.problems=2", *settings), tmp_path_factory.mktemp("run")
    paths, device = config.model_paths(), torch.device("cpu")
    models = {role: load_trained(config, role, path, device, resumes=False) for role, path in paths.items()}
    learner = make_learner(config, models, exact_engines=list(models))
    parts = replace(make_components(config), learner=learner)
    run_folder = RunFolder(folder)
    run_folder.start(config, 1, -1)
    assert Trainer(parts, run_folder, None, lambda line: None).train()
    return FinishedRun(config, adapted, folder, parts, models)


def largest_gap(engine: Engine, model: PreTrainedModel, parts: RunComponents) -> float:
    """Between the log-probs of the engine and of a model's own forward pass, on text that neither chose.

    In units of the log-prob where it is below -1: these reach -13, and the starter is 6e-6 from its own float64 copy.
    """
    draw = torch.Generator().manual_seed(0)
    prompts = [parts.task.prompt("test", index) for index in range(4)]
    rollouts = [rollout_of(prompt, torch.randint(3, 32, (8,), generator=draw).tolist()) for prompt in prompts]
    scores = engine.score(rollouts, 1.0)
    with torch.no_grad():
        model_log_probs = [sampled_log_probs(model, rollout, 1.0) for rollout in rollouts]
    engine_row, model_row = torch.cat(scores).double(), torch.cat(model_log_probs)
    return ((engine_row - model_row).abs() / model_row.abs().clamp(min=1.0)).max().item()


def test_adapters_move_the_base_stays_and_the_engines_follow(adapter_run: FinishedRun) -> None:
    config, parts, models = adapter_run.config, adapter_run.parts, adapter_run.models
    for role in adapter_run.adapted:
        first_model = load_model(f"starter:{role}", torch.float32)
        fresh_model = load_trained(config, role, f"starter:{role}", torch.device("cpu"), resumes=False)
        first_weights, weights_by_name = dict(fresh_model.named_parameters()), dict(models[role].named_parameters())
        moved_names = {name for name in weights_by_name if not torch.equal(first_weights[name], weights_by_name[name])}
        assert moved_names == {name for name in weights_by_name if ".lora_" in name}

        engine = parts.policy_engine if role == "policy" else parts.engine
        assert largest_gap(engine, models[role], parts) < 1e-5
        assert largest_gap(engine, first_model, parts) > 1e-2


def test_training_sees_what_the_engine_samples_from(adapter_run: FinishedRun) -> None:
    gaps = [line["mismatch/engine_gap_max"] for line in metrics(adapter_run.folder)[1:]]
    assert len(gaps) == 3
    assert max(gaps) < 1e-5


def test_a_weight_that_is_not_sent_is_noticed(tmp_path: Path) -> None:
    config = small_config(*POLICY, "rollout_model=null", "objective.correction=none")
    model = load_trained(config, "policy", "starter:policy", torch.device("cpu"), resumes=False)
    engine = make_engine(config.engine, "starter:policy", torch.device("cpu"), Version(0, 0))
    learner = make_learner(config, {"policy": model}, exact_engines=["policy"])

    sent_weights = list(learner.weights("policy"))
    for index, (name, _) in enumerate(sent_weights):
        with pytest.raises(EngineError, match=f"1 missing .{name}"):
            engine.update_weights(sent_weights[:index] + sent_weights[index + 1 :], Version(1, 1))


def test_a_checkpoint_holds_an_adapter_that_peft_reads(adapter_run: FinishedRun) -> None:
    ids = torch.arange(3, 12).view(1, 9)
    for role, model in adapter_run.models.items():
        folder = adapter_run.folder / "checkpoints" / "last" / role
        assert (folder / "adapter").exists() == (role in adapter_run.adapted)

        plain_model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            torch.testing.assert_close(plain_model(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
            if role in adapter_run.adapted:
                base = AutoModelForCausalLM.from_pretrained(starter_path(role), dtype=torch.float32)
                fuse(base)  # as the trained model, whose numbers differ by rounding otherwise
                assert torch.equal(PeftModel.from_pretrained(base, folder / "adapter")(ids).logits, model(ids).logits)


def test_the_optimizer_keeps_moments_of_the_adapter_alone(adapter_run: FinishedRun) -> None:
    for role, size in model_sizes(adapter_run.config).items():
        moments = load_file(adapter_run.folder / "checkpoints" / "last" / "moments" / f"{role}.safetensors")
        counts = [moment.numel() for name, moment in moments.items() if name.endswith(".exp_avg")]
        assert sum(counts) == size.trained
        assert size.trained > 0


def test_the_seed_of_the_run_decides_the_adapters() -> None:
    def first_adapter_weight(seed: int, role: Role) -> torch.Tensor:
        config = small_config(*BOTH, f"seed={seed}", "rollout_model.path=starter:policy", "rollout_model.lora.rank=4")
        model = load_trained(config, role, "starter:policy", torch.device("cpu"), resumes=False)
        return next(parameter for name, parameter in model.named_parameters() if ".lora_A" in name)

    assert torch.equal(first_adapter_weight(0, "policy"), first_adapter_weight(0, "policy"))
    assert not torch.equal(first_adapter_weight(0, "policy"), first_adapter_weight(1, "policy"))
    assert not torch.equal(first_adapter_weight(0, "policy"), first_adapter_weight(0, "rollout_model"))


@pytest.mark.slow
def test_a_run_is_not_continued_beside_another_base(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(starter_path("policy"), base)
    config = small_config(SHORT, "iterations=1", *POLICY, f"policy.path={base}")
    run(config, tmp_path / "run")

    changed_model = load_model(base, torch.float32)
    changed_model.model.norm.weight.data[0] += 1e-3
    changed_model.save_pretrained(base)

    with pytest.raises(CheckpointError, match="trained on other"):
        launch(config, tmp_path / "run", lambda line: None)


def test_a_run_from_a_checkpoint_starts_at_merged_weights(finished_run: FinishedRuns) -> None:
    first_run = finished_run("iterations=1", "evaluation.problems=2", *POLICY)
    start = first_run / "checkpoints" / "last" / "policy"
    config = small_config(*POLICY, f"policy.path={start}")
    parts = make_components(config)
    merged_weights = weights(first_run, "policy")

    assert all(torch.equal(tensor, merged_weights[name]) for name, tensor in parts.learner.weights("policy"))

    sent_dtypes = {tensor.dtype for _, tensor in parts.learner.weights("policy", torch.bfloat16)}
    assert sent_dtypes == {torch.float32, torch.bfloat16}  # merged ones are copies, which come in the engine's dtype
