"""Lets one of our engines generate the rollouts of TRL's trainer."""

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
    """A rollout function for TRL's trainer: one of our engines generates, with another model than the trained one.

    TRL's settings decide the sampling. Seeds are hashed from TRL's seed, the optimizer step, the process and the row of
    the batch, so a resumed run generates the same again.

    Args:
        model: an engine; or folder, hub name or starter:NAME of the model that generates in this process.
        dtype: number format of the weights, fp32 or bf16, by default fp32; only where `model` is not an engine.
        num_top_log_probs: K of the top-k lists that are returned.

    Raises:
        ConfigError: `dtype` is unknown, or was given for an engine.
    """

    def __init__(
        self, model: str | Path | Engine, *, dtype: str | None = None, num_top_log_probs: int = NUM_TOP
    ) -> None:
        """Keep the engine, or the path and the settings from which the first call makes one."""
        is_engine = isinstance(model, Engine)
        if is_engine and dtype:
            raise ConfigError(f"dtype is {dtype!r}, but an engine was given, which has its own; leave it out")
        settings = validated(TransformersEngineConfig, {"dtype": dtype} if dtype else {})
        # From a path the engine is made when TRL first asks for rollouts: only then is the device known.
        self._engine: Engine | tuple[str | Path, TransformersEngineConfig] = model if is_engine else (model, settings)
        self._num_top = num_top_log_probs
        self._names = BatchNames()  # names of generation batches, with which the uids of their rollouts begin

    def __call__(self, prompts: list[Any], trainer: TRLTrainer) -> dict[str, Any]:
        """Generate a completion for each prompt; return token ids, log-probs and top-k lists, as `completions` does.

        Raises:
            EngineError: the engine gave up a response.
            ConfigError: TRL's settings of sampling have one that our engines do not have.
        """
        if not isinstance(self._engine, Engine):
            self._engine = make_engine(*self._engine, trainer)
        name, _ = self._names.next(trainer)
        return completions(self._engine.generate(requests(prompts, trainer, name, self._num_top)))


class BatchNames:
    """A counter that names generation batches by optimizer step, so that a resumed run gives the same names again."""

    def __init__(self) -> None:
        """Begin before the first batch of each kind."""
        # By kind of batch, train or eval: the optimizer steps before the newest batch, and the index of that batch
        # among the batches since the last step.
        self._newest: dict[str, tuple[int, int]] = {}

    def next(self, trainer: TRLTrainer) -> tuple[str, int]:
        """Return the name of the next batch, and its index among the batches since the last optimizer step."""
        kind = "train" if trainer.model.training else "eval"
        step = trainer.state.global_step
        last_step, last_index = self._newest.get(kind, (step, -1))  # -1: the first batch of a kind has the index 0

        index = last_index + 1 if last_step == step else 0
        self._newest[kind] = (step, index)
        return f"{kind}/{step}/{index}", index


def completions(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the token ids, log-probs and top-k lists of rollouts, by the keys that `CorrectedGRPOTrainer` reads.

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
    """Convert TRL's settings of sampling to ours.

    Args:
        args: TRL's GRPOConfig.

    Raises:
        ConfigError: some settings are not supported by our engines.
    """
    # Settings that our engines lack; None where the value changes nothing, such as a min_p of 0.
    unknown = {
        "min_p": args.min_p or None,
        "generation_kwargs": args.generation_kwargs or None,
        "repetition_penalty": None if args.repetition_penalty == 1.0 else args.repetition_penalty,
    }
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
        name: name of the generation batch, unique within a run.

    Raises:
        ConfigError: as `sampling_of`.
    """
    args, rank = trainer.args, trainer.accelerator.process_index
    sampling = sampling_of(args, num_top_log_probs)
    requests = []
    for row, ids in enumerate(trainer._tokenize_prompts(prompts)[0]):  # [0]: token ids; the rest is of images
        uid = f"{name}/{rank}/{row}"
        prompt = Prompt(uid=uid, text=str(prompts[row]), answer="", token_ids=tuple(ids))
        requests.append(Request(uid=uid, prompt=prompt, seed=fold_in(args.seed, "sample", uid), sampling=sampling))
    return requests


def make_engine(
    path: str | Path,
    settings: TransformersEngineConfig,
    trainer: TRLTrainer,
    drafter: TransformersEngine | None = None,
) -> TransformersEngine:
    """Make an engine of transformers with a model that has the tokenizer of TRL's model.

    Args:
        path: folder, hub name or starter:NAME of the model.
        drafter: engine of the model that drafts for this one; None: no model drafts.

    Raises:
        DataError, ModelError: the tokenizers differ, or the model cannot be loaded.
    """
    tokenizer = trainer.processing_class
    check_same_tokenizer(tokenizer, load_tokenizer(path))
    model = load_model(path, DTYPES[settings.dtype], trainer.accelerator.device)
    # Only token ids that TRL's model has can be sampled.
    cut_head(model, output_layer(plain_model(trainer.accelerator.unwrap_model(trainer.model))).out_features)
    ends = {*eos_token_ids(model), tokenizer.eos_token_id}  # pyright: ignore[reportUnhashable] (an id, and no list)
    return TransformersEngine(
        model, settings, eos_token_ids=sorted(ends), version=Version(policy=0, rollout_model=0), drafter=drafter
    )
