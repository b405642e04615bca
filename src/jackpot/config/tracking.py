"""Settings of services that get a run's metrics."""

from typing import Annotated, Literal

from jackpot.config.base import MAY_CHANGE, Strict


class WandbConfig(Strict):
    """Settings of the Weights & Biases run that shows the lines of metrics.jsonl."""

    project: Annotated[str, MAY_CHANGE]
    """Project that the run is in."""
    entity: Annotated[str | None, MAY_CHANGE] = None
    """User or team that owns the project; null: the default one of who is logged in."""
    mode: Annotated[Literal["online", "offline"], MAY_CHANGE] = "online"
    """Send metrics while the run trains (online, unless the environment variable WANDB_MODE says otherwise), or only
    write them to the run folder's wandb/, which `wandb sync` sends later (offline)."""


class TrackingConfig(Strict):
    """Settings of services that get a run's metrics. Nothing is sent unless one of them is set."""

    wandb: Annotated[WandbConfig | None, MAY_CHANGE] = None
    """Send metrics and settings to Weights & Biases, and no rollouts, code or output; null: send nothing. Needs the
    extra `wandb`. Status: never run on its target (the service of W&B). It has run offline."""
