"""Refuse models, tasks and engines that do not fit the settings, before the first rollout is generated."""

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
from jackpot.launch.engines import EnginePart, engine_parts, reference_path
from jackpot.models.forward import output_layer
from jackpot.models.gathered import check_layers
from jackpot.models.load import head_rows, load_meta_model
from jackpot.rollout.tasks.base import Split, Task
from jackpot.training.objectives import policy_objective


def check_start(config: Config, paths: Mapping[Role, str], ranks: int) -> dict[Role, PreTrainedModel]:
    """Refuse what no start accepts, from the settings and the shapes of the models alone.

    A start asks this before it makes anything; `--dry-run` and `jackpot launch` ask the same.

    Args:
        paths: where each model is read from.
        ranks: processes that train.

    Returns:
        Each model on the meta device.

    Raises:
        ConfigError, EngineError: settings that do not fit each other, the models, or several ranks.
        ModelError: a model cannot be used, not with the others, or not on several ranks.
    """
    check_ranks(config, ranks)
    outlines: dict[Role, PreTrainedModel] = {role: _outline(role, path) for role, path in paths.items()}
    others = {role: _outline(role, path) for role, path in reference_path(config).items()}

    if ranks > 1:
        for role, model in {**outlines, **others}.items():
            check_layers(role, model)
    prompt_limit(config, [model.config for model in outlines.values()])

    parts = engine_parts(config, paths)
    _check_rows(config, parts)
    check_top_log_probs(config, parts["engine"].rows)

    engines = [config.engine, *([config.evaluation.engine or config.engine] if config.is_mixed else [])]
    for settings in engines:
        engine_is_exact(config, is_quantized(settings), settings)
    return outlines


def _outline(role: str, path: str) -> PreTrainedModel:
    with role_named(role):
        model = load_meta_model(path)
        output_layer(model)  # raises where there is none
        return model


@contextmanager
def role_named(role: str) -> Iterator[None]:
    """Put a model's role before the error of a model that cannot be used."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{role}: {error}") from error


def _check_rows(config: Config, parts: Mapping[str, EnginePart]) -> None:
    """Refuse engines that would sample ids for which another model of the run has no row (`head_rows`).

    Raises:
        EngineError: a server, or vLLM with a draft model, whose model has a longer output layer.
    """
    for name, part in parts.items():
        size, settings = head_rows({name: part.path}), part.settings
        drafts = config.draft is not None and isinstance(settings, VLLMEngineConfig)
        if size > part.rows and (drafts or is_remote(settings)):
            raise EngineError(
                f"{name}={settings.name}{' with drafts' if drafts else ''} samples from all {size} rows of the output "
                f"layer of {part.path}, and another model of the run has {part.rows}; use transformers, or take a copy "
                f"of the longer model that model.resize_token_embeddings({part.rows}) has cut"
            )


def prompt_limit(config: Config, models: Iterable[PreTrainedConfig]) -> int:
    """Return the most tokens of a prompt that leave room for `sampling.max_new_tokens`: in the context of every model
    and engine, and in `batch.micro_batch_tokens`.

    Raises:
        ConfigError: there is no room for any prompt.
    """
    contexts = [getattr(model.get_text_config(), "max_position_embeddings", None) for model in models]
    engines = [getattr(engine, "max_model_len", None) for engine in (config.engine, config.evaluation.engine)]

    rooms = [("the models' context", context) for context in contexts]
    rooms += [("engine.max_model_len", length) for length in engines]
    rooms += [("batch.micro_batch_tokens", config.batch.micro_batch_tokens)]
    name, room = min(((name, size) for name, size in rooms if size), key=lambda item: item[1])

    wanted = config.sampling.max_new_tokens
    if room <= wanted:
        more = "take models with a longer one" if name == "the models' context" else f"raise {name}"
        raise ConfigError(
            f"sampling.max_new_tokens {wanted} leaves no room for a prompt in {name} of {room} tokens; lower "
            f"max_new_tokens, or {more}"
        )
    return room - wanted


def limited_task(task: TaskConfig, limit: int) -> TaskConfig:
    """Return the settings of a task with `max_prompt_tokens` of at most `limit`, where the task has it."""
    if not isinstance(task, MathConfig):
        return task
    return task.model_copy(update={"max_prompt_tokens": min(task.max_prompt_tokens or limit, limit)})


def check_lengths(config: Config, limit: int, task: Task) -> None:
    """Refuse length limits that the first prompts of the task already break.

    A task with `max_prompt_tokens` has none that does; in others, a longer one that comes later is refused by the
    engine or by batching.

    Args:
        limit: as of `prompt_limit`.

    Raises:
        ConfigError: a prompt is longer than the limit.
    """
    prompt, wanted = (
        max(len(task.prompt(split, 0).token_ids) for split in get_args(Split)),
        config.sampling.max_new_tokens,
    )
    if prompt > limit:
        lower = wanted + limit - prompt
        advice = f"lower max_new_tokens to at most {lower}, or shorten" if lower > 0 else "shorten"
        raise ConfigError(
            f"a prompt of {prompt} tokens and sampling.max_new_tokens {wanted} do not fit the {limit + wanted} tokens "
            f"that context and batch.micro_batch_tokens allow; {advice} the prompts, or raise the smaller of the two"
        )


def check_top_log_probs(config: Config, most: int) -> None:
    """Refuse `sampling.num_top_log_probs` above the `most` that the engine returns."""
    wanted = config.sampling.num_top_log_probs
    if wanted > most:
        raise ConfigError(f"sampling.num_top_log_probs is {wanted}, but the engine returns at most {most}; lower it")


def engine_is_exact(config: Config, quantized: bool, settings: EngineConfig | None = None) -> bool:
    """Return whether a model in training has the distribution that the engine of its rollouts samples from.

    In bf16 both agree up to rounding, which is good enough to fill in missing log-probs (`mismatch/engine_gap` shows
    how good) and not for `normalizer: exact`.

    Args:
        quantized: whether the engine computes with quantized numbers.
        settings: of the engine; None: `config.engine`.

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
