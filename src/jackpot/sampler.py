"""One iteration's rollout batch: prompts, responses, rewards, advantages. Layer 5."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from jackpot.config import Config
from jackpot.conversation import write
from jackpot.evaluate import judge
from jackpot.objectives.advantages import compute_advantages
from jackpot.ops.reduce import Mean, Sums, Total
from jackpot.ops.uniforms import stream_key
from jackpot.parts import Parts
from jackpot.tasks.base import PromptStream
from jackpot.tasks.shaping import overlong_penalty
from jackpot.telemetry import Clock
from jackpot.types import Prompt, Request, Rollout, Score, ScoredRollout


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    scored: list[ScoredRollout]  # what is trained on
    first: list[Rollout]  # all that can be used of the first round, before any choice among them
    sums: Sums  # about all that was written, what is left out too


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    rollout: Rollout
    task_reward: float  # before shaping
    score: Score  # what is trained on


class Sampler:
    """Draws prompts and has the engine answer them.

    Args:
        event: called with (iteration, event) for every rollout that cannot be used.
    """

    def __init__(
        self, parts: Parts, prompts: PromptStream, clock: Clock, event: Callable[[int, dict[str, Any]], None]
    ) -> None:
        self._parts, self._prompts, self._clock, self._event = parts, prompts, clock, event

    def next_batch(self, iteration: int) -> RolloutBatch:
        """The rollout batch of an iteration.

        With dynamic sampling, groups to which the task gave equal rewards only fill what the last round left missing.
        """
        config = self._parts.config
        wanted, dynamic = config.batch.prompts, config.batch.dynamic_sampling
        rounds = 0
        written: list[Rollout] = []
        unusable: list[str] = []  # why, of each
        first: list[Rollout] = []
        unequal: list[list[Judged]] = []
        equal: list[list[Judged]] = []
        while rounds == 0 or (dynamic and rounds < dynamic.max_rounds and len(unequal) < wanted):
            rounds += 1
            with self._clock("rollout"):
                parts, requests = self._parts, self._requests(iteration, self._prompts.next(wanted))
                rollouts = write(parts.engine, parts.task, parts.tokenizer, requests)
            written += rollouts
            with self._clock("score"):
                usable, why_not = self._usable(iteration, rollouts)
                unusable += why_not
                first = first or usable
                for group in self._judge(usable):
                    is_equal = len({item.task_reward for item in group}) == 1
                    (equal if is_equal and dynamic else unequal).append(group)
        taken = (unequal + equal)[:wanted]
        scored = self._with_advantages([item for group in taken for item in group])
        groups = unequal + equal
        sums = _sums(written, unusable, groups) | _rounds(rounds, len(groups), wanted)
        return RolloutBatch(scored=scored, first=first, sums=sums)

    def _requests(self, iteration: int, prompts: Sequence[Prompt]) -> list[Request]:
        """A group of requests for each prompt; the seed of each is hashed from its uid."""
        config = self._parts.config
        uids = [
            (f"{iteration}/{prompt.uid}#{member}", prompt)
            for prompt in prompts
            for member in range(config.batch.group_size)
        ]
        return [
            Request(uid=uid, prompt=prompt, seed=stream_key(config.seed, "sample", uid), sampling=config.sampling)
            for uid, prompt in uids
        ]

    def _usable(self, iteration: int, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], list[str]]:
        """Those that ended by themselves or at the limit, with finite log-probs; why not, of each of the others.

        They are events and counts, and not rewards of 0.
        """
        usable, why_not = [], []
        for rollout in rollouts:
            if why := _useless(rollout):
                why_not.append(why)
                self._event(iteration, {"event": f"{why}_rollout", "uid": rollout.uid})
            else:
                usable.append(rollout)
        return usable, why_not

    def _judge(self, rollouts: Sequence[Rollout]) -> list[list[Judged]]:
        """By prompt, with their rewards."""
        _, scores = judge(rollouts, self._parts.task, self._parts.tokenizer)
        groups: dict[str, list[Judged]] = {}
        for rollout, score in zip(rollouts, scores, strict=True):
            shaped = shaped_score(self._parts.config, rollout, score)
            judged = Judged(rollout=rollout, task_reward=score.reward, score=shaped)
            groups.setdefault(rollout.prompt.uid, []).append(judged)
        return list(groups.values())

    def _with_advantages(self, items: Sequence[Judged]) -> list[ScoredRollout]:
        """Of whole responses; those of single tokens come from the learner's critic."""
        name, numbers = self._parts.config.objective.advantage, {}
        index = [numbers.setdefault(item.rollout.prompt.uid, len(numbers)) for item in items]
        rewards = torch.tensor([item.score.reward for item in items], dtype=torch.float64)
        groups = torch.tensor(index, dtype=torch.int64)
        lengths = torch.tensor([int(item.rollout.sampled_mask.sum()) for item in items], dtype=torch.int64)
        has_critic = name == "gae"
        advantages = torch.zeros_like(rewards) if has_critic else compute_advantages(name, rewards, groups, lengths)
        return [
            ScoredRollout(
                rollout=item.rollout,
                score=item.score,
                advantages=torch.full((len(item.rollout.token_ids),), advantage),
            )
            for item, advantage in zip(items, advantages.tolist(), strict=True)
        ]


def shaped_score(config: Config, rollout: Rollout, score: Score) -> Score:
    """The task's score with what `objective.overlong` takes from the reward."""
    overlong = config.objective.overlong
    if overlong is None:
        return score
    limit = config.sampling.max_new_tokens
    penalty = overlong_penalty(len(rollout.token_ids), limit, overlong.buffer, overlong.penalty)
    return replace(score, reward=score.reward + penalty)


def _useless(rollout: Rollout) -> str | None:
    """Why a rollout cannot be trained on."""
    if rollout.finish == "aborted":
        return "aborted"
    return None if rollout.rollout_log_probs[rollout.sampled_mask].isfinite().all() else "non_finite"


def _rounds(rounds: int, groups: int, wanted: int) -> Sums:
    return {
        "sampling/rounds": mean([rounds]),
        "sampling/groups_left_out": mean([max(0, groups - wanted)]),
    }


def _sums(
    written: Sequence[Rollout],
    unusable: Sequence[str],
    groups: Sequence[Sequence[Judged]],
) -> Sums:
    judged = [item for group in groups for item in group]
    lengths = [len(item.rollout.token_ids) for item in judged]
    return {
        "reward/mean": mean([item.score.reward for item in judged]),
        "reward/correct": mean([item.score.correct for item in judged]),
        "reward/all_right": mean([all(item.score.correct for item in group) for group in groups]),
        "reward/all_wrong": mean([not any(item.score.correct for item in group) for group in groups]),
        "response/tokens": mean(lengths),
        "response/tool_tokens": mean([int((~item.rollout.sampled_mask).sum()) for item in judged]),
        "response/truncated": mean([item.rollout.finish == "length" for item in judged]),
        "response/aborted": mean([unusable.count("aborted") / len(written)]),
        "response/non_finite": mean([unusable.count("non_finite") / len(written)]),
        "tokens/rollout": Total.number(sum(len(rollout.token_ids) for rollout in written)),
    }


def mean(values: Sequence[float]) -> Mean:
    """Of plain numbers, as a sum."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return Mean.of(tensor, torch.ones_like(tensor, dtype=torch.bool))
