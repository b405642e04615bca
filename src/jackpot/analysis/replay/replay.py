"""The command `jackpot replay`, which applies every correction to saved rollouts in one pass over the files.

Status: supported.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from jackpot.analysis.advice.rule import Costs
from jackpot.analysis.plan.sizes import outline
from jackpot.analysis.replay.formats import AUTO, find_format
from jackpot.analysis.replay.formats import jackpot as ours
from jackpot.analysis.replay.formats.base import DumpFormat, read_files
from jackpot.analysis.replay.formats.columns import OURS
from jackpot.analysis.replay.mixups import ColumnPairs
from jackpot.analysis.replay.replay_sums import ReplaySums
from jackpot.analysis.replay.responses import SavedResponse, response_batches
from jackpot.analysis.replay.results import ReplayResult
from jackpot.analysis.replay.scoring import PolicyScorer
from jackpot.analysis.replay.settings import settings_of
from jackpot.analysis.replay.stats import EndGaps
from jackpot.config.config import Config
from jackpot.core.errors import DataError, JackpotError
from jackpot.training.run_folder.checkpoint import resolve_model_path

MOST_WARNINGS = 20  # kinds of warnings that are shown; warnings of other kinds are only counted
MOST_CHARACTERS = 400  # characters after which a warning is cut, since a warning may quote the file
_FULLY_MASKED = "they have no sampled token (sampled_mask is false throughout)"
_BY_POLICY = "the policy sampled them itself, and the others are judged"
_DIGITS = re.compile(r"[-+]?[0-9][0-9.,_]*(?:e[-+]?[0-9]+)?")


def replay(
    path: Path,
    name: str = AUTO,
    names: Sequence[str] = (),
    model: str | None = None,
    temperature: float | None = None,
    every: int = 1,
    listen: Callable[[int], None] = lambda _: None,
) -> ReplayResult:
    """Read all saved rollouts once, apply every correction to them and recommend one.

    Args:
        path: a run folder, or a file or folder of saved rollouts.
        name: name of the files' format, or `auto`, which finds the format.
        names: names of the corrections to apply; empty: all.
        model: path of the model that scores the responses, or of a run folder, whose best policy scores them; None: the
            policy's saved log-probs are used.
        temperature: sampling temperature at which `model` scores; None: that of the run, or 1.
        every: only one of `every` responses is replayed, which suffices for a run with many tokens.
        listen: function that is called with the number of responses read so far.

    Raises:
        ConfigError: an unknown format or correction.
        DataError: nothing to replay, or a dump without what every correction needs.
        ModelError: a model that cannot be read.
    """
    dump, files = find_format(path, name)
    config = ours.config_of(path) if dump.name == "jackpot" else None
    # `EndGaps` collects the total variation between rollout model and policy in the first and in the last file.
    sums, end_gaps = ReplaySums(settings_of(config, names)), EndGaps()

    if temperature is None:
        temperature = config.sampling.temperature if config else 1.0
    scorer = PolicyScorer(resolve_model_path(model), temperature) if model else None
    reading = _Reading(dump, files, config, needs_policy=scorer is None)
    pairs = _column_pairs(dump, config, scorer)  # finds mix-ups between the engine's and the policy's log-probs

    for responses in response_batches(reading.responses(every)):
        batch = scorer.score(responses) if scorer else responses
        end_gaps.add(batch)
        pairs.add(batch)
        sums.add(batch)
        listen(reading.read)
    reading.check()

    # Texts for the report: where the policy's log-probs come from, and the first and the last file that were read.
    policy = "as training scored it when it saved the batch" if config else "as the file has it"
    weights = " to ".join(dict.fromkeys(where for where, _ in end_gaps.gaps))
    if scorer:
        policy = f"{scorer.path}, read at temperature {scorer.temperature:g}"
        weights += f" under {policy}"

    costs, no_cost_advice = _costs(config)
    # A dump in which engine and policy differ at no token has one column of log-probs, written twice.
    is_copied = not (config or scorer) and float(sums.run["policy_max"].value) == 0.0
    return ReplayResult(
        path=path,
        format=dump.name,
        files=len(files),
        policy=policy,
        run=sums.run,
        ends=end_gaps.gaps,
        corrections=sums.corrections,
        left_out=(*sums.left_out, *reading.left_out, *no_cost_advice),
        unreadable=reading.unreadable,
        problems=reading.problems,
        answer=sums.advice(weights, costs, problem=_COPIED if is_copied else pairs.mixup, rounding=pairs.rounding),
    )


def _column_pairs(dump: DumpFormat, config: Config | None, scorer: PolicyScorer | None) -> ColumnPairs:
    """Return an empty `ColumnPairs` with the names of the engine's and of the policy's column of log-probs."""
    columns = dump.columns or OURS
    policy = "what --model gives" if scorer else columns.old_log_probs or columns.log_probs
    return ColumnPairs(columns.rollout_log_probs, policy, one_model=not (config and config.rollout_model))


class _Reading:
    """A reader of the saved responses in all files, which counts the responses that it leaves out.

    Args:
        dump: format of the files.
        files: all files, in their order.
        config: settings of the run; None for another library's dump.
        needs_policy: whether a response without log-probs of the policy is left out.
    """

    def __init__(self, dump: DumpFormat, files: Sequence[Path], config: Config | None, needs_policy: bool) -> None:
        """Set all counts to 0; nothing is read before `responses`."""
        self._dump, self._files, self._needs_policy = dump, files, needs_policy
        # Of a run in which both models generate, only the rollout model's responses are replayed. `writers` has the
        # roles of the models that generated rollouts.
        writers = config.writers(1, config.iterations) if config else ()
        self._is_mixed = config is not None and config.is_mixed and "rollout_model" in writers
        self.read = 0  # number of responses that can be replayed
        self.unreadable = 0  # number of reading problems of all kinds
        # For each kind of problem, by its text with 0 in place of every number: the first one's text, and their number.
        self._kinds: dict[str, tuple[str, int]] = {}
        self._left_out = {_FULLY_MASKED: 0, _BY_POLICY: 0}  # number of responses by the reason why they are left out
        self._without_policy: str | None = None  # what to do about the first response without log-probs of the policy

    def responses(self, every: int) -> Iterator[SavedResponse]:
        """Yield those responses that can be replayed, of the first one and each `every`-th one after it.

        Left out, and counted, are responses without a sampled token and, where both models generated, the policy's.
        Responses that lack the policy's log-probs where these are needed are left out with a warning.
        """
        for response in islice(read_files(self._dump, self._files, self._warn), 0, None, every):
            if not response.sampled_mask.any():
                self._left_out[_FULLY_MASKED] += 1
            elif self._is_mixed and response.sampled_by == "policy":
                self._left_out[_BY_POLICY] += 1
            elif self._needs_policy and response.log_probs is None:
                lack = f"{response.where} has no log-probs of the policy (old_log_probs)"
                self._warn(f"{lack} for response {response.uid}; left out")
                # `check` raises an error with this text about the first such response, if none can be replayed.
                self._without_policy = self._without_policy or (
                    f"{lack}; give --model PATH, the model that was trained, and they are computed.\n{self._dump.how}"
                )
            else:
                self.read += 1
                yield response

    def check(self) -> None:
        """Raise DataError if the files held no response that can be replayed."""
        if self.read:
            return
        why = "; ".join((*self.problems, *self.left_out)) or "its files are empty"
        raise DataError(self._without_policy or f"there is no response to replay in {len(self._files)} files: {why}")

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return a sentence for each reason to leave out responses, with the number of responses left out for it."""
        return tuple(f"{count:,} responses: {why}" for why, count in self._left_out.items() if count)

    @property
    def problems(self) -> tuple[str, ...]:
        """Return the first reading problem of each kind as text, with the number of further problems of that kind."""
        return tuple(
            first + (f" (and {count - 1:,} more like this)" if count > 1 else "")
            for first, count in self._kinds.values()
        )

    def _warn(self, problem: str) -> None:
        """Count a reading problem, and keep its text if no earlier text is the same up to the numbers in it."""
        self.unreadable += 1
        text = problem[:MOST_CHARACTERS]
        kind = _DIGITS.sub("0", text)
        if kind in self._kinds or len(self._kinds) < MOST_WARNINGS:
            first, count = self._kinds.get(kind, (text, 0))
            self._kinds[kind] = first, count + 1


_COPIED = (
    "the policy's log-probs are a copy of the engine's, the same to the last bit at every sampled token, as in verl's "
    "bypass mode; give --model PATH, the model that was trained, and they are computed"
)


def _costs(config: Config | None) -> tuple[Costs | None, list[str]]:
    """Return the rollout model's costs relative to the policy's, and sentences on advice that is left out.

    Without a run's settings or a rollout model this is (None, []); where costs cannot be used, None and one sentence.
    """
    if config is None or config.rollout_model is None:
        return None, []
    if "rollout_model" not in config.writers(1, config.iterations):
        return None, [
            "shares of the rollout model and drafts, which need rollouts of the rollout model: the policy generated "
            "all of this run, and how far the two models are apart is not in them"
        ]
    try:
        return Costs.of(outline(config.policy.path), outline(config.rollout_model.path)), []
    except JackpotError as error:
        return None, [f"shares of the rollout model and drafts, which need the costs of both models: {error}"]
