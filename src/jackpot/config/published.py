"""What stands in a recipe beside its settings: the GPUs it is meant for, and what a paper published."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jackpot.config.base import Count, Strict

PAPERS = {  # a recipe's name for a paper, and its title
    "Jackpot": "Jackpot: Optimal Budgeted Rejection Sampling for Extreme Actor-Policy Mismatch RL, arXiv 2602.06107",
    "submission": "Jackpot: Align Actor-Policy Distribution for Scalable and Stable RL for LLM, its earlier submission",
    "Jet-RL": "Jet-RL: On-Policy FP8 RL with Unified Training and Rollout Precision Flow, arXiv 2601.14243",
    "TIS post": "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, Yao et al. 2025",
}


class GpusConfig(Strict):
    """The machine that a recipe is meant for."""

    kind: Literal["A6000", "A100", "H100", "H200"]  # 48, 80, 80 and 141 GB
    count: Count


class PublishedRow(Strict):
    """One row of a paper's table, or one curve of a figure."""

    row: str  # as the paper names it
    arm: str  # of this recipe; where not_runnable is set, the name that it will have
    numbers: Annotated[tuple[float | None, ...], Field(strict=False)] = ()  # one a column; null: none
    note: str = ""
    not_runnable: str = ""  # why the recipe has no such arm yet


class PublishedTable(Strict):
    """Rows of one table of one paper that this recipe is about. Accuracies are in percent."""

    paper: Literal[tuple(PAPERS)]
    table: str  # its name, and which block of it
    columns: Annotated[tuple[str, ...], Field(strict=False)] = ()
    rows: Annotated[tuple[PublishedRow, ...], Field(strict=False, min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> "PublishedTable":
        for row in self.rows:
            if len(row.numbers) not in (0, len(self.columns)):
                raise ValueError(
                    f"{self.table}, row {row.row!r} has {len(row.numbers)} numbers for {len(self.columns)} columns; "
                    f"give one for each, null where the paper has none, or leave them all out"
                )
        return self


class RecipeNotes(Strict):
    """What a recipe says beside its settings and arms. No run depends on it."""

    gpus: GpusConfig | None = None  # null: whatever is there
    published: Annotated[tuple[PublishedTable, ...], Field(strict=False)] = ()


BESIDE_SETTINGS = ("arms", *RecipeNotes.model_fields)  # keys of a recipe that are not settings
