"""Settings of checkpoints, of the checks that stop a run, and of saved rollouts."""

from typing import Annotated

from jackpot.config.base import MAY_CHANGE, Count, Strict


class CheckpointConfig(Strict):
    """Settings of the checkpoints that a run continues from."""

    every: Annotated[Count, MAY_CHANGE] = 100
    """Iterations between two checkpoints; there is also one after the last iteration."""
    keep: Annotated[Count, MAY_CHANGE] = 2
    """Newest checkpoints that are kept, in addition to the best; with 1 there is no other if the newest is corrupt."""


class GuardConfig(Strict):
    """Settings of the checks that stop a run which no longer trains."""

    check_engine: Annotated[bool, MAY_CHANGE] = True
    """Compare the engine's log-probs and top-k lists with those of training, at every evaluation and for every rollout
    batch before it is trained on, and check over all batches that the engine samples as it reports; after the steps
    on a batch, and before they are saved, compare all tokens of weights that the learner still has (none of a rollout
    model that is trained with `batch.ahead`). With `batch.ahead` the host's memory keeps a copy
    of the weights that generate, of every model that is trained and generates."""
    max_non_finite_steps: Annotated[Count, MAY_CHANGE] = 10
    """Optimizer steps in a row with NaN or infinite gradients, each skipped and counted, after which the run stops."""


class RolloutsConfig(Strict):
    """Settings of the rollouts that a run saves for `jackpot replay` and `jackpot report`."""

    every: Annotated[Count, MAY_CHANGE] = 10
    """Iterations between two saved rollout batches."""
    keep: Annotated[Count, MAY_CHANGE] = 20
    """Files of rollouts that are kept: the first, the newest, that of the best checkpoint, and others spread evenly
    between them."""
