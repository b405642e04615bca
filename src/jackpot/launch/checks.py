"""Refuse models, tasks and engines that do not fit the settings, before the first rollout is generated."""

from typing import get_args

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jackpot.config.run import Config
from jackpot.core.errors import ConfigError, EngineError, ModelError
from jackpot.core.types import Role
from jackpot.launch.objectives import policy_objective
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.tasks.base import Split, Task


def check_vocabulary(models: dict[Role, PreTrainedModel], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse models whose output layers differ in size: log-probs are compared token id by token id.

    Raises:
        ModelError: the sizes differ, or the tokenizer has more tokens than the output layer.
    """
    sizes = {role: model.get_output_embeddings().weight.shape[0] for role, model in models.items()}
    if len(set(sizes.values())) > 1:
        raise ModelError(f"the models' output layers differ in size, {sizes}; policy and rollout model must share one")
    if len(tokenizer) > sizes["policy"]:
        raise ModelError(f"the tokenizer has {len(tokenizer)} tokens, the models' output layer only {sizes['policy']}")


def check_lengths(config: Config, models: dict[Role, PreTrainedModel], task: Task) -> None:
    """Refuse length limits that the first prompts of the task already break.

    A longer prompt that comes later is refused by the engine or by batching.

    Raises:
        ConfigError: prompt and response together exceed the models' context or `batch.micro_batch_tokens`.
    """
    context = min(model.config.get_text_config().max_position_embeddings for model in models.values())
    prompt = max(len(task.prompt(split, 0).token_ids) for split in get_args(Split))
    wanted = config.sampling.max_new_tokens
    if prompt + wanted > context:
        raise ConfigError(
            f"a prompt of {prompt} tokens and sampling.max_new_tokens {wanted} do not fit the models' context of "
            f"{context}; lower max_new_tokens to at most {context - prompt}, or shorten the prompts"
        )
    if prompt + wanted > config.batch.micro_batch_tokens:
        raise ConfigError(
            f"a prompt of {prompt} tokens and sampling.max_new_tokens {wanted} do not fit batch.micro_batch_tokens "
            f"{config.batch.micro_batch_tokens}; raise it to at least {prompt + wanted}, or lower max_new_tokens"
        )


def check_top_log_probs(config: Config, engine: Engine) -> None:
    """Refuse `sampling.num_top_log_probs` beyond what the engine returns."""
    wanted, most = config.sampling.num_top_log_probs, engine.capabilities.num_top_log_probs
    if wanted > most:
        raise ConfigError(f"sampling.num_top_log_probs is {wanted}, but the engine returns at most {most}; lower it")


def engine_is_exact(config: Config, engine: Engine) -> bool:
    """Return whether the rollout model in training has the distribution that the engine samples from.

    In bf16 both agree up to rounding, which is good enough to fill in missing log-probs (`mismatch/engine_gap` shows
    how good) and not for `normalizer: exact`.

    Raises:
        EngineError: `normalizer: exact` on anything but an fp32 engine with fp32 training.
    """
    quantized = engine.capabilities.quantized
    is_exact = not quantized and not config.sampling.truncated and config.engine.dtype == config.precision
    if policy_objective(config).normalizer == "exact" and not (is_exact and config.precision == "fp32"):
        raise EngineError(
            f"normalizer 'exact' takes p_inf from training, but the engine computes in {config.engine.dtype}"
            f"{', quantized,' if quantized else ''} and training in {config.precision}; use normalizer: topk, or fp32 "
            f"on both sides and no quantization"
        )
    return is_exact
