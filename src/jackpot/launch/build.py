"""Builds the models, the engines and the learner of a run from its settings, in this process.

Status: supported.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jackpot.config.config import Config
from jackpot.config.engines import is_remote
from jackpot.config.processes import place_engines
from jackpot.config.tools import sets_of
from jackpot.core.prng import fold_in
from jackpot.core.process_rank import process_rank
from jackpot.core.roles import Role
from jackpot.core.stages import stage
from jackpot.core.types import Version
from jackpot.launch.checks import (
    check_lengths,
    check_start,
    check_top_log_probs,
    engine_is_exact,
    limited_task,
    prompt_limit,
    role_named,
)
from jackpot.launch.engine_processes import engine_pool, process_links
from jackpot.launch.engines import engine_parts, make_each, reference_path, run_rows
from jackpot.launch.head_kernel import head_options
from jackpot.launch.ray import ray_links
from jackpot.models.cost import forward_cost
from jackpot.models.device import pick_device
from jackpot.models.forward import checkpoint_activations, cut_head, widen_head
from jackpot.models.fused import fuse
from jackpot.models.gathered import shard
from jackpot.models.load import (
    DTYPES,
    head_rows,
    load_config,
    load_meta_model,
    load_model,
    load_tokenizers,
    load_value_model,
)
from jackpot.models.lora import add_adapter, load_adapter
from jackpot.models.quantization.formats import SideFormats, layer_differences, layer_formats
from jackpot.models.quantization.quantizer import SCHEMES
from jackpot.models.quantization.training import train_in_codes
from jackpot.objectives.kernels.autograd import HeadOptions
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.tasks.base import Task
from jackpot.rollout.tasks.math import Math
from jackpot.rollout.tasks.registry import make_sets, make_task
from jackpot.training.advantages import Critic
from jackpot.training.components import RunComponents
from jackpot.training.joint_learner import JointLearner
from jackpot.training.learner import Learner
from jackpot.training.learner_options import LearnerOptions
from jackpot.training.objectives import policy_objective, rollout_model_objective
from jackpot.training.optimizer import ModelOptimizer
from jackpot.training.reference import Reference
from jackpot.training.run_folder.checkpoint import Checkpoint

_log = logging.getLogger(__name__)
Models = Mapping[str, PreTrainedModel]  # by name, as `load_models` has them

# Makes a learner from settings, the checkpoint to continue from (None for a new run), and the models whose engine has
# the distribution that they have in training (`engine_is_exact`).
BuildLearner = Callable[[Config, Checkpoint | None, Collection[Role]], Learner]


def run_task(config: Config, paths: Mapping[Role, str] | Mapping[str, str], tokenizer: PreTrainedTokenizerBase) -> Task:
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
    config: Config, checkpoint: Checkpoint | None = None, build: BuildLearner | None = None
) -> RunComponents:
    """Build task, engines and learner, all with the same weights and version; an error leaves nothing open.

    Args:
        checkpoint: to continue from; None for a new run.
        build: makes the learner; None: `build_learner`, in this process alone.
    """
    ranks, device = process_rank(), pick_device(config.device)
    config = place_engines(config, ranks.size, device.type == "cuda", ranks.beside)
    paths = config.model_paths(checkpoint.folder if checkpoint else None)
    outlines = check_start(config, paths, ranks.size)
    tokenizer = load_tokenizers(paths)
    head_rows(paths | reference_path(config), tokenizer)
    version = Version(*checkpoint.state["version"]) if checkpoint else Version(0, 0)

    with ExitStack() as undo:
        task = run_task(config, paths, tokenizer)
        undo.callback(task.close)
        reward_fn = task.reward_fn if isinstance(task, Math) else None
        benchmarks = make_sets(config.evaluation.benchmark_names, tokenizer, sets_of(config.task), reward_fn)
        for benchmark in benchmarks.values():
            undo.callback(benchmark.close)

        engine, policy_engine = make_engines(config, paths, device, version, undo)
        writer: Role = "rollout_model" if "rollout_model" in paths else "policy"
        check_top_log_probs(config, engine.capabilities.num_top_log_probs)
        exact: dict[Role, bool] = {writer: engine_is_exact(config, engine.capabilities.quantized)}
        if config.is_mixed:
            check_top_log_probs(config, policy_engine.capabilities.num_top_log_probs)
            exact["policy"] = engine_is_exact(config, policy_engine.capabilities.quantized, config.evaluation.engine)

        learner = (build or build_learner)(config, checkpoint, [role for role, is_exact in exact.items() if is_exact])
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
    checkpoint: Checkpoint | None,
    exact_engines: Collection[Role],
    mesh: DeviceMesh | None = None,
) -> JointLearner:
    """Load the models and make the learner of this process from them, as `BuildLearner` says.

    Args:
        mesh: as in `make_learner`.
    """
    device = None if mesh else pick_device(config.device)
    models = load_models(config, checkpoint.folder if checkpoint else None, device)
    learner = make_learner(config, models, exact_engines, mesh)
    if checkpoint:
        learner.load(checkpoint.folder, checkpoint.state["learner"])
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
    has_hosts = config.placement.engine_processes > 0
    placed = {name: part for name, part in parts.items() if has_hosts and not is_remote(part.settings)}
    links = ray_links if config.placement.launcher == "ray" else process_links
    engines = engine_pool(config, placed, config.model_paths(), device, version, links).engines if placed else {}
    for engine in engines.values():
        undo.callback(engine.close)
    here = {name: part for name, part in parts.items() if name not in placed}
    engines |= make_each(here, device, version, bool(config.draft), undo)
    return engines["engine"], engines.get("evaluation.engine", engines["engine"])


def computed_differently(config: Config) -> list[list[str]]:
    """Return the layers that an engine of the rollouts and training compute in different number formats: name, the
    engine's format, and training's."""
    is_coded = config.trained_quantization is not None
    device = pick_device(config.device).type
    of_engines = [SideFormats.of(settings, device) for settings in config.writing_engines.values()]

    of_training = SideFormats(
        dtype=config.compute_dtype if is_coded else "fp32",
        quantization=config.trained_quantization,
        kv_cache_dtype=config.engine.kv_cache_dtype if is_coded else None,
        head_dtype=config.head_dtype,
        autocast="bf16" if config.precision == "bf16" else None,
    )

    if all(formats == of_training for formats in of_engines):
        return []

    model = load_meta_model((config.rollout_model or config.policy).path)
    of_layers = layer_formats(model, of_training)
    differing = [layer_differences(layer_formats(model, formats), of_layers) for formats in of_engines]
    return list(map(list, dict.fromkeys(chain.from_iterable(differing))))


def load_models(config: Config, checkpoint: Path | None, device: torch.device | None) -> Models:
    """Load all models of a learner: `policy`, and `rollout_model`, `critic` and `reference` where the run has them.

    The reference never comes from a checkpoint, where the policy has moved on.

    Args:
        checkpoint: folder of the checkpoint to continue from; None for a new run.
        device: as in `load_model`: None for models that are to be sharded.

    Raises:
        ModelError: a model cannot be used.
    """
    paths = config.model_paths(checkpoint)
    models: dict[str, PreTrainedModel] = {
        role: load_trained(config, role, path, device, bool(checkpoint)) for role, path in paths.items()
    }
    if config.critic:
        path = str(checkpoint / "critic") if checkpoint else config.critic.path or config.policy.path
        models["critic"] = load_critic(config, path, device)
    for name, path in reference_path(config).items():
        models[name] = load_model(path, torch.float32, device)
        prepare(config, name, models[name], pick_device(config.device).type == "cpu")
    cut_heads(models, run_rows(config, paths))
    return models


def cut_heads(models: Models, rows: int) -> None:
    """Have the first rows of the output layers of a learner's models read and no others, as `head_rows` says."""
    for name, model in models.items():
        if name != "critic":
            cut_head(model, rows)


def load_trained(config: Config, role: Role, path: str, device: torch.device | None, resumes: bool) -> PreTrainedModel:
    """Load a model to train or to score with: the one in `path`, with an adapter where the settings ask for LoRA.

    With LoRA the weights are those that the run began with, and the adapter is new, or that of the checkpoint in `path`
    where the run `resumes`.
    """
    settings = getattr(config, role)
    with role_named(role):
        model = load_model(path if settings.lora is None else settings.path, torch.float32, device)
    prepare(config, role, model, pick_device(config.device).type == "cpu")
    if settings.lora is not None and resumes:
        load_adapter(model, Path(path))
    return model


def load_critic(config: Config, path: str, device: torch.device | None) -> PreTrainedModel:
    """Load the value model of a critic to train: the one in `path`."""
    with role_named("critic"):
        model = load_value_model(path, torch.float32, device)
    prepare(config, "critic", model, pick_device(config.device).type == "cpu")
    return model


def prepare(config: Config, name: str, model: PreTrainedModel, on_cpu: bool) -> None:
    """Have a model of a learner compute as in training, with an adapter and checkpoints where the settings ask for
    them.

    Args:
        name: of `load_models`.
        on_cpu: whether it computes on the CPU, where parts of trained models are fused; models that are to be sharded
            over GPUs stand there too.
    """
    settings = getattr(config, name, None)  # none of the reference
    in_codes = name != "critic" and config.trained_quantization
    if name != "critic" and config.head_dtype == "fp32":  # in one flow the weight is rounded as the engine's is
        widen_head(model, DTYPES[config.compute_dtype] if in_codes else None)
    if in_codes:  # those of the engine; other parts stay those of the engine, unfused
        scheme, fp8_cache = SCHEMES[in_codes], config.engine.kv_cache_dtype == "fp8"
        train_in_codes(model, scheme, config.fp8_backward, fp8_cache, on_cpu, DTYPES[config.compute_dtype])
    elif on_cpu and settings:
        fuse(model)
    if lora := getattr(settings, "lora", None):
        add_adapter(model, lora, fold_in(config.seed, "adapter", name))
    if config.activation_checkpointing and settings and settings.optimizer is not None:
        checkpoint_activations(model)


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
    gathered = shard(models, mesh, config.placement.offload) if mesh else None

    each_step = settings is None or settings.update == "step"
    optimizers: dict[Role, ModelOptimizer] = {}
    if config.policy.optimizer:
        parameters = models["policy"].parameters()
        optimizers["policy"] = ModelOptimizer(parameters, config.policy.optimizer, _total_steps(config))
    rollout_objective = distill_control = None
    if settings and settings.optimizer:
        steps = _total_steps(config) if each_step else config.iterations
        parameters = models["rollout_model"].parameters()
        optimizers["rollout_model"] = ModelOptimizer(parameters, settings.optimizer, steps)
        rollout_objective = rollout_model_objective(settings, config.objective.loss_agg_mode)
        distill_control = settings.distill_control

    options = LearnerOptions(
        temperature=config.sampling.temperature,
        num_top_log_probs=config.sampling.num_top_log_probs,
        max_length=config.sampling.max_new_tokens,
        advantage=config.objective.advantage,
        within_model=config.objective.baseline == "model",
        beta=config.objective.oapl_beta,
        on_support=config.sampling.lists_support,
        exact_engines=exact_engines,
        is_mixed=config.is_mixed,
        autocast=None if config.compute_dtype == "fp32" else DTYPES[config.compute_dtype],
        rollout_model_each_step=each_step,
        distill_control=distill_control,
        ess_scaling=config.policy.ess_scaling,
        head=head,
    )
    return JointLearner(
        models,
        optimizers,
        policy_objective(config.objective),
        rollout_objective,
        options,
        critic=make_critic(config, models),
        reference=reference,
        gathered=gathered,
    )


def make_critic(config: Config, models: Models) -> Critic | None:
    """Build the critic from its value model, where the run has one."""
    if config.critic is None:
        return None
    model = models["critic"]
    optimizer = ModelOptimizer(model.parameters(), config.critic.optimizer, _total_steps(config))
    return Critic(model, optimizer, config.critic, config.batch.micro_batch_tokens)


def _reference(config: Config, models: Models, head: HeadOptions) -> Reference | None:
    settings, temperature = config.objective.reference, config.sampling.temperature
    if settings is None:
        return None
    return Reference(
        models["reference"], models["policy"], estimate=settings.kl_loss_type, temperature=temperature, head=head
    )


def _total_steps(config: Config) -> int:
    return config.iterations * config.batch.steps_per_iteration
