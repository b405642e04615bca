"""Guards: checks that stop a run whose engine or gradients are broken, instead of letting the run train on.

They compare what engines report with what training computes, and count steps with non-finite gradients.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from jackpot.config.config import Config
from jackpot.config.sampling import Sampling
from jackpot.core.errors import EngineError, JackpotError, TrainingError
from jackpot.core.prng import fold_in
from jackpot.core.roles import Role
from jackpot.core.types import TOKEN_COLUMNS, Rollout, Version
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.sampler import discard_reason
from jackpot.training.batching import plain_batches
from jackpot.training.gap_evidence import GapEvidence
from jackpot.training.learner import Scorer, StepResult
from jackpot.training.limits import LARGEST_GAPS, precisions
from jackpot.training.reported_lists import ReportedLists, SamplingEvidence, check_ids, check_lists

THOROUGH_CHECKS = 2  # number of thorough checks after each start of a run: before and after the first weight update
CHECKED_TOKENS = 4096  # sampled tokens that a thorough check scores, in whole rollouts
QUICK_TOKENS, QUICK_ROLLOUTS = 256, 16  # most tokens and rollouts that a quick check scores
QUICK_SHARE, QUICK_FEWEST = 16, 4  # a quick check scores one rollout in QUICK_SHARE, but at least QUICK_FEWEST
# At single positions in responses (depths), a mean gap up to the largest allowed gap of all tokens divided by this
# number is always allowed.
ALWAYS_ALLOWED = 4.0
LIST_GAP_FACTOR = 3.0  # largest total variation of top-k lists, as a multiple of the largest allowed gap of tokens

# Ratios of the engine's temperature to training's that are tried as the cause of a gap
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5)

_PRECISION_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}

ScoreFn = Callable[[Sampling], Mapping[str, Tensor]]  # computes log-probs under `Sampling`, [T, 1 + K] by rollout uid
RecordEvent = Callable[[int, dict[str, Any]], None]  # is called with an iteration and an event of this iteration


class EngineCheck:
    """A check of one engine against training, which goes on through a run and stops the run where the two disagree.

    Every rollout batch is checked before it is trained on. Over all tokens, the engine's report must be consistent in
    itself: its top-k lists, and how often it draws each token (`SamplingEvidence`). Training also scores some tokens
    again: many tokens of two batches after every start of the run (of the first batch, and of the first that newer
    weights generated), and few tokens of all other batches. After the steps on the batch all tokens are compared, by
    log-probs that training computed anyway (`GapEvidence`). `guard.check_engine: false` turns these checks off.

    A batch that was begun ahead (`batch.ahead`) is scored by a copy of the weights that generated it.

    The evidence begins anew with every start of a run, since the engine is a new process, perhaps of another version.

    Args:
        learner: learner with the weights that the engine should hold.
        role: model whose rollouts are checked.
        record: called with every event: what a thorough check found, or why the run stops.
    """

    def __init__(self, config: Config, learner: Scorer, role: Role, record: RecordEvent) -> None:
        """Begin without evidence; `role` is the model whose rollouts are checked, `record` gets every event."""
        self._config = config
        self._learner = learner
        self._record = record
        self._role: Role = role
        self._column = Version._fields.index(role)  # column of this model in `Rollout.versions`
        self._thorough: set[int] = set()  # versions of weights whose rollouts were checked thoroughly
        # Evidence of all batches since the start: that tokens are not drawn as reported, and that log-probs drift away
        # from training's.
        self._evidence, self._gap_evidence = SamplingEvidence(), GapEvidence()
        # Version of the weights of which the learner keeps a copy; None: no copy.
        self._copied_version: int | None = None

    def keep_weights(self) -> None:
        """Have the learner copy its current weights, to check the rollouts that they generate ahead."""
        if self._config.guard.check_engine:
            self._learner.keep_weights(self._role)
            self._copied_version = self._learner.version[self._column]

    def check_batch(self, engine: Engine, rollouts: Sequence[Rollout], iteration: int) -> None:
        """Check the rollouts that the engine's model generated for an iteration, before they are trained on.

        Rollouts of weights that the learner neither holds nor keeps cannot be scored again and are skipped.

        Raises:
            EngineError: an id lies outside the vocabulary (checked even without `guard.check_engine`); the engine's
                log-probs are not those of the distribution that it samples from; or no rollout carries the version of
                the weights that the engine was sent.
        """
        config = self._config
        if not rollouts:
            return
        with stop_recorded(self._record, iteration):
            check_ids(rollouts, engine.capabilities.vocab_size)
            if not config.guard.check_engine:
                return

            # Choose rollouts to score again. A check after a start is thorough, with many tokens, for the first two
            # versions of the weights; all other checks take few tokens. Rollouts that other weights than those of
            # `version` generated, if only in part, are skipped.
            version = self._version_of(rollouts, iteration)
            is_thorough = version not in self._thorough and len(self._thorough) < THOROUGH_CHECKS
            seed = fold_in(config.seed, "glance", iteration)
            scored = [
                rollout
                for rollout in (first_rollouts(rollouts) if is_thorough else sample_rollouts(rollouts, seed))
                if rollout.sampled_mask.any() and bool((rollout.versions[:, self._column] == version).all())
            ]

            # Check the report in itself, then against training's log-probs, then by the frequencies of drawn tokens.
            lists = ReportedLists.of(rollouts)
            check_lists(lists)
            if scored:
                score = self._score(scored, from_copy=version != self._learner.version[self._column])
                gaps = check_gap(scored, config.sampling, self._precisions(engine), score)
            evidence = self._evidence.add(lists, rollouts)

        if version is not None and is_thorough and scored:
            self._thorough.add(version)
            # Report a thorough check.
            event = {
                "event": "engine_check",
                "model": self._role,
                "tokens": _sampled_tokens(scored),
                "sampling_evidence": evidence,
            }
            self._record(iteration, event | gaps)

    def check_gaps(
        self, engine: Engine, rollouts: Sequence[Rollout], gaps: Mapping[str, Tensor], iteration: int
    ) -> None:
        """Check every token that the engine's model generated for an iteration, after the steps and before saving.

        Nothing is checked where top-p or top-k truncates the engine's distribution and the top-k lists do not name all
        tokens that are left, because then training's log-probs are those of another distribution.

        Args:
            gaps: `TrainResult.engine_gaps`.

        Raises:
            EngineError: the engine's log-probs are further from training's than earlier in this run.
        """
        config = self._config
        trained = [rollout for rollout in rollouts if rollout.uid in gaps]
        is_comparable = config.sampling.lists_support or not config.sampling.truncated
        if trained and config.guard.check_engine and is_comparable:
            with stop_recorded(self._record, iteration):
                # `allowed` is the largest mean gap over all depths of responses that the precisions explain. At single
                # depths smaller gaps may count as evidence too, but none up to `always`.
                allowed = max(LARGEST_GAPS[precision] for precision in self._precisions(engine))
                always = allowed / ALWAYS_ALLOWED
                self._gap_evidence.add(trained, [gaps[rollout.uid] for rollout in trained], always)

    def gap(self, engine: Engine, rollouts: Sequence[Rollout], iteration: int) -> float:
        """Return the mean |p_engine - p_training| over a few rollouts of an evaluation; NaN if none can be used.

        Only a few, because scoring all rollouts would take as long as generating them.

        Raises:
            EngineError: an id lies outside the vocabulary, or the gap is more than rounding and `guard.check_engine`
                is on; an event of `iteration` reports the error.
        """
        config = self._config
        usable = [rollout for rollout in rollouts if rollout.sampled_mask.any() and not discard_reason(rollout)]
        scored = sample_rollouts(usable, fold_in(config.seed, "gap", iteration))
        if not scored:
            return math.nan

        with stop_recorded(self._record, iteration):
            check_ids(scored, engine.capabilities.vocab_size)
            score = self._score(scored)
            if not config.guard.check_engine:  # the gap is measured and not judged
                return engine_gap(scored, score(config.evaluation_sampling))

            check_lists(ReportedLists.of(scored))
            return check_gap(scored, config.evaluation_sampling, self._precisions(engine), score)["mean_gap"]

    def _version_of(self, rollouts: Sequence[Rollout], iteration: int) -> int | None:
        """Return the version of the weights that generated a batch, if the learner holds or keeps these weights.

        The learner's current weights come first, if several have generated parts. None: no token carries a version.

        Raises:
            EngineError: no rollout was generated by weights that the learner holds or keeps.
        """
        versions = torch.cat([rollout.versions[:, self._column] for rollout in rollouts]).unique().tolist()
        # The versions of the learner's current weights and of its copy, if it keeps one (`keep_weights`).
        learner_versions = [self._learner.version[self._column], self._copied_version]
        if not versions:
            return None
        for version in learner_versions:
            if version in versions:
                return version

        carried = f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else f"{versions[0]}"
        sent = " or ".join(str(version) for version in dict.fromkeys(learner_versions) if version is not None)
        raise EngineError(
            f"none of the {len(rollouts)} rollouts of iteration {iteration} carries the version of the weights "
            f"that the engine was sent: {sent} optimizer steps of the model that generates; they carry {carried}. "
            f"Have the engine put the version of its last update_weights on every token"
        )

    def _score(self, rollouts: Sequence[Rollout], from_copy: bool = False) -> ScoreFn:
        """Return a function that computes training's log-probs of the rollouts, as `Learner.score` does.

        With `from_copy` it computes them with the copy of the weights that the learner keeps.
        """
        config, pads = self._config, self._learner.pads
        batches = plain_batches(rollouts, config.batch.micro_batch_tokens, config.seed, pads)
        return lambda sampling: self._learner.score(self._role, batches, sampling, from_copy)

    def _precisions(self, engine: Engine) -> list[str]:
        """Return the precisions of engine and training, keys of `LARGEST_GAPS`.

        A quantized engine whose number formats training shares counts as unquantized.
        """
        capabilities, config = engine.capabilities, self._config
        engine_dtype = _PRECISION_NAMES[capabilities.dtype]
        # If both sides compute in the same number formats, they differ by the rounding of the dtype alone.
        are_equal = (capabilities.number_formats, engine_dtype) == (config.number_formats, config.compute_dtype)
        if are_equal and config.number_formats is not None:
            return precisions(engine_dtype, engine_dtype, capabilities.device, config.sampling)

        of_engine = "quantized" if capabilities.quantized else engine_dtype
        of_training = "quantized" if config.number_formats else config.precision
        return precisions(of_engine, of_training, capabilities.device, config.sampling)


class NonFiniteGuard:
    """A counter of consecutive optimizer steps with a non-finite gradient, which stops a run at a limit.

    Args:
        limit: `guard.max_non_finite_steps`.
        record: called with the event that says why the run stops.
        count: number of consecutive bad steps up to the checkpoint from which the run continues.
    """

    def __init__(self, limit: int, record: RecordEvent, count: int = 0) -> None:
        """Begin with `count` consecutive bad steps; the run stops at `limit`, and `record` gets the event."""
        self._limit = limit
        self._record = record
        self.count = count

    def check(self, results: Sequence[StepResult], iteration: int) -> None:
        """Update `count`, the number of consecutive bad steps up to now, by the optimizer steps of an iteration.

        Raises:
            TrainingError: the limit is reached. No bad step has changed the weights.
        """
        for result in results:
            is_bad = bool(result.metrics["health/non_finite_steps"].value)
            self.count = self.count + 1 if is_bad else 0
            if self.count >= self._limit:
                with stop_recorded(self._record, iteration):
                    raise TrainingError(
                        f"the last {self.count} optimizer steps, up to iteration {iteration}, had a non-finite loss or "
                        f"gradient. All were skipped, so the weights and every checkpoint are those of before. Look at "
                        f"policy/grad_norm and mismatch/ratio_max before them; lower the learning rate or "
                        f"max_grad_norm, or cap the weights. guard.max_non_finite_steps is {self._limit}"
                    )


@contextmanager
def stop_recorded(record: RecordEvent, iteration: int, kind: type[JackpotError] = JackpotError) -> Iterator[None]:
    """Record an error of class `kind` from the `with` block as an event of `iteration`, and let it stop the run."""
    try:
        yield
    except kind as error:
        record(iteration, {"event": "stopped", "why": str(error)})
        raise


def check_gap(
    rollouts: Sequence[Rollout], sampling: Sampling, precisions: Sequence[str], score: ScoreFn
) -> dict[str, float]:
    """Check that training agrees with the log-probs that an engine reports, of sampled tokens and of top-k lists.

    Training scores the engine's tokens with equal weights, after temperature, top-p and top-k, so that all differences
    must be rounding. A few tokens suffice to catch a broken weight update, after which an engine still has some or all
    of its old weights.

    Args:
        rollouts: generated by the weights that training holds now, with a sampled token in each.
        precisions: precisions of engine and training, keys of `LARGEST_GAPS`; the largest of their gaps is allowed.
        score: computes training's log-probs of these rollouts, as `Learner.score` does.

    Returns:
        `mean_gap`, of the sampled tokens' probabilities (`engine_gap`); `list_gap`, the mean total variation between
        engine and training on the top-k lists (`list_gap`); and `allowed`, the limit of `mean_gap`.

    Raises:
        EngineError: a gap is larger than the precisions explain; names a distribution that the reported numbers do
            agree with, if one is found.
    """
    scores = score(sampling)
    gap, gap_of_lists = engine_gap(rollouts, scores), list_gap(rollouts, scores)

    allowed = max(LARGEST_GAPS[precision] for precision in precisions)
    tokens = _sampled_tokens(rollouts)
    formats = " and ".join(dict.fromkeys(precisions))

    if not gap <= allowed:
        raise EngineError(
            f"the engine's log-probs are not those of the distribution it was asked to sample from: over "
            f"{tokens} tokens they differ from training's by {gap:.2g} in probability on average; at most "
            f"{allowed:g} is allowed in {formats}. {_suspicion(rollouts, sampling, score, allowed)}"
        )

    if not gap_of_lists <= LIST_GAP_FACTOR * allowed:
        raise EngineError(
            f"the engine's top-k lists are not those of the distribution it samples from: over {tokens} tokens they "
            f"differ from training's at the same ids by {gap_of_lists:.2g} in total variation on average, and the "
            f"sampled tokens by {gap:.2g}; at most {LIST_GAP_FACTOR * allowed:g} is allowed in {formats}. Z is made of "
            f"them. Likely causes: lists of another position or another request; a filter such as top_k that one side "
            f"does not apply"
        )
    return {"mean_gap": gap, "list_gap": gap_of_lists, "allowed": allowed}


def engine_gap(rollouts: Sequence[Rollout], scores: Mapping[str, Tensor]) -> float:
    """Return the mean |p_engine - p_training| over the sampled tokens of rollouts; NaN without rollouts.

    Args:
        scores: training's log-probs by rollout uid, [T, 1 + K]: of each token, then of the K ids in its top-k list.
    """
    gaps = [_differences(rollout, rollout.rollout_log_probs, scores[rollout.uid][:, 0]) for rollout in rollouts]
    return float(torch.cat(gaps).mean()) if gaps else math.nan


def list_gap(rollouts: Sequence[Rollout], scores: Mapping[str, Tensor]) -> float:
    """Return the mean total variation between the engine's top-k lists and training's probabilities of the listed ids.

    It is 0 for empty lists, and NaN without rollouts. Arguments are as in `engine_gap`.
    """
    # The total variation at a token is half the sum of the differences in its list.
    gaps = [_differences(rollout, rollout.top_log_probs, scores[rollout.uid][:, 1:]) for rollout in rollouts]
    return float(torch.cat(gaps).sum(-1).mean() / 2.0) if gaps else math.nan


def _differences(rollout: Rollout, reported: Tensor, scored: Tensor) -> Tensor:
    """Return |p_engine - p_training| at the sampled tokens of a rollout.

    Args:
        reported, scored: log-probs of engine and training, of equal shapes [T, ...].
    """
    return (scored.double().exp() - reported.double().exp())[rollout.sampled_mask].abs()


def _sampled_tokens(rollouts: Sequence[Rollout]) -> int:
    """Count the tokens of rollouts that the model sampled."""
    return sum(int(rollout.sampled_mask.sum()) for rollout in rollouts)


def first_rollouts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the first rollouts of a batch, as many as it takes to have CHECKED_TOKENS sampled tokens."""
    # For each rollout, the number of sampled tokens before it; that of all rollouts comes last and is not used.
    tokens_before = accumulate((int(rollout.sampled_mask.sum()) for rollout in rollouts), initial=0)
    return [rollout for rollout, tokens in zip(rollouts, tokens_before, strict=False) if tokens < CHECKED_TOKENS]


def sample_rollouts(rollouts: Sequence[Rollout], seed: int) -> list[Rollout]:
    """Cut a batch into up to QUICK_ROLLOUTS equal parts; return a rollout of each part, cut to its first tokens.

    The seed chooses the rollout of each part, because at equal distances all could come from one of several servers
    that take turns. A small batch gives fewer rollouts, since each is read with its prompt: scoring 16 of 64 short
    rollouts took as long as scoring a quarter of the batch.
    """
    # A part of the batch, but at least QUICK_FEWEST and at most QUICK_ROLLOUTS of the rollouts that there are.
    count = min(QUICK_ROLLOUTS, max(QUICK_FEWEST, len(rollouts) // QUICK_SHARE), len(rollouts))
    edges = [len(rollouts) * share // count for share in range(count + 1)] if count else []
    indices = [start + fold_in(seed, start) % (end - start) for start, end in pairwise(edges)]
    return [_beginning(rollouts[index], QUICK_TOKENS // count) for index in indices]


def _beginning(rollout: Rollout, length: int) -> Rollout:
    """Return a rollout with its first `length` response tokens alone."""
    return replace(rollout, **{name: getattr(rollout, name)[:length] for name in TOKEN_COLUMNS})


def _suspicion(rollouts: Sequence[Rollout], sampling: Sampling, score: ScoreFn, allowed: float) -> str:
    """Guess, as a sentence, which distribution an engine's wrong log-probs belong to, or else name likely causes."""
    plain = {"top_p": 1.0, "top_k": 0}  # settings of sampling without filters
    suspects = {
        "of the model before temperature, top_p and top_k": plain | {"temperature": 1.0},
        "of the model before top_p and top_k": plain,
        "of the model before the temperature": {"temperature": 1.0},
    }
    suspects |= {
        f"of temperature {factor * sampling.temperature:g}": {"temperature": factor * sampling.temperature}
        for factor in TEMPERATURES
    }

    for description, changes in suspects.items():
        suspect = sampling.model_copy(update=changes)
        if suspect != sampling and engine_gap(rollouts, score(suspect)) <= allowed:
            return f"They are the log-probs {description}; have the engine return processed log-probs"

    reported = torch.cat([rollout.rollout_log_probs[rollout.sampled_mask] for rollout in rollouts])
    if torch.equal(reported, reported.bfloat16().float()):
        return "They are rounded to bf16; have the engine report them in fp32"

    # Compare each token's reported probability with training's of the token before it, and of the token after it.
    scores = score(sampling)  # [T, 1 + K] by rollout uid; column 0 has the log-probs of the tokens
    without_first, without_last = slice(1, None), slice(None, -1)
    for engine_tokens, training_tokens in ((without_first, without_last), (without_last, without_first)):
        differences = [
            rollout.rollout_log_probs[engine_tokens].exp() - scores[rollout.uid][training_tokens, 0].exp()
            for rollout in rollouts
        ]
        if float(torch.cat(differences).abs().mean()) <= allowed:
            return "They are off by one: those of the token next to it; shift them where the rollouts are made"

    # A log-prob above 0, rounding aside, would be a probability above 1.
    largest = max(float(rollout.rollout_log_probs[rollout.sampled_mask].max()) for rollout in rollouts)
    hint = "they are no distribution over tokens" if largest > 1e-3 else "other weights, or another tokenizer"
    return f"Likely causes: {hint}; a temperature or filter that one side does not apply; a broken weight update"
