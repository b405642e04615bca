"""Rewards: built-in rewards, reward functions of the user, and their weighted sum. See docs/rewards.md.

Status: supported.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import Any, Literal

from jackpot.config.tasks import RewardConfig, VerdictConfig
from jackpot.core.cores import free_cores
from jackpot.core.errors import ConfigError, unknown_name
from jackpot.core.package import install
from jackpot.core.types import DecodedResponse, Prompt, RewardError, Score
from jackpot.rollout.rewards.pool import CallLimits, RewardResult, RewardWorkerPool
from jackpot.rollout.rewards.verifier.compare import compare_without_algebra
from jackpot.rollout.rewards.verifier.extract import final_answer, is_well_formed

VERIFY = "jackpot.rollout.rewards.verifier.expressions:verify"  # compares an answer with a reference, in a worker
# Built-in rewards by name; each is called with a response and whether its final answer is right.
BUILT_IN: Mapping[str, Callable[[DecodedResponse, bool], float]] = {
    "correct": lambda response, correct: float(correct),
    "format": lambda response, correct: float(is_well_formed(response.text, response.finished)),
}
REWARD = "reward"  # name by which a verdict refers to the weighted sum of rewards
_VERIFIED = VerdictConfig(name="correct")
_FUNCTION = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")  # package.module:function
_ROUNDING = 1e-9  # share of max(1, |threshold|) by which a reward may lie below its threshold and still reach it


class RewardFn:
    """The reward of a task: it verifies final answers where needed, calls reward functions, and sums by weights.

    Comparisons that need no algebra run in this process. Other comparisons, and reward functions of the user, run in
    worker processes.

    Args:
        rewards: names, weights and limits of the rewards.
        verdict: the verdict that `submit` will be given. If it is by a reward function of the user, that function is
            started too; None: no further function is started.
        workers: largest number of processes of the verifier and of each reward function; auto: number of free cores.
        timeout: seconds for one comparison, or for one call of a reward function without a limit in the settings.
            After that the answer is wrong, or the function's value 0, and `Score.reward_error` says so.

    Raises:
        ConfigError: a reward does not exist or cannot be imported, or math-verify is not installed.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        *,
        workers: int | Literal["auto"],
        timeout: float,
        verdict: VerdictConfig | None = None,
    ) -> None:
        """Start a worker for each reward function of the user, the verdict's too, and wait until all are imported.

        The arguments, and the ConfigError for a reward that cannot be used, are as in `RewardFn`.
        """
        if find_spec("math_verify") is None:
            raise ConfigError(f"math-verify is not installed, which verifies answers: {install('train')}")

        self._rewards = tuple(rewards)
        most_workers = free_cores() if workers == "auto" else workers

        limits_of = {
            reward.name: CallLimits(
                timeout=reward.timeout or timeout,
                retries=reward.retries,
                batch_size=reward.batch_size,
                memory=reward.memory,
                environment=reward.environment,
            )
            for reward in rewards
            if reward.name not in BUILT_IN
        }
        # The verdict may be by a reward function that is none of the rewards.
        if verdict is not None and verdict.name not in (REWARD, *BUILT_IN):
            limits_of.setdefault(verdict.name, CallLimits(timeout=timeout))

        for name in limits_of:
            if _FUNCTION.fullmatch(name) is None:
                raise ConfigError(unknown_name("reward", name, [*BUILT_IN, "package.module:function"]))

        self._verifier = RewardWorkerPool(VERIFY, CallLimits(timeout=timeout), workers=most_workers)
        self._functions = {
            name: RewardWorkerPool(name, limits, workers=most_workers) for name, limits in limits_of.items()
        }

        try:
            for pool in self._functions.values():
                pool.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def scores(self, responses: Sequence[DecodedResponse], verdict: VerdictConfig | None = _VERIFIED) -> list[Score]:
        """Return a score for each response, in their order; `verdict` is as in `submit`."""
        return self.submit(responses, verdict)()

    def submit(
        self,
        responses: Sequence[DecodedResponse],
        verdict: VerdictConfig | None = _VERIFIED,
        limit: float = math.inf,
    ) -> Callable[[], list[Score]]:
        """Begin to score responses; the returned function waits for the scores, in their order.

        Equal pairs of answer and reference are compared once.

        Args:
            verdict: decides `Score.correct`; None: no response is right or wrong.
            limit: seconds after which a call that has not begun is given up, with the error `timeout`.
        """
        # Compare without algebra first, where None means that only algebra, in a worker, can decide. A pair whose
        # answer is missing is unequal; where no comparison is needed, each response has one such pair, ("", "").
        needed = self._needed_names(verdict)  # names of the rewards that the scores need
        pairs_of_each = [_pairs(response) if "correct" in needed else [("", "")] for response in responses]
        pairs = dict.fromkeys(chain.from_iterable(pairs_of_each))
        equal = {pair: compare_without_algebra(*pair) if pair[0] else False for pair in pairs}
        undecided_pairs = [pair for pair, is_equal in equal.items() if is_equal is None]

        comparisons = [{"answer": answer, "reference": reference} for answer, reference in undecided_pairs]
        wait_for_verifier = self._verifier.submit(comparisons, limit)
        items = [_arguments(response) for response in responses]
        # By name of a reward function that is needed, the function that waits for its results.
        waits = {name: pool.submit(items, limit) for name, pool in self._functions.items() if name in needed}

        def wait() -> list[Score]:
            """Wait for the verifier and the reward functions, and return the scores."""
            # The verifier's result for each pair of answer and reference: first `equal`, found without algebra, where
            # None counts as wrong; then the results of the workers replace those of the `undecided_pairs`.
            verified = {
                pair: RewardResult(value=float(is_equal or False), error=None) for pair, is_equal in equal.items()
            }
            verified |= zip(undecided_pairs, wait_for_verifier(), strict=True)
            # By name of a reward function, its results in the order of the responses.
            returned = {name: wait_for_results() for name, wait_for_results in waits.items()}

            scores = []
            for index, response in enumerate(responses):
                # Of several references the one that was right counts, or else one whose comparison failed.
                best = _best_of([verified[pair] for pair in pairs_of_each[index]])
                of_functions = {name: results[index] for name, results in returned.items()}
                scores.append(self._score(response, best, of_functions, verdict))
            return scores

        return wait

    def close(self) -> None:
        """End the worker processes; a second call does nothing."""
        for pool in (self._verifier, *self._functions.values()):
            pool.close()

    def _needed_names(self, verdict: VerdictConfig | None) -> set[str]:
        """Return the names of all rewards that a score with this verdict needs."""
        return {reward.name for reward in self._rewards} | ({verdict.name} if verdict else set())

    def _score(
        self,
        response: DecodedResponse,
        verified: RewardResult,
        returned: Mapping[str, RewardResult],
        verdict: VerdictConfig | None,
    ) -> Score:
        """Sum the rewards of a response, where a failed reward counts 0.

        Of several errors the score keeps the first, the verifier's before those of functions.

        Args:
            verified: the verifier's result; its value is 1 for a right answer.
            returned: by name, the result of each reward function.
        """
        is_right, needed = verified.value == 1.0, self._needed_names(verdict)  # `needed`: reward names
        values = {name: reward(response, is_right) for name, reward in BUILT_IN.items() if name in needed}
        values |= {name: result.value for name, result in returned.items()}
        values[REWARD] = sum(reward.weight * values[reward.name] for reward in self._rewards)

        results = {"correct": verified, **returned}
        errors: dict[str, RewardError] = {name: result.error for name, result in results.items() if result.error}
        failed_reward = next(iter(errors), None)
        return Score(
            reward=values[REWARD],
            # None without a verdict
            correct=verdict and _is_right(verdict, values, errors),
            reward_error=errors[failed_reward] if failed_reward else None,
            reward_retries=sum(result.retries for result in results.values()),
            error_text=f"{failed_reward}: {results[failed_reward].text}" if failed_reward else None,
        )


@cache
def _verifier() -> RewardFn:
    """Return the `RewardFn` with which `verify_all` compares answers, made once in this process."""
    return RewardFn([RewardConfig(name="correct")], workers="auto", timeout=5.0)


def verify(response: str, reference: str, *, finished: bool = True) -> bool | None:
    r"""Return whether the final answer of a response equals a reference answer, by the rules of docs/rewards.md.

    >>> verify(r"So it is $\boxed{\frac{1}{2}}$.", "0.5")
    True

    Args:
        response: a whole response, with its answer in a box or after ####.
        finished: False for a response that was cut at its limit: then only an answer in a closed box counts.

    Returns:
        Whether the answer is right; None where the comparison took more than 5 seconds or failed.
    """
    return verify_all([(response, reference)], finished=[finished])[0]


def verify_all(pairs: Sequence[tuple[str, str]], *, finished: Sequence[bool] | None = None) -> list[bool | None]:
    """Compare many pairs of response and reference as `verify` does, on all free cores; results in their order."""
    are_finished = [True] * len(pairs) if finished is None else finished
    responses = [
        DecodedResponse(Prompt(uid="", text="", answer=reference, token_ids=()), response, is_finished)
        for (response, reference), is_finished in zip(pairs, are_finished, strict=True)
    ]
    return [None if score.reward_error else score.correct for score in _verifier().scores(responses)]


def _is_right(verdict: VerdictConfig, values: Mapping[str, float], errors: Mapping[str, RewardError]) -> bool:
    """Return whether the reward that the verdict names had no error, and reaches the threshold up to rounding."""
    is_known = not errors if verdict.name == REWARD else verdict.name not in errors
    return is_known and values[verdict.name] >= verdict.threshold - _ROUNDING * max(1.0, abs(verdict.threshold))


def _pairs(response: DecodedResponse) -> list[tuple[str, str]]:
    """Pair the final answer of a response, empty if there is none, with each of the reference answers."""
    answer = final_answer(response.text, response.finished) or ""
    return [(answer, reference) for reference in (response.prompt.answer, *response.prompt.other_answers)]


def _best_of(results: Sequence[RewardResult]) -> RewardResult:
    """Combine the results of several references: a right one, else the first with an error, else a wrong one."""
    return max(results, key=lambda result: (result.value == 1.0, result.error is not None))


def _arguments(response: DecodedResponse) -> dict[str, Any]:
    """Return the keyword arguments that a reward function gets for a response."""
    prompt = response.prompt
    return {
        "problem": prompt.text,
        "response": response.text,
        "answer": [prompt.answer, *prompt.other_answers] if prompt.other_answers else prompt.answer,
        "finished": response.finished,
    }


def overlong_penalty(length: int, limit: int, buffer: int, penalty: float) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), a number to add to the reward.

    It is 0 up to `limit - buffer` response tokens, then falls linearly to `-penalty` at `limit` tokens, where responses
    are cut.
    """
    return -penalty * max(0, length - (limit - buffer)) / buffer
