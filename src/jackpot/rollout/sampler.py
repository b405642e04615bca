"""The sampler makes the rollout batch of one iteration: prompts, responses, rewards."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from jackpot.config.run import Config
from jackpot.core.clock import Clock
from jackpot.core.metrics import Mean, Sum, Sums
from jackpot.core.prng import fold_in
from jackpot.core.types import Prompt, Rollout, Score, ScoredRollout
from jackpot.models.cost import ForwardCost
from jackpot.rollout.engines.base import Engine, Request
from jackpot.rollout.evaluate import score_rollouts
from jackpot.rollout.multi_turn import stream_rollouts
from jackpot.rollout.rewards.rewards import overlong_penalty
from jackpot.rollout.tasks.base import PromptStream, Task


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What the engine wrote to one round of prompts, in the order of its requests."""

    written: list[Rollout]
    unusable: dict[str, str]  # uid: why; these are events and counts, and not rewards of 0
    groups: list[list[Judged]]  # by prompt; what cannot be used is in none


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """A round that the engine is writing."""

    requests: list[Request]
    stream: Iterator[Rollout]


class Sampler:
    """Draws prompts and has the engine answer them.

    Args:
        engine: writes the rollouts.
        cost: of a forward pass of the model that the engine decodes with.
        event: called with (iteration, event) for every rollout that cannot be used, or not be judged.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        cost: ForwardCost,
        prompts: PromptStream,
        clock: Clock,
        event: Callable[[int, dict[str, Any]], None],
    ) -> None:
        self._config, self._engine, self._task, self._tokenizer, self._cost = config, engine, task, tokenizer, cost
        self._prompts, self._clock, self._event = prompts, clock, event
        self._ahead: list[Round] | None = None  # of the next iteration
        self._before_ahead: dict[str, int] | None = None  # the state of the prompts before them

    def next_batch(self, iteration: int) -> RolloutBatch:
        """The rollout batch of an iteration: what was written ahead, or else what is written now.

        Nothing in it depends on the order in which responses ended. With dynamic sampling, groups to which the task
        gave equal rewards only fill what the last round left missing.
        """
        config = self._config
        rounds = self._ahead or self._all_written(iteration, self._begin(iteration))
        self._ahead = self._before_ahead = None
        for uid, why in (item for one in rounds for item in one.unusable.items()):
            self._event(iteration, {"event": f"{why}_rollout", "uid": uid})
        groups, wanted = [group for one in rounds for group in one.groups], config.batch.prompts
        for item in (item for group in groups for item in group if item.score.reward_error):
            self._event(iteration, {"event": f"reward_{item.score.reward_error}", "uid": item.rollout.uid})
        if config.batch.filter_groups:
            groups.sort(key=_is_equal)
        first = next((one.groups for one in rounds if one.groups), [])
        return RolloutBatch(
            scored=[
                ScoredRollout(rollout=item.rollout, score=item.score) for group in groups[:wanted] for item in group
            ],
            first=[item.rollout for group in first for item in group],
            sums=_sums(rounds, groups, self._cost) | _rounds(rounds, groups, wanted),
        )

    @contextmanager
    def overlap_with_training(self, iteration: int) -> Iterator[None]:
        """While the body runs the engine rests, or with `batch.ahead` writes the rollout batch of `iteration`.

        That begins with the weights that the engine has now, and all of it is there at the end: only then are new
        weights taken. Of a response with a tool it is the first turn that is written meanwhile, for nobody answers the
        calls.
        """
        config = self._config
        if not config.batch.ahead or iteration > config.iterations:
            self._engine.sleep()
            yield
            return
        self._before_ahead = self._prompts.state_dict()
        begun = self._begin(iteration)
        yield
        self._ahead = self._all_written(iteration, begun)

    @property
    def prompt_state(self) -> dict[str, int]:
        """Of the prompt stream, for a checkpoint: before what was written ahead, which a resumed run writes anew."""
        return self._before_ahead or self._prompts.state_dict()

    def _all_written(self, iteration: int, begun: _Begun) -> list[Round]:
        """Wait for a round, and with dynamic sampling for as many more as it takes."""
        wanted, dynamic = self._config.batch.prompts, self._config.batch.filter_groups
        rounds = [self._written(begun)]
        while dynamic and len(rounds) < dynamic.max_num_gen_batches:
            if sum(not _is_equal(group) for one in rounds for group in one.groups) >= wanted:
                break
            rounds.append(self._written(self._begin(iteration)))
        return rounds

    def _begin(self, iteration: int) -> _Begun:
        """Give the engine one round of prompts."""
        with self._clock("rollout"):
            requests = self._requests(iteration, self._prompts.next(self._config.batch.prompts))
            return _Begun(
                requests=requests, stream=stream_rollouts(self._engine, self._task, self._tokenizer, requests)
            )

    def _written(self, begun: _Begun) -> Round:
        """Wait for a round. Groups are judged as they are complete, while the engine goes on with the others."""
        members: dict[str, list[str]] = {}
        for request in begun.requests:
            members.setdefault(request.prompt.uid, []).append(request.uid)
        rollouts: dict[str, Rollout] = {}
        unusable: dict[str, str] = {}
        groups: dict[str, list[Judged]] = {}
        while len(groups) < len(members):
            with self._clock("rollout"):
                rollout = next(begun.stream)
            rollouts[rollout.uid] = rollout
            if why := useless(rollout):
                unusable[rollout.uid] = why
            if rollouts.keys() >= set(group := members[rollout.prompt.uid]):
                with self._clock("score"):
                    groups[rollout.prompt.uid] = self._judge([rollouts[uid] for uid in group if uid not in unusable])
        order = [request.uid for request in begun.requests]
        return Round(
            written=[rollouts[uid] for uid in order],
            unusable={uid: unusable[uid] for uid in order if uid in unusable},
            groups=[groups[prompt] for prompt in members if groups[prompt]],
        )

    def _requests(self, iteration: int, prompts: Sequence[Prompt]) -> list[Request]:
        """A group of requests for each prompt; the seed of each is hashed from its uid."""
        config = self._config
        uids = [
            (f"{iteration}/{prompt.uid}#{member}", prompt)
            for prompt in prompts
            for member in range(config.batch.group_size)
        ]
        return [
            Request(uid=uid, prompt=prompt, seed=fold_in(config.seed, "sample", uid), sampling=config.sampling)
            for uid, prompt in uids
        ]

    def _judge(self, group: Sequence[Rollout]) -> list[Judged]:
        """What the task says of each response to a prompt."""
        _, scores = score_rollouts(group, self._task, self._tokenizer)
        return [
            Judged(rollout=rollout, task_reward=score.reward, score=shaped_score(self._config, rollout, score))
            for rollout, score in zip(group, scores, strict=True)
        ]


def shaped_score(config: Config, rollout: Rollout, score: Score) -> Score:
    """The task's score with what `objective.overlong_buffer` takes from the reward."""
    overlong = config.objective.overlong_buffer
    if overlong is None:
        return score
    limit = config.sampling.max_new_tokens
    penalty = overlong_penalty(len(rollout.token_ids), limit, overlong.len, overlong.penalty_factor)
    return replace(score, reward=score.reward + penalty)


def tokens_read(rollout: Rollout) -> int:
    """How many tokens a model reads to write this response or to score it: all but the last one, with the prompt."""
    return len(rollout.prompt.token_ids) + len(rollout.token_ids) - 1


def _is_equal(group: Sequence[Judged]) -> bool:
    """Whether the task gave one reward to all."""
    return len({item.task_reward for item in group}) == 1


def useless(rollout: Rollout) -> str | None:
    """Why a rollout cannot be trained on; None for one that ended by itself or at the limit with finite log-probs."""
    if rollout.finish == "aborted":
        return "aborted"
    return None if rollout.rollout_log_probs[rollout.sampled_mask].isfinite().all() else "non_finite"


def _rounds(rounds: Sequence[Round], groups: Sequence[Sequence[Judged]], wanted: int) -> Sums:
    return {
        "sampling/gen_batches": mean([len(rounds)]),
        "sampling/groups_filtered": mean([max(0, len(groups) - wanted)]),
    }


def _sums(rounds: Sequence[Round], groups: Sequence[Sequence[Judged]], cost: ForwardCost) -> Sums:
    """About all that was written, by a writer of this cost."""
    written = [rollout for one in rounds for rollout in one.written]
    unusable = [why for one in rounds for why in one.unusable.values()]
    judged = [item for group in groups for item in group]
    lengths = [len(item.rollout.token_ids) for item in judged]
    return {
        "reward/mean": mean([item.score.reward for item in judged]),
        "reward/correct": mean([item.score.correct for item in judged]),
        "reward/timeouts": mean([item.score.reward_error == "timeout" for item in judged]),
        "reward/errors": mean([item.score.reward_error == "crash" for item in judged]),
        "reward/all_right": mean([all(item.score.correct for item in group) for group in groups]),
        "reward/all_wrong": mean([not any(item.score.correct for item in group) for group in groups]),
        "response/tokens": mean(lengths),
        "response/tool_tokens": mean([int((~item.rollout.sampled_mask).sum()) for item in judged]),
        "response/truncated": mean([item.rollout.finish == "length" for item in judged]),
        "response/aborted": mean([unusable.count("aborted") / len(written)]),
        "response/non_finite": mean([unusable.count("non_finite") / len(written)]),
        "tokens/rollout": Sum.number(sum(len(rollout.token_ids) for rollout in written)),
        "flops/rollout": Sum.number(sum(cost.sequence(tokens_read(rollout)) for rollout in written)),
    }


def mean(values: Sequence[float]) -> Mean:
    """Of plain numbers, as a sum."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return Mean.of(tensor, torch.ones_like(tensor, dtype=torch.bool))
