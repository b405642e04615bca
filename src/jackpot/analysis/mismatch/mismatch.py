"""The command `jackpot mismatch`: every sampler generates responses, which every learner scores.

Only one model, and the responses of one sampler, are in memory at a time.

Status: supported.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from jackpot.analysis.mismatch.learner import LearnerScores, learner_model, learner_scores
from jackpot.analysis.mismatch.measure import MismatchNumbers, mismatch_numbers
from jackpot.analysis.mismatch.sides import short_names, verdict
from jackpot.analysis.mismatch.tokens import SamplerScores, token_mismatch
from jackpot.config.engines import TransformersEngineConfig, is_remote
from jackpot.config.sampling import Sampling
from jackpot.config.tools import LearnerConfig, MismatchConfig, SideConfig
from jackpot.core.cores import pick_threads
from jackpot.core.errors import ModelError
from jackpot.core.prng import fold_in
from jackpot.core.types import Rollout, Version
from jackpot.launch.engines import make_engine
from jackpot.models.device import pick_device
from jackpot.models.load import DTYPES, head_rows, load_meta_model, load_tokenizers
from jackpot.models.quantization.formats import LayerDifference, SideFormats, layer_differences, layer_formats
from jackpot.models.routing import expert_layers
from jackpot.rollout.engines.base import Capabilities, Request
from jackpot.rollout.multi_turn import generate_rollouts
from jackpot.rollout.tasks.base import PromptStream, Task
from jackpot.rollout.tasks.registry import make_sets, make_task

_MOST_LOG_PROBS = 2**26  # most log-probs of all tokens together that are kept by default: 800 MB with token ids
_TOP_LOG_PROBS = 64  # log-probs that are kept of each token where whole distributions would exceed _MOST_LOG_PROBS
_VERSION = Version(policy=0, rollout_model=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchPair:
    """The result of comparing one learner with one sampler, on the sampler's responses."""

    name: str  # short name of the pair, by `_pair_name`
    sampler: str
    learner: str
    verdict: str  # a sentence about the mean gap
    cut: float  # share of responses that ended at the limit of their length
    top_log_probs: int  # number of log-probs of the sampler's distribution that are known at every token
    vocabulary: int  # size of the vocabulary
    numbers: MismatchNumbers
    layers: tuple[LayerDifference, ...]  # layers that sampler and learner compute in different number formats


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchResult:
    """The results of all pairs of a sampler and a learner, in the order of the samplers and then of the learners."""

    settings: dict[str, Any]  # as `MismatchConfig` has them
    pairs: tuple[MismatchPair, ...]


def measure_mismatch(config: MismatchConfig, listen: Callable[[str], None]) -> MismatchResult:
    """Let every sampler generate responses and every learner score them, and compare all pairs.

    Args:
        config: settings of the measurement.
        listen: function that is called with a few words at each stage.

    Raises:
        ModelError, DataError: models or tokenizers that cannot be read or do not fit each other.
        EngineError: an engine that cannot do what was requested, or a truncated sampler that cannot be compared.
    """
    torch.set_num_threads(pick_threads(config.threads))
    device = pick_device(config.device)
    sides = (*config.samplers, *config.learners)

    # All distributions are over the same token ids: those for which every model has a row in its output layer.
    paths = {side.path: side.path for side in sides}
    tokenizer = load_tokenizers(paths)
    rows = head_rows(paths, tokenizer)
    _check_servers(sides, rows)

    names = short_names(sides)
    sampler_names, learner_names = names[: len(config.samplers)], names[len(config.samplers) :]
    pairs = []
    with ExitStack() as cleanup:
        # The prompts are those of the benchmarks, or else those of the task.
        benchmarks = make_sets(config.benchmarks, tokenizer, config) if config.benchmarks else {}
        tasks = list(benchmarks.values()) or [make_task(config.task, tokenizer)]
        for task in tasks:
            cleanup.callback(task.close)

        for sampler_name, sampler in zip(sampler_names, config.samplers, strict=True):
            listen(f"{sampler_name} generates")
            rollouts, scores = _sample(config, sampler, tasks, tokenizer, device, rows)

            for learner_name, learner in zip(learner_names, config.learners, strict=True):
                listen(f"{learner_name} scores the responses of {sampler_name}")
                temperature = learner.temperature or config.sampling.temperature
                learner_scores = _learner_scores(learner, rollouts, temperature, device, rows)
                numbers = mismatch_numbers(
                    (sampled.uid, token_mismatch(sampled, learned))
                    for sampled, learned in zip(scores, learner_scores, strict=True)
                )

                pairs.append(
                    MismatchPair(
                        name=_pair_name(config, sampler_name, learner_name),
                        sampler=sampler_name,
                        learner=learner_name,
                        verdict=verdict(sampler, learner, device.type, config.sampling, numbers.gap.value),
                        cut=sum(rollout.finish == "length" for rollout in rollouts) / len(rollouts),
                        top_log_probs=scores[0].top_ids.shape[1],
                        vocabulary=scores[0].vocabulary,
                        numbers=numbers,
                        layers=layer_differences(_formats(sampler, device.type), _formats(learner, device.type)),
                    )
                )
    return MismatchResult(settings=config.model_dump(mode="json"), pairs=tuple(pairs))


def _pair_name(config: MismatchConfig, sampler: str, learner: str) -> str:
    """Return a short name for the pair of a sampler and a learner.

    If there are several samplers and one learner, the sampler's name is enough, and if there are several learners and
    one sampler, the learner's. Else the name is `SAMPLER | LEARNER`.

    Args:
        sampler, learner: names of the two.
    """
    if (len(config.samplers) > 1) == (len(config.learners) > 1):
        return f"{sampler} | {learner}"
    return sampler if len(config.samplers) > 1 else learner


def _check_servers(sides: Sequence[SideConfig], rows: int) -> None:
    """Raise ModelError for a server whose model has token ids from `rows` on: servers sample and score all ids."""
    for side in sides:
        rows_read = head_rows({side.path: side.path})
        if is_remote(side.engine) and rows_read > rows:
            raise ModelError(
                f"{side.engine.name} reads all {rows_read} rows of the output layer of {side.path}, and another side "
                f"has {rows}; take a copy of the longer model that model.resize_token_embeddings({rows}) has cut"
            )


def _sample(
    config: MismatchConfig,
    sampler: SideConfig,
    tasks: Sequence[Task],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    rows: int,
) -> tuple[list[Rollout], list[SamplerScores]]:
    """Generate the responses of one sampler, and return them with the sampler's scores.

    Every sampler gets the same prompts and the same random numbers, and samples only token ids below `rows`.
    """
    with closing(make_engine(sampler.engine, sampler.path, device, _VERSION, rows=rows)) as engine:
        vocabulary = engine.capabilities.vocab_size
        settings = config.sampling.model_dump() | {"num_top_log_probs": _top_log_probs(config, engine.capabilities)}
        sampling = Sampling.model_validate(settings)
        rollouts = [
            rollout
            for task, requests in _requests(config, tasks, sampling)
            for rollout in generate_rollouts(engine, task, tokenizer, requests)
        ]

    scores = [
        SamplerScores(
            uid=rollout.uid,
            sampled=rollout.sampled_mask,
            log_probs=rollout.rollout_log_probs.double(),
            top_ids=rollout.top_ids,
            top_log_probs=rollout.top_log_probs.double(),
            vocabulary=vocabulary,
            truncated=sampling.truncated,
        )
        for rollout in rollouts
    ]

    # Decoding does not report experts, so a mixture of experts reads its responses again.
    has_experts = isinstance(sampler.engine, TransformersEngineConfig) and expert_layers(load_meta_model(sampler.path))
    if config.reread or has_experts:
        as_learner = LearnerConfig(path=sampler.path, engine=sampler.engine)
        second_pass = _learner_scores(as_learner, rollouts, sampling.temperature, device, rows)
        scores = [
            _read_again(score, second_score, reread=config.reread)
            for score, second_score in zip(scores, second_pass, strict=True)
        ]
    return rollouts, scores


def _top_log_probs(config: MismatchConfig, capabilities: Capabilities) -> int:
    """Return how many of the sampler's log-probs are kept at a token, as `top_log_probs` says.

    By default all are kept if the engine reports them and they take little memory, else _TOP_LOG_PROBS at most.
    """
    vocabulary, most_reported = capabilities.vocab_size, capabilities.num_top_log_probs
    if config.top_log_probs is not None:
        return min(config.top_log_probs, vocabulary)

    tokens = config.responses * config.sampling.max_new_tokens
    is_small = vocabulary * tokens <= _MOST_LOG_PROBS and most_reported >= vocabulary
    return vocabulary if is_small else min(_TOP_LOG_PROBS, most_reported)


def _requests(
    config: MismatchConfig, tasks: Sequence[Task], sampling: Sampling
) -> Iterator[tuple[Task, list[Request]]]:
    """Yield each task with the requests to a sampler; the responses are spread evenly over the tasks."""
    for index, task in enumerate(tasks):
        # The first tasks get the remainder, one response each.
        count = config.responses // len(tasks) + (index < config.responses % len(tasks))
        requests = []
        for prompt in PromptStream(task, "test", config.seed).next(count):
            key = ("mismatch", index, prompt.uid, 0)  # index of the task, problem, number of the sample
            uid = "/".join(map(str, key))
            requests.append(Request(uid=uid, prompt=prompt, seed=fold_in(config.seed, *key), sampling=sampling))
        yield task, requests


def _learner_scores(
    learner: LearnerConfig, rollouts: Sequence[Rollout], temperature: float, device: torch.device, rows: int
) -> list[LearnerScores]:
    """Score responses with a learner: transformers scores whole distributions, every other engine single tokens.

    The learner's distributions are over the token ids below `rows`.
    """
    if isinstance(learner.engine, TransformersEngineConfig):
        model = learner_model(learner.engine, learner.path, device, rows)
        autocast = DTYPES[learner.autocast] if learner.autocast else None
        return list(learner_scores(model, rollouts, temperature, autocast))
    with closing(make_engine(learner.engine, learner.path, device, _VERSION, rows=rows)) as engine:
        return [LearnerScores(log_probs=log_probs.double()) for log_probs in engine.score(rollouts, temperature)]


def _read_again(scores: SamplerScores, second_pass: LearnerScores, reread: bool) -> SamplerScores:
    """Add to a response's scores the experts, and on request the log-probs, of the sampler's second pass.

    In this pass the sampler reads the whole response in one forward pass.

    Args:
        scores: the sampler's scores from sampling.
        second_pass: scores of the second pass.
        reread: whether the log-probs of the second pass replace those of sampling.
    """
    scores = replace(scores, experts=second_pass.experts)
    if not reread:
        return scores
    if second_pass.top_log_probs is None:  # an engine that scores single tokens gives no top-k list
        empty = scores.top_ids[:, :0]
        return replace(scores, log_probs=second_pass.log_probs, top_ids=empty, top_log_probs=empty.double())
    return replace(scores, log_probs=second_pass.log_probs, top_log_probs=second_pass.top_log_probs)


def _formats(side: SideConfig, device: str) -> dict[str, str]:
    """Return layer name -> number format in which a sampler or learner computes the layer on a kind of device."""
    formats = SideFormats.of(side.engine, device, getattr(side, "autocast", None))
    return layer_formats(load_meta_model(side.path), formats)
