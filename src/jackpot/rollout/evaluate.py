"""Scoring of rollouts, and evaluation of a model on problems.

Sample j of a problem is drawn with random numbers hashed from the seed, the evaluation set, the problem and j. So a
response depends neither on the other requests, nor on the number of samples, nor on where an interrupted evaluation
continues.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from jackpot.config.sampling import Sampling
from jackpot.core.prng import fold_in
from jackpot.core.types import DecodedResponse, Prompt, Rollout, Score
from jackpot.rollout.engines.base import Engine, Request
from jackpot.rollout.multi_turn import generate_rollouts, stream_rollouts
from jackpot.rollout.pass_at_k import standard_error
from jackpot.rollout.rewards.worker import MAX_REWARD
from jackpot.rollout.tasks.base import Task, decoded_response

OWN_SET = ""  # name of the task's own held-out problems among the evaluation sets
# `generate_and_score` scores ended responses as soon as there are this many, or this many seconds after it last scored.
# So a killed evaluation loses few responses that were generated but not scored.
_SCORE_BATCH = 64
_SCORE_INTERVAL = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The k sampled responses to each of several problems, with scores; all k of the first problem come first."""

    k: int  # number of samples of each problem
    rollouts: tuple[Rollout, ...]
    responses: tuple[str, ...]  # text of each rollout
    scores: tuple[Score, ...]

    @property
    def has_verdict(self) -> bool:
        """Return whether the task judges responses as right or wrong, and does not only give rewards."""
        return any(score.correct is not None for score in self.scores)

    @property
    def accuracy(self) -> float:
        """Return mean@k, the share of correct responses."""
        return sum(bool(score.correct) for score in self.scores) / len(self.scores)

    @property
    def accuracy_stderr(self) -> float:
        """Return the standard error of `accuracy`, if the problems are a random sample of all such problems."""
        return standard_error(self._means([bool(score.correct) for score in self.scores]))

    @property
    def pass_at_k(self) -> float:
        """Return pass@k, the share of problems with at least one correct response among the k samples."""
        problems = [self.scores[first : first + self.k] for first in range(0, len(self.scores), self.k)]
        return sum(any(score.correct for score in problem) for problem in problems) / len(problems)

    @property
    def reward(self) -> float:
        """Return the mean reward of a response as the task gave it, without the penalty for overlong responses."""
        return sum(score.reward for score in self.scores) / len(self.scores)

    @property
    def reward_stderr(self) -> float:
        """Return the standard error of `reward`, if the problems are a random sample; NaN for a single problem."""
        means = self._means([score.reward for score in self.scores])
        return float(means.std(ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else math.nan

    def _means(self, values: Sequence[float]) -> NDArray[np.float64]:
        """Average values of all responses over the k samples of each of P problems: P * k values -> [P]."""
        return np.array(values, dtype=np.float64).reshape(-1, self.k).mean(axis=1)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all responses together."""
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    @property
    def mean_tokens(self) -> float:
        """Return the mean response length in tokens."""
        return self.tokens / len(self.rollouts)

    @property
    def truncated(self) -> float:
        """Return the share of responses that were cut at the length limit."""
        return sum(rollout.finish == "length" for rollout in self.rollouts) / len(self.rollouts)

    def role_metrics(self) -> dict[str, float]:
        """Return metrics of a model on held-out problems, logged as `eval/ROLE_...`; accuracy needs `has_verdict`."""
        metrics = {"reward": self.reward}
        if self.has_verdict:
            metrics |= {"accuracy": self.accuracy, "accuracy_stderr": self.accuracy_stderr}
            metrics |= {"pass_at_k": self.pass_at_k} if self.k > 1 else {}  # at 1 it is the accuracy
        else:
            metrics["reward_stderr"] = self.reward_stderr
        return metrics | {"tokens": self.mean_tokens, "truncated": self.truncated}

    def set_metrics(self) -> dict[str, float]:
        """Return metrics of a benchmark, logged as `eval/NAME/...`; if not `has_verdict`, reward in place of mean@k."""
        if self.has_verdict:
            metrics = {
                "mean_at_k": self.accuracy,
                "mean_at_k_stderr": self.accuracy_stderr,
                "pass_at_k": self.pass_at_k,
            }
        else:
            metrics = {"reward": self.reward, "reward_stderr": self.reward_stderr}
        return metrics | {
            "tokens": self.mean_tokens,
            "truncated": self.truncated,
            "reward_errors": sum(score.reward_error is not None for score in self.scores) / len(self.scores),
        }


class ScoredResponse(NamedTuple):
    """A sampled response, as tokens and as text, with the task's score."""

    rollout: Rollout
    response: str
    score: Score


def eval_request(prompt: Prompt, sample: int, sampling: Sampling, seed: int, name: str = OWN_SET) -> Request:
    """Return the request for sample number `sample` of a problem in the set `name`, without top log-probs.

    Drafts are accepted exactly (as at `draft.lam` 1), because an evaluation measures the model, and not what relaxed
    drafts make of its distribution.
    """
    # Seed and uid of sample 0 of a held-out problem (in `OWN_SET`) come from the problem alone, so the response stays
    # the same where more samples or more evaluation sets are asked for.
    own_key = (prompt.uid, sample) if sample else (prompt.uid,)
    key = own_key if name == OWN_SET else (name, prompt.uid, sample)
    return Request(
        uid="/".join(map(str, ("eval", *key))),
        prompt=prompt,
        seed=fold_in(seed, "eval", *key),
        sampling=sampling.model_copy(update={"num_top_log_probs": 0}),
        exact_drafts=True,
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
    name: str = OWN_SET,
) -> Evaluation:
    """Sample k responses to each prompt and score them.

    Equal seeds give equal random numbers in every call, so two evaluations of a run differ by the model alone.
    """
    requests = [eval_request(prompt, sample, sampling, seed, name) for prompt in prompts for sample in range(k)]
    rollouts = generate_rollouts(engine, task, tokenizer, requests)
    responses, scores = score_rollouts(rollouts, task, tokenizer)
    return Evaluation(k=k, rollouts=tuple(rollouts), responses=tuple(responses), scores=tuple(scores))


def generate_and_score(
    engine: Engine, task: Task, tokenizer: PreTrainedTokenizerBase, requests: Iterable[Request], concurrency: int
) -> Iterator[list[ScoredResponse]]:
    """Yield the scored response to every request exactly once, a few at a time as responses end, in any order.

    At most `2 * concurrency` requests are in flight, and yielded responses are not kept, so memory does not grow with
    the number of requests.

    Raises:
        EngineError: as `stream_rollouts`. Responses that were already yielded stay valid.
    """

    def scored(rollouts: Sequence[Rollout]) -> list[ScoredResponse]:
        """Decode and score rollouts, in their order."""
        responses, scores = score_rollouts(rollouts, task, tokenizer)
        return list(map(ScoredResponse, rollouts, responses, scores))

    ended: list[Rollout] = []  # rollouts that have ended and are not scored yet
    last_time = time.monotonic()
    for rollout in _as_completed(engine, task, tokenizer, iter(requests), concurrency):
        ended.append(rollout)
        if len(ended) >= _SCORE_BATCH or time.monotonic() - last_time > _SCORE_INTERVAL:
            yield scored(ended)
            ended, last_time = [], time.monotonic()

    if ended:
        yield scored(ended)


def _as_completed(
    engine: Engine, task: Task, tokenizer: PreTrainedTokenizerBase, requests: Iterator[Request], concurrency: int
) -> Iterator[Rollout]:
    """Generate the responses to requests, chunk by chunk, and yield the rollouts of a chunk as they end.

    Two chunks of `concurrency` requests are in flight, so that the engine has work while the last responses of the
    older chunk are generated.
    """
    # Each pass of the loop begins a chunk (`stream_rollouts` submits its requests at once), then yields the rollouts of
    # the chunk that was begun in the pass before, until that chunk has ended.
    current: Iterator[Rollout] = iter(())
    while chunk := list(islice(requests, concurrency)):
        following = stream_rollouts(engine, task, tokenizer, chunk)
        yield from current
        current = following
    yield from current


def score_rollouts(
    rollouts: Sequence[Rollout], task: Task, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], list[Score]]:
    """Decode rollouts, score them in one call of the task, and return texts and scores in the order of the rollouts."""
    responses = decoded_responses(rollouts, task, tokenizer)
    return [response.text for response in responses], checked_scores(rollouts, task.scores(responses))


def start_scoring(
    rollouts: Sequence[Rollout], task: Task, tokenizer: PreTrainedTokenizerBase
) -> Callable[[], list[Score]]:
    """Decode rollouts and begin to score them; the returned function waits for their scores.

    An aborted response is wrong and has reward 0. For a response that was cut at its limit the task's score counts: its
    answer may have been complete by then.
    """
    wait = task.start_scoring(decoded_responses(rollouts, task, tokenizer))
    return lambda: checked_scores(rollouts, wait())


def decoded_responses(
    rollouts: Sequence[Rollout], task: Task, tokenizer: PreTrainedTokenizerBase
) -> list[DecodedResponse]:
    """Decode the tokens of rollouts to text, in the form in which a task scores responses."""
    return [
        decoded_response(
            tokenizer,
            rollout.prompt,
            rollout.token_ids,
            rollout.sampled_mask,
            finished=rollout.finish == "stop",
            turn_end_token_ids=task.turn_end_token_ids,
        )
        for rollout in rollouts
    ]


def checked_scores(rollouts: Sequence[Rollout], scores: Sequence[Score]) -> list[Score]:
    """Return a task's scores, with reward 0 and a wrong answer where the response was aborted or the reward is invalid.

    A reward is invalid if it is NaN or larger than `MAX_REWARD` in absolute value.
    """
    checked = []
    for rollout, score in zip(rollouts, scores, strict=True):
        is_valid = abs(score.reward) <= MAX_REWARD  # False for NaN
        if not is_valid:
            text = f"the reward is {score.reward:g}; it must be a number from -1e30 to 1e30"
            score = replace(score, reward_error="invalid", error_text=text)

        if not is_valid or rollout.finish == "aborted":  # a verdict of None stays None
            score = replace(score, reward=0.0, correct=None if score.correct is None else False)
        checked.append(score)
    return checked
