"""Is an answer right, and what is it worth? See docs/rewards.md."""

import re
from collections.abc import Callable, Mapping, Sequence

from jackpot.config.tasks import RewardConfig
from jackpot.core.errors import ConfigError, unknown_name
from jackpot.core.types import Answer, Score
from jackpot.rollout.rewards.pool import Job, JudgePool, Outcome
from jackpot.rollout.rewards.verifier.compare import compare_plainly
from jackpot.rollout.rewards.verifier.extract import final_answer, is_well_formed

VERDICT = "verdict"  # of rollout/rewards/verifier/worker.py
NAMED: Mapping[str, Callable[[Answer, bool], float]] = {
    "correct": lambda answer, correct: float(correct),
    "format": lambda answer, correct: float(is_well_formed(answer.response, answer.finished)),
}
_FUNCTION = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")
_KNOWN = {True: Outcome(1.0, None), False: Outcome(0.0, None)}


class Judge:
    """Scores answers against `Prompt.answer`: plain ones here, everything else in processes of its own.

    Args:
        rewards: summed by their weights. `Score.correct` is the verdict whatever the rewards are.
        workers: processes, at least 1.
        seconds: for one verdict, or one call of a reward function; after that it counts as wrong, with `Score.problem`.

    Raises:
        ConfigError: a reward that does not exist or cannot be imported.
    """

    def __init__(self, rewards: Sequence[RewardConfig], *, workers: int, seconds: float) -> None:
        if workers < 1:
            raise ConfigError(f"{workers} judge processes were asked for; at least 1 is needed")
        self._rewards = tuple(rewards)
        self._functions = tuple(dict.fromkeys(one.name for one in rewards if one.name not in NAMED))
        for name in self._functions:
            if _FUNCTION.fullmatch(name) is None:
                raise ConfigError(unknown_name("reward", name, [*NAMED, "package.module:function"]))
        self._pool = JudgePool(self._functions, workers=workers, seconds=seconds)

    def scores(self, answers: Sequence[Answer]) -> list[Score]:
        """One for each answer, in their order. Equal questions to the judge are asked once."""
        questions = [_question(answer) for answer in answers]
        known = {one: compare_plainly(*one) if one[0] else False for one in set(questions)}
        hard = [one for one in dict.fromkeys(questions) if known[one] is None]
        jobs = [Job(VERDICT, {"answer": given, "reference": reference}) for given, reference in hard]
        jobs += [Job(name, _arguments(answer)) for answer in answers for name in self._functions]
        outcomes = self._pool.run(jobs)
        verdicts = {one: _KNOWN[verdict] for one, verdict in known.items() if verdict is not None}
        verdicts |= dict(zip(hard, outcomes, strict=False))
        rest, width = outcomes[len(hard) :], len(self._functions)
        return [
            self._score(answer, verdicts[question], rest[number * width : (number + 1) * width])
            for number, (answer, question) in enumerate(zip(answers, questions, strict=True))
        ]

    def close(self) -> None:
        """End the processes; a second time does nothing."""
        self._pool.close()

    def _score(self, answer: Answer, verdict: Outcome, own: Sequence[Outcome]) -> Score:
        """What could not be judged gives 0; the first problem is told, the verdict's before a function's."""
        correct, of = verdict.value == 1.0, dict(zip(self._functions, own, strict=True))
        reward = sum(
            one.weight * (of[one.name].value if one.name in of else NAMED[one.name](answer, correct))
            for one in self._rewards
        )
        problem = next((outcome.problem for outcome in (verdict, *own) if outcome.problem), None)
        return Score(reward=reward, correct=correct, problem=problem)


def _question(answer: Answer) -> tuple[str, str]:
    """The final answer, empty where there is none, and the reference."""
    return final_answer(answer.response, answer.finished) or "", answer.prompt.answer


def _arguments(answer: Answer) -> dict[str, str | bool]:
    """What a reward function is called with, by name."""
    return {
        "problem": answer.prompt.text,
        "response": answer.response,
        "answer": answer.prompt.answer,
        "finished": answer.finished,
    }


def overlong_penalty(length: int, limit: int, buffer: int, penalty: float) -> float:
    """DAPO's soft overlong punishment, arXiv 2503.14476 eq. 13, to be added to a reward; between -penalty and 0.

    0 up to limit - buffer response tokens, then falling evenly, and -penalty at `limit`, where a response is cut.
    """
    return -penalty * max(0, length - (limit - buffer)) / buffer
