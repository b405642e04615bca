"""Settings of the sizes of batches, `batch` in a recipe."""

from typing import Annotated

from pydantic import Field

from jackpot.config.base import MAY_CHANGE, Conflicts, Count, Strict


class FilterGroupsConfig(Strict):
    """Settings of DAPO's dynamic sampling, which replaces groups of equal rewards (arXiv 2503.14476, 3.2)."""

    max_num_gen_batches: Annotated[int, Field(ge=2)] = 10
    """Generation batches of `prompts` prompts each, the first included, after which groups of equal rewards fill what
    is missing."""


class BatchConfig(Strict):
    """Settings of an iteration's batches, counted in sequences: a rollout batch has prompts x group_size of them."""

    prompts: Count
    """Prompts of one iteration."""
    group_size: Count
    """Responses to each prompt, which the advantage compares with each other."""
    mini_batch_size: Count | None = None
    """Sequences of one optimizer step; null: the whole rollout batch."""
    ppo_epochs: Count = 1
    """Passes over one rollout batch."""
    micro_batch_tokens: Annotated[Count, MAY_CHANGE] = 16_384
    """Tokens of one forward pass, the prompt of each response included; padding counts only for models that read it. It
    changes memory and speed, and results only by rounding."""
    filter_groups: FilterGroupsConfig | None = None
    """Replace groups of equal rewards by further groups; null: train on every group."""
    ahead: Annotated[int, Field(ge=0, le=8)] = 0
    """Iterations that the weights in training may be younger than those that generated the rollout batch, 0 to 8. With
    0 the engine waits for the learner; with 1 it generates the next batch while the learner trains, with 3 or more
    several at a time."""

    @property
    def rollouts(self) -> int:
        """Return the number of sequences of one rollout batch."""
        return self.prompts * self.group_size

    @property
    def steps_per_iteration(self) -> int:
        """Return the number of optimizer steps of one iteration."""
        return self.rollouts // (self.mini_batch_size or self.rollouts) * self.ppo_epochs

    def conflicts(self) -> Conflicts:
        """Refuse a batch that does not divide into equal optimizer steps."""
        mini_batch_size = self.mini_batch_size or self.rollouts
        return [
            (
                self.rollouts % mini_batch_size != 0,
                f"prompts {self.prompts} x group_size {self.group_size} = {self.rollouts} sequences do not divide "
                f"into optimizer steps of mini_batch_size {mini_batch_size}; choose a mini_batch_size that divides "
                f"{self.rollouts}, or other prompts or group_size",
            ),
        ]


def batches_in_reserve(ahead: int) -> int:
    """Return how many finished batches wait for training when the engines get new weights and begin new batches.

    The learner trains on the waiting batches while the engines generate the new ones, which fill up to `ahead`. About
    half of `ahead` wait, and never fewer than there are new ones. If fewer waited, the learner would run out of
    batches; if more did, the engines would begin fewer batches together each time that they get new weights.

    Args:
        ahead: the setting `batch.ahead`, iterations.
    """
    return ahead // 2 + 1 if ahead else 0
