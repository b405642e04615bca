"""`jackpot mismatch`: every sampler generates responses, and every learner scores the responses of each sampler.

One model is in memory at a time, and the responses of one sampler.

Status: supported.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jackpot.analysis.mismatch.learner import LearnerScores, learner_model, learner_scores
from jackpot.analysis.mismatch.lengths import LengthRow, compare_lengths
from jackpot.analysis.mismatch.measure import MismatchNumbers, MismatchSums
from jackpot.analysis.mismatch.sides import short_names, verdict
from jackpot.analysis.mismatch.tokens import SamplerScores, sampler_scores, token_mismatch
from jackpot.config.config import Sampling
from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.tools import LearnerConfig, MismatchConfig, SideConfig
from jackpot.core.cores import pick_threads
from jackpot.core.prng import fold_in
from jackpot.core.types import Rollout, Version
from jackpot.launch.checks import check_vocabulary
from jackpot.launch.engines import make_engine
from jackpot.models.device import pick_device
from jackpot.models.load import DTYPES, load_meta_model, load_tokenizers
from jackpot.models.quantization.formats import LayerDifference, SideFormats, layer_differences, layer_formats
from jackpot.models.routing import expert_layers
from jackpot.rollout.engines.base import Capabilities, Request
from jackpot.rollout.multi_turn import generate_rollouts
from jackpot.rollout.tasks.base import PromptStream, Task
from jackpot.rollout.tasks.registry import make_sets, make_task

_MOST_LOG_PROBS = 2**26  # log-probs of all tokens that are kept by default: 800 MB
_TOP_LOG_PROBS = 64  # log-probs of a token where the whole distribution would be more
_VERSION = Version(0, 0)
MismatchListener = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchPair:
    """One learner compared with one sampler, on the sampler's responses."""

    name: str  # of the side that differs from other pairs
    sampler: str
    learner: str
    verdict: str
    cut: float  # share of responses that ended at the limit
    top_log_probs: int  # number of log-probs of the sampler's distribution at every token
    vocabulary: int
    numbers: MismatchNumbers
    layers: tuple[LayerDifference, ...]  # which sampler and learner compute in different number formats
    lengths: tuple[LengthRow, ...]  # one long response against several short ones; empty where not requested for


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchResult:
    """The result for all pairs, in the order of the samplers and then of the learners."""

    settings: dict[str, Any]  # as `MismatchConfig` has them
    pairs: tuple[MismatchPair, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _SampledResponses:
    """The responses of one sampler, equally many to each prompt, prompt by prompt."""

    rollouts: tuple[Rollout, ...]
    sides: tuple[SamplerScores, ...]


def measure_mismatch(config: MismatchConfig, listen: MismatchListener) -> MismatchResult:
    """Sample, score and compare all pairs of samplers and learners.

    Args:
        listen: called with a few words at each stage.

    Raises:
        ModelError, DataError: models or tokenizers that cannot be read or do not fit each other.
        EngineError: an engine that cannot do what was requested, or a truncated sampler that cannot be compared.
    """
    torch.set_num_threads(pick_threads(config.threads))
    device, first = pick_device(config.device), config.samplers[0].path
    paths = {"policy": first} | {side.path: side.path for side in (*config.samplers, *config.learners)}
    tokenizer = load_tokenizers(paths)
    check_vocabulary({role: load_meta_model(path) for role, path in paths.items()}, tokenizer)
    names = short_names((*config.samplers, *config.learners))
    samplers, learners = names[: len(config.samplers)], names[len(config.samplers) :]
    pairs = []
    with ExitStack() as undo:
        tasks = _tasks(config, tokenizer, undo)
        for name, sampler in zip(samplers, config.samplers, strict=True):
            listen(f"{name} generates")
            sampled = _sample(config, sampler, tasks, tokenizer, device)
            for learner_name, learner in zip(learners, config.learners, strict=True):
                listen(f"{learner_name} scores the responses of {name}")
                temperature = learner.temperature or config.sampling.temperature
                scored = _learner_scores(learner, [responses.rollouts for responses in sampled], temperature, device)
                pairs.append(_pair((name, learner_name), (sampler, learner), sampled, scored, config))
    return MismatchResult(settings=config.model_dump(mode="json"), pairs=tuple(pairs))


def _tasks(config: MismatchConfig, tokenizer: PreTrainedTokenizerBase, undo: ExitStack) -> list[Task]:
    """Make the tasks whose held-out problems are the prompts."""
    if config.benchmarks:
        tasks = list(make_sets(config.benchmarks, tokenizer, config).values())
    else:
        tasks = [make_task(config.task, tokenizer)]
    for task in tasks:
        undo.callback(task.close)
    return tasks


def _sample(
    config: MismatchConfig,
    sampler: SideConfig,
    tasks: Sequence[Task],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> list[_SampledResponses]:
    """Generate the responses, and apart from them the short ones if any, so that these change no batch of the others.

    Every sampler has the same prompts and the same random numbers.
    """
    with closing(make_engine(sampler.engine, sampler.path, device, _VERSION)) as engine:
        vocabulary = engine.capabilities.vocab_size
        sampling = Sampling(
            **config.sampling.model_dump() | {"num_top_log_probs": _top_log_probs(config, engine.capabilities)}
        )
        sampled: list[list[Rollout]] = []
        for each in _samplings(config, sampling):
            requested = _requests(config, tasks, each)
            sampled.append(
                [one for task, requests in requested for one in generate_rollouts(engine, task, tokenizer, requests)]
            )
    sides = [[sampler_scores(rollout, vocabulary, sampling.truncated) for rollout in rollouts] for rollouts in sampled]
    has_experts = isinstance(sampler.engine, TransformersEngineConfig) and expert_layers(load_meta_model(sampler.path))
    if config.reread or has_experts:
        as_learner = LearnerConfig(path=sampler.path, engine=sampler.engine)
        scored = _learner_scores(as_learner, sampled, sampling.temperature, device)
        take = _with_reread_scores if config.reread else _with_experts
        sides = [list(map(take, *both)) for both in zip(sides, scored, strict=True)]
    return [
        _SampledResponses(rollouts=tuple(rollouts), sides=tuple(of_responses))
        for rollouts, of_responses in zip(sampled, sides, strict=True)
    ]


def _samplings(config: MismatchConfig, sampling: Sampling) -> list[tuple[Sampling, range]]:
    """Return how each set of responses is sampled, and the numbers of its responses to a prompt."""
    if config.short is None:
        return [(sampling, range(1))]
    brief = sampling.model_copy(update={"max_new_tokens": _short_limit(config)})
    return [(sampling, range(1)), (brief, range(1, 1 + config.short))]


def _short_limit(config: MismatchConfig) -> int:
    return max(1, config.sampling.max_new_tokens // config.short)


def _top_log_probs(config: MismatchConfig, capabilities: Capabilities) -> int:
    """Return how many log-probs of the sampler's distribution are kept at every token."""
    vocabulary, most = capabilities.vocab_size, capabilities.num_top_log_probs
    if config.top_log_probs is not None:
        return min(config.top_log_probs, vocabulary)
    tokens = config.responses * config.sampling.max_new_tokens * (2 if config.short else 1)
    is_small = vocabulary * tokens <= _MOST_LOG_PROBS and most >= vocabulary
    return vocabulary if is_small else min(_TOP_LOG_PROBS, most)


def _requests(
    config: MismatchConfig, tasks: Sequence[Task], responses: tuple[Sampling, range]
) -> Iterator[tuple[Task, list[Request]]]:
    """Yield the requests of one set of responses, which are spread evenly over the tasks."""
    sampling, samples = responses
    for number, task in enumerate(tasks):
        count = config.responses // len(tasks) + (number < config.responses % len(tasks))
        keys = [
            (prompt, ("mismatch", number, prompt.uid, sample))
            for prompt in PromptStream(task, "test", config.seed).next(count)
            for sample in samples
        ]
        yield (
            task,
            [
                Request(
                    uid="/".join(map(str, key)),
                    prompt=prompt,
                    seed=fold_in(config.seed, *key),
                    sampling=sampling,
                )
                for prompt, key in keys
            ],
        )


def _learner_scores(
    learner: LearnerConfig, sampled: Sequence[Sequence[Rollout]], temperature: float, device: torch.device
) -> list[list[LearnerScores]]:
    """Score the responses: transformers gives whole distributions, every other engine single tokens."""
    if isinstance(learner.engine, TransformersEngineConfig):
        model = learner_model(learner.engine, learner.path, device)
        cast = DTYPES[learner.autocast] if learner.autocast else None
        return [list(learner_scores(model, rollouts, temperature, cast)) for rollouts in sampled]
    with closing(make_engine(learner.engine, learner.path, device, _VERSION)) as engine:
        return [
            [LearnerScores(log_probs=one.double()) for one in engine.score(responses, temperature)]
            for responses in sampled
        ]


def _with_reread_scores(side: SamplerScores, scores: LearnerScores) -> SamplerScores:
    """Replace the sampler's log-probs by those of a second pass, without top-k ones where its engine gives none."""
    if scores.top_log_probs is None:
        none = side.top_ids[:, :0]
        return replace(side, log_probs=scores.log_probs, top_ids=none, top_log_probs=none.double())
    side = _with_experts(side, scores)
    return replace(side, log_probs=scores.log_probs, top_log_probs=scores.top_log_probs)


def _with_experts(side: SamplerScores, scores: LearnerScores) -> SamplerScores:
    """Add the experts to which a second pass over the responses sends their tokens: decoding does not report them."""
    return replace(side, experts=scores.experts)


def _pair(
    names: tuple[str, str],
    sides: tuple[SideConfig, LearnerConfig],
    sampled: Sequence[_SampledResponses],
    scored: Sequence[Sequence[LearnerScores]],
    config: MismatchConfig,
) -> MismatchPair:
    tokens = [list(map(token_mismatch, responses.sides, read)) for responses, read in zip(sampled, scored, strict=True)]
    responses, measure, device = sampled[0], MismatchSums(), pick_device(config.device).type
    for side, one in zip(responses.sides, tokens[0], strict=True):
        measure.add(side.uid, one)
    numbers = measure.numbers()
    gaps = [[one.gap for one in of_responses] for of_responses in tokens]
    return MismatchPair(
        name=_pair_name(names, len(config.samplers), len(config.learners)),
        sampler=names[0],
        learner=names[1],
        verdict=verdict(*sides, device, config.sampling, numbers.gap.value),
        cut=sum(rollout.finish == "length" for rollout in responses.rollouts) / len(responses.rollouts),
        top_log_probs=responses.sides[0].top_ids.shape[1],
        vocabulary=responses.sides[0].vocabulary,
        numbers=numbers,
        layers=layer_differences(*(_formats(side, device) for side in sides)),
        lengths=_lengths(gaps, config) if config.short else (),
    )


def _formats(side: SideConfig, device: str) -> dict[str, str]:
    """Return the number formats of a side's layers on a kind of device."""
    formats = SideFormats.of(side.engine, device, getattr(side, "autocast", None))
    return layer_formats(load_meta_model(side.path), formats)


def _pair_name(names: tuple[str, str], samplers: int, learners: int) -> str:
    """Return the name of the side that differs between pairs, or both names."""
    if samplers > 1 and learners == 1:
        return names[0]
    return names[1] if learners > 1 and samplers == 1 else " | ".join(names)


def _lengths(gaps: Sequence[Sequence[Tensor]], config: MismatchConfig) -> tuple[LengthRow, ...]:
    long, short = gaps
    groups = [short[first : first + config.short] for first in range(0, len(short), config.short)]
    return compare_lengths(long, groups, _short_limit(config))
