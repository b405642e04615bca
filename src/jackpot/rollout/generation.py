"""The scored responses to one batch of prompts, and their form in a checkpoint: plain values and one tensor a column.

A rollout batch consists of one generation batch, or of several where groups of responses are filtered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from jackpot.core.types import TOKEN_COLUMNS, Prompt, Rollout, Score, ScoredRollout


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptGroup:
    """The usable responses to one prompt, with their scores."""

    members: list[ScoredRollout]
    # Whether the members that are compared with each other all have equal rewards, as the task gave them (unshaped)
    has_equal_rewards: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationBatch:
    """All responses to one batch of prompts, in the order of the requests."""

    generated: list[Rollout]
    discarded: dict[str, str]  # uid of an unusable rollout and the reason, `aborted` or `non_finite`
    groups: list[PromptGroup]  # by prompt, without discarded rollouts and without empty groups
    metrics: dict[str, float]  # metrics that the engines report, by name

    def state_dict(self) -> dict[str, Any]:
        """Return the batch as plain values and one tensor a column, which torch loads with `weights_only`."""
        prompts = {rollout.prompt.uid: rollout.prompt for rollout in self.generated}
        return {
            "prompts": [_values(prompt) for prompt in prompts.values()],
            "rollouts": [
                (one.uid, one.prompt.uid, one.finish, one.sampled_by, len(one.token_ids)) for one in self.generated
            ],
            "columns": {name: _joined(self.generated, name) for name in TOKEN_COLUMNS},
            "discarded": dict(self.discarded),
            "groups": [
                (group.has_equal_rewards, [(one.rollout.uid, *_values(one.score)) for one in group.members])
                for group in self.groups
            ],
            "metrics": dict(self.metrics),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "GenerationBatch":
        """Return the batch of which `state_dict` returned `state`."""
        prompts = {prompt.uid: prompt for prompt in (Prompt(**_named(Prompt, one)) for one in state["prompts"])}
        ends = [0]
        for *_, length in state["rollouts"]:
            ends.append(ends[-1] + length)

        rollouts = {
            uid: Rollout(
                uid=uid,
                prompt=prompts[prompt],
                finish=finish,
                sampled_by=sampled_by,
                **{name: column[begin:end] for name, column in state["columns"].items()},
            )
            for (uid, prompt, finish, sampled_by, _), (begin, end) in zip(
                state["rollouts"], pairwise(ends), strict=True
            )
        }

        groups = [
            PromptGroup(
                members=[
                    ScoredRollout(rollout=rollouts[uid], score=Score(**_named(Score, score))) for uid, *score in members
                ],
                has_equal_rewards=has_equal_rewards,
            )
            for has_equal_rewards, members in state["groups"]
        ]

        return cls(
            generated=list(rollouts.values()),
            discarded=state["discarded"],
            groups=groups,
            metrics=state["metrics"],
        )


def _joined(rollouts: Sequence[Rollout], name: str) -> Tensor:
    """Join a column of all rollouts, [tokens of all rollouts, ...].

    Rollouts without tokens are left out, because the K of their empty lists may differ.
    """
    columns = [getattr(rollout, name) for rollout in rollouts]
    return torch.cat([column for column in columns if len(column)] or columns[:1])


def _values(item: Prompt | Score) -> tuple:
    # Unlike `dataclasses.astuple` this copies nothing.
    return tuple(getattr(item, name) for name in item.__dataclass_fields__)


def _named(kind: type, values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(kind.__dataclass_fields__, values, strict=True))
