"""Verdicts on responses, and a model on held-out problems. Layer 5."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from jackpot.conversation import write
from jackpot.engines.base import Engine
from jackpot.ops.uniforms import stream_key
from jackpot.tasks.base import Answer, Task, decode
from jackpot.types import Prompt, Request, Rollout, Sampling, Score


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One sampled answer to each of some problems."""

    rollouts: tuple[Rollout, ...]
    responses: tuple[str, ...]
    scores: tuple[Score, ...]

    @property
    def accuracy(self) -> float:
        return sum(score.correct for score in self.scores) / len(self.scores)

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


def evaluate(
    engine: Engine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seed: int,
) -> Evaluation:
    """Sample one answer to each prompt as in training. The same seed draws the same uniforms every time, so that two
    evaluations of a run differ by the model alone."""
    sampling = sampling.model_copy(update={"num_top_log_probs": 0})
    requests = [
        Request(uid=f"eval/{prompt.uid}", prompt=prompt, seed=stream_key(seed, "eval", prompt.uid), sampling=sampling)
        for prompt in prompts
    ]
    rollouts = write(engine, task, tokenizer, requests)
    responses, scores = judge(rollouts, task, tokenizer)
    return Evaluation(rollouts=tuple(rollouts), responses=tuple(responses), scores=tuple(scores))


def judge(rollouts: Sequence[Rollout], task: Task, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[Score]]:
    """Decode every response and ask the task about all of them at once."""
    responses = [decode(tokenizer, rollout.token_ids) for rollout in rollouts]
    answers = [
        Answer(rollout.prompt, response, rollout.finish == "stop")
        for rollout, response in zip(rollouts, responses, strict=True)
    ]
    return responses, task.scores(answers)
