"""TRL's experimental `AsyncGRPOTrainer`, which has no correction of its own, with one of ours (docs/trl.md).

TRL takes PPO's ratio from the log-probs of the engine, whose weights are some steps old. So the change of the policy
since then, and the engine's rounding, use up the range of PPO's clip, and below an advantage of 0 the ratio has no
bound. Here the correction turns that ratio into a weight, and PPO's ratio is taken from the current policy. A sample is
trained on once, so for the settings `target` and `proximal` the values `old` and `new` mean the same.

Status: never run on its target (a GPU).

Shapes: `N` tokens of a row of packed samples, `M` of them trained on, `B` samples in the row, `T` tokens of a sample,
`K` entries of a top-k list, `H` hidden size; log-probs in nats. Z, which OBRS reads, is the sum over the vocabulary of
min(p_engine, p_policy / lam).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from jackpot.adapters.trl.base import Batch, asynchronous, caught_states, loss_mask, plain_model, token_batch
from jackpot.adapters.trl.corrected import Correcting
from jackpot.adapters.trl.refusals import check_server, refuse_anywhere, refuse_placement
from jackpot.adapters.trl.rollouts import NUM_TOP
from jackpot.config.build import validated
from jackpot.config.engines import VLLMServerEngineConfig
from jackpot.core.errors import ConfigError, ModelError
from jackpot.core.types import Version
from jackpot.models.forward import logit_softcap, output_layer
from jackpot.objectives.joint import OldLogProbs
from jackpot.objectives.kernels.linear_head import HeadOutput, LinearHead
from jackpot.rollout.engines.vllm.protocol import choice_rows
from jackpot.rollout.engines.vllm.server_engine import VLLMServerEngine
from jackpot.training.components import send_weights

_trainer, _worker = asynchronous()
_MAX_GAP = 0.1  # nats; a larger mean difference between two computations of log-probs is more than rounding


class ServerWeights:
    """A `weight_transfer` of TRL's trainer that sends weights to a vLLM server as a file, without NCCL.

    The server finishes the requests that it began with the old weights, and then reads the file. The checksums of what
    it read are compared with the file's, as for the engine `vllm_server` (docs/vllm.md).

    Args:
        settings: settings of the engine `vllm_server` (docs/settings.md), such as `weights_folder`, a folder that has
            the same path on both sides, and `dtype`, which must be the server's. Without `weights_folder` the file is
            in shared memory of this machine.
    """

    def __init__(self, **settings: Any) -> None:
        """Keep the settings, which `connect` checks; nothing is connected yet."""
        self._given_settings = settings
        self._sent = 0  # times that weights were sent
        self._engine: Any = None

    def connect(self, model: PreTrainedModel, url: str) -> None:
        """Keep the model whose weights will be sent and the server's address, for `init_weight_transfer`.

        Raises:
            ConfigError: the settings given at construction are unknown, or the policy has an adapter of peft.
        """
        if hasattr(model, "peft_config"):
            raise ConfigError(
                "the policy has an adapter of peft, which ServerWeights does not merge; leave weight_transfer out: TRL "
                "then sends the adapter alone to a server with --enable-lora, and merged weights to another"
            )
        self._model = model
        self._settings = validated(VLLMServerEngineConfig, {"urls": [url]} | self._given_settings)

    def init_weight_transfer(self) -> None:
        """Connect to the server, and send the policy's first weights.

        Raises:
            EngineError: the server cannot be reached, or serves another model or with other settings.
        """
        self._engine = VLLMServerEngine(self._model, self._settings, eos_token_ids=(), version=Version(0, 0))

    def pause(self) -> None:
        """Do nothing: `send_weights` itself pauses the server while the server loads weights."""

    def resume(self) -> None:
        """Do nothing: the server is resumed when `send_weights` returns."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Send all weights of the policy, which `iterator` yields by name, to the server.

        Raises:
            EngineError, WeightsError: the server does not hold these weights afterwards.
        """
        self._sent += 1  # also serves as the number of the version that is sent
        send_weights(self._engine, iterator, Version(policy=self._sent, rollout_model=self._sent))

    def destroy(self) -> None:
        """Close the connection to the server, and remove the files of weights."""
        if self._engine:
            self._engine.close()


class ListingLoop(_worker._AsyncRolloutLoop):
    """The loop of TRL's rollout worker, made to ask the server for the top-k list of every token too.

    TRL carries the sampled token's log-prob from here to the loss, in `old_log_probs`. This loop replaces it by a row
    of 1 + 2K numbers: the log-prob itself, the ids of the K most probable tokens, and their K log-probs.
    """

    def __init__(self, *, num_top_log_probs: int, **settings: Any) -> None:
        """Set the loop up with TRL's settings; `num_top_log_probs` is K, the length of each top-k list."""
        super().__init__(**settings)
        self._num_top = num_top_log_probs

    async def _post(self, path: str, payload: dict, timeout: float, max_retries: int = 3) -> dict:
        """Send a request that asks for top-k lists, and replace each log-prob in the answer by a row of `_flat_row`."""
        payload |= {"logprobs": self._num_top, "return_tokens_as_token_ids": True}
        output = await super()._post(path, payload, timeout, max_retries)
        for choice in output["choices"]:
            rows = choice_rows(choice, self._num_top, "a completion")
            choice["logprobs"]["token_logprobs"] = list(map(_flat_row, rows))
        return output

    async def _score_group(self, group: Any) -> list[Any]:
        """Give tokens that were not sampled rows of 1 + 2K zeros, then score the group of samples as TRL does."""
        blank = [0.0] * (1 + 2 * self._num_top)  # for tokens of the context: TRL has the number 0 as their log-prob
        for sequence in chain.from_iterable(group.completions_sequences):
            sequence.old_log_probs = [row if isinstance(row, list) else blank for row in sequence.old_log_probs]
        return await super()._score_group(group)


def _flat_row(entries: Sequence[tuple[int, float]]) -> list[float]:
    """Return the 1 + 2K numbers that `ListingLoop` puts in the place of a token's log-prob.

    They are the log-prob of the sampled token, the ids of the K most probable tokens, and their K log-probs.

    Args:
        entries: (id, log-prob) of the sampled token, then of the K most probable tokens.
    """
    (_, sampled), *top = entries
    return [sampled, *(token for token, _ in top), *(log_prob for _, log_prob in top)]


class _Forwarded(Exception):
    """An exception that leaves TRL's loss right after the model's forward pass, and carries the model's output."""


class CorrectedAsyncGRPOTrainer(Correcting, _trainer.AsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer` with one of our corrections; TRL's own loss has no correction.

    OBRS accepts or rejects each token, and Z is the probability that it accepts a token of the engine in a state. Its
    factor kappa, the sum of the tokens' acceptance probabilities over the sum of Z, is computed from a micro-batch of
    all processes. The log-probs of the current policy come from TRL's own forward pass. With `correction="none"` the
    loss is TRL's, to the bit.

    Args:
        args, kwargs: arguments of TRL's trainer. If you give a `rollout_worker` of your own and the correction reads Z,
            the `old_log_probs` of its samples must be [T, 1 + 2K]: for each token its log-prob, then the ids and then
            the log-probs of the K most probable tokens (`ListingLoop`).
        correction: settings of the correction, as in `CorrectedGRPOTrainer`.
        num_top_log_probs: length K of the top-k lists that the vLLM server is asked for, where the correction reads Z.

    Raises:
        ConfigError: settings or features of TRL cannot be combined with the correction (docs/trl.md lists them).
        ModelError: the model's output layer is not supported.
    """

    _tag_names = (*_trainer.AsyncGRPOTrainer._tag_names, "jackpot")

    def __init__(
        self,
        *args: Any,
        correction: str | Mapping[str, Any] = "obrs",
        num_top_log_probs: int = NUM_TOP,
        rollout_worker: Any = None,
        weight_transfer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Set TRL's trainer up with the correction; if that reads Z, have TRL's worker ask for top-k lists."""
        # Without a correction, PPO's ratio is that to the sampler (`proximal: rollout`), as in TRL's own loss.
        is_plain = correction in ("none", {"name": "none"})
        # Sets `_correction_name`, `_objective` and `_names`.
        self._choose({"name": "none", "proximal": "rollout"} if is_plain else correction)
        refuse_anywhere(self._correction_name, self._objective)

        super().__init__(*args, rollout_worker=rollout_worker, weight_transfer=weight_transfer, **kwargs)
        self._policy = plain_model(self.accelerator.unwrap_model(self.model))
        if isinstance(weight_transfer, ServerWeights):
            refuse_placement(self)  # the process that writes the file needs whole weights
            weight_transfer.connect(self.accelerator.unwrap_model(self.model), self.args.vllm_server_base_url)

        if self._reads_z:
            refuse_placement(self)
            self._head = LinearHead(output_layer(self._policy), policy_soft_cap=logit_softcap(self._policy))
            # A worker that TRL has made asks for top-k lists too; a worker of the user's stays as it is.
            if isinstance(self.rollout_worker, _worker.AsyncRolloutWorker) and rollout_worker is None:
                self.rollout_worker._loop_cls = partial(ListingLoop, num_top_log_probs=num_top_log_probs)

    def get_train_dataloader(self) -> Any:
        """Check the server if the rollout worker is of TRL's class, and return TRL's data loader of rollouts.

        Raises:
            ConfigError: the server reports log-probs of another distribution than it samples from.
        """
        if isinstance(self.rollout_worker, _worker.AsyncRolloutWorker):
            self.vllm_client.wait_for_server_ready()
            check_server(self.vllm_client)
        return super().get_train_dataloader()

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Compute TRL's loss of a micro-batch with corrected advantages and the log-probs of the proximal point."""
        outputs, states = self._forward(model, inputs)
        corrected = inputs | self._corrected(inputs, outputs.log_probs.detach().flatten(), states)
        # The lambda stands in for the model, which has run already.
        return super().compute_loss(lambda **_: outputs, corrected, return_outputs, num_items_in_batch)

    def _forward(self, model: Any, inputs: Batch) -> Any:
        """Run the forward pass of TRL's loss; return the model's output, and its last hidden states, [1, N, H].

        TRL prepares the model's inputs and computes the loss in one function. So that function is called twice: the
        first call ends with the forward pass, and the second (`compute_loss`) gets the output of that pass.
        """

        def run(**inputs_of_model: Any) -> None:
            """Stand in for the model in TRL's loss: run the model, and leave the loss with its output."""
            raise _Forwarded(model(**inputs_of_model))

        try:
            with caught_states(self._policy) as states:
                super().compute_loss(run, inputs)
        except _Forwarded as forwarded:
            return forwarded.args[0], states[0].detach()

    @torch.no_grad()
    def _corrected(self, inputs: Batch, log_probs: Tensor, states: Tensor) -> Batch:
        """Return the advantages and proximal log-probs of a micro-batch, by the names that TRL's loss reads.

        The policy's log-probs, [N], and its hidden states, [1, N, H], are those of all tokens of the packed row.
        """
        # token_index: for each trained token its place among the N tokens of the row; -1 where there is no token.
        # `index` and `labels`, [M], are the places and the ids of the M trained tokens.
        selected = inputs["token_index"] >= 0
        index = inputs["token_index"][selected]
        labels = inputs["shift_labels"][inputs["attention_mask"].bool()][index]
        # [M, 1 + 2K]: the log-prob of each trained token, then ids and then log-probs of its top-k list (`_flat_row`).
        rollout = inputs["old_log_probs"][selected].reshape(len(index), -1)
        k = rollout.shape[1] // 2
        if self._reads_z and not k:
            raise ConfigError(
                f"correction {self._correction_name} needs the top-k of every token, and the old_log_probs of the "
                f"rollout worker's samples are [T]; make them [T, 1 + 2K] as `ListingLoop` does, or use correction tis"
            )

        # TRL packs the samples into one row, one behind another; the correction reads [B, T], one sample a row.
        lengths = inputs["segment_id"][selected].bincount().tolist()
        columns = {
            "completion_ids": labels,
            "completion_mask": torch.ones_like(labels, dtype=torch.bool),
            "sampling_per_token_logps": rollout[:, 0],
            "jackpot_advantages": inputs["advantages"][selected],
            "jackpot_top_ids": rollout[:, 1 : 1 + k].long(),
            "jackpot_top_log_probs": rollout[:, 1 + k :],
        }
        batch = {name: pad_sequence(column.split(lengths), batch_first=True) for name, column in columns.items()}
        mask = batch["completion_mask"]
        no_prompt = labels.new_zeros(len(lengths), 0)
        batch |= {"prompt_ids": no_prompt, "prompt_mask": no_prompt, "jackpot_uniforms": self._uniforms(mask)}
        batch["jackpot_advantages"] = batch["jackpot_advantages"][:, 0]  # [B]: all tokens of a sample have the same one

        scores = self._policy_scores(batch, log_probs[index].float(), labels, states[0, index])
        measured, overlap = self._measured(batch, old=scores, now=scores)
        self._correct([(batch, measured, overlap)])

        # Back from [B, T] to the places that the trained tokens have in TRL's tensors.
        blank = torch.zeros_like(inputs["advantages"])
        # TRL's loss takes PPO's ratio to `old_log_probs`, here the proximal log-probs.
        corrected = {"advantages": batch["advantages"], "old_log_probs": measured.proximal_log_probs}
        return {name: blank.masked_scatter(selected, column[mask]) for name, column in corrected.items()}

    def _policy_scores(self, batch: Batch, log_probs: Tensor, labels: Tensor, states: Tensor) -> OldLogProbs:
        """Return the policy's log-probs, which TRL computed, and Z, which our output layer computes if it is needed.

        `_scores` brings both into the form that the correction reads; Z is 1 for a correction that does not read it.

        Args:
            log_probs: log-probs of the tokens by TRL's forward pass, [M].
            labels: ids of the tokens, [M].
            states: hidden states that predict the tokens, [M, H].

        Raises:
            ModelError: the model computes logits by more than its output layer, so our log-probs differ from TRL's.
        """
        tokens = token_batch(batch, loss_mask(batch), with_lists=self._reads_z)
        if not self._reads_z:
            empty = log_probs.new_zeros(len(log_probs), 0)  # no top-k lists
            output = HeadOutput(
                log_probs=log_probs, entropy=None, top_ids=empty.long(), top_log_probs=empty, gathered=empty
            )
            return self._scores(output, tokens, with_z=False)

        head = self._head(
            states,
            None,  # no hidden states of a rollout model
            labels,
            temperature=self.temperature,
            num_top=tokens.top_ids.shape[-1],
            gather_ids=tokens.at_sampled(tokens.top_ids),
            only_log_probs=True,
        )
        if (gap := float((head.log_probs - log_probs).abs().mean())) > _MAX_GAP:
            raise ModelError(
                f"TRL's log-probs of the policy are {gap:.3g} nats from those of its output layer: "
                f"{type(self._policy).__name__} computes more; use a correction that reads the ratio alone, such as tis"
            )
        return self._scores(replace(head, log_probs=log_probs), tokens, with_z=True)
