"""Builds the models, the engines and the learner of a run from its settings, in this process.

Status: supported.
"""

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
from jackpot.launch.engine_processes import engine_pool
from jackpot.launch.engines import engine_specs, make_each, reference_path, run_rows
from jackpot.launch.head_kernel import head_options
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

Models = Mapping[str, PreTrainedModel]  # by name: policy, rollout_model, critic, reference

# A function that makes a learner. Its arguments: the settings; the checkpoint to continue from, None for a new run; and
# the roles of those models whose engine samples from the distribution that the model has in training
# (`engine_is_exact`).
BuildLearner = Callable[[Config, Checkpoint | None, Collection[Role]], Learner]


def run_task(config: Config, paths: Mapping[Role, str] | Mapping[str, str], tokenizer: PreTrainedTokenizerBase) -> Task:
    """Make the task of a run from the problems that leave room for a response in every model's and engine's context.

    Args:
        paths: where each model is read from, by role.

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
    """Build the task, the engines and the learner of a run, all with the same weights and version.

    If an error is raised, the parts that were built before it are closed.

    Args:
        checkpoint: the checkpoint to continue from; None for a new run.
        build: makes the learner; None: `build_learner`, in this process alone.

    Raises:
        ConfigError, DataError, EngineError, ModelError: as `check_start`, `run_task`, `make_engines` and the learner.
    """
    process, device = process_rank(), pick_device(config.device)
    config = place_engines(config, process.size, on_gpu=device.type == "cuda", local_ranks=process.beside)

    paths = config.model_paths(checkpoint.folder if checkpoint else None)
    outlines = check_start(config, paths, process.size)
    tokenizer = load_tokenizers(paths)
    head_rows(paths | reference_path(config), tokenizer)  # refuses a tokenizer that some output layer is too short for
    version = Version(*checkpoint.state["version"]) if checkpoint else Version(policy=0, rollout_model=0)

    with ExitStack() as undo:
        task = run_task(config, paths, tokenizer)
        undo.callback(task.close)
        reward_fn = task.reward_fn if isinstance(task, Math) else None  # benchmarks are graded as the task is
        benchmarks = make_sets(config.evaluation.benchmark_names, tokenizer, sets_of(config.task), reward_fn)
        for benchmark in benchmarks.values():
            undo.callback(benchmark.close)

        engine, policy_engine = make_engines(config, paths, device, version, undo)
        exact_engines = _exact_engines(config, engine, policy_engine)
        learner = (build or build_learner)(config, checkpoint, exact_engines)
        undo.pop_all()  # from here on, closing the components closes task, benchmarks and engines

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


def _exact_engines(config: Config, engine: Engine, policy_engine: Engine) -> list[Role]:
    """Return the role of each model whose engine samples rollouts from the distribution that the model has in training.

    Raises:
        ConfigError: an engine returns fewer top log-probs than the settings ask for.
        EngineError: as `engine_is_exact`.
    """
    check_top_log_probs(config, engine.capabilities.num_top_log_probs)
    generator: Role = "rollout_model" if config.rollout_model else "policy"  # the model that `engine` runs
    is_exact: dict[Role, bool] = {generator: engine_is_exact(config, engine.capabilities.quantized)}

    if config.is_mixed:  # the policy generates rollouts too, by the engine of its evaluations
        check_top_log_probs(config, policy_engine.capabilities.num_top_log_probs)
        is_exact["policy"] = engine_is_exact(config, policy_engine.capabilities.quantized, config.evaluation.engine)
    return [role for role in is_exact if is_exact[role]]


def build_learner(
    config: Config,
    checkpoint: Checkpoint | None,
    exact_engines: Collection[Role],
    mesh: DeviceMesh | None = None,
) -> JointLearner:
    """Load the models of a run, and make the learner of this process from them.

    Args:
        checkpoint: the checkpoint to continue from; None for a new run.
        exact_engines: roles of the models whose engine samples from the distribution that the model has in training.
        mesh: all ranks, over which the models are sharded; None: this process keeps the models whole.
    """
    device = None if mesh else pick_device(config.device)  # None: the models are sharded after they are loaded
    models = load_models(config, checkpoint.folder if checkpoint else None, device)
    learner = make_learner(config, models, exact_engines, mesh)
    if checkpoint:
        learner.load(checkpoint.folder, checkpoint.state["learner"])
    return learner


def make_engines(
    config: Config, paths: dict[Role, str], device: torch.device, version: Version, undo: ExitStack
) -> tuple[Engine, Engine]:
    """Start the engine that generates rollouts and the policy's engine for evaluations, in this order.

    The two are one engine where the policy generates its own rollouts and `evaluation.engine` names no other. With
    `placement.engines` engines generate in processes of their own or in actors of Ray, unless they are servers.

    Args:
        paths: where each model is read from, by role.
        device: the learner's device.
        version: version of the weights in `paths`.
        undo: gets each engine's `close` as a callback.

    Raises:
        ConfigError, EngineError, ModelError: an engine cannot be made (`make_engine`, `engine_pool`).
    """
    stage("starting the engine")
    specs = engine_specs(config, paths)
    has_hosts = config.placement.engine_processes > 0
    # Hosted engines run in the processes of `placement.engines`, local ones in this process.
    hosted = {name: spec for name, spec in specs.items() if has_hosts and not is_remote(spec.settings)}
    local = {name: spec for name, spec in specs.items() if name not in hosted}

    engines: dict[str, Engine] = {}
    if hosted:
        engines |= engine_pool(config, hosted, device, version).engines
    for engine in engines.values():
        undo.callback(engine.close)

    engines |= make_each(local, device, version, drafts=bool(config.draft), undo=undo)
    return engines["engine"], engines.get("evaluation.engine", engines["engine"])


def computed_differently(config: Config) -> list[list[str]]:
    """Return the layers that training and an engine of rollouts compute in different number formats.

    Returns:
        For each layer its name, the engine's format and training's.
    """
    is_quantized = config.trained_quantization is not None  # whether training quantizes, as the engine then does
    device = pick_device(config.device).type
    of_engines = [SideFormats.of(settings, device) for settings in config.writing_engines.values()]
    of_training = SideFormats(
        dtype=config.compute_dtype if is_quantized else "fp32",
        quantization=config.trained_quantization,
        kv_cache_dtype=config.engine.kv_cache_dtype if is_quantized else None,
        head_dtype=config.head_dtype,
        autocast="bf16" if config.precision == "bf16" else None,
    )
    if all(formats == of_training for formats in of_engines):
        return []

    model = load_meta_model((config.rollout_model or config.policy).path)
    in_training = layer_formats(model, of_training)
    differing = [layer_differences(layer_formats(model, formats), in_training) for formats in of_engines]
    # The layers of all engines, each difference once.
    return [list(layer) for layer in dict.fromkeys(chain.from_iterable(differing))]


def learner_paths(config: Config, checkpoint: Path | None = None) -> dict[str, str]:
    """Return where all models of a learner are read from, by name: in the settings, or below a checkpoint's folder.

    The reference is always read from the path in the settings: a checkpoint's policy has moved away from it.
    """
    paths: dict[str, str] = {**config.model_paths(checkpoint)}
    if config.critic:
        paths["critic"] = str(checkpoint / "critic") if checkpoint else config.critic.path or config.policy.path
    return paths | reference_path(config)


def load_models(config: Config, checkpoint: Path | None, device: torch.device | None) -> Models:
    """Load all models of a learner: `policy`, and `rollout_model`, `critic` and `reference` where the run has them.

    Args:
        checkpoint: folder of the checkpoint to continue from; None for a new run.
        device: where the models go; None for models that will be sharded.

    Raises:
        ModelError: a model cannot be used.
    """
    models = {
        name: load_trained(config, name, path, device, resumes=bool(checkpoint))
        for name, path in learner_paths(config, checkpoint).items()
    }
    # Leave every output layer only the rows of the token ids that all models have.
    cut_heads(models, run_rows(config, config.model_paths(checkpoint)))
    return models


def cut_heads(models: Models, rows: int) -> None:
    """Cut the output layers of a learner's models to their first rows, one for each id that a run may sample.

    Args:
        rows: number of rows that are kept, that of the shortest output layer (`run_rows`). The critic's output layer
            has one row, and stays.
    """
    for name, model in models.items():
        if name != "critic":
            cut_head(model, rows)


def load_trained(config: Config, name: str, path: str, device: torch.device | None, resumes: bool) -> PreTrainedModel:
    """Load a model to train or to score with, with an adapter where the settings ask for LoRA.

    Args:
        name: `policy`, `rollout_model`, `critic` or `reference`.
        path: folder or name of the model. Where a run with LoRA resumes, `path` is the folder of the adapter, and the
            weights are read from the path in the settings, as the run began with them.
        device: where the model goes; None for a model that will be sharded.
        resumes: whether `path` is inside a checkpoint.
    """
    settings = getattr(config, name, None)  # None for the reference
    lora = getattr(settings, "lora", None)
    load = load_value_model if name == "critic" else load_model
    with role_named(name):
        model = load(settings.path if settings and lora else path, torch.float32, device)

    # Set the number formats, and add an adapter with new weights for LoRA.
    prepare(config, name, model, on_cpu=pick_device(config.device).type == "cpu")
    if lora and resumes:
        load_adapter(model, Path(path))
    return model


def prepare(config: Config, name: str, model: PreTrainedModel, on_cpu: bool) -> None:
    """Change a learner's model so that it computes in the number formats of training, with LoRA and activation
    checkpointing where the settings ask for them.

    Args:
        name: `policy`, `rollout_model`, `critic` or `reference`.
        on_cpu: whether the model computes on the CPU, where some operations of trained models are fused. A model that
            is loaded into CPU memory only to be sharded over GPUs does not.
    """
    settings = getattr(config, name, None)  # None for the reference
    compute_dtype = DTYPES[config.compute_dtype]
    quantization = None if name == "critic" else config.trained_quantization

    if name != "critic" and config.head_dtype == "fp32":
        # Quantized training computes bit for bit what its engine computes, so the weight of the output layer is rounded
        # to the engine's dtype before it is widened.
        widen_head(model, compute_dtype if quantization else None)

    if quantization:
        # Linear layers compute with the codes (quantized numbers) that the engine computes with.
        train_in_codes(
            model,
            SCHEMES[quantization],
            config.fp8_backward,
            fp8_cache=config.engine.kv_cache_dtype == "fp8",
            exact=on_cpu,  # attend in float64, as the engine does on a CPU
            dtype=compute_dtype,
        )
    elif on_cpu and settings:  # not the reference, which is never trained
        fuse(model)

    if lora := getattr(settings, "lora", None):
        add_adapter(model, lora, fold_in(config.seed, "adapter", name))
    if config.activation_checkpointing and settings and settings.optimizer is not None:
        checkpoint_activations(model)


def make_learner(
    config: Config, models: Models, exact_engines: Collection[Role], mesh: DeviceMesh | None = None
) -> JointLearner:
    """Build a learner with the optimizers and objectives of the settings.

    Args:
        models: the models of `load_models`, which are trained in place.
        exact_engines: roles of the models whose engine samples from the distribution that the model has in training.
        mesh: all ranks of torch.distributed, over which the models are sharded in place; None: this process keeps the
            models whole.
    """
    head = head_options(config)
    reference = _make_reference(config, models, head)  # before sharding: its digest needs whole weights
    gathered = shard(models, mesh, config.placement.offload) if mesh else None

    optimizers: dict[Role, ModelOptimizer] = {}
    if config.policy.optimizer:
        parameters = models["policy"].parameters()
        optimizers["policy"] = ModelOptimizer(parameters, config.policy.optimizer, _total_steps(config))

    rollout_settings = config.rollout_model
    each_step = rollout_settings is None or rollout_settings.update == "step"  # else one update in each iteration
    rollout_objective = None
    if rollout_settings and rollout_settings.optimizer:
        steps = _total_steps(config) if each_step else config.iterations
        parameters = models["rollout_model"].parameters()
        optimizers["rollout_model"] = ModelOptimizer(parameters, rollout_settings.optimizer, steps)
        rollout_objective = rollout_model_objective(rollout_settings, config.objective.loss_agg_mode)

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
        distill_control=rollout_settings.distill_control if rollout_settings else None,
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
    """Build the critic of a run from its value model; None for a run without one."""
    if config.critic is None:
        return None
    model = models["critic"]
    optimizer = ModelOptimizer(model.parameters(), config.critic.optimizer, _total_steps(config))
    return Critic(model, optimizer, config.critic, config.batch.micro_batch_tokens)


def _make_reference(config: Config, models: Models, head: HeadOptions) -> Reference | None:
    """Build the reference, the model that a KL term of the loss keeps the policy close to; None without a reference."""
    if config.objective.reference is None:
        return None
    return Reference(
        models["reference"],
        models["policy"],
        estimate=config.objective.reference.kl_loss_type,
        temperature=config.sampling.temperature,
        head=head,
    )


def _total_steps(config: Config) -> int:
    """Return the number of optimizer steps of the whole run."""
    return config.iterations * config.batch.steps_per_iteration
