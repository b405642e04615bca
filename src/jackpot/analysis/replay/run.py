"""`jackpot replay`: applies every correction to saved rollouts, in one pass with a few thousand tokens in memory."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch

from jackpot.analysis.replay.distributions import SavedDistributions, StateDistributions, saved_distributions, z_of
from jackpot.analysis.replay.factors import GradientFactors, factors, inputs_of, needs_z
from jackpot.analysis.replay.formats import AUTO, find_format
from jackpot.analysis.replay.formats.base import DumpFormat, ReadLimits, read_files
from jackpot.analysis.replay.gradient import StateSums, state_sums
from jackpot.analysis.replay.recommend import recommend
from jackpot.analysis.replay.rejected import TopRejected
from jackpot.analysis.replay.responses import ResponseBatch, SavedResponse, collate, response_batches
from jackpot.analysis.replay.results import ReplayedCorrection, ReplayResult
from jackpot.analysis.replay.scoring import PolicyScorer
from jackpot.analysis.replay.settings import CorrectionSetting, settings_of
from jackpot.analysis.replay.stats import CorrectionStats, EndGaps, bands_of, correction_sums, run_sums
from jackpot.config.run import Config
from jackpot.core.errors import DataError
from jackpot.core.metrics import Sums, add_sums
from jackpot.objectives.obrs import known_z
from jackpot.training.run.folder import run_config
from jackpot.training.run.models import resolve_model_path

MOST_WARNINGS = 20  # kinds of warnings that are kept as text; all are counted
MOST_CHARACTERS = 400  # of a warning, which may quote what the file has
LIMITS = ReadLimits()
_NUMBER = re.compile(r"[-+]?[0-9][0-9.,_]*(?:e[-+]?[0-9]+)?")
SPLIT_HALVES = 2  # parts of the responses on which the recommendation is checked


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
    own = config.sampling.temperature if config else 1.0
    place = resolve_model_path(model) if model else None
    scorer = PolicyScorer(place, own if temperature is None else temperature) if place else None
    reading = _Pass(found, files, scorer, settings, every, listen, limits)
    reading.read()
    return reading.result(path, _policy(config, place, own if temperature is None else temperature))


class _Pass:
    """One pass over the files: sums of the run and of every correction, and warnings."""

    def __init__(
        self,
        found: DumpFormat,
        files: Sequence[Path],
        scorer: PolicyScorer | None,
        settings: Sequence[CorrectionSetting],
        every: int,
        listen: Callable[[int], None],
        limits: ReadLimits,
    ) -> None:
        self._format, self._files, self._scorer, self._listen = found, files, scorer, listen
        self._limits = limits
        self._settings, self._every = settings, every
        self._whole = [CorrectionStats() for _ in settings]
        self._halves = [[CorrectionStats() for _ in range(SPLIT_HALVES)] for _ in settings]
        self._changed = [TopRejected() for _ in settings]
        self._run: Sums = {}
        self._ends = EndGaps()
        self._run_halves: list[Sums] = [{} for _ in range(SPLIT_HALVES)]
        self._left_out: dict[str, dict[str, None]] = {}  # reason -> what is left out for it
        self._problems: dict[str, str] = {}  # the first of those that are alike but for numbers
        self._alike: Counter[str] = Counter()  # and how many there are
        self._unreadable = self._responses = self._fully_masked = self._dealt = 0
        self._without_policy: str | None = None

    def read(self) -> None:
        """Read all files. Raises DataError where no file has a response."""
        for read in response_batches(self._responses_read()):
            part = self._scorer.score(read) if self._scorer else read
            self._ends.add(part)
            for half, responses in enumerate(self._halved(part)):
                for alike in _by_lists(responses):
                    self._add(collate(alike), half)
            self._listen(self._responses)
        if not self._responses:
            if self._without_policy:
                raise DataError(self._without_policy)
            why = "; ".join([*self._problem_texts(), *self._masked()]) or "its files are empty"
            raise DataError(f"there is no response to replay in {len(self._files)} files: {why}")

    def result(self, path: Path, policy: str) -> ReplayResult:
        """Return the sums of everything read, with the recommendation."""
        corrections = tuple(
            ReplayedCorrection(setting=setting, whole=whole, halves=tuple(halves), changed=changed)
            for setting, whole, halves, changed in zip(
                self._settings, self._whole, self._halves, self._changed, strict=True
            )
            if whole.sums
        )
        return ReplayResult(
            path=path,
            format=self._format.name,
            files=len(self._files),
            policy=policy,
            run=self._run,
            run_halves=tuple(self._run_halves),
            ends=self._ends.gaps,
            corrections=corrections,
            left_out=(*self._left_out_texts(), *self._partly(), *self._masked()),
            unreadable=self._unreadable,
            problems=tuple(self._problem_texts()),
            answer=recommend(
                self._run,
                self._run_halves,
                [(one.setting, one.whole, one.halves) for one in corrections],
                self._copied(),
            ),
        )

    def _responses_read(self) -> Iterator[SavedResponse]:
        """Yield the responses that have log-probs of the policy and at least one sampled token."""
        for response in islice(read_files(self._format, self._files, self._warn, self._limits), 0, None, self._every):
            if not response.sampled_mask.any():
                self._fully_masked += 1
            elif not self._scorer and response.old_log_probs is None and response.log_probs is None:
                lack = f"{response.where} has no log-probs of the policy (old_log_probs)"
                self._warn(f"{lack} for response {response.uid}; left out")
                self._without_policy = self._without_policy or (
                    f"{lack}; give --model PATH, the model that was trained, and they are computed.\n{self._format.how}"
                )
            else:
                self._responses += 1
                yield response

    def _halved(self, part: Sequence[SavedResponse]) -> list[list[SavedResponse]]:
        """Deal the responses to the halves in turn, over batches too."""
        halves: list[list[SavedResponse]] = [[] for _ in range(SPLIT_HALVES)]
        for response in part:
            halves[self._dealt % SPLIT_HALVES].append(response)
            self._dealt += 1
        return halves

    def _masked(self) -> Iterator[str]:
        if self._fully_masked:
            yield f"{self._fully_masked:,} responses: they have no sampled token (sampled_mask is false throughout)"

    def _copied(self) -> str | None:
        """Return a warning where another library saved the engine's log-probs as the policy's, else None."""
        is_ours = self._format.name == "jackpot" or self._scorer is not None
        return None if is_ours or float(self._run["policy_max"].value) > 0.0 else _COPIED

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

    def _leave_out(self, what: str, why: str) -> None:
        self._left_out.setdefault(why, {})[what] = None

    def _left_out_texts(self) -> Iterator[str]:
        for why, names in self._left_out.items():
            yield f"{', '.join(names)}: {why}"

    def _partly(self) -> Iterator[str]:
        """Name the corrections that could be replayed on some tokens only; they are no candidates for the rule."""
        every = int(self._run["total_variation"].count)
        names: dict[int, list[str]] = {}
        for setting, whole in zip(self._settings, self._whole, strict=True):
            if 0 < whole.tokens < every:
                names.setdefault(whole.tokens, []).append(setting.label)
        for tokens, some in names.items():
            yield f"{', '.join(some)}: replayed on only {tokens:,} of {every:,} tokens, so the rule leaves them out"

    def _add(self, batch: ResponseBatch, half: int) -> None:
        if any(one.advantages is None for one in batch.responses):
            self._leave_out("the sign of the advantages", _NO_ADVANTAGES)
        lists = saved_distributions(batch)
        states = lists.known if lists else None
        sums = run_sums(batch, states)
        self._run = add_sums(self._run, sums)
        self._run_halves[half] = add_sums(self._run_halves[half], sums)
        bands, ratio = bands_of(batch, states), torch.where(batch.mask, batch.new - batch.rollout, 0.0).exp()
        for number, setting in enumerate(self._settings):
            correction_result = self._measured(setting, batch, lists)
            if correction_result is None:
                continue
            found, of_states = correction_result
            sampled_only = batch.mask & ~states.at if states and of_states else batch.mask
            sums = correction_sums(found, found.scale * ratio, batch.mask, sampled_only, bands)
            self._whole[number].add(sums, of_states)
            self._halves[number][half].add(sums, of_states)
            self._changed[number].add(batch, found, ratio)

    def _measured(
        self, setting: CorrectionSetting, batch: ResponseBatch, lists: SavedDistributions | None
    ) -> tuple[GradientFactors, StateSums | None] | None:
        """Compute the factors on the sampled tokens, and the sums over whole distributions where those are known."""
        objective = setting.objective
        z = z_of(lists, batch, objective.correction.lam, objective.target)
        if z is None and needs_z(setting):
            self._leave_out(setting.label, _NO_LISTS if lists is None else _NO_OLD)
            return None
        if z is None:
            z = known_z(torch.ones_like(batch.rollout))
        inputs = inputs_of(setting, batch.rollout, batch.old, batch.new, batch.mask, z)
        totals = objective.correction.measure(inputs)
        found = factors(setting, inputs, batch.new, batch.advantages, totals)
        states, of_states = lists.known if lists else None, None
        if states and not setting.weighs_whole_responses and (states.old is not None or not _reads_old(setting)):
            of_states = state_sums(_of_states(setting, states, totals), states)
        return found, of_states


def _reads_old(setting: CorrectionSetting) -> bool:
    return "old" in (setting.objective.target, setting.objective.proximal)


def _of_states(setting: CorrectionSetting, states: StateDistributions, totals: Sums) -> GradientFactors:
    """Compute the factors of every token of every state, [N, M]."""
    objective = setting.objective
    z = states.z(objective.correction.lam, objective.target)
    value = (torch.ones_like(states.new[:, 0]) if z is None else z).unsqueeze(-1).expand_as(states.new)
    old = states.new if states.old is None else states.old
    everywhere = torch.ones_like(states.new, dtype=torch.bool)
    inputs = inputs_of(setting, states.rollout, old, states.new, everywhere, known_z(value))
    return factors(setting, inputs, states.new, None, totals)


def _by_lists(responses: Sequence[SavedResponse]) -> list[list[SavedResponse]]:
    """Separate responses with top-k lists of both models from those without, as a batch needs the lists of all."""
    parts = ([one for one in responses if one.has_lists == have] for have in (True, False))
    return [part for part in parts if part]


_COPIED = (
    "the policy's log-probs are a copy of the engine's, the same to the last bit at every sampled token, as in verl's "
    "bypass mode; give --model PATH, the model that was trained, and they are computed"
)
_NO_LISTS = (
    "Z is needed, and there are no top-k lists of both models (log rollout_top_ids, rollout_top_log_probs, "
    "policy_top_ids, policy_top_log_probs)"
)
_NO_OLD = "Z of the old policy is needed, and the top-k lists are those of the policy that is updated"
_NO_ADVANTAGES = (
    "there are no advantages, so each counts as +1, and PPO's clip, dppo, f_tis and prefix reject what they reject of "
    "positive ones"
)


def _policy(config: Config | None, model: str | None, temperature: float) -> str:
    if model:
        return f"{model}, read at temperature {temperature:g}"
    return "as training scored it when it saved the batch" if config else "as the file has it"
