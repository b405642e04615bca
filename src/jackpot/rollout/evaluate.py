"""Verdicts on responses, and a model on problems.

Sample j of a problem draws from a stream of its own, named by (seed, set, problem, j). So an answer depends neither on
what else is asked, nor on how many answers there are, nor on where an interrupted evaluation goes on.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from jackpot.config.run import Sampling
from jackpot.core.prng import stream_key
from jackpot.core.types import Answer, Prompt, Rollout, Score
from jackpot.rollout.engines.base import Engine, Request
from jackpot.rollout.multi_turn import stream, write
from jackpot.rollout.tasks.base import Task, decode

OWN = ""  # the name of the task's own held-out problems among the sets
_JUDGED_AT_ONCE = 64  # responses, or as many as end in so many seconds: what a kill can cost
_JUDGED_EVERY = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """k sampled answers to each of some problems: all of the first problem, then all of the second."""

    k: int
    rollouts: tuple[Rollout, ...]
    responses: tuple[str, ...]
    scores: tuple[Score, ...]

    @property
    def accuracy(self) -> float:
        """mean@k: the share of all answers that are right."""
        return sum(score.correct for score in self.scores) / len(self.scores)

    @property
    def passed(self) -> float:
        """pass@k: the share of problems with a right answer among the k."""
        problems = [self.scores[first : first + self.k] for first in range(0, len(self.scores), self.k)]
        return sum(any(score.correct for score in problem) for problem in problems) / len(problems)

    @property
    def reward(self) -> float:
        """The task's mean reward."""
        return sum(score.reward for score in self.scores) / len(self.scores)

    @property
    def tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    @property
    def mean_tokens(self) -> float:
        return self.tokens / len(self.rollouts)

    @property
    def truncated(self) -> float:
        """Share of responses cut at the length limit."""
        return sum(rollout.finish == "length" for rollout in self.rollouts) / len(self.rollouts)

    def of_role(self) -> dict[str, float]:
        """Metrics about the task's own problems, behind `eval/ROLE_`."""
        numbers = {"accuracy": self.accuracy, "reward": self.reward}
        numbers |= {"pass_at_k": self.passed} if self.k > 1 else {}
        return numbers | {"tokens": self.mean_tokens, "truncated": self.truncated}

    def of_set(self) -> dict[str, float]:
        """Metrics about another set, behind `eval/NAME/`."""
        return {
            "mean_at_k": self.accuracy,
            "pass_at_k": self.passed,
            "tokens": self.mean_tokens,
            "truncated": self.truncated,
            "reward_errors": sum(score.problem is not None for score in self.scores) / len(self.scores),
        }


class Answered(NamedTuple):
    """One sampled answer and what the task says of it."""

    rollout: Rollout
    response: str
    score: Score


def request(prompt: Prompt, sample: int, sampling: Sampling, seed: int, name: str = OWN) -> Request:
    """The request for sample number `sample` of a problem in the set `name`.

    Sample 0 of the task's own problems has the stream that it had when there were no other samples and no other sets.
    """
    what = (prompt.uid, *((sample,) if sample else ())) if name == OWN else (name, prompt.uid, sample)
    return Request(
        uid="/".join(map(str, ("eval", *what))),
        prompt=prompt,
        seed=stream_key(seed, "eval", *what),
        sampling=sampling.model_copy(update={"num_top_log_probs": 0}),
    )


def evaluate(
    engine: Engine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seed: int,
    *,
    k: int,
    name: str = OWN,
) -> Evaluation:
    """Sample k answers to each prompt as in training. The same seed draws the same uniforms every time, so that two
    evaluations of a run differ by the model alone."""
    requests = [request(prompt, sample, sampling, seed, name) for prompt in prompts for sample in range(k)]
    rollouts = write(engine, task, tokenizer, requests)
    responses, scores = judge(rollouts, task, tokenizer)
    return Evaluation(k=k, rollouts=tuple(rollouts), responses=tuple(responses), scores=tuple(scores))


def answer(
    engine: Engine, task: Task, tokenizer: PreTrainedTokenizerBase, requests: Iterable[Request], at_once: int
) -> Iterator[list[Answered]]:
    """Judged answers to requests, a few at a time, as they end and in any order; each exactly once.

    At most `2 * at_once` are under way, and nothing is kept of what was handed out, so their number does not matter to
    memory.

    Raises:
        EngineError: as `conversation.stream`. What has been handed out stays good.
    """

    def judged() -> list[Answered]:
        responses, scores = judge(ended, task, tokenizer)
        return [Answered(*one) for one in zip(ended, responses, scores, strict=True)]

    ended: list[Rollout] = []
    since = time.monotonic()
    for rollout in _as_they_end(engine, task, tokenizer, iter(requests), at_once):
        ended.append(rollout)
        if len(ended) >= _JUDGED_AT_ONCE or time.monotonic() - since > _JUDGED_EVERY:
            yield judged()
            ended, since = [], time.monotonic()
    if ended:
        yield judged()


def _as_they_end(
    engine: Engine, task: Task, tokenizer: PreTrainedTokenizerBase, requests: Iterator[Request], at_once: int
) -> Iterator[Rollout]:
    """The next requests are submitted before the last of those before them have ended: no engine waits for them."""

    def begin() -> Iterator[Rollout] | None:
        following = list(islice(requests, at_once))
        return stream(engine, task, tokenizer, following) if following else None

    writing = begin()
    while writing is not None:
        ahead = begin()
        yield from writing
        writing = ahead


def judge(rollouts: Sequence[Rollout], task: Task, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[Score]]:
    """Decode every response and ask the task about all of them at once.

    What the engine gave up is wrong and gives 0, whatever stands in it. A response that was cut at its limit is as the
    task says: one that had closed its answer by then can be right.
    """
    responses = [decode(tokenizer, rollout.token_ids) for rollout in rollouts]
    answers = [
        Answer(rollout.prompt, response, rollout.finish == "stop")
        for rollout, response in zip(rollouts, responses, strict=True)
    ]
    scores = [
        Score(reward=0.0, correct=False) if rollout.finish == "aborted" else score
        for rollout, score in zip(rollouts, task.scores(answers), strict=True)
    ]
    return responses, scores
