"""The command `jackpot simulate`, which compares candidate rollout models with a policy, before any training.

Each candidate answers prompts, and both models score the candidate's tokens.

Status: supported.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jackpot.analysis.advice.rule import Costs
from jackpot.analysis.replay.replay_sums import ReplaySums
from jackpot.analysis.replay.responses import SavedResponse, response_of
from jackpot.analysis.replay.settings import settings_of
from jackpot.analysis.simulate.distributions import RECIPE_LAM, StateNumbers, StatePairs, concatenate, measure_states
from jackpot.config.config import Config
from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.errors import ConfigError
from jackpot.core.types import Prompt, Rollout, Version
from jackpot.launch.build import run_task
from jackpot.launch.engines import make_engine
from jackpot.models.device import pick_device
from jackpot.models.forward import cut_head
from jackpot.models.load import head_rows, load_model, load_tokenizers
from jackpot.models.packing import FORWARD_TOKENS, pack, rollout_lengths
from jackpot.models.scoring import exact_log_probs, forward_rollouts
from jackpot.objectives.metrics import mismatch
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.evaluate import Evaluation, evaluate
from jackpot.rollout.tasks.base import PromptStream, Split, Task

MOST_STATES = 4_096  # sampled tokens at which whole distributions are compared
PROMPTS = 256  # held-out prompts that each rollout model answers by default
LOW_ACCEPTANCE = 0.5  # acceptance Z of OBRS below which the models are far apart in a state


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A rollout model measured beside the policy, before training. Means are over response tokens unless noted."""

    name: str  # path of the rollout model
    parameters: int  # number of parameters of the rollout model
    policy_parameters: int
    responses: int  # number of responses
    states: int  # tokens whose whole distributions were compared
    accuracy: float | None  # share of the rollout model's responses that are right; None where the task has no verdict
    policy_accuracy: float | None  # share of the policy's responses that are right
    reward: float  # mean reward of the rollout model's responses
    policy_reward: float
    kl_policy_rollout: float  # KL(policy || rollout model), nats a token
    kl_rollout_policy: float  # KL(rollout model || policy), nats a token
    kl_after: float  # KL(policy || accepted tokens) at lam = 1
    acceptance: float  # mean acceptance Z of OBRS at lam = 1
    acceptance_spread: float  # standard deviation of Z over states; if 0, OBRS weights as TIS up to a common factor
    low_acceptance: float  # share of states with Z below 0.5
    tis_cut: float  # share of the policy's probability that TIS's cap takes away
    obrs_cut: float  # share that OBRS's cap takes away of its expected weight, which would be Z without the cap
    tis_ess: float  # effective share of tokens under the weights of TIS
    obrs_ess: float  # effective share of tokens under OBRS with a sampled mask
    expected_ess: float  # effective share of tokens under OBRS with an expected mask
    agreement: float  # cosine between the weights of TIS and those of OBRS in expectation, over tokens
    sequence_log_ratio: float  # mean over responses of log p_policy / p_rollout of the whole response
    sequence_ess: float  # effective share of the responses, weighted by that ratio
    answer: dict[str, Any]  # which correction to use, and why, as plain values (`Recommendation.numbers`)


class PairBench:
    """A bench that measures a policy and candidate rollout models on the same task, tokenizer and prompts.

    All distributions are over the rows of the shortest output layer (`head_rows`), as in a run.

    Args:
        config: settings of a run, for task and sampling.
        policy: path of the policy.
        candidates: paths of the rollout models.
        prompts: number of prompts.
        seed: seed of prompts and sampling.
        split: split of the task from which prompts are taken.
        listen: function that is called with the seconds that a rollout model needed for its answers.

    Raises:
        ConfigError: sampling that leaves out tokens, or limits that the models or the task do not allow.
        ModelError, DataError: models or tokenizers that cannot be read or do not fit each other.
    """

    def __init__(
        self,
        config: Config,
        policy: str,
        candidates: Sequence[str],
        prompts: int,
        seed: int,
        split: Split = "test",
        listen: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Load the tokenizer, the task and the prompts, but no weights; the class explains arguments and errors."""
        if config.sampling.truncated:
            raise ConfigError(
                f"the engine would sample with top_p {config.sampling.top_p} and top_k {config.sampling.top_k}, but "
                f"this compares distributions over the whole vocabulary; use sampling.top_p=1.0 sampling.top_k=0"
            )

        self._config, self._policy = config, policy
        self._seed, self._listen = seed, listen
        paths = {"policy": policy} | {f"rollout model {path}": path for path in candidates}
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizers(paths)
        self._rows = head_rows(paths, self._tokenizer)  # number of token ids that all models have
        self._task: Task = run_task(config, paths, self._tokenizer)
        self._device = pick_device(config.device)
        self.prompts: list[Prompt] = PromptStream(self._task, split, seed).next(prompts)

    def measure(self, rollout_model: str) -> Candidate:
        """Measure how well policy and rollout model answer, and how far both are apart on the rollout model's answers.

        Args:
            rollout_model: path of the rollout model.
        """
        begun = time.monotonic()
        sampled = self.answers(rollout_model)
        self._listen(time.monotonic() - begun)

        temperature = self._config.sampling.temperature
        with closing(self._engine(self._policy)) as engine:
            of_policy = self._evaluate(engine)
            scores = engine.score(sampled.rollouts, temperature)

        # Compare whole distributions of both models, at the tokens of the first responses.
        loaded_policy, loaded_rollout_model = (
            load_model(path, torch.float32, self._device) for path in (self._policy, rollout_model)
        )
        for model in (loaded_policy, loaded_rollout_model):
            cut_head(model, self._rows)

        chosen = first_rollouts(sampled.rollouts, MOST_STATES)
        chunks, columns = [], []
        for states in pair_states(loaded_policy, loaded_rollout_model, chosen, temperature):
            chunks.append(measure_states(states))
            columns.append(saved_columns(states, self._config.sampling.num_top_log_probs))

        # Give the advice that `jackpot replay` would give about the same tokens.
        sums = ReplaySums(settings_of(self._config, ()))
        sums.add(saved_responses(chosen, columns, rollout_model))
        weights = f"{rollout_model} on held-out prompts, scored by {self._policy}"
        answer = sums.advice(weights, Costs.of(loaded_policy, loaded_rollout_model))

        return Candidate(
            name=rollout_model,
            parameters=loaded_rollout_model.num_parameters(),
            policy_parameters=loaded_policy.num_parameters(),
            responses=len(sampled.rollouts),
            accuracy=sampled.accuracy if sampled.has_verdict else None,
            policy_accuracy=of_policy.accuracy if of_policy.has_verdict else None,
            reward=sampled.reward,
            policy_reward=of_policy.reward,
            answer=answer.numbers(),
            **_state_means(concatenate(chunks)),
            **_sequence_means(sampled.rollouts, scores),
        )

    def answers(self, path: str) -> Evaluation:
        """Let the model at a path answer all prompts, and score the answers."""
        with closing(self._engine(path)) as engine:
            return self._evaluate(engine)

    def _evaluate(self, engine: Engine) -> Evaluation:
        """Generate one answer to each prompt with an engine, and score the answers."""
        return evaluate(engine, self._task, self._tokenizer, self.prompts, self._config.sampling, self._seed, k=1)

    def _engine(self, path: str) -> Engine:
        """Start a transformers engine with the model at a path."""
        # The engine of the recipe may be a vLLM server, which holds a single model.
        settings = TransformersEngineConfig(dtype=self._config.engine.dtype)
        return make_engine(settings, path, self._device, Version(policy=0, rollout_model=0), rows=self._rows)


def simulate_candidates(
    config: Config,
    candidates: Sequence[str],
    prompts: int,
    seed: int,
    listen: Callable[[float], None] = lambda _: None,
) -> list[Candidate]:
    """Compare the recipe's policy with each candidate rollout model.

    Args:
        config: settings of the recipe.
        candidates: paths of rollout models; empty: the recipe's own.
        prompts: number of held-out prompts that each rollout model answers.
        seed: seed of prompts and sampling.
        listen: function that is called with the seconds that a candidate needed for its answers.

    Raises:
        ConfigError: the recipe has no rollout model and no candidate is named, or a path is named twice.
        ModelError, DataError: as `PairBench`.
    """
    candidates = list(candidates) or ([config.rollout_model.path] if config.rollout_model else [])
    if not candidates:
        raise ConfigError(
            "rollout_model is null, so the policy generates its own rollouts and there is no gap to measure; name "
            "candidates with --rollout-model PATH, or take an arm with a rollout model"
        )
    if len(set(candidates)) < len(candidates):
        raise ConfigError(f"--rollout-model names a path twice: {', '.join(candidates)}; give each candidate once")

    bench = PairBench(config, config.policy.path, candidates, prompts=prompts, seed=seed, listen=listen)
    return [bench.measure(path) for path in candidates]


def saved_columns(states: StatePairs, k: int) -> dict[str, Tensor]:
    """Return the columns that a run would save at n sampled tokens: log-probs [n], and both models' top-k lists [n, k].

    Args:
        states: both models' distributions at the n tokens.
        k: length of the top-k lists.
    """
    columns = {
        "rollout_log_probs": states.rollout.gather(-1, states.token_ids)[:, 0],
        "old_log_probs": states.target.gather(-1, states.token_ids)[:, 0],
    }
    for model, log_probs in (("rollout", states.rollout), ("policy", states.target)):
        top = log_probs.topk(min(k, log_probs.shape[1]), dim=-1)
        columns |= {f"{model}_top_ids": top.indices, f"{model}_top_log_probs": top.values}
    return columns


def saved_responses(
    rollouts: Sequence[Rollout], columns: Sequence[dict[str, Tensor]], where: str
) -> list[SavedResponse]:
    """Convert rollouts to saved responses, which hold only sampled tokens and have no advantages.

    Args:
        rollouts: the rollouts.
        columns: chunks of `saved_columns` that together cover all sampled tokens, in their order.
        where: name of the rollouts' source, for messages.
    """
    # Cut every column over all tokens into one piece for each response, and collect each response's pieces by name.
    counts = [int(rollout.sampled_mask.sum()) for rollout in rollouts]
    by_name = {name: torch.cat([chunk[name] for chunk in columns]).split(counts) for name in columns[0]}
    of_each = [dict(zip(by_name, tensors, strict=True)) for tensors in zip(*by_name.values(), strict=True)]

    return [
        response_of(
            {
                "uid": rollout.uid,
                "prompt_ids": rollout.prompt.token_ids,
                "token_ids": rollout.token_ids[rollout.sampled_mask],
                **saved,
            },
            where=where,
            index=index,
        )
        for index, (rollout, saved) in enumerate(zip(rollouts, of_each, strict=True))
        if counts[index]  # a response without a sampled token is left out
    ]


@torch.no_grad()
def pair_states(
    policy: PreTrainedModel, rollout_model: PreTrainedModel, rollouts: Sequence[Rollout], temperature: float
) -> Iterator[StatePairs]:
    """Yield both models' next-token distributions at every sampled token of rollouts, a few tokens at a time.

    The `token_ids`, [N, 1], of the yielded pairs are the sampled tokens.

    Args:
        policy, rollout_model: the two models, whose output layers have equally many rows.
        rollouts: responses of the rollout model.
        temperature: temperature of both models' log-probs.
    """
    for batch in pack(rollouts, FORWARD_TOKENS, rollout_lengths):
        sampled = pad_sequence([rollout.sampled_mask for rollout in batch], batch_first=True).to(policy.device)
        by_rollout_model, by_policy = (forward_rollouts(model, batch) for model in (rollout_model, policy))

        # Each yields chunks of n sampled tokens: log-probs of all tokens [n, V]; `of_rollout_model` also ids [n, 1].
        ids = by_policy.token_ids[sampled][:, None]
        of_rollout_model = exact_log_probs(rollout_model, temperature, by_rollout_model.hidden[sampled], ids)
        of_policy = exact_log_probs(policy, temperature, by_policy.hidden[sampled])
        for (log_p_rollout, token_ids), (log_p_policy,) in zip(of_rollout_model, of_policy, strict=True):
            yield StatePairs(rollout=log_p_rollout.cpu(), target=log_p_policy.cpu(), token_ids=token_ids.cpu())


def first_rollouts(rollouts: Sequence[Rollout], most: int) -> list[Rollout]:
    """Return the first rollouts with at most `most` sampled tokens in all, but at least one rollout if there is one."""
    return next(pack(rollouts, most, lambda rollout: (0, int(rollout.sampled_mask.sum())), pads=False), [])


def _state_means(numbers: StateNumbers) -> dict[str, Any]:
    """Return those fields of `Candidate` that are computed from whole distributions at tokens."""
    acceptance = numbers.acceptance[:, RECIPE_LAM]  # at lam = 1
    # Means over states of the six moments of `weight_moments`: of TIS t and t^2, of OBRS e, a w^2 and e^2, then t e.
    # Without caps the mean of t is 1, that of e is Z, the acceptance; a cut is the share that caps take of such a mean.
    tis, tis_square, expected, obrs_square, expected_square, product = numbers.weights.mean(0).tolist()

    return {
        "states": len(acceptance),
        "kl_policy_rollout": float(numbers.kl.mean()),
        "kl_rollout_policy": float(numbers.reverse_kl.mean()),
        "kl_after": float(numbers.kl_after[:, RECIPE_LAM].mean()),
        "acceptance": float(acceptance.mean()),
        "acceptance_spread": float(acceptance.std(correction=0)),
        "low_acceptance": float((acceptance < LOW_ACCEPTANCE).double().mean()),
        "tis_cut": 1.0 - tis,
        "obrs_cut": 1.0 - expected / float(acceptance.mean()),
        # Effective shares of tokens, (E w)^2 / E w^2; and the cosine between the weights t and e over tokens.
        "tis_ess": tis**2 / tis_square,
        "obrs_ess": expected**2 / obrs_square,
        "expected_ess": expected**2 / expected_square,
        "agreement": product / math.sqrt(tis_square * expected_square),
    }


def _sequence_means(rollouts: Sequence[Rollout], scores: Sequence[Tensor]) -> dict[str, Any]:
    """Return those fields of `Candidate` that are about whole responses, from log-probs by the engines.

    Args:
        rollouts: responses of the rollout model.
        scores: the policy's log-probs of each response's tokens.
    """
    log_ratios = [
        torch.where(rollout.sampled_mask, score - rollout.rollout_log_probs, 0.0)
        for rollout, score in zip(rollouts, scores, strict=True)
    ]
    mask = pad_sequence([rollout.sampled_mask for rollout in rollouts], batch_first=True)
    sums = mismatch(pad_sequence(log_ratios, batch_first=True), mask)

    return {
        "sequence_log_ratio": float(sums["mismatch/sequence_log_ratio"].value),
        "sequence_ess": float(sums["mismatch/sequence_ess"].value),
    }
