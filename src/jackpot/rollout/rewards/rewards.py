"""Computes rewards: the built-in ones, reward functions of the user, and their weighted sum. See docs/rewards.md."""

import re
from collections.abc import Callable, Mapping, Sequence

from jackpot.config.tasks import RewardConfig
from jackpot.core.errors import ConfigError, unknown_name
from jackpot.core.types import DecodedResponse, Score
from jackpot.rollout.rewards.pool import RewardJob, RewardResult, RewardWorkerPool
from jackpot.rollout.rewards.verifier.compare import VERIFY, compare_without_algebra
from jackpot.rollout.rewards.verifier.extract import final_answer, is_well_formed

BUILT_IN: Mapping[str, Callable[[DecodedResponse, bool], float]] = {
    "correct": lambda response, correct: float(correct),
    "format": lambda response, correct: float(is_well_formed(response.text, response.finished)),
}
_FUNCTION = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")
_DECIDED = {True: RewardResult(1.0, None), False: RewardResult(0.0, None)}


class RewardFn:
    """Scores responses: verifies their final answers and sums the rewards by their weights.

    Comparisons without algebra run in this process, all others and reward functions of the user in worker processes.

    Args:
        rewards: names and weights. `Score.correct` is the verifier's result and does not depend on them.
        workers: number of worker processes, at least 1.
        timeout: seconds for one comparison or one call of a reward function. After that the answer is wrong, or the
            function's value 0, and `Score.reward_error` says so.

    Raises:
        ConfigError: a reward that does not exist or cannot be imported.
    """

    def __init__(self, rewards: Sequence[RewardConfig], *, workers: int, timeout: float) -> None:
        if workers < 1:
            raise ConfigError(f"{workers} reward workers were asked for; at least 1 is needed")
        self._rewards = tuple(rewards)
        self._functions = tuple(dict.fromkeys(one.name for one in rewards if one.name not in BUILT_IN))
        for name in self._functions:
            if _FUNCTION.fullmatch(name) is None:
                raise ConfigError(unknown_name("reward", name, [*BUILT_IN, "package.module:function"]))
        self._pool = RewardWorkerPool(self._functions, workers=workers, timeout=timeout)

    def scores(self, responses: Sequence[DecodedResponse]) -> list[Score]:
        """Return one score for each response, in their order. Equal pairs of answer and reference are compared once."""
        pairs = [_pair(response) for response in responses]
        known = {pair: compare_without_algebra(*pair) if pair[0] else False for pair in set(pairs)}
        undecided = [pair for pair in dict.fromkeys(pairs) if known[pair] is None]
        jobs = [RewardJob(VERIFY, {"answer": answer, "reference": reference}) for answer, reference in undecided]
        jobs += [RewardJob(name, _arguments(response)) for response in responses for name in self._functions]
        results = self._pool.run(jobs)
        verified = {pair: _DECIDED[equal] for pair, equal in known.items() if equal is not None}
        verified |= dict(zip(undecided, results, strict=False))
        rest, width = results[len(undecided) :], len(self._functions)
        return [
            self._score(response, verified[pair], rest[number * width : (number + 1) * width])
            for number, (response, pair) in enumerate(zip(responses, pairs, strict=True))
        ]

    def close(self) -> None:
        """End the worker processes; a second call does nothing."""
        self._pool.close()

    def _score(self, response: DecodedResponse, verified: RewardResult, own: Sequence[RewardResult]) -> Score:
        """Sum the rewards. A part that failed gives 0; the first error is kept, the verifier's before a function's."""
        correct, of = verified.value == 1.0, dict(zip(self._functions, own, strict=True))
        reward = sum(
            one.weight * (of[one.name].value if one.name in of else BUILT_IN[one.name](response, correct))
            for one in self._rewards
        )
        error = next((result.error for result in (verified, *own) if result.error), None)
        return Score(reward=reward, correct=correct, reward_error=error)


def _pair(response: DecodedResponse) -> tuple[str, str]:
    """Return the final answer, empty where there is none, and the reference."""
    return final_answer(response.text, response.finished) or "", response.prompt.answer


def _arguments(response: DecodedResponse) -> dict[str, str | bool]:
    """Return the keyword arguments of a reward function."""
    return {
        "problem": response.prompt.text,
        "response": response.text,
        "answer": response.prompt.answer,
        "finished": response.finished,
    }


def overlong_penalty(length: int, limit: int, buffer: int, penalty: float) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), a number to add to the reward.

    It is 0 up to `limit - buffer` response tokens, then falls linearly to `-penalty` at `limit` tokens, where responses
    are cut.
    """
    return -penalty * max(0, length - (limit - buffer)) / buffer
