"""Check the advice of `replay` and `simulate` against the study: does the rule rank arms as their accuracy does?

    python -m research.advice             # judge rollouts of short runs: a minute a pair of models, on one core
    python -m research.advice --write     # compare with the study's lines that there are, and write it down

The first writes docs/study/advice.json: for each pair of models, what each arm of research/study.yaml is worth on the
rollouts of a short run of that recipe. The second needs no run; it writes the section of docs/replay.md.
"""

import argparse
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from jackpot.analysis.advice.rule import TIE_ERRORS, TIE_SHARE, estimate, worth_of
from jackpot.analysis.compare.summary import RunSummary
from jackpot.analysis.replay.formats import find_format
from jackpot.analysis.replay.formats.base import read_files
from jackpot.analysis.replay.replay_sums import ReplaySums
from jackpot.analysis.replay.responses import response_batches
from jackpot.analysis.replay.settings import CorrectionSetting, settings_of
from jackpot.config.config import Config
from jackpot.config.recipes import resolve
from jackpot.core.files import whole_file
from jackpot.core.statistics import paired_differences
from jackpot.launch.start import train_run
from research.study import (
    ALONE,
    PANELS,
    RECIPE,
    ROOT,
    TUNING_SEED,
    best_factor,
    committed,
    interval_of,
    read_summary,
    recipe_of,
    tuning_name,
)
from tools.toy_models import STUDY_MODELS, make_toy_models

JUDGED = ROOT / "docs" / "study" / "advice.json"
PAGE, HEADING = ROOT / "docs" / "replay.md", "## How often the rule was right"
FIRST_EDITION = ROOT / "docs" / "study" / "first_edition" / "reported.jsonl"
RUN_ARM, ITERATIONS = "expected", 20  # of the short run whose rollouts are judged
NOT_JUDGED = ("drafted", "frozen_annealed")  # exact; rollouts of a model that no short run has
FIRST_EDITION_ARMS = {"tis_new": ["objective.correction.proximal=new"]}  # of `tis`, that study.yaml has no more


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One arm on the rollouts of one pair of models."""

    groups: Tensor | None  # [G, 7], the rule's sums; None where the policy generates everything
    shares: Mapping[float, float]  # share of the rollout model -> part of the iterations

    def worth(self, sums: Tensor) -> Tensor:
        """Mean worth over the iterations."""
        return sum(part * worth_of(sums, share).value for share, part in self.shares.items())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the study has of one arm: accuracies by seed."""

    accuracy: Mapping[int, float]
    error: float | None = None  # standard error over problems, where there is one seed


@cache
def configs(pair: str) -> dict[str, Config]:
    """Return the settings of every arm whose accuracy the study has with a pair of models."""
    arms = dict.fromkeys(cell.arm for panel in ("first", "gap") for cell in PANELS[panel] if cell.pair in (pair, ALONE))
    found = {arm: recipe_of(arm) for arm in arms if arm not in NOT_JUDGED}
    return found | {name: resolve(str(RECIPE), "tis", keys) for name, keys in FIRST_EDITION_ARMS.items()}


def shares_of(config: Config) -> dict[float, float]:
    """Return the parts of the iterations at each share of the rollout model; one share 0 without it."""
    if config.rollout_model is None:
        return {0.0: 1.0}
    over = Counter(config.rollout_model.share_at(number) for number in range(1, config.iterations + 1))
    return {share: count / config.iterations for share, count in over.items()}


def own_setting(config: Config) -> CorrectionSetting:
    return next(one for one in settings_of(config, ()) if one.is_own)


def short_run(pair: str, runs: Path) -> Path:
    """Run the recipe's first iterations once, with rollouts saved at five of them."""
    folder = runs / "advice" / pair
    if not (folder / "checkpoints" / f"step-{ITERATIONS}").exists():
        keys = [
            f"policy.path={runs}/models/policy",
            f"rollout_model.path={runs}/models/{pair}",
            *(f"iterations={ITERATIONS}", f"seed={TUNING_SEED}", "rollouts.every=5", "rollouts.keep=5"),
            *(f"evaluation.every={ITERATIONS}", "evaluation.problems=64", f"checkpoint.every={ITERATIONS}"),
        ]
        train_run(resolve(str(RECIPE), RUN_ARM, keys), folder, lambda line: None)
    return folder


def judge(pair: str, run: Path) -> dict[str, object]:
    """Return what the rule reads of every arm that can be judged on all tokens."""
    arms = configs(pair)
    settings = {arm: own_setting(config) for arm, config in arms.items() if config.rollout_model}
    by_label = {setting.label: setting for setting in settings.values()}
    dump, files = find_format(run, "jackpot")
    measured = ReplaySums(list(by_label.values()))
    for part in response_batches(read_files(dump, files, print)):
        measured.add([response for response in part if response.sampled_mask.any()])
    judged = {one.setting.label: one for one in measured.corrections if one.tokens == measured.tokens}
    return {
        "tokens": measured.tokens,
        "total_variation": float(measured.run["total_variation"].value),
        "labels": {arm: setting.label for arm, setting in settings.items() if setting.label in judged},
        "groups": {label: _rounded(one.groups) for label, one in judged.items()},
    }


def _rounded(groups: Tensor) -> list[list[float]]:
    return [[float(f"{value:.7g}") for value in row] for row in groups.tolist()]


@cache
def judged_arms(pair: str) -> dict[str, Judged]:
    """Read what the rule judged."""
    kept = json.loads(JUDGED.read_text()).get(pair)
    if kept is None:
        return {}
    arms = {}
    for arm, config in configs(pair).items():
        label = kept["labels"].get(arm)
        if label or not config.rollout_model:
            groups = torch.tensor(kept["groups"][label], dtype=torch.float64) if label else None
            arms[arm] = Judged(groups=groups, shares=shares_of(config))
    return arms


def predicted(one: Judged, other: Judged) -> int:
    """Return 1 where the rule holds the first for worth more, -1 for less, 0 for a tie, by its own limits."""
    known = next((arm.groups for arm in (one, other) if arm.groups is not None), None)
    if known is None:
        return 0
    both = [arm.groups if arm.groups is not None else known for arm in (one, other)]  # at a share of 0 none is read
    worths = [estimate(arm.worth, groups).value for arm, groups in zip((one, other), both, strict=True)]
    better = worths[0] >= worths[1]
    (first, a), (second, b) = ((one, both[0]), (other, both[1])) if better else ((other, both[1]), (one, both[0]))
    less = estimate(lambda x, y: second.worth(y) / first.worth(x), a, b)
    if less.value >= TIE_SHARE or (less.error is not None and 1.0 - less.value <= TIE_ERRORS * less.error):
        return 0
    return 1 if better else -1


def outcome(one: Outcome, other: Outcome) -> int | None:
    """Return 1 where the first is more accurate, -1 for less, 0 where the 95 % interval holds 0; None without one."""
    differences = paired_differences(one.accuracy, other.accuracy)
    if differences is None:
        return None

    interval = interval_of(differences)
    if interval.low is not None:
        half = interval.high - interval.value
    elif one.error is not None and other.error is not None:
        half = 1.96 * math.hypot(one.error, other.error)
    else:
        return None
    return 0 if abs(interval.value) <= half else int(math.copysign(1, interval.value))


def outcomes(runs: Iterable[RunSummary], pair: str) -> dict[str, Outcome]:
    """Collect last accuracies by arm, those of the arms without a rollout model among them."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        prefix, _, arm = run.arm.partition("/")
        if prefix in (pair, ALONE) or arm == "on_policy":
            found.setdefault(arm, {})[run.seed] = run.last.policy_accuracy
    return {arm: Outcome(accuracy=by_seed) for arm, by_seed in found.items()}


def tuned_outcomes(pair: str) -> dict[str, Outcome]:
    """Return the tuning's one seed at the best learning rate, for arms of which all were run."""
    tuning = committed().read("tuning")
    runs = {one.run.arm: one.run for one in tuning}
    found = {}
    for cell in (cell for panel in ("first", "gap") for cell in PANELS[panel] if cell.pair in (pair, ALONE)):
        if cell.rate_of is None and all(tuning_name(cell, factor) in runs for factor in (0.5, 1.0, 2.0)):
            last = runs[tuning_name(cell, best_factor(tuning, cell))].last
            found[cell.arm] = Outcome(accuracy={TUNING_SEED: last.policy_accuracy}, error=last.policy_accuracy_stderr)
    return found


@dataclass(frozen=True, kw_only=True)
class Source:
    """Some lines of the study."""

    name: str
    lines: int
    by_pair: Mapping[str, Mapping[str, Outcome]]


def sources() -> list[Source]:
    """Return the study's lines that there are now."""
    study, pairs = committed(), ("close", "far", "gap")
    first = [read_summary(line) for line in FIRST_EDITION.read_text().splitlines()]
    second = [one.run for panel in ("first", "gap") for one in study.read(panel)]
    return [
        Source(name="first edition", lines=len(first), by_pair={pair: outcomes(first, pair) for pair in pairs}),
        Source(name="second edition", lines=len(second), by_pair={pair: outcomes(second, pair) for pair in pairs}),
        Source(
            name="second edition's tuning, one seed",
            lines=len(study.read("tuning")),
            by_pair={pair: tuned_outcomes(pair) for pair in pairs},
        ),
    ]


KINDS = ("right", "both tie", "only the rule", "only the study", "opposite")


def kind(said: int, found: int) -> str:
    """Name how the rule's word on two arms and the study's fall together."""
    if said and found:
        return "right" if said == found else "opposite"
    return "only the rule" if said else "only the study" if found else "both tie"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two arms of which the rule's word and the study's are known: 1 where the first is better, -1, 0 for a tie."""

    arms: tuple[Judged, Judged]
    said: int
    found: int

    @property
    def by_share(self) -> int:
        """Return what a rule would say that knows no more than the mean share: less of the rollout model is better."""
        one, other = (sum(share * part for share, part in arm.shares.items()) for arm in self.arms)
        return (one < other) - (one > other)


def pairs_of(source: Source) -> list[Pair]:
    """Return all two arms of which the rule's word and the study's are known."""
    pairs = []
    for models, found in source.by_pair.items():
        arms = judged_arms(models)
        for one, other in combinations([arm for arm in arms if arm in found], 2):
            result = outcome(found[one], found[other])
            if result is not None:
                both = arms[one], arms[other]
                pairs.append(Pair(arms=both, said=predicted(*both), found=result))
    return pairs


def agreed(pairs: Sequence[Pair], say: Callable[[Pair], int]) -> str:
    """Word in how many pairs the study finds what `say` says."""
    if not pairs:
        return "-"
    right = sum(say(one) == one.found for one in pairs)
    return f"{right} of {len(pairs)} ({right / len(pairs):.0%})"


SPLIT = ("lines of the", "unequal shares: the rule", '"less is better"', "one share: the rule", '"always a tie"')


def split_row(source: Source, pairs: Sequence[Pair]) -> str:
    """One row of the second table: what of the agreement the share of the rollout model alone decides."""
    by_share, alike = ([one for one in pairs if bool(one.by_share) == is_decided] for is_decided in (True, False))
    cells = [
        agreed(by_share, lambda one: one.said),
        agreed(by_share, lambda one: one.by_share),
        agreed(alike, lambda one: one.said),
        agreed(alike, lambda one: 0),
    ]
    return f"| {source.name} | {' | '.join(cells)} |"


def row(source: Source, pairs: Sequence[Pair]) -> str:
    """One row of the table, with what a rule would get right that always says tie."""
    counts = Counter(kind(one.said, one.found) for one in pairs)
    total = counts.total()
    if not total:
        return f"| {source.name} | {source.lines} | not yet |" + " |" * (len(KINDS) + 1)
    agreed, always = counts["right"] + counts["both tie"], counts["both tie"] + counts["only the rule"]
    cells = " | ".join(str(counts[one]) for one in KINDS)
    share = f"{agreed} of {total} ({agreed / total:.0%})"
    return f"| {source.name} | {source.lines} | {share} | {cells} | {always / total:.0%} |"


def worth_rows(pairs: Sequence[str]) -> list[str]:
    """Return a row for each arm: what it is worth with each pair of models."""
    by_pair = [judged_arms(pair) for pair in pairs]
    arms = dict.fromkeys(arm for found in by_pair for arm in found if arm != "on_policy")
    cells = {arm: [worth_text(found.get(arm)) for found in by_pair] for arm in arms}
    return [f"| `{arm}` | {' | '.join(texts)} |" for arm, texts in cells.items()]


def worth_text(arm: Judged | None) -> str:
    return "-" if arm is None else f"{estimate(arm.worth, arm.groups).value:.2f}"


def largest_error(pairs: Sequence[str]) -> float:
    """Return the largest standard error of a worth that `worth_rows` shows."""
    arms = [arm for pair in pairs for arm in judged_arms(pair).values() if arm.groups is not None]
    return max(estimate(arm.worth, arm.groups).error or 0.0 for arm in arms)


def section() -> str:
    """Return the section of docs/replay.md from the study's lines that there are now."""
    kept = json.loads(JUDGED.read_text())
    every = sources()
    lines, pairs = sum(source.lines for source in every), [pairs_of(source) for source in every]
    return f"""{HEADING}

Every two arms of [the study](study.md) were compared by their worth, on the rollouts of one run for each pair of models
(`{RUN_ARM}`, {ITERATIONS} iterations), and by their last accuracies, which tie where the 95 % interval of their
difference holds 0 (with one seed too narrow). The rule was written with the first edition known. Of {lines} lines:

| lines of the | number | agree | {" | ".join(KINDS)} | "always a tie" agrees |
|---|---|---|{"---|" * len(KINDS)}---|
{chr(10).join(map(row, every, pairs))}

Where two arms differ in the share of the rollout model, the rule knows little more than "less of it is better":

| {" | ".join(SPLIT)} |
|{"---|" * len(SPLIT)}
{chr(10).join(map(split_row, every, pairs))}

| worth, in rollouts of the policy's own | {" | ".join(kept)} |
|---|{"---|" * len(kept)}
| total variation before a correction | {" | ".join(f"{one['total_variation']:.1%}" for one in kept.values())} |
{chr(10).join(worth_rows([*kept]))}

`on_policy` is worth 1; standard errors are at most {largest_error([*kept]):.2f}. `python -m research.advice` judges the
rollouts again, and `--write` compares with the lines that there are.

"""


def write_section() -> None:
    """Put the section into the page in place of the one that is there."""
    text = PAGE.read_text()
    before, _, rest = text.partition(HEADING)
    if not rest:
        raise SystemExit(f"{PAGE} has no heading {HEADING!r} to write under")
    _, heading, after = rest.partition("\n## ")
    with whole_file(PAGE) as partial:
        partial.write_text(before + section() + heading.lstrip("\n") + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", action="append", choices=("close", "far", "gap"), help="only this pair of models")
    parser.add_argument("--write", action="store_true", help="compare with the study and write docs/replay.md")
    options = parser.parse_args()
    os.chdir(ROOT)
    if options.write:
        write_section()
        return
    runs = committed().runs
    missing = {name: spec for name, spec in STUDY_MODELS.items() if not (runs / "models" / name).exists()}
    make_toy_models(runs / "models", missing)
    kept = json.loads(JUDGED.read_text()) if JUDGED.exists() else {}
    for pair in options.pair or ("close", "far", "gap"):
        kept[pair] = judge(pair, short_run(pair, runs))
    JUDGED.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
