"""Builds all components of a run from its settings, in this process.

Status: supported.
"""

import gc
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jackpot.config.engines import is_remote
from jackpot.config.run import Config, OptimizerConfig
from jackpot.config.tools import BenchmarksConfig, MismatchConfig, sets_of
from jackpot.core.cores import free_cores
from jackpot.core.errors import ConfigError
from jackpot.core.place import place
from jackpot.core.prng import fold_in
from jackpot.core.stages import stage
from jackpot.core.types import Role, Version
from jackpot.launch.checks import (
    check_lengths,
    check_start,
    check_top_log_probs,
    check_vocabulary,
    engine_is_exact,
    limited_task,
    prompt_limit,
    role_named,
)
from jackpot.launch.engine_processes import engine_pool, process_links
from jackpot.launch.engines import engine_parts, make_each
from jackpot.launch.head_kernel import tile_reader
from jackpot.launch.ray import check_placed, ray_links
from jackpot.models.cost import forward_cost
from jackpot.models.forward import checkpoint_activations, widen_head
from jackpot.models.fused import fuse
from jackpot.models.gathered import CPU, shard
from jackpot.models.load import (
    DTYPES,
    check_same_tokenizer,
    load_config,
    load_meta_model,
    load_model,
    load_tokenizer,
    load_value_model,
)
from jackpot.models.lora import add_adapter, load_adapter
from jackpot.models.quantization.formats import SideFormats, layer_differences, layer_formats
from jackpot.models.quantization.product import product_name
from jackpot.models.quantization.quantizer import SCHEMES
from jackpot.models.quantization.training import train_in_codes
from jackpot.objectives.kernels.autograd import HeadOptions
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.tasks.base import Task
from jackpot.rollout.tasks.math import Math
from jackpot.rollout.tasks.registry import make_sets, make_task
from jackpot.training.components import RunComponents
from jackpot.training.critic import Critic
from jackpot.training.joint_learner import JointLearner, LearnerOptions
from jackpot.training.learner import Learner
from jackpot.training.objectives import policy_objective, rollout_model_objective
from jackpot.training.optimizer import ModelOptimizer
from jackpot.training.reference import Reference
from jackpot.training.run.checkpoint import Checkpoints
from jackpot.training.run.folder import RunFolder
from jackpot.training.run.rollbacks import Rollbacks
from jackpot.training.trainer import OnMetrics, Trainer

_log = logging.getLogger(__name__)
Models = Mapping[str, PreTrainedModel]  # by name, as `load_models` has them

# Makes a learner from settings, the checkpoint to continue from and the content of its state.pt (None for a new run),
# and the models whose engine has the distribution that they have in training (`engine_is_exact`).
BuildLearner = Callable[[Config, Path | None, dict[str, Any] | None, Collection[Role]], Learner]


def train_run(
    config: Config,
    path: Path,
    on_metrics: OnMetrics,
    on_start: Callable[[int], None] = lambda iteration: None,
    build: BuildLearner | None = None,
) -> bool:
    """Train a new run in `path`, or the one that stands there, and start it again after each rollback.

    Args:
        on_metrics: called with every line of metrics.jsonl once it is written.
        on_start: called with the iteration that a start continues after, -1 for a new run.
        build: as in `make_components`.

    Returns:
        Whether the run has reached its last iteration; False where a signal ended it early.

    Raises:
        JackpotError: as `launch` and `Trainer.train`.
    """
    while (is_finished := _one_start(config, path, on_metrics, on_start, build)) is None:
        gc.collect()  # models and engines of this start, before the next one loads its own
    return is_finished


def _one_start(
    config: Config,
    path: Path,
    on_metrics: OnMetrics,
    on_start: Callable[[int], None],
    build: BuildLearner | None,
) -> bool | None:
    """Do what `train_run` does, up to the next rollback; None where the run goes back."""
    with closing(launch(config, path, on_metrics, build)) as trainer:
        on_start(trainer.iteration)
        is_finished = trainer.train()
        return None if trainer.rolls_back else is_finished


def launch(config: Config, path: Path, on_metrics: OnMetrics, build: BuildLearner | None = None) -> Trainer:
    """Build the trainer of a new run in `path`, or of the run that stands there, from its newest intact checkpoint.

    A pending rollback is carried out: checkpoints that it leaves behind move to superseded/.

    Args:
        on_metrics: called with every line of metrics.jsonl once it is written.
        build: as in `make_components`.

    Raises:
        CheckpointError: the folder is in use, is damaged, or holds a run with other settings or without an intact
            checkpoint.
        ModelError, DataError, ConfigError: models, tokenizers or settings do not fit each other.
    """
    check_placed(config)
    folder = RunFolder(path)
    with ExitStack() as undo:
        undo.callback(folder.close)
        folder.lock()
        undo.callback(folder.give_up)
        folder.check(config)
        checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep)
        rollbacks = Rollbacks(path)
        pending = rollbacks.pending
        if pending:
            folder.supersede(checkpoints.after(pending.back_to))
        found, corrupt = checkpoints.find()
        if found:
            found.check_settings(config)
        state = found.state if found else None
        slower = scaled_rates(config, rollbacks.rate_factor)
        components = replace(make_components(slower, found.folder if found else None, state, build), config=config)
        undo.callback(components.close)
        torch.set_num_threads(folder.start(config, threads(config), state["iteration"] if state else -1))
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
        if (kernel := head_options(config).reader.name) != "eager":
            folder.event(state["iteration"] if state else 0, {"event": "head_kernel", "kernel": kernel})
        if config.scheme:
            codes = SCHEMES[config.scheme].weights.codes
            event = {"event": f"{config.precision}_training", "product": product_name(pick_device(config), codes)}
            folder.event(state["iteration"] if state else 0, event | {"backward": config.fp8_backward})
        if layers := computed_differently(config):
            folder.event(state["iteration"] if state else 0, {"event": "computed_differently", "layers": layers})
        for one in corrupt:
            names = {"checkpoint": one.folder.name, "file": one.file, "why": one.why}
            folder.warn(state["iteration"], {"event": "corrupt_checkpoint"} | names)
            checkpoints.set_aside(one.folder)
        if pending and state:
            folder.event(state["iteration"], {"event": "rollback", "number": len(rollbacks.all)} | pending.facts)
            rollbacks.complete()
            _log.warning(
                "iteration %d: the run goes back here from iteration %d, with learning rates times %g: %s",
                *(state["iteration"], pending.back_from, pending.rate_factor, pending.why),
            )
        trainer = Trainer(components, folder, state, on_metrics)
        undo.pop_all()
    return trainer


def scaled_rates(config: Config, factor: float) -> Config:
    """Return the settings of a run with the learning rate of every trained model times `factor`."""
    changes = {}
    for role in get_args(Role):
        settings = getattr(config, role)
        if settings is not None and settings.optimizer is not None:
            rate = settings.optimizer.learning_rate * factor
            optimizer = settings.optimizer.model_copy(update={"learning_rate": rate})
            changes[role] = settings.model_copy(update={"optimizer": optimizer})
    return config.model_copy(update=changes)


def model_paths(config: Config, checkpoint: Path | None) -> dict[Role, str]:
    """Return where each model of the run is read from: a checkpoint's folders, or the paths in the settings."""
    paths: dict[Role, str] = {"policy": config.policy.path}
    if config.rollout_model is not None:
        paths["rollout_model"] = config.rollout_model.path
    return {role: str(checkpoint / role) for role in paths} if checkpoint else paths


def run_task(config: Config, paths: Mapping[Role, str], tokenizer: PreTrainedTokenizerBase) -> Task:
    """Make the task of a run; its problems leave room for a response in the context of every model and engine.

    Raises:
        ConfigError: prompts and `sampling.max_new_tokens` do not fit.
        DataError: the problems cannot be read, or none is left.
    """
    stage("reading the problems")
    limit = prompt_limit(config, [load_config(path) for path in paths.values()])
    task = make_task(limited_task(config.task, limit), tokenizer)
    try:
        check_lengths(config, limit, task)
    except BaseException:
        task.close()
        raise
    return task


def make_components(
    config: Config, checkpoint: Path | None, state: dict[str, Any] | None, build: BuildLearner | None = None
) -> RunComponents:
    """Build task, engines and learner, all with the same weights and version; an error leaves nothing open.

    Args:
        checkpoint: folder of the checkpoint to continue from; None for a new run.
        state: content of its state.pt.
        build: makes the learner; None: `build_learner`, in this process alone.
    """
    paths = model_paths(config, checkpoint)
    outlines = check_start(config, paths, place().size)
    device, tokenizer = pick_device(config), load_tokenizers(paths)
    check_vocabulary(outlines, tokenizer)
    version = Version(*state["version"]) if state else Version(0, 0)
    with ExitStack() as undo:
        task = run_task(config, paths, tokenizer)
        undo.callback(task.close)
        reward_fn = task.reward_fn if isinstance(task, Math) else None
        benchmarks = make_sets(config.evaluation.benchmarks, tokenizer, sets_of(config.task), reward_fn)
        for one in benchmarks.values():
            undo.callback(one.close)
        engine, policy_engine = make_engines(config, paths, device, version, undo)
        writer: Role = "rollout_model" if "rollout_model" in paths else "policy"
        check_top_log_probs(config, engine.capabilities.num_top_log_probs)
        exact = {writer: engine_is_exact(config, engine.capabilities.quantized)}
        if config.is_mixed:
            check_top_log_probs(config, policy_engine.capabilities.num_top_log_probs)
            exact["policy"] = engine_is_exact(config, policy_engine.capabilities.quantized, config.evaluation.engine)
        learner = (build or build_learner)(config, checkpoint, state, [role for role, one in exact.items() if one])
        undo.pop_all()
    return RunComponents(
        config=config,
        task=task,
        benchmarks=benchmarks,
        tokenizer=tokenizer,
        engine=engine,
        policy_engine=policy_engine,
        learner=learner,
        costs={role: forward_cost(outline) for role, outline in outlines.items()},
    )


def build_learner(
    config: Config,
    checkpoint: Path | None,
    state: dict[str, Any] | None,
    exact_engines: Collection[Role],
    mesh: DeviceMesh | None = None,
) -> JointLearner:
    """Load the models and make the learner of this process from them, as `BuildLearner` says.

    Args:
        mesh: as in `make_learner`.
    """
    models = load_models(config, checkpoint, None if mesh else pick_device(config))
    learner = make_learner(config, models, exact_engines, mesh)
    if state is not None:
        learner.load(checkpoint, state["learner"])
    return learner


def make_engines(
    config: Config, paths: dict[Role, str], device: torch.device, version: Version, undo: ExitStack
) -> tuple[Engine, Engine]:
    """Start the engine of the rollout model and that of the policy in evaluations; `undo` gets their `close`.

    Both are one engine where the policy generates its own rollouts and `evaluation.engine` names no other. With
    `placement.engines` they generate in processes of their own or actors of Ray, unless they are servers.
    """
    stage("starting the engine")
    parts = engine_parts(config, paths)
    placed = {name: part for name, part in parts.items() if config.placement.engines and not is_remote(part.settings)}
    links = ray_links if config.placement.launcher == "ray" else process_links
    engines = engine_pool(config, placed, model_paths(config, None), device, version, links).engines if placed else {}
    for engine in engines.values():
        undo.callback(engine.close)
    here = {name: part for name, part in parts.items() if name not in placed}
    engines |= make_each(here, device, version, bool(config.draft), undo)
    return engines["engine"], engines.get("evaluation.engine", engines["engine"])


def computed_differently(config: Config) -> list[list[str]]:
    """Return the layers that an engine of the rollouts and training compute in different number formats: name, the
    engine's format, and training's."""
    is_coded = config.scheme is not None
    device = pick_device(config).type
    of_engines = [SideFormats.of(one, device) for one in config.writing_engines.values()]
    of_training = SideFormats(
        dtype=config.compute_dtype if is_coded else "fp32",
        quantization=config.scheme,
        kv_cache_dtype=config.engine.kv_cache_dtype if is_coded else None,
        head_dtype=config.head_dtype,
        autocast="bf16" if config.precision == "bf16" else None,
    )
    if all(one == of_training for one in of_engines):
        return []
    model = load_meta_model((config.rollout_model or config.policy).path)
    formats = [layer_formats(model, one) for one in of_engines]
    of_layers = layer_formats(model, of_training)
    found = dict.fromkeys(layer for one in formats for layer in layer_differences(one, of_layers))
    return list(map(list, found))


def load_models(config: Config, checkpoint: Path | None, device: torch.device | None) -> Models:
    """Load all models of a learner: `policy`, and `rollout_model`, `critic` and `reference` where the run has them.

    The reference never comes from a checkpoint, where the policy has moved on.

    Args:
        checkpoint: folder of the checkpoint to continue from; None for a new run.
        device: as in `load_model`: None for models that are to be sharded.

    Raises:
        ModelError: a model cannot be used.
    """
    paths = model_paths(config, checkpoint)
    models = {role: load_trained(config, role, path, device, bool(checkpoint)) for role, path in paths.items()}
    if config.critic:
        models["critic"] = load_critic(config, checkpoint, device)
    if reference := config.objective.reference:
        model = load_model(reference.path or config.policy.path, torch.float32, device)
        if config.scheme:
            _train_in_codes(config, model)
        widen(config, model)
        models["reference"] = model
    return models


def load_trained(config: Config, role: Role, path: str, device: torch.device | None, resumes: bool) -> PreTrainedModel:
    """Load a model to train or to score with: the one in `path`, with an adapter where the settings ask for LoRA.

    With LoRA the weights are those that the run began with, and the adapter is new, or that of the checkpoint in `path`
    where the run `resumes`.
    """
    settings = getattr(config, role)
    with role_named(role):
        model = load_model(path if settings.lora is None else settings.path, torch.float32, device)
    widen(config, model)
    if config.scheme:
        _train_in_codes(config, model)
    else:
        _fuse(config, model)
    if settings.lora is not None:
        add_adapter(model, settings.lora, fold_in(config.seed, "adapter", role))
        if resumes:
            load_adapter(model, Path(path))
    if config.activation_checkpointing and settings.optimizer is not None:
        checkpoint_activations(model)
    return model


def load_critic(config: Config, checkpoint: Path | None, device: torch.device | None) -> PreTrainedModel:
    """Load the critic's value model from a checkpoint, or for a new run from the settings."""
    path = str(checkpoint / "critic") if checkpoint else config.critic.path or config.policy.path
    with role_named("critic"):
        model = load_value_model(path, torch.float32, device)
    _fuse(config, model)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    return model


def _fuse(config: Config, model: PreTrainedModel) -> None:
    """Fuse parts of a model that will compute on the CPU; models that are to be sharded over GPUs stand there too."""
    if pick_device(config).type == "cpu":
        fuse(model)


def widen(config: Config, model: PreTrainedModel) -> None:
    """Have the output layer of a model multiply in float32 where the settings say so; in one flow its weight is rounded
    as the engine's is."""
    if config.head_dtype == "fp32":
        widen_head(model, DTYPES[config.compute_dtype] if config.scheme else None)


def _train_in_codes(config: Config, model: PreTrainedModel) -> None:
    """Let a model compute with the numbers of the engine; its other parts stay those of the engine, unfused."""
    fp8_cache, exact = config.engine.kv_cache_dtype == "fp8", pick_device(config).type == "cpu"
    scheme, dtype = SCHEMES[config.scheme], DTYPES[config.compute_dtype]
    train_in_codes(model, scheme, config.fp8_backward, fp8_cache, exact, dtype)


def make_learner(
    config: Config, models: Models, exact_engines: Collection[Role], mesh: DeviceMesh | None = None
) -> JointLearner:
    """Build the learner: optimizers and objectives come from the settings.

    Args:
        models: of `load_models`, trained in place.
        exact_engines: models whose engine has the distribution that they have in training (`engine_is_exact`).
        mesh: all ranks of torch.distributed, over which the models are sharded in place; None: this process keeps them.
    """
    settings, head = config.rollout_model, head_options(config)
    reference = _reference(config, models, head)  # its digest is of whole weights
    sends_from = pick_device(config) if config.placement.weight_transfer == "device" else CPU
    gathered = shard(models, mesh, config.placement.offload, sends_from) if mesh else None

    trains = settings is not None and settings.optimizer is not None
    each_step = settings is None or settings.update == "step"
    optimizers = {"policy": _optimizer(models["policy"], config.policy.optimizer, _total_steps(config))}
    if trains:
        steps = _total_steps(config) if each_step else config.iterations
        optimizers["rollout_model"] = _optimizer(models["rollout_model"], settings.optimizer, steps)

    options = LearnerOptions(
        temperature=config.sampling.temperature,
        num_top_log_probs=config.sampling.num_top_log_probs,
        max_length=config.sampling.max_new_tokens,
        advantage=config.objective.advantage,
        within_model=config.objective.baseline == "model",
        exact_engines=exact_engines,
        is_mixed=config.is_mixed,
        autocast=None if config.compute_dtype == "fp32" else DTYPES[config.compute_dtype],
        rollout_model_each_step=each_step,
        distill_control=settings.distill_control if trains else None,
        ess_scaling=config.policy.ess_scaling,
        head=head,
    )
    return JointLearner(
        models,
        optimizers,
        policy_objective(config.objective),
        rollout_model_objective(settings, config.objective.loss_agg_mode) if trains else None,
        options,
        critic=make_critic(config, models["critic"]) if config.critic else None,
        reference=reference,
        gathered=gathered,
    )


def make_critic(config: Config, model: PreTrainedModel) -> Critic:
    """Build the critic from its value model."""
    optimizer = _optimizer(model, config.critic.optimizer, _total_steps(config))
    return Critic(model, optimizer, config.critic, config.batch.micro_batch_tokens)


def _reference(config: Config, models: Models, head: HeadOptions) -> Reference | None:
    if "reference" not in models:
        return None
    estimate = config.objective.reference.kl_loss_type
    options = dict(estimate=estimate, temperature=config.sampling.temperature, head=head)
    return Reference(models["reference"], models["policy"], **options)


def head_options(config: Config) -> HeadOptions:
    """Return how the joint head is computed.

    Raises:
        ConfigError: as `tile_reader` and `pick_device`.
    """
    reader = tile_reader(config.head_kernel, pick_device(config))
    return HeadOptions(reader, config.head_logits_memory * 2**20)


def _total_steps(config: Config) -> int:
    return config.iterations * config.batch.steps_per_iteration


def load_tokenizers(paths: dict[Role, str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer that both models share.

    Raises:
        DataError: the tokenizers differ; names the token.
    """
    tokenizers = {role: load_tokenizer(path) for role, path in paths.items()}
    for tokenizer in tokenizers.values():
        check_same_tokenizer(tokenizers["policy"], tokenizer)
    return tokenizers["policy"]


def pick_device(config: Config | BenchmarksConfig | MismatchConfig) -> torch.device:
    """Return the device of the models: for `auto` CUDA where there is a GPU, else the CPU.

    Raises:
        ConfigError: `device` is cuda and there is no GPU.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device is cuda, but torch finds no GPU; use device: auto or cpu, or install torch for CUDA")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def threads(config: Config | BenchmarksConfig | MismatchConfig) -> int:
    """Return the number of CPU threads: for `auto` the number of free cores, shared by the ranks on this machine.

    On a machine with another busy process, training with one thread too many was 10 times slower.
    """
    return max(1, free_cores() // place().local_size) if config.threads == "auto" else config.threads


def _optimizer(model: PreTrainedModel, config: OptimizerConfig, total_steps: int) -> ModelOptimizer:
    return ModelOptimizer(model.parameters(), config, total_steps)
