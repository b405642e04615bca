"""TRL's `GRPOTrainer` with a correction of this package in the place of TRL's own (docs/trl.md).

A weight w >= 0 of a token can be multiplied into its advantage A: with PPO's ratio r, min(r wA, clip(r) wA) =
w min(r A, clip(r) A), and every other loss of TRL is linear in the size of A too. So we change TRL's advantages,
[B, T], and all else stays TRL's: data, generation, rewards, loss, optimizer, checkpoints and logs.

Shapes: `B` sequences of a generation batch or of a micro-batch, `T` completion tokens, `K` entries of a top-k list;
log-probs in nats. Z, which OBRS reads, is the sum over the vocabulary of min(p_sampler, p_policy / lam).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from jackpot.adapters.trl.base import (
    Batch,
    RolloutFunc,
    TRLTrainer,
    caught_states,
    completion_states,
    loss_mask,
    plain_model,
    token_batch,
    usable_mask,
    without_dropout,
)
from jackpot.adapters.trl.refusals import (
    check_server,
    has_turns,
    refuse,
    refuse_placement,
    refuse_prompts,
    refuse_reference,
)
from jackpot.adapters.trl.rollouts import NUM_TOP, BatchNames, EngineRollouts, sampling_of
from jackpot.config.build import validated
from jackpot.config.objective import ObjectiveConfig
from jackpot.core.errors import ConfigError, DataError
from jackpot.core.metrics import Mean, Sums, add_sums, all_reduce_sums, to_host
from jackpot.core.prng import fold_in, key_tensor, uniforms
from jackpot.core.types import TokenBatch
from jackpot.models.forward import check_head, logit_softcap, output_layer, response_hidden
from jackpot.objectives.corrections import CorrectionInputs
from jackpot.objectives.joint import OldLogProbs, measured_inputs, on_support, scores_on_support, token_scores
from jackpot.objectives.kernels.linear_head import HeadOutput, JointOutput, LinearHead
from jackpot.objectives.kernels.tiles import Head
from jackpot.objectives.metrics import correction_summary
from jackpot.objectives.obrs import ZEstimate, known_z
from jackpot.rollout.engines.vllm.protocol import MINUS_INFINITY
from jackpot.training.objectives import policy_objective


class _Lists(NamedTuple):
    """The top-k lists of a generation batch, as vLLM or a rollout function returns them for each completion."""

    completion_ids: Sequence[Sequence[int]]  # ids of the sampled tokens, T for each completion
    ids: Sequence[Any]  # token ids of each list, [T, K] for each completion, most probable first
    log_probs: Sequence[Any]  # their log-probs, [T, K] for each completion

    def padded(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the lists' token ids and log-probs as tensors [B, T, K], with zeros behind the end of a completion.

        Args:
            width: T, the length of the longest completion.

        Raises:
            DataError: a list is not [T, K] with one K for all.
        """
        lengths = list(map(len, self.completion_ids))
        ids = [torch.as_tensor(rows, dtype=torch.int64) for rows in self.ids]
        log_probs = [torch.as_tensor(rows, dtype=torch.float32) for rows in self.log_probs]

        k = ids[0].shape[-1]
        expected = [(length, k) for length in lengths]
        id_shapes = [tuple(rows.shape) for rows in ids]
        log_prob_shapes = [tuple(rows.shape) for rows in log_probs]
        if not id_shapes == log_prob_shapes == expected:
            raise DataError(
                f"top_ids and top_log_probs of completions with {lengths[:3]} tokens have the shapes {id_shapes[:3]} "
                f"and {log_prob_shapes[:3]}; each must be [T, K], a row for every token of the completion, with one K "
                f"for all"
            )

        # vLLM writes a log-prob of minus infinity as the number MINUS_INFINITY.
        log_probs = [rows.masked_fill(rows <= MINUS_INFINITY, -math.inf) for rows in log_probs]
        blank = torch.zeros(width, k)  # goes first, so that `pad_sequence` pads all to `width`, and is cut off again
        ids = pad_sequence([blank.long(), *ids], batch_first=True)[1:]
        return ids, pad_sequence([blank, *log_probs], batch_first=True)[1:]


_AnyTRLTrainer: Any = object  # to a type checker, a class with the attributes of any trainer of TRL


class Correcting(_AnyTRLTrainer):
    """A mixin for any trainer of TRL: it corrects advantages, and logs metrics of the correction."""

    def _choose(self, correction: str | Mapping[str, Any]) -> None:
        """Set the correction by its settings, which may be its name; a trainer calls this before anything else."""
        settings = validated(ObjectiveConfig, {"correction": correction})
        self._correction_name = settings.correction.name
        self._objective = policy_objective(settings)
        self._names = BatchNames()  # names of batches, from which the random numbers of their tokens are hashed

    @property
    def _reads_z(self) -> bool:
        """Whether the correction reads Z, which can only be estimated from the sampler's top-k lists."""
        return "z" in self._objective.correction.reads

    def _uniforms(self, mask: Tensor) -> Tensor:
        """Draw the random numbers in [0, 1) by which the tokens of a batch are accepted or rejected: [B, T] float64.

        A number is hashed from TRL's seed, the name of the batch, the process, and the token's row and column.
        """
        name, _ = self._names.next(self)
        name = name.removeprefix("train/")  # in training the name is then STEP/INDEX
        names = [f"{name}/{self.accelerator.process_index}/{row}" for row in range(len(mask))]
        keys = key_tensor([fold_in(self.args.seed, "accept", name, 0) for name in names])  # 0 is the epoch
        return uniforms(keys[:, None], torch.arange(mask.shape[1])).to(mask.device)

    def _scores(self, head: HeadOutput | JointOutput, tokens: TokenBatch, with_z: bool) -> OldLogProbs:
        """Return the scores that the correction reads, log-probs and Z, from the outputs of the output layers.

        Args:
            with_z: whether Z is estimated; else it is 1.
        """
        scores = OldLogProbs.of(
            token_scores(
                head,
                tokens,
                rollout_weights_are_current=self._is_current(tokens),
                lam=self._objective.correction.lam,
                normalizer="topk",
                distill=None,
            )
        )
        return scores if with_z else replace(scores, z=known_z(torch.ones_like(scores.old_log_probs)))

    def _is_current(self, tokens: TokenBatch) -> Tensor:
        """Return a mask, [B, T] bool, of tokens whose sampler still has the weights that sampled them; here none."""
        return torch.zeros_like(tokens.response_mask)

    def _measured(self, batch: Batch, old: OldLogProbs, now: OldLogProbs) -> tuple[CorrectionInputs, Sums]:
        """Return the correction's inputs on a batch, and sums over its tokens, such as acceptance and Z for kappa.

        A token for which vLLM reported no log-prob (NaN) is left out.

        Args:
            old: the scores of the policy before the update.
            now: the scores of the current policy.
        """
        tokens = token_batch(batch, usable_mask(batch), with_lists=False)
        # A token that is left out gets the policy's log-prob, a ratio of 1, so that nothing in a sum is NaN.
        rollout = torch.where(tokens.response_mask, tokens.rollout_log_probs, old.old_log_probs)
        return measured_inputs(self._objective, replace(tokens, rollout_log_probs=rollout), old, now)

    def _correct(self, measured: Sequence[tuple[Batch, CorrectionInputs, Sums]]) -> None:
        """Multiply the correction's weights into the advantages of batches, and log the correction's metrics.

        Args:
            measured: batches, which are changed in place, with the inputs and sums of `_measured`. Over all of these
                batches, in all processes, kappa is computed: a factor that the weights of OBRS contain.
        """
        objective, has_z = self._objective, self._reads_z
        totals = all_reduce_sums(add_sums(*(overlap for _, _, overlap in measured)))
        summaries: list[Sums] = []
        for batch, inputs, overlap in measured:
            correction = objective.correction.apply(inputs, totals)
            batch["advantages"] = inputs.advantages * correction.weights * correction.accept_mask
            # `old_per_token_logps`: log-probs of the proximal policy, which PPO's ratio in TRL's loss is taken from.
            if objective.proximal == "rollout":
                batch["old_per_token_logps"] = inputs.proximal_log_probs
            elif objective.proximal == "new":
                batch.pop("old_per_token_logps", None)  # TRL then takes the detached current log-probs

            mask = loss_mask(batch)
            unusable: Sums = {"unusable_tokens": Mean.of(mask & ~inputs.response_mask, mask)}
            summaries.append(correction_summary(correction, inputs, overlap, has_z) | unusable)

        sums = to_host(all_reduce_sums(add_sums(*summaries)))
        metrics = {name: metric.value for name, metric in sums.items()}
        # kappa is one number for all of these batches, so that of the last batch's correction is logged.
        self._log_metrics(metrics | ({"obrs/kappa": correction.kappa} if has_z else {}))

    def _log_metrics(self, values: Mapping[str, Tensor | float]) -> None:
        """Add values to TRL's log, which averages those of several steps.

        NaN and -inf are left out: the values of metrics that counted no token.
        """
        for name, value in values.items():
            if float(value) > -math.inf:  # False for NaN too
                self._metrics["train"][f"jackpot/{name}"].append(float(value))


def _first_entries(rows: Sequence[Sequence[Any]], k: int) -> list[list[Any]]:
    """Return the first k ids, or log-probs, at each token of a completion; NaN stands for a missing log-prob."""
    return [[math.nan if entry is None else entry for entry in entries[:k]] for entries in rows]


class CorrectedGRPOTrainer(Correcting, TRLTrainer):
    """TRL's `GRPOTrainer` with one of our corrections in the place of `vllm_importance_sampling_correction`.

    The sampler, TRL's vLLM (`use_vllm=True`) or a `rollout_func`, must report the log-probs of the sampled tokens. For
    corrections that read Z, the probability that OBRS accepts a token in a state, it must return its top-k lists too:
    TRL's vLLM is asked for them; a `rollout_func` returns `top_ids` and `top_log_probs`, [T, K] for each completion,
    beside TRL's keys.

    The factor kappa of OBRS, the sum of the tokens' acceptance probabilities over the sum of Z, is computed from the
    generation batch of all processes. A correction that follows the current policy (`target: new`, `proximal: new`)
    scores the micro-batches of a step again if the policy has moved since they were generated, and computes kappa from
    them. An evaluation's loss is not corrected.

    Args:
        args, kwargs: arguments of TRL's trainer.
        correction: settings of the correction: its name, or a mapping with the name and settings, such as
            `{"name": "obrs", "lam": 1.0, "c1": 3.0}` (docs/corrections.md).
        num_top_log_probs: length K of the top-k lists that TRL's vLLM is asked for, by default 20, the largest that
            vLLM allows by default.

    Raises:
        ConfigError: TRL's own correction is on too, no sampler reports log-probs, or a feature of TRL is used that a
            correction of single tokens cannot be combined with (docs/trl.md lists them).
        ModelError: the model's output layer is not supported.
    """

    _tag_names = (*TRLTrainer._tag_names, "jackpot")

    def __init__(
        self,
        *args: Any,
        correction: str | Mapping[str, Any] = "obrs",
        num_top_log_probs: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Set TRL's trainer up with the correction, and have vLLM return top-k lists where they are read."""
        arguments = signature(TRLTrainer).bind(*args, **kwargs).arguments  # all arguments by name
        self._choose(correction)  # sets `_correction_name`, `_objective` and `_names`
        refuse(arguments, self._correction_name, self._objective)

        num_top = NUM_TOP if num_top_log_probs is None else num_top_log_probs
        is_cut = (arguments["args"].top_k or 0) > 1  # whether top_k cuts the distribution, and leaves several tokens
        if num_top_log_probs is not None and (arguments.get("rollout_func") or not (self._reads_z or is_cut)):
            raise ConfigError(
                f"num_top_log_probs is {num_top_log_probs}, but only TRL's vLLM is asked for it, and only for a "
                f"correction that reads Z, or with a top_k; leave it out. `EngineRollouts` has an argument of this name"
            )

        self._lists: _Lists | None = None  # the top-k lists of the generation batch in progress
        self._loss_batch: Batch = {}  # the micro-batch whose loss TRL is computing
        self._corrected_at = 0  # optimizer steps that the policy had taken when advantages were last corrected

        if rollout_func := arguments.get("rollout_func"):
            if isinstance(rollout_func, EngineRollouts):
                sampling_of(arguments["args"], NUM_TOP)  # raises where our engines do not have TRL's sampling
            arguments["rollout_func"] = partial(self._call_rollout_func, rollout_func)

        super().__init__(**arguments)
        refuse_placement(self)

        whole = self.accelerator.unwrap_model(self.model)
        refuse_prompts(whole)
        model = plain_model(whole)
        with without_dropout(model):
            check_head(model)
        self._head = LinearHead(output_layer(model), policy_soft_cap=logit_softcap(model))

        if self.use_vllm:
            check_server(getattr(self.vllm_generation, "vllm_client", None))
            # Lists are needed for Z, and with top_k if they hold all tokens that top_k keeps (`_lists_support`).
            if self._reads_z or (is_cut and self.args.top_k <= num_top and not has_turns(arguments)):
                generation = self.vllm_generation
                generation.logprobs = num_top
                generation.generate = partial(self._generate_by_vllm, generation.generate, num_top)

    @property
    def _follows(self) -> bool:
        """Whether the correction's weights depend on the current policy, so that they change with its steps."""
        return "new" in (self._objective.target, self._objective.proximal)

    def _call_rollout_func(self, rollout_func: RolloutFunc, prompts: list[Any], trainer: TRLTrainer) -> dict[str, Any]:
        """Call the rollout function, and keep the top-k lists that it returns aside: TRL does not carry them."""
        output = dict(rollout_func(prompts, trainer))
        ids, log_probs = output.pop("top_ids", None), output.pop("top_log_probs", None)
        if ids is not None and log_probs is not None:
            self._lists = _Lists(completion_ids=output["completion_ids"], ids=ids, log_probs=log_probs)
        return output

    def _generate_by_vllm(self, generate: Callable[..., tuple], k: int, **arguments: Any) -> tuple:
        """Have TRL's vLLM generate, keep the top-k lists, and return the sampled tokens' log-probs to TRL.

        vLLM orders the entries of a position by rank, and puts the sampled token behind the first k if it is not among
        them. TRL takes the first entry of a position as the sampled token's, so TRL gets that token's entry alone.
        """
        prompt_ids, completion_ids, log_probs, ids = generate(**arguments)
        self._lists = _Lists(
            completion_ids=completion_ids,
            ids=[_first_entries(rows, k) for rows in ids],
            log_probs=[_first_entries(rows, k) for rows in log_probs],
        )

        # For each token, its log-prob in its list.
        sampled = []
        for completion in zip(completion_ids, ids, log_probs, strict=True):
            tokens = zip(*completion, strict=True)
            sampled.append([[listed_log_probs[listed.index(token)]] for token, listed, listed_log_probs in tokens])
        return prompt_ids, completion_ids, sampled, ids

    def _generate_and_score_completions(self, inputs: list[Batch]) -> Batch:
        """Generate and score a batch as TRL does; in training, also correct its advantages."""
        batch = super()._generate_and_score_completions(inputs)
        lists, self._lists = self._lists, None  # the top-k lists that generation has set aside, if it returned any
        if not self.model.training:
            return batch
        if batch.get("sampling_per_token_logps") is None:
            raise ConfigError(
                "the rollout function returned logprobs None, so there is nothing to correct by; return the log-probs "
                "of the distribution that the tokens were sampled from, or use TRL's GRPOTrainer"
            )

        batch |= self._columns(batch, lists)
        scores = self._read(batch, self._reads_z)
        batch |= self._columns_of_scores(scores)
        if self._lists_support(batch):
            refuse_reference(batch, self.args)
            if "old_per_token_logps" in batch:  # TRL's are over all tokens; ours over those that top_k kept
                batch["old_per_token_logps"] = scores.old_log_probs

        self._corrected_at = self.state.global_step
        # No update came between: the scores before it are those of the current policy.
        self._correct([(batch, *self._measured(batch, old=scores, now=scores))])
        return batch

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        """Return the next micro-batch, corrected anew where the correction follows a policy that has moved."""
        inputs = super()._prepare_inputs(generation_batch)
        # Nothing to do in evaluations, if weights do not follow the policy, or if it took no step since the last time.
        if not (self.model.training and self._follows) or self._corrected_at == self.state.global_step:
            return inputs
        self._corrected_at = self.state.global_step

        # The micro-batches of the coming optimizer step, of which `inputs` is the first.
        first = self._step % self.args.steps_per_generation
        needs_z = self._reads_z and self._objective.target == "new"
        measured = []
        for batch in self._buffered_inputs[first : first + self.args.gradient_accumulation_steps]:
            old = OldLogProbs(
                old_log_probs=batch["jackpot_old"],
                rollout_model_old_log_probs=batch["jackpot_old"],  # any numbers: no correction reads these
                z=ZEstimate(*batch["jackpot_old_z"].unbind(-1)),
            )
            correction_inputs, overlap = self._measured(batch, old=old, now=self._read(batch, needs_z))
            measured.append((batch, correction_inputs, overlap))
        self._correct(measured)
        return inputs

    def _columns(self, batch: Batch, lists: _Lists | None) -> dict[str, Tensor]:
        """Return the tensors that the correction reads beside TRL's own; TRL shuffles and splits these columns too."""
        columns = {
            "jackpot_advantages": batch["advantages"],
            "jackpot_uniforms": self._uniforms(batch["completion_mask"]),
        }
        # Lists are needed for Z; else they are kept if they came and TRL's settings have a top_k (`_lists_support`).
        if not self._reads_z and (lists is None or not self.args.top_k):
            return columns
        if lists is None:
            raise ConfigError(
                f"correction {self._correction_name} needs the top-k of the distribution that the tokens were sampled "
                f"from, and the rollout function did not return it; return top_ids and top_log_probs, [T, K] for each "
                f"completion, or use correction tis"
            )

        device = batch["completion_ids"].device
        ids, log_probs = lists.padded(batch["completion_ids"].shape[1])
        return columns | {"jackpot_top_ids": ids.to(device), "jackpot_top_log_probs": log_probs.to(device)}

    def _lists_support(self, batch: Batch) -> bool:
        """Return whether the sampler chose by top_k among 2 or more tokens, and the batch's lists hold all of them."""
        return "jackpot_top_ids" in batch and 1 < (self.args.top_k or 0) <= batch["jackpot_top_ids"].shape[-1]

    def _on_support(self, output: Any, heads: Sequence[Head], batch: Batch, tokens: TokenBatch) -> Any:
        """Renormalize outputs of output layers over the tokens that top_k kept; unchanged unless `_lists_support`."""
        return on_support(output, heads, tokens, self.temperature) if self._lists_support(batch) else output

    def _compute_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        """Compute TRL's loss; meanwhile `_get_per_token_logps_and_entropies` finds the batch in `_loss_batch`."""
        self._loss_batch = inputs
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._loss_batch = {}

    def _get_per_token_logps_and_entropies(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute log-probs and entropies of the completions' tokens for TRL's loss, with TRL's method.

        If the batch's top-k lists hold all tokens that top_k kept (`_lists_support`), these log-probs are replaced by
        those of the distribution that is renormalized over the kept tokens.
        """
        batch = self._loss_batch
        if not self._lists_support(batch):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

        with caught_states(self.accelerator.unwrap_model(model)) as caught:
            _, *entropies = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

        tokens = token_batch(batch, loss_mask(batch), with_lists=True)
        states = tokens.at_sampled(completion_states(batch, caught[0]))
        with self.accelerator.autocast():
            log_probs, _ = scores_on_support(self._head.heads(states, None)[0], tokens, self.temperature)
        return tokens.spread(log_probs), *entropies

    def _columns_of_scores(self, scores: OldLogProbs) -> dict[str, Tensor]:
        """Return the scores that are needed once the policy has moved, as columns of a generation batch."""
        if not self._follows:
            return {}
        return {"jackpot_old": scores.old_log_probs, "jackpot_old_z": torch.stack(scores.z, dim=-1)}

    @torch.no_grad()
    def _read(self, batch: Batch, with_z: bool) -> OldLogProbs:
        """Return the policy's log-probs of a batch's tokens, without dropout, and Z, which is 1 unless `with_z`.

        They are computed for `per_device_train_batch_size` rows at a time.
        """
        model = plain_model(self.accelerator.unwrap_model(self.model))
        rows = self.args.per_device_train_batch_size
        # All tensors of the batch that have rows, and their parts of `rows` rows.
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim() > 0}
        splits = zip(*(tensor.split(rows) for tensor in tensors.values()), strict=True)
        with without_dropout(model), self.accelerator.autocast():
            scores = [self._read_rows(model, dict(zip(tensors, split, strict=True)), with_z) for split in splits]

        return OldLogProbs(
            old_log_probs=torch.cat([score.old_log_probs for score in scores]),
            rollout_model_old_log_probs=torch.cat([score.rollout_model_old_log_probs for score in scores]),
            z=ZEstimate(*map(torch.cat, zip(*(score.z for score in scores), strict=True))),
        )

    def _read_rows(self, model: PreTrainedModel, batch: Batch, with_z: bool) -> OldLogProbs:
        """Score the tokens of some sequences of a batch with the policy, `model`; Z is 1 unless `with_z`."""
        tokens = token_batch(batch, loss_mask(batch), with_lists=with_z or self._lists_support(batch))
        hidden = response_hidden(model, tokens), self._rollout_model_hidden(tokens)  # of policy and rollout model
        head = self._head(
            *hidden,
            tokens.at_sampled(tokens.response_ids),
            temperature=self.temperature,
            num_top=tokens.top_ids.shape[-1],
            gather_ids=tokens.at_sampled(tokens.top_ids),
            only_log_probs=True,
        )
        # If top_k cut the sampler's distribution and the lists hold all kept tokens, scores are renormalized over them.
        return self._scores(self._on_support(head, self._head.heads(*hidden), batch, tokens), tokens, with_z)

    def _rollout_model_hidden(self, tokens: TokenBatch) -> Tensor | None:
        """Return the hidden states of a jointly trained rollout model, [N, H]; None: this trainer has no such model."""
        return None
