"""Refuses models, tasks and engines that do not fit the settings, before the first rollout is generated."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import get_args

from transformers import PreTrainedConfig, PreTrainedModel

from jackpot.config.config import Config
from jackpot.config.engines import EngineConfig, VLLMEngineConfig, is_quantized, is_remote
from jackpot.config.processes import check_ranks
from jackpot.config.tasks import MathConfig, TaskConfig
from jackpot.core.errors import ConfigError, EngineError, ModelError
from jackpot.core.roles import Role
from jackpot.launch.engines import EngineSpec, engine_specs, reference_path
from jackpot.models.forward import output_layer
from jackpot.models.gathered import check_layers
from jackpot.models.load import head_rows, load_meta_model
from jackpot.rollout.tasks.base import Split, Task
from jackpot.training.objectives import policy_objective


def check_start(config: Config, paths: Mapping[Role, str], ranks: int) -> dict[Role, PreTrainedModel]:
    """Refuse a run that cannot start, judged by its settings and the shapes of its models alone.

    A start calls this before it makes anything; so do `--dry-run` and `jackpot launch`.

    Args:
        paths: where each model is read from, by role.
        ranks: number of processes that train.

    Returns:
        Each model of `paths` on the meta device, without weights.

    Raises:
        ConfigError, EngineError: settings that do not fit each other, the models, or several ranks.
        ModelError: a model cannot be used at all, together with the others, or on several ranks.
    """
    # Every call below may refuse the run by an error; a result that is not kept is of no use here.
    check_ranks(config, ranks)
    outlines: dict[Role, PreTrainedModel] = {role: _outline(role, path) for role, path in paths.items()}
    reference = {name: _outline(name, path) for name, path in reference_path(config).items()}
    if ranks > 1:
        for name, model in {**outlines, **reference}.items():
            check_layers(name, model)

    prompt_limit(config, [model.config for model in outlines.values()])

    specs = engine_specs(config, paths)
    _check_rows(config, specs)
    check_top_log_probs(config, specs["engine"].rows)

    for key, spec in specs.items():
        if key == "engine" or config.is_mixed:  # the policy generates rollouts too, by its engine of evaluations
            engine_is_exact(config, is_quantized(spec.settings), spec.settings)
    return outlines


def _outline(role: str, path: str) -> PreTrainedModel:
    """Return a model on the meta device, without weights; refuse a model without an output layer."""
    with role_named(role):
        model = load_meta_model(path)
        output_layer(model)  # raises ModelError where there is none
        return model


@contextmanager
def role_named(role: str) -> Iterator[None]:
    """Put a model's role before the text of every ModelError that the block raises."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{role}: {error}") from error


def _check_rows(config: Config, specs: Mapping[str, EngineSpec]) -> None:
    """Refuse engines that would sample token ids for which another model's output layer has no row (`head_rows`).

    Raises:
        EngineError: a server, or vLLM with a draft model, whose model has a longer output layer.
    """
    for name, (settings, path, rows) in specs.items():  # `rows`: how many token ids all models have
        own_rows = head_rows({name: path})
        drafts = config.draft is not None and isinstance(settings, VLLMEngineConfig)
        if own_rows > rows and (drafts or is_remote(settings)):  # any other engine draws from `rows` ids alone
            raise EngineError(
                f"{name}={settings.name}{' with drafts' if drafts else ''} samples from all {own_rows} rows of the "
                f"output layer of {path}, and another model of the run has {rows}; use transformers, or take a copy of "
                f"the longer model that model.resize_token_embeddings({rows}) has cut"
            )


def prompt_limit(config: Config, models: Iterable[PreTrainedConfig]) -> int:
    """Return the largest number of tokens of a prompt that leaves room for `sampling.max_new_tokens`.

    There must be room in the context of every model and engine, and in `batch.micro_batch_tokens`.

    Raises:
        ConfigError: there is no room for any prompt.
    """
    contexts = [getattr(model.get_text_config(), "max_position_embeddings", None) for model in models]
    engines = [getattr(engine, "max_model_len", None) for engine in (config.engine, config.evaluation.engine)]

    # Where there may be a limit, and how many tokens it allows to prompt and response together; None: no limit there.
    rooms = [
        *(("the models' context", context) for context in contexts),
        *(("engine.max_model_len", length) for length in engines),
        ("batch.micro_batch_tokens", config.batch.micro_batch_tokens),
    ]
    name, room = min(((name, size) for name, size in rooms if size), key=lambda item: item[1])

    max_new_tokens = config.sampling.max_new_tokens
    if room <= max_new_tokens:
        more = "take models with a longer one" if name == "the models' context" else f"raise {name}"
        raise ConfigError(
            f"sampling.max_new_tokens {max_new_tokens} leaves no room for a prompt in {name} of {room} tokens; lower "
            f"max_new_tokens, or {more}"
        )
    return room - max_new_tokens


def limited_task(task: TaskConfig, limit: int) -> TaskConfig:
    """Return the settings of a task, with `max_prompt_tokens` lowered to `limit` where the task has this setting."""
    if not isinstance(task, MathConfig):
        return task
    return task.model_copy(update={"max_prompt_tokens": min(task.max_prompt_tokens or limit, limit)})


def check_lengths(config: Config, limit: int, task: Task) -> None:
    """Refuse length limits that the first prompt of a split of the task already exceeds.

    A task with `max_prompt_tokens` has left out prompts that are too long. In other tasks a prompt that is too long
    and comes later is refused by the engine, or when batches are made.

    Args:
        limit: most tokens of a prompt (`prompt_limit`).

    Raises:
        ConfigError: a prompt is longer than the limit.
    """
    longest = max(len(task.prompt(split, 0).token_ids) for split in get_args(Split))
    if longest > limit:
        max_new_tokens = config.sampling.max_new_tokens
        fitting = max_new_tokens + limit - longest
        advice = f"lower max_new_tokens to at most {fitting}, or shorten" if fitting > 0 else "shorten"
        raise ConfigError(
            f"a prompt of {longest} tokens and sampling.max_new_tokens {max_new_tokens} do not fit the "
            f"{limit + max_new_tokens} tokens that context and batch.micro_batch_tokens allow; {advice} the prompts, "
            f"or raise the smaller of the two"
        )


def check_top_log_probs(config: Config, limit: int) -> None:
    """Refuse a `sampling.num_top_log_probs` above `limit`, the most top log-probs that an engine returns."""
    num_top = config.sampling.num_top_log_probs
    if num_top > limit:
        raise ConfigError(f"sampling.num_top_log_probs is {num_top}, but the engine returns at most {limit}; lower it")


def engine_is_exact(config: Config, quantized: bool, settings: EngineConfig | None = None) -> bool:
    """Return whether an engine samples rollouts from the distribution that the engine's model has in training.

    In bf16 the two distributions agree up to rounding (`mismatch/engine_gap` measures how far). That is good enough to
    fill in missing log-probs, and not for `normalizer: exact`.

    Args:
        quantized: whether the engine computes with quantized numbers.
        settings: settings of the engine; None: `config.engine`.

    Raises:
        EngineError: `normalizer: exact` on anything but an fp32 engine with fp32 training.
    """
    dtype = (settings or config.engine).dtype
    is_exact = not quantized and not config.sampling.truncated and dtype == config.precision
    if policy_objective(config.objective).normalizer == "exact" and not (is_exact and config.precision == "fp32"):
        raise EngineError(
            f"normalizer 'exact' takes p_inf from training, but the engine computes in {dtype}"
            f"{', quantized,' if quantized else ''} and training in {config.precision}; use normalizer: topk, or fp32 "
            f"on both sides and no quantization"
        )
    return is_exact
