"""Generation batches, the scored responses to one batch of prompts, and how a checkpoint stores such a batch.

The rollout batch of an iteration consists of one generation batch, or of several if `batch.filter_groups` drops groups
of responses with equal rewards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jackpot.core.types import TOKEN_COLUMNS, Prompt, Rollout, Score, ScoredRollout


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptGroup:
    """The usable responses to one prompt, with their scores."""

    members: list[ScoredRollout]
    # True if responses that are compared with each other have equal rewards. All members are compared, or those of each
    # sampling model among themselves, by the rewards that the task gave, without a penalty for overlong responses.
    has_equal_rewards: bool

    def scores(self) -> list[tuple]:
        """Return a tuple for each member: the member's uid, then the values of the fields of the member's score."""
        return [(member.rollout.uid, *_values(member.score)) for member in self.members]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationBatch:
    """All responses to one batch of prompts, with the scores of those that can be trained on."""

    generated: list[Rollout]  # all rollouts, discarded ones too, in the order of the requests
    discarded: dict[str, str]  # by uid of an unusable rollout, the reason: `aborted` or `non_finite`
    groups: list[PromptGroup]  # one for each prompt that has a rollout which was not discarded
    metrics: dict[str, float]  # metrics that the engines report, by name

    def state_dict(self) -> dict[str, Any]:
        """Return the batch as plain values and one tensor per token column, without objects that need pickle."""
        prompts = {rollout.prompt.uid: rollout.prompt for rollout in self.generated}
        # A tuple for each rollout, whose fields `from_state` reads in the same order; all else is in the token columns.
        rollouts = [
            (rollout.uid, rollout.prompt.uid, rollout.finish, rollout.sampled_by, len(rollout.token_ids))
            for rollout in self.generated
        ]

        return {
            "prompts": [_values(prompt) for prompt in prompts.values()],
            "rollouts": rollouts,
            "columns": {name: _joined(self.generated, name) for name in TOKEN_COLUMNS},
            "discarded": dict(self.discarded),
            # `scores` gives a tuple for each member: its uid and its score.
            "groups": [(group.has_equal_rewards, group.scores()) for group in self.groups],
            "metrics": dict(self.metrics),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "GenerationBatch":
        """Make a batch again from `state`, which its `state_dict` returned."""
        prompts = [Prompt(**_named(Prompt, values)) for values in state["prompts"]]
        prompt_of = {prompt.uid: prompt for prompt in prompts}

        # Cut each token column, which holds the tokens of all rollouts, into a piece for each rollout.
        lengths = [length for *_, length in state["rollouts"]]
        columns = {name: column.split(lengths) for name, column in state["columns"].items()}

        # Each rollout has a tuple, as `state_dict` made it, and a piece of every column.
        rollouts: dict[str, Rollout] = {}
        for (uid, prompt_uid, finish, sampled_by, _), *values in zip(state["rollouts"], *columns.values(), strict=True):
            rollouts[uid] = Rollout(
                uid=uid,
                prompt=prompt_of[prompt_uid],
                finish=finish,
                sampled_by=sampled_by,
                **dict(zip(columns, values, strict=True)),
            )

        # Each score is a tuple: the uid of its rollout, then the values of the fields of `Score`, in their order.
        groups = []
        for has_equal_rewards, scores in state["groups"]:
            members = [
                ScoredRollout(rollout=rollouts[uid], score=Score(**_named(Score, values))) for uid, *values in scores
            ]
            groups.append(PromptGroup(members=members, has_equal_rewards=has_equal_rewards))

        return cls(
            generated=list(rollouts.values()),
            discarded=state["discarded"],
            groups=groups,
            metrics=state["metrics"],
        )


def _joined(rollouts: Sequence[Rollout], name: str) -> Tensor:
    """Join the column `name` of all rollouts along the tokens: [tokens of all rollouts, ...].

    Rollouts without tokens are left out, since their columns [0, K] may have another K, the number of top log-probs.
    Where no rollout has tokens, the first rollout's empty column is returned.
    """
    columns = [getattr(rollout, name) for rollout in rollouts]
    return torch.cat([column for column in columns if len(column)] or columns[:1])


def _values(item: Prompt | Score) -> tuple:
    """Return the values of an item's fields in the order of the fields; unlike `dataclasses.astuple`, copy nothing."""
    return tuple(getattr(item, name) for name in item.__dataclass_fields__)


def _named(kind: type, values: Sequence[Any]) -> dict[str, Any]:
    """Return keyword arguments for the dataclass `kind` from the values of its fields, in the order of the fields."""
    return dict(zip(kind.__dataclass_fields__, values, strict=True))
