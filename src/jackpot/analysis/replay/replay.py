"""`jackpot replay`: applies every correction to saved rollouts, in one pass with a few thousand tokens in memory.

Status: supported.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from jackpot.analysis.advice.costs import costs_of_run
from jackpot.analysis.advice.rule import Costs
from jackpot.analysis.replay.formats import AUTO, find_format
from jackpot.analysis.replay.formats.base import DumpFormat, read_files
from jackpot.analysis.replay.formats.records import ReadLimits
from jackpot.analysis.replay.measured import Measured
from jackpot.analysis.replay.responses import SavedResponse, response_batches
from jackpot.analysis.replay.results import ReplayResult
from jackpot.analysis.replay.scoring import PolicyScorer
from jackpot.analysis.replay.settings import CorrectionSetting, settings_of
from jackpot.analysis.replay.stats import EndGaps
from jackpot.config.config import Config
from jackpot.core.errors import DataError, JackpotError
from jackpot.training.run_folder.checkpoint import resolve_model_path
from jackpot.training.run_folder.folder import run_config

MOST_WARNINGS = 20  # kinds of warnings that are kept as text; all are counted
MOST_CHARACTERS = 400  # of a warning, which may quote what the file has
LIMITS = ReadLimits()
_NUMBER = re.compile(r"[-+]?[0-9][0-9.,_]*(?:e[-+]?[0-9]+)?")


def replay(
    path: Path,
    name: str = AUTO,
    names: Sequence[str] = (),
    model: str | None = None,
    temperature: float | None = None,
    every: int = 1,
    listen: Callable[[int], None] = lambda _: None,
    limits: ReadLimits = LIMITS,
) -> ReplayResult:
    """Read all saved rollouts once, apply every correction to them and recommend one.

    Args:
        name: of a format, or `auto`.
        names: of corrections; empty for all.
        model: computes the policy's log-probs: a model, or a run with its best policy; None takes the saved ones.
        temperature: of the sampling, for `model`; None: the run's, or 1.
        every: one of so many responses is replayed, which suffices for a run with many tokens.
        listen: called with the number of responses read so far.
        limits: sizes beyond which a response or a file is left out.

    Raises:
        ConfigError: an unknown format or correction.
        DataError: nothing to replay, or a dump without what every correction needs.
        ModelError: a model that cannot be read.
    """
    found, files = find_format(path, name, limits)
    config = run_config(path) if found.name == "jackpot" else None
    settings = settings_of(config, names)
    if temperature is None:
        temperature = config.sampling.temperature if config else 1.0
    scored_by = resolve_model_path(model) if model else None
    scorer = PolicyScorer(scored_by, temperature) if scored_by else None

    is_mixed = config is not None and config.is_mixed and "rollout_model" in config.writers(1, config.iterations)
    reading = _Pass(found, files, scorer, settings, every, listen, limits, is_mixed)
    reading.read()
    return reading.result(path, config, _policy(config, scored_by, temperature))


class _Pass:
    """One pass over the files: what is measured of them, and warnings."""

    def __init__(
        self,
        found: DumpFormat,
        files: Sequence[Path],
        scorer: PolicyScorer | None,
        settings: Sequence[CorrectionSetting],
        every: int,
        listen: Callable[[int], None],
        limits: ReadLimits,
        is_mixed: bool,
    ) -> None:
        self._format, self._files, self._scorer, self._listen = found, files, scorer, listen
        self._limits = limits
        self._every, self._is_mixed = every, is_mixed
        self._measured = Measured(settings)
        self._ends = EndGaps()
        self._problems: dict[str, str] = {}  # the first of those that are alike but for numbers
        self._alike: Counter[str] = Counter()  # and how many there are
        self._unreadable = self._responses = self._fully_masked = self._by_policy = 0
        self._without_policy: str | None = None

    def read(self) -> None:
        """Read all files. Raises DataError where no file has a response."""
        for read in response_batches(self._responses_read()):
            part = self._scorer.score(read) if self._scorer else read
            self._ends.add(part)
            self._measured.add(part)
            self._listen(self._responses)
        if not self._responses:
            if self._without_policy:
                raise DataError(self._without_policy)
            why = "; ".join([*self._problem_texts(), *self._masked()]) or "its files are empty"
            raise DataError(f"there is no response to replay in {len(self._files)} files: {why}")

    def result(self, path: Path, config: Config | None, policy: str) -> ReplayResult:
        """Return the sums of everything read, with the advice."""
        costs, why = _costs(config)
        ends = [where for where, _ in self._ends.gaps]
        weights = f"{ends[0]} to {ends[-1]}" if len(ends) > 1 else ends[0]
        if self._scorer:
            weights = f"{weights} under {policy}"
        return ReplayResult(
            path=path,
            format=self._format.name,
            files=len(self._files),
            policy=policy,
            run=self._measured.run,
            ends=self._ends.gaps,
            corrections=self._measured.corrections,
            left_out=(*self._measured.left_out, *self._masked(), *why),
            unreadable=self._unreadable,
            problems=tuple(self._problem_texts()),
            answer=self._measured.advice(weights, costs, self._copied()),
        )

    def _responses_read(self) -> Iterator[SavedResponse]:
        """Yield the responses that have log-probs of the policy and at least one sampled token."""
        for response in islice(read_files(self._format, self._files, self._warn, self._limits), 0, None, self._every):
            if not response.sampled_mask.any():
                self._fully_masked += 1
            elif self._is_mixed and response.sampled_by == "policy":
                self._by_policy += 1
            elif not self._scorer and response.old_log_probs is None and response.log_probs is None:
                lack = f"{response.where} has no log-probs of the policy (old_log_probs)"
                self._warn(f"{lack} for response {response.uid}; left out")
                self._without_policy = self._without_policy or (
                    f"{lack}; give --model PATH, the model that was trained, and they are computed.\n{self._format.how}"
                )
            else:
                self._responses += 1
                yield response

    def _masked(self) -> Iterator[str]:
        if self._fully_masked:
            yield f"{self._fully_masked:,} responses: they have no sampled token (sampled_mask is false throughout)"
        if self._by_policy:
            yield f"{self._by_policy:,} responses: the policy sampled them itself, and the others are judged"

    def _copied(self) -> str | None:
        """Return a warning where another library saved the engine's log-probs as the policy's, else None."""
        is_ours = self._format.name == "jackpot" or self._scorer is not None
        return None if is_ours or float(self._measured.run["policy_max"].value) > 0.0 else _COPIED

    def _warn(self, problem: str) -> None:
        """Count a problem; of those that differ in numbers alone the first is kept as text."""
        self._unreadable += 1
        alike = _NUMBER.sub("0", problem[:MOST_CHARACTERS])
        if alike in self._problems or len(self._problems) < MOST_WARNINGS:
            self._problems.setdefault(alike, problem[:MOST_CHARACTERS])
            self._alike[alike] += 1

    def _problem_texts(self) -> Iterator[str]:
        for alike, first in self._problems.items():
            others = self._alike[alike] - 1
            yield f"{first} (and {others:,} more like this)" if others else first


_COPIED = (
    "the policy's log-probs are a copy of the engine's, the same to the last bit at every sampled token, as in verl's "
    "bypass mode; give --model PATH, the model that was trained, and they are computed"
)


def _policy(config: Config | None, model: str | None, temperature: float) -> str:
    if model:
        return f"{model}, read at temperature {temperature:g}"
    return "as training scored it when it saved the batch" if config else "as the file has it"


def _costs(config: Config | None) -> tuple[Costs | None, list[str]]:
    """Return the costs of the run's models, or why nothing is to be priced."""
    if config and config.rollout_model and "rollout_model" not in config.writers(1, config.iterations):
        return None, [
            "shares of the rollout model and drafts, which need rollouts of the rollout model: the policy generated "
            "all of this run, and how far the two models are apart is not in them"
        ]
    try:
        costs = costs_of_run(config) if config else None
    except JackpotError as error:
        return None, [f"shares of the rollout model and drafts, which need the costs of both models: {error}"]
    return costs, []
