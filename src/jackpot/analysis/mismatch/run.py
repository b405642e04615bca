"""`jackpot mismatch`: every sampler writes, every learner reads what each of them wrote.

One model is in memory at a time, and the responses of one sampler.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jackpot.analysis.mismatch.learner import LearnerScores, learner_model, learner_scores
from jackpot.analysis.mismatch.lengths import LengthRow, long_against_short
from jackpot.analysis.mismatch.measure import Measure, Numbers
from jackpot.analysis.mismatch.sides import short_names, verdict
from jackpot.analysis.mismatch.tokens import Written, token_numbers, written
from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.run import Sampling
from jackpot.config.tools import LearnerConfig, MismatchConfig, SideConfig
from jackpot.core.prng import fold_in
from jackpot.core.types import Rollout, Version
from jackpot.launch.checks import check_vocabulary
from jackpot.launch.engines import make_engine
from jackpot.launch.local import load_tokenizers, pick_device, threads
from jackpot.models.load import DTYPES, load_outline
from jackpot.rollout.engines.base import Capabilities, Request
from jackpot.rollout.multi_turn import generate_rollouts
from jackpot.rollout.tasks.base import PromptStream, Task
from jackpot.rollout.tasks.registry import make_sets, make_task

_MOST_LOG_PROBS = 2**26  # of all tokens together that are kept without being asked for: 800 MB
_TOP_LOG_PROBS = 64
_VERSION = Version(0, 0)
Listener = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One learner on the text of one sampler."""

    name: str  # what tells it from the other pairs
    sampler: str
    learner: str
    verdict: str
    cut: float  # share of responses that ended at the limit
    top_log_probs: int  # of the sampler's distribution, at every token
    vocabulary: int
    numbers: Numbers
    lengths: tuple[LengthRow, ...]  # one long response against several short ones; empty where not asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """All pairs, in the order of the samplers and then of the learners."""

    settings: dict[str, Any]  # as `MismatchConfig` has them
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Text:
    """What one sampler wrote to all prompts, as many responses to each, prompt by prompt."""

    rollouts: tuple[Rollout, ...]
    sides: tuple[Written, ...]


def measure_mismatch(config: MismatchConfig, listen: Listener) -> Found:
    """All of it.

    Args:
        listen: is told what is done now, in a few words.

    Raises:
        ModelError, DataError: models or tokenizers that cannot be read or do not fit each other.
        EngineError: an engine that cannot do what was asked, or a truncated sampler that cannot be compared.
    """
    torch.set_num_threads(threads(config))
    device, first = pick_device(config), config.samplers[0].path
    paths = {"policy": first} | {side.path: side.path for side in (*config.samplers, *config.learners)}
    tokenizer = load_tokenizers(paths)
    check_vocabulary({role: load_outline(path) for role, path in paths.items()}, tokenizer)
    names = short_names((*config.samplers, *config.learners))
    samplers, learners = names[: len(config.samplers)], names[len(config.samplers) :]
    pairs = []
    with ExitStack() as undo:
        tasks = _tasks(config, tokenizer, undo)
        for name, sampler in zip(samplers, config.samplers, strict=True):
            listen(f"{name} writes")
            texts = _write(config, sampler, tasks, tokenizer, device)
            for reader, learner in zip(learners, config.learners, strict=True):
                listen(f"{reader} reads what {name} wrote")
                temperature = learner.temperature or config.sampling.temperature
                readings = _readings(learner, [text.rollouts for text in texts], temperature, device)
                pairs.append(_pair((name, reader), (sampler, learner), texts, readings, config))
    return Found(settings=config.model_dump(mode="json"), pairs=tuple(pairs))


def _tasks(config: MismatchConfig, tokenizer: PreTrainedTokenizerBase, undo: ExitStack) -> list[Task]:
    """Whose held-out problems are the prompts."""
    if config.benchmarks:
        tasks = list(make_sets(config.benchmarks, tokenizer, config).values())
    else:
        tasks = [make_task(config.task, tokenizer)]
    for task in tasks:
        undo.callback(task.close)
    return tasks


def _write(
    config: MismatchConfig,
    sampler: SideConfig,
    tasks: Sequence[Task],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> list[_Text]:
    """The responses, and in a second text the short ones if any; written and read apart, so that those change nothing.

    Every sampler has the same prompts and the same random numbers.
    """
    with closing(make_engine(sampler.engine, sampler.path, device, _VERSION)) as engine:
        vocabulary = engine.capabilities.vocab_size
        sampling = Sampling(
            **config.sampling.model_dump() | {"num_top_log_probs": _top_log_probs(config, engine.capabilities)}
        )
        texts: list[list[Rollout]] = []
        for each in _samplings(config, sampling):
            asked = _requests(config, tasks, each)
            texts.append(
                [one for task, requests in asked for one in generate_rollouts(engine, task, tokenizer, requests)]
            )
    sides = [[written(rollout, vocabulary, sampling.truncated) for rollout in rollouts] for rollouts in texts]
    if config.reread:
        as_learner = LearnerConfig(path=sampler.path, engine=sampler.engine)
        readings = _readings(as_learner, texts, sampling.temperature, device)
        sides = [list(map(_reread, *both)) for both in zip(sides, readings, strict=True)]
    return [
        _Text(rollouts=tuple(rollouts), sides=tuple(of_text)) for rollouts, of_text in zip(texts, sides, strict=True)
    ]


def _samplings(config: MismatchConfig, sampling: Sampling) -> list[tuple[Sampling, range]]:
    """For each text how it is sampled, and the numbers of its responses to a prompt."""
    if config.short is None:
        return [(sampling, range(1))]
    brief = sampling.model_copy(update={"max_new_tokens": _short_limit(config)})
    return [(sampling, range(1)), (brief, range(1, 1 + config.short))]


def _short_limit(config: MismatchConfig) -> int:
    return max(1, config.sampling.max_new_tokens // config.short)


def _top_log_probs(config: MismatchConfig, capabilities: Capabilities) -> int:
    """How much of the sampler's distribution is kept."""
    vocabulary, most = capabilities.vocab_size, capabilities.num_top_log_probs
    if config.top_log_probs is not None:
        return min(config.top_log_probs, vocabulary)
    tokens = config.responses * config.sampling.max_new_tokens * (2 if config.short else 1)
    is_small = vocabulary * tokens <= _MOST_LOG_PROBS and most >= vocabulary
    return vocabulary if is_small else min(_TOP_LOG_PROBS, most)


def _requests(
    config: MismatchConfig, tasks: Sequence[Task], text: tuple[Sampling, range]
) -> Iterator[tuple[Task, list[Request]]]:
    """What is asked for one text; responses are spread evenly over the tasks."""
    sampling, samples = text
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


def _readings(
    learner: LearnerConfig, texts: Sequence[Sequence[Rollout]], temperature: float, device: torch.device
) -> list[list[LearnerScores]]:
    """Transformers reads whole distributions, every other engine gives the probabilities of the tokens alone."""
    if isinstance(learner.engine, TransformersEngineConfig):
        model = learner_model(learner.engine, learner.path, device)
        cast = DTYPES[learner.autocast] if learner.autocast else None
        return [list(learner_scores(model, rollouts, temperature, cast)) for rollouts in texts]
    with closing(make_engine(learner.engine, learner.path, device, _VERSION)) as engine:
        return [[LearnerScores(log_probs=one.double()) for one in engine.score(text, temperature)] for text in texts]


def _reread(side: Written, reading: LearnerScores) -> Written:
    """The sampler's side with what it says when it reads; of single tokens alone, where it says no more."""
    if reading.top_log_probs is None:
        none = side.top_ids[:, :0]
        return replace(side, log_probs=reading.log_probs, top_ids=none, top_log_probs=none.double())
    return replace(side, log_probs=reading.log_probs, top_log_probs=reading.top_log_probs)


def _pair(
    names: tuple[str, str],
    sides: tuple[SideConfig, LearnerConfig],
    texts: Sequence[_Text],
    readings: Sequence[Sequence[LearnerScores]],
    config: MismatchConfig,
) -> Pair:
    tokens = [list(map(token_numbers, text.sides, read)) for text, read in zip(texts, readings, strict=True)]
    text, measure = texts[0], Measure()
    for side, one in zip(text.sides, tokens[0], strict=True):
        measure.add(side.uid, one)
    numbers = measure.numbers()
    gaps = [[one.gap for one in of_text] for of_text in tokens]
    return Pair(
        name=_pair_name(names, len(config.samplers), len(config.learners)),
        sampler=names[0],
        learner=names[1],
        verdict=verdict(*sides, numbers.gap.value),
        cut=sum(rollout.finish == "length" for rollout in text.rollouts) / len(text.rollouts),
        top_log_probs=text.sides[0].top_ids.shape[1],
        vocabulary=text.sides[0].vocabulary,
        numbers=numbers,
        lengths=_lengths(gaps, config) if config.short else (),
    )


def _pair_name(names: tuple[str, str], samplers: int, learners: int) -> str:
    """The side that differs between pairs, or both."""
    if samplers > 1 and learners == 1:
        return names[0]
    return names[1] if learners > 1 and samplers == 1 else " | ".join(names)


def _lengths(gaps: Sequence[Sequence[Tensor]], config: MismatchConfig) -> tuple[LengthRow, ...]:
    long, short = gaps
    groups = [short[first : first + config.short] for first in range(0, len(short), config.short)]
    return long_against_short(long, groups, _short_limit(config))
