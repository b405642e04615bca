"""Samples the rollout batch of one iteration: prompts, responses, rewards."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from jackpot.config.run import Config
from jackpot.core.clock import Clock
from jackpot.core.metrics import Mean, Sum, Sums, add_sums
from jackpot.core.prng import fold_in, uniforms
from jackpot.core.types import Prompt, Role, Rollout, Score, ScoredRollout
from jackpot.models.cost import ForwardCost
from jackpot.objectives.advantages import all_equal
from jackpot.rollout.engines.base import Engine, Request
from jackpot.rollout.evaluate import start_scoring
from jackpot.rollout.multi_turn import stream_rollouts
from jackpot.rollout.rewards.rewards import overlong_penalty
from jackpot.rollout.tasks.base import PromptStream, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """Holds the rollouts of one iteration and the sums of their metrics."""

    scored: list[ScoredRollout]  # rollouts to train on
    unfiltered: list[Rollout]  # usable rollouts of the first generation batch, before groups are filtered
    sums: Sums  # metrics over everything generated, what is not trained on included


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptGroup:
    """Holds the usable responses to one prompt."""

    members: list[ScoredRollout]
    has_equal_rewards: bool  # whether the task gave all members the same reward, before shaping


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationBatch:
    """Holds all responses to one batch of prompts, in the order of the requests."""

    generated: list[Rollout]
    discarded: dict[str, str]  # uid of an unusable rollout and the reason, `aborted` or `non_finite`
    groups: list[PromptGroup]  # by prompt, without discarded rollouts and without empty groups
    sums: Sums  # the engines' own metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class _PendingBatch:
    """Tracks a generation batch that was submitted to the engine."""

    requests: list[Request]
    sampled_by: list[Role]  # of each request
    rollouts: Iterator[Rollout]  # of each engine in the order in which they end


class Sampler:
    """Makes the rollout batch of each iteration: draws prompts, has the engine generate responses, and scores them.

    Args:
        engines: by model, the one that generates its rollouts.
        costs: by model, cost of a forward pass.
        prompts: source of training prompts.
        clock: times `rollout` (waiting for the engine) and `score` (scoring responses).
        event: called with (iteration, event) for every rollout that is discarded or cannot be scored.
    """

    def __init__(
        self,
        config: Config,
        engines: Mapping[Role, Engine],
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        costs: Mapping[Role, ForwardCost],
        prompts: PromptStream,
        clock: Clock,
        event: Callable[[int, dict[str, Any]], None],
    ) -> None:
        self._config, self._engines, self._task, self._tokenizer, self._costs = config, engines, task, tokenizer, costs
        self._prompts, self._clock, self._event = prompts, clock, event
        self._ahead: list[GenerationBatch] | None = None  # generated ahead for the next iteration
        self._state_before_ahead: dict[str, int] | None = None  # the prompt stream's state before `_ahead`

    def next_batch(self, iteration: int) -> RolloutBatch:
        """Return the rollout batch of an iteration: the one generated ahead, else one generated now.

        It does not depend on the order in which responses ended. With `batch.filter_groups`, groups to which the task
        gave equal rewards are used only where the last generation batch left too few others.
        """
        config = self._config
        batches = self._ahead or self._generate(iteration, self._submit(iteration))
        self._ahead = self._state_before_ahead = None
        for uid, reason in (item for batch in batches for item in batch.discarded.items()):
            self._event(iteration, {"event": f"{reason}_rollout", "uid": uid})
        groups, wanted = [group for batch in batches for group in batch.groups], config.batch.prompts
        for one in (one for group in groups for one in group.members if one.score.reward_error):
            self._event(iteration, {"event": f"reward_{one.score.reward_error}", "uid": one.rollout.uid})
        if config.batch.filter_groups:
            groups.sort(key=lambda group: group.has_equal_rewards)
        first = next((batch.groups for batch in batches if batch.groups), [])
        return RolloutBatch(
            scored=[one for group in groups[:wanted] for one in group.members],
            unfiltered=[one.rollout for group in first for one in group.members],
            sums=self._sums(batches, groups) | _sampling_sums(batches, groups, wanted),
        )

    @contextmanager
    def overlap_with_training(self, iteration: int) -> Iterator[None]:
        """Let the engine sleep while the body runs, or with `batch.ahead` generate the batch of `iteration` meanwhile.

        Generation begins with the engine's current weights and is complete at the end of the context, so that new
        weights are sent only then. Of responses with several turns, only the first turn is generated meanwhile, because
        no tool is called before the end of the body.
        """
        config = self._config
        if not config.batch.ahead or iteration > config.iterations:
            for role in config.writers(iteration - 1):
                self._engines[role].sleep()
            yield
            return
        self._state_before_ahead = self._prompts.state_dict()
        pending = self._submit(iteration)
        yield
        self._ahead = self._generate(iteration, pending)

    @property
    def prompt_state(self) -> dict[str, int]:
        """Return the prompt stream's state for a checkpoint.

        It is the state before a batch that was generated ahead, so that a resumed run generates that batch again.
        """
        return self._state_before_ahead or self._prompts.state_dict()

    def _generate(self, iteration: int, pending: _PendingBatch) -> list[GenerationBatch]:
        """Wait for a generation batch, and with `batch.filter_groups` for as many more as are needed and allowed."""
        wanted, filtering = self._config.batch.prompts, self._config.batch.filter_groups
        batches = [self._wait(pending)]
        while filtering and len(batches) < filtering.max_num_gen_batches:
            if sum(not group.has_equal_rewards for batch in batches for group in batch.groups) >= wanted:
                break
            batches.append(self._wait(self._submit(iteration)))
        return batches

    def _submit(self, iteration: int) -> _PendingBatch:
        """Submit the requests of one generation batch to the engine."""
        for engine in self._engines.values():
            engine.take_metrics()  # those of an evaluation
        with self._clock("rollout"):
            requests = self._requests(iteration, self._prompts.next(self._config.batch.prompts))
            sampled_by = assign_models(self._config, iteration, [request.prompt.uid for request in requests])
            streams = []
            for role in dict.fromkeys(sampled_by):
                own = [request for request, one in zip(requests, sampled_by, strict=True) if one == role]
                streams.append(stream_rollouts(self._engines[role], self._task, self._tokenizer, own))
            return _PendingBatch(requests=requests, sampled_by=sampled_by, rollouts=chain(*streams))

    def _wait(self, pending: _PendingBatch) -> GenerationBatch:
        """Wait for a generation batch. Scoring of each group begins once it is complete, while others are generated."""
        members: dict[str, list[str]] = {}
        for request in pending.requests:
            members.setdefault(request.prompt.uid, []).append(request.uid)
        order = [request.uid for request in pending.requests]
        sampled_by = dict(zip(order, pending.sampled_by, strict=True))
        rollouts: dict[str, Rollout] = {}
        discarded: dict[str, str] = {}
        scoring: dict[str, tuple[list[Rollout], Callable[[], list[Score]]]] = {}
        while len(scoring) < len(members):
            with self._clock("rollout"):
                rollout = next(pending.rollouts)
            rollouts[rollout.uid] = rollout = replace(rollout, sampled_by=sampled_by[rollout.uid])
            if reason := discard_reason(rollout):
                discarded[rollout.uid] = reason
            if rollouts.keys() >= set(group := members[rollout.prompt.uid]):
                with self._clock("score"):
                    usable = [rollouts[uid] for uid in group if uid not in discarded]
                    wait = start_scoring(usable, self._task, self._tokenizer)
                    scoring[rollout.prompt.uid] = usable, wait
        with self._clock("score"):
            groups = {prompt: self._group(usable, wait()) for prompt, (usable, wait) in scoring.items()}
        return GenerationBatch(
            generated=[rollouts[uid] for uid in order],
            discarded={uid: discarded[uid] for uid in order if uid in discarded},
            groups=[groups[prompt] for prompt in members if groups[prompt].members],
            sums={
                name: Mean.number(value)
                for engine in self._engines.values()
                for name, value in engine.take_metrics().items()
            },
        )

    def _requests(self, iteration: int, prompts: Sequence[Prompt]) -> list[Request]:
        """Make a group of requests for each prompt; the seed of each is hashed from its uid."""
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

    def _sums(self, batches: Sequence[GenerationBatch], groups: Sequence[PromptGroup]) -> Sums:
        """Return the metrics of what was generated, and of what each of two models generated."""
        generated = [rollout for batch in batches for rollout in batch.generated]
        discarded = {uid: reason for batch in batches for uid, reason in batch.discarded.items()}
        drafts = add_sums(*(batch.sums for batch in batches))
        costs = self._costs | ({"policy": _drafted_cost(self._costs, drafts)} if drafts else {})
        sums = drafts | _rollout_sums(generated, list(discarded.values()), groups, costs)
        if not self._config.is_mixed:
            return sums
        for role in self._engines:
            own = [rollout for rollout in generated if rollout.sampled_by == role]
            reasons = [discarded[rollout.uid] for rollout in own if rollout.uid in discarded]
            parts = [
                replace(group, members=[one for one in group.members if one.rollout.sampled_by == role])
                for group in groups
            ]
            parts = [part for part in parts if part.members]
            found = _rollout_sums(own, reasons, parts, costs) if own else {}
            sums |= {f"{name}_by_{role}": entry for name, entry in found.items()}
        written = [rollout.sampled_by == "rollout_model" for rollout in generated]
        return sums | {"sampling/rollout_model_share": Mean.numbers(written)}

    def _group(self, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> PromptGroup:
        """Pair the responses to one prompt with their scores."""
        members = [
            ScoredRollout(rollout=rollout, score=shaped_score(self._config, rollout, score))
            for rollout, score in zip(rollouts, scores, strict=True)
        ]
        return PromptGroup(members=members, has_equal_rewards=all_equal([score.reward for score in scores]))


def _drafted_cost(costs: Mapping[Role, ForwardCost], drafts: Sums) -> ForwardCost:
    """Return the cost of a forward pass of the policy, with all that both models read for the same responses."""
    policy, draft = (float(drafts[name].value) for name in ("draft/policy_reads", "draft/draft_reads"))
    own, other = costs["policy"], costs["rollout_model"]
    return ForwardCost(
        per_token=round(policy * own.per_token + draft * other.per_token),
        per_pair=round(policy * own.per_pair + draft * other.per_pair),
    )


def assign_models(config: Config, iteration: int, prompts: Sequence[str]) -> list[Role]:
    """Return the model that generates each response of a generation batch.

    A number of responses between two whole ones is rounded up with that chance, so that the share is met on average.
    Hashes choose the prompts, not their order.

    Args:
        prompts: uid of the prompt of each response, those of a group one after the other.
    """
    model = config.rollout_model
    if model is None:
        return ["policy"] * len(prompts)
    share = model.share_at(iteration)
    if share in (0.0, 1.0):
        return ["rollout_model" if share else "policy"] * len(prompts)
    uids, size = list(dict.fromkeys(prompts)), config.batch.group_size
    by_hash = sorted(uids, key=lambda uid: fold_in(config.seed, "sampled by", iteration, uid))
    (chance,) = uniforms([fold_in(config.seed, "share", iteration, *by_hash)], [0]).tolist()
    if model.split == "prompt":
        count = int(share * len(uids) + chance)
        of_prompt = dict.fromkeys(by_hash[:count], size)
    else:
        least, more = divmod(int(share * len(prompts) + chance), len(uids))
        of_prompt = {uid: least + (place < more) for place, uid in enumerate(by_hash)}
    left, roles = dict(of_prompt), []
    for uid in prompts:
        roles.append("rollout_model" if left.get(uid, 0) > 0 else "policy")
        left[uid] = left.get(uid, 0) - 1
    return roles


def shaped_score(config: Config, rollout: Rollout, score: Score) -> Score:
    """Return the task's score with the penalty of `objective.overlong_buffer` added to its reward."""
    overlong = config.objective.overlong_buffer
    if overlong is None:
        return score
    limit = config.sampling.max_new_tokens
    penalty = overlong_penalty(len(rollout.token_ids), limit, overlong.len, overlong.penalty_factor)
    return replace(score, reward=score.reward + penalty)


def tokens_read(rollout: Rollout) -> int:
    """Return how many tokens a model reads to generate or score a rollout: all of prompt and response but the last."""
    return len(rollout.prompt.token_ids) + len(rollout.token_ids) - 1


def discard_reason(rollout: Rollout) -> str | None:
    """Return why a rollout cannot be trained on: `aborted` or `non_finite` log-probs; None where it can."""
    if rollout.finish == "aborted":
        return "aborted"
    log_probs = rollout.rollout_log_probs
    is_finite = math.isfinite(log_probs.sum()) or log_probs[rollout.sampled_mask].isfinite().all()  # a sum is cheaper
    return None if is_finite else "non_finite"


def _sampling_sums(batches: Sequence[GenerationBatch], groups: Sequence[PromptGroup], wanted: int) -> Sums:
    """Return the metrics of filtering groups."""
    return {
        "sampling/gen_batches": Mean.number(len(batches)),
        "sampling/groups_filtered": Mean.number(max(0, len(groups) - wanted)),
    }


def _rollout_sums(
    generated: Sequence[Rollout],
    discarded: Sequence[str],
    groups: Sequence[PromptGroup],
    costs: Mapping[Role, ForwardCost],
) -> Sums:
    """Return the metrics of rewards and responses over everything that was generated.

    Args:
        discarded: the reason for each rollout that was discarded.
    """
    scored = [one for group in groups for one in group.members]
    errors = [one.score.reward_error for one in scored]
    verdicts = [[one.score.correct for one in group.members if one.score.correct is not None] for group in groups]
    judged = [verdict for verdict in verdicts if verdict]  # none of a task without a verdict
    flops = sum(costs[rollout.sampled_by].sequence(tokens_read(rollout)) for rollout in generated)
    return {
        "reward/mean": Mean.numbers([one.score.reward for one in scored]),
        "reward/correct": Mean.numbers([correct for verdict in judged for correct in verdict]),
        "reward/timeouts": Mean.numbers([error == "timeout" for error in errors]),
        "reward/errors": Mean.numbers([error in ("crash", "invalid") for error in errors]),
        "reward/retries": Mean.numbers([one.score.reward_retries for one in scored]),
        "reward/all_right": Mean.numbers([all(verdict) for verdict in judged]),
        "reward/all_wrong": Mean.numbers([not any(verdict) for verdict in judged]),
        "response/tokens": Mean.numbers([len(one.rollout.token_ids) for one in scored]),
        "response/tool_tokens": Mean.numbers([int((~one.rollout.sampled_mask).sum()) for one in scored]),
        "response/truncated": Mean.numbers([one.rollout.finish == "length" for one in scored]),
        "response/aborted": Mean.number(discarded.count("aborted") / len(generated)),
        "response/non_finite": Mean.number(discarded.count("non_finite") / len(generated)),
        "tokens/rollout": Sum.number(sum(len(rollout.token_ids) for rollout in generated)),
        "flops/rollout": Sum.number(flops),
    }
