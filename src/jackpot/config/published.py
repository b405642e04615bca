"""The parts of a recipe that no run depends on: the GPUs it is meant for, and the numbers that its paper published."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from jackpot.config.base import Conflicts, Count, Strict
from jackpot.core.errors import ConfigError

Paper = Literal["Jackpot", "submission", "Jet-RL", "TIS post"]
PAPERS: dict[str, str] = {  # titles of papers, by the names that recipes give them
    "Jackpot": "Jackpot: Optimal Budgeted Rejection Sampling for Extreme Actor-Policy Mismatch RL, arXiv 2602.06107",
    "submission": "Jackpot: Align Actor-Policy Distribution for Scalable and Stable RL for LLM, its earlier submission",
    "Jet-RL": "Jet-RL: On-Policy FP8 RL with Unified Training and Rollout Precision Flow, arXiv 2601.14243",
    "TIS post": "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, Yao et al. 2025",
}


class GpusConfig(Strict):
    """The machine that a recipe is meant for."""

    kind: Literal["4090", "A6000", "A100", "H100", "H200"]
    """Model of the GPUs, with 24, 48, 80, 80 or 141 GB."""
    count: Count
    """Number of GPUs."""


def parse_gpus(text: str) -> GpusConfig:
    """Parse a number and kind of GPUs as a person writes them: 4xH100.

    Raises:
        ConfigError: the text is not a number, an x and a known kind.
    """
    count, _, kind = text.partition("x")
    try:
        return GpusConfig.model_validate({"kind": kind, "count": int(count)})
    except ValueError as error:
        kinds = ", ".join(get_args(GpusConfig.model_fields["kind"].annotation))
        raise ConfigError(
            f"GPUs are {text!r}; give their number and kind as in 4xH100, with a kind of {kinds}"
        ) from error


class PublishedRow(Strict):
    """One row of a paper's table, or one curve of a figure."""

    row: str
    """Name of the row in the paper."""
    arm: str
    """Arm of the recipe that repeats it; where `not_runnable` is set, the name that the arm will have."""
    numbers: Annotated[tuple[float | None, ...], Field(strict=False)] = ()
    """Published number of each column; null: the paper has none."""
    note: str = ""
    """Remark about the row."""
    not_runnable: str = ""
    """Reason why the recipe has no such arm yet; empty: it has one."""


class PublishedTable(Strict):
    """Those rows of one table of a paper that a recipe repeats. Accuracies are in percent."""

    paper: Paper
    """Short name of the paper."""
    table: str
    """Name of the table, and which block of it."""
    columns: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of the columns; a curve of a figure may have none."""
    rows: Annotated[tuple[PublishedRow, ...], Field(strict=False, min_length=1)]
    """Rows of the table or curves of the figure."""

    def conflicts(self) -> Conflicts:
        """Refuse a row that has numbers, but not one for each column."""
        return [
            (
                len(row.numbers) not in (0, len(self.columns)),
                f"{self.table}, row {row.row!r} has {len(row.numbers)} numbers for {len(self.columns)} columns; give "
                "one for each, null where the paper has none, or leave them all out",
            )
            for row in self.rows
        ]


class RecipeNotes(Strict):
    """The parts of a recipe that are neither settings nor arms. No run depends on these notes."""

    gpus: GpusConfig | None = None
    """Machine that the recipe is meant for; null: any."""
    published: Annotated[tuple[PublishedTable, ...], Field(strict=False)] = ()
    """Tables and figures that the recipe repeats."""


NOT_SETTINGS = ("arms", *RecipeNotes.model_fields)  # keys of a recipe that are not settings
