"""One of our engines as the rollout function of TRL's trainer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jackpot.adapters.trl.base import TRLTrainer, plain_model
from jackpot.config.build import validated
from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.core.errors import ConfigError, EngineError
from jackpot.core.prng import fold_in
from jackpot.core.types import Prompt, Rollout, Version
from jackpot.models.forward import cut_head, output_layer
from jackpot.models.load import DTYPES, check_same_tokenizer, eos_token_ids, load_model, load_tokenizer
from jackpot.rollout.engines.base import Engine, Request
from jackpot.rollout.engines.transformers.engine import TransformersEngine

NUM_TOP = Sampling().num_top_log_probs


class EngineRollouts:
    """Is a rollout function of TRL: one of our engines generates, with another model than the one in training.

    The sampling is that of TRL's settings. Seeds are hashed from TRL's seed, the optimizer step, the process and the
    row of the batch, so a resumed run generates the same again.

    Args:
        model: folder, hub name or starter:NAME of the model that generates, in this process; or an engine.
        dtype: of its weights, fp32 or bf16, where `model` is a path; by default fp32. An engine has its own.
        num_top_log_probs: K of the top-k that it returns.

    Raises:
        ConfigError: an unknown dtype, or one for an engine.
    """

    def __init__(
        self, model: str | Path | Engine, *, dtype: str | None = None, num_top_log_probs: int = NUM_TOP
    ) -> None:
        is_engine = isinstance(model, Engine)
        if is_engine and dtype:
            raise ConfigError(f"dtype is {dtype!r}, but an engine was given, which has its own; leave it out")
        settings = validated(TransformersEngineConfig, {"dtype": dtype} if dtype else {})
        self._engine: Engine | tuple[str | Path, TransformersEngineConfig] = model if is_engine else (model, settings)
        self._top = num_top_log_probs
        self._names = BatchNames()

    def __call__(self, prompts: list[Any], trainer: TRLTrainer) -> dict[str, Any]:
        """Return a completion for each prompt, as TRL and `CorrectedGRPOTrainer` take them.

        Raises:
            EngineError: the engine gave up a response.
            ConfigError: settings of TRL's sampling that our engines do not have.
        """
        if not isinstance(self._engine, Engine):
            self._engine = make_engine(*self._engine, trainer)
        name, _ = self._names.next(trainer)
        return completions(self._engine.generate(requests(prompts, trainer, name, self._top)))


class BatchNames:
    """Names the generation batches of a run, so that a resumed run has the same names, evaluations or not."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}  # optimizer steps, and batches since the last of them

    def next(self, trainer: TRLTrainer) -> tuple[str, int]:
        """Return the name of the next batch, and how many came before it since the last optimizer step."""
        kind, step = "train" if trainer.model.training else "eval", trainer.state.global_step
        before, number = self._last.get(kind, (step, -1))
        number = number + 1 if before == step else 0
        self._last[kind] = (step, number)
        return f"{kind}/{step}/{number}", number


def completions(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return rollouts as a rollout function returns them to `CorrectedGRPOTrainer`.

    Raises:
        EngineError: the engine gave up a response.
    """
    if gave_up := [rollout.uid for rollout in rollouts if rollout.finish == "aborted"]:
        raise EngineError(f"the engine gave up {len(gave_up)} of {len(rollouts)} responses, such as {gave_up[0]}")
    return {
        "prompt_ids": [list(rollout.prompt.token_ids) for rollout in rollouts],
        "completion_ids": [rollout.token_ids.tolist() for rollout in rollouts],
        "logprobs": [rollout.rollout_log_probs.tolist() for rollout in rollouts],
        "top_ids": [rollout.top_ids for rollout in rollouts],
        "top_log_probs": [rollout.top_log_probs for rollout in rollouts],
    }


def sampling_of(args: Any, num_top_log_probs: int) -> Sampling:
    """Return TRL's settings of sampling as ours.

    Raises:
        ConfigError: settings of TRL's sampling that our engines do not have.
    """
    unknown = {"min_p": args.min_p or None, "generation_kwargs": args.generation_kwargs or None}
    unknown["repetition_penalty"] = None if args.repetition_penalty == 1.0 else args.repetition_penalty
    if named := ", ".join(f"{key} is {value!r}" for key, value in unknown.items() if value is not None):
        raise ConfigError(f"{named}: our engines do not have them; leave them out, or sample with vLLM")
    return Sampling(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        max_new_tokens=args.max_completion_length,
        num_top_log_probs=num_top_log_probs,
    )


def requests(prompts: list[Any], trainer: TRLTrainer, name: str, num_top_log_probs: int) -> list[Request]:
    """Make a request for each of TRL's prompts, with the sampling of TRL's settings.

    Args:
        name: of the generation batch, unique within a run.

    Raises:
        ConfigError: as `sampling_of`.
    """
    args, rank = trainer.args, trainer.accelerator.process_index
    sampling, made = sampling_of(args, num_top_log_probs), []
    for row, ids in enumerate(trainer._tokenize_prompts(prompts)[0]):
        uid = f"{name}/{rank}/{row}"
        prompt = Prompt(uid=uid, text=str(prompts[row]), answer="", token_ids=tuple(ids))
        made.append(Request(uid=uid, prompt=prompt, seed=fold_in(args.seed, "sample", uid), sampling=sampling))
    return made


def make_engine(
    path: str | Path,
    settings: TransformersEngineConfig,
    trainer: TRLTrainer,
    drafter: TransformersEngine | None = None,
) -> TransformersEngine:
    """Make the engine of a model that shares the tokenizer of TRL's.

    Args:
        drafter: as of `TransformersEngine`.
    """
    tokenizer = trainer.processing_class
    check_same_tokenizer(tokenizer, load_tokenizer(path))
    model = load_model(path, DTYPES[settings.dtype], trainer.accelerator.device)
    cut_head(model, output_layer(plain_model(trainer.accelerator.unwrap_model(trainer.model))).out_features)
    ends = {*eos_token_ids(model), tokenizer.eos_token_id}  # pyright: ignore[reportUnhashable] (an id, and no list)
    return TransformersEngine(model, settings, eos_token_ids=sorted(ends), version=Version(0, 0), drafter=drafter)
