"""Scores for responses: in training, and of a model on held-out problems. Layer 5."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from jackpot.conversation import write
from jackpot.engines.base import Engine
from jackpot.objectives.advantages import compute_advantages
from jackpot.ops.uniforms import stream_key
from jackpot.tasks.base import Task, decode
from jackpot.types import Prompt, Request, Rollout, Sampling, Score, ScoredRollout


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
    def mean_tokens(self) -> float:
        return sum(len(rollout.token_ids) for rollout in self.rollouts) / len(self.rollouts)

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
    """Decode every response and ask the task."""
    responses = [decode(tokenizer, rollout.token_ids) for rollout in rollouts]
    scores = [
        task.score(rollout.prompt, response, rollout.finish == "stop")
        for rollout, response in zip(rollouts, responses, strict=True)
    ]
    return responses, scores


def score_rollouts(
    rollouts: Sequence[Rollout], task: Task, tokenizer: PreTrainedTokenizerBase, advantage: str
) -> list[ScoredRollout]:
    """Rewards, and advantages within the group of each prompt."""
    _, scores = judge(rollouts, task, tokenizer)
    groups: dict[str, int] = {}
    index = [groups.setdefault(rollout.prompt.uid, len(groups)) for rollout in rollouts]
    rewards = torch.tensor([score.reward for score in scores], dtype=torch.float64)
    advantages = compute_advantages(advantage, rewards, torch.tensor(index, dtype=torch.int64)).tolist()
    return [
        ScoredRollout(rollout=rollout, score=score, advantages=torch.full((len(rollout.token_ids),), value))
        for rollout, score, value in zip(rollouts, scores, advantages, strict=True)
    ]
