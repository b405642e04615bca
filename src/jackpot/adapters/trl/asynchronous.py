"""TRL's experimental `AsyncGRPOTrainer` with a correction of this package; it has none of its own (docs/trl.md).

TRL takes PPO's ratio from the log-probs of whoever sampled, some weights ago. What the policy learned since, and what
the engine rounds, use up the clip, and where A < 0 the ratio has no bound. Here the correction makes a weight of that
ratio, and PPO's is taken from the policy of now. A sample trains once, so the policy before an update is that of now:
`target` and `proximal` mean the same by `old` and by `new`.

Status: never run on its target (a GPU).

Shapes: `M` trained tokens of a row of packed samples, `B` its samples, `T` tokens of a sample, `K` top-k; nats.
"""

from collections.abc import Iterator, Mapping
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
_APART = 0.1  # nats: a mean difference of log-probs above all rounding


class ServerWeights:
    """The weights that TRL's trainer sends to its vLLM server, as a file and without NCCL: a `weight_transfer` of it.

    The server reads the file, answers what it began by the old weights first, and its checksums are compared with the
    file's, as those of the engine `vllm_server` (docs/vllm.md).

    Args:
        settings: of the engine `vllm_server` (docs/settings.md), such as `weights_folder`, which both sides see under
            the same path, and `dtype`, that of the server; without a folder, shared memory of this machine.
    """

    def __init__(self, **settings: Any) -> None:
        self._given, self._sent = settings, 0
        self._engine: Any = None

    def of(self, model: PreTrainedModel, url: str) -> None:
        """Set whose weights go where.

        Raises:
            ConfigError: unknown settings, or a policy with an adapter of peft.
        """
        if hasattr(model, "peft_config"):
            raise ConfigError(
                "the policy has an adapter of peft, which ServerWeights does not merge; leave weight_transfer out, so "
                "that TRL sends the adapter alone"
            )
        self._model, self._settings = model, validated(VLLMServerEngineConfig, {"urls": [url]} | self._given)

    def init_weight_transfer(self) -> None:
        """Send the first weights.

        Raises:
            EngineError: the server cannot be reached, serves another model or in another way.
        """
        self._engine = VLLMServerEngine(self._model, self._settings, eos_token_ids=(), version=Version(0, 0))

    def pause(self) -> None:
        """Do nothing: `send_weights` pauses the server while it loads."""

    def resume(self) -> None:
        """Do nothing: the server is resumed when `send_weights` returns."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Send all weights.

        Raises:
            EngineError, WeightsError: the server holds others afterwards.
        """
        self._sent += 1
        send_weights(self._engine, iterator, Version(self._sent, self._sent))

    def destroy(self) -> None:
        """Remove the files."""
        if self._engine:
            self._engine.close()


class ListingLoop(_worker._AsyncRolloutLoop):
    """The loop of TRL's rollout worker, which asks the server for the top-k too.

    TRL carries the sampled token's log-prob from here to the loss, in `old_log_probs`. In its place comes a row of 1 +
    2K numbers: that, K ids and their K log-probs.
    """

    def __init__(self, *, num_top_log_probs: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._top = num_top_log_probs

    async def _post(self, path: str, payload: dict, timeout: float, max_retries: int = 3) -> dict:
        payload |= {"logprobs": self._top, "return_tokens_as_token_ids": True}
        output = await super()._post(path, payload, timeout, max_retries)
        for choice in output["choices"]:
            choice["logprobs"]["token_logprobs"] = [
                [row[0][1], *(token for token, _ in row[1:]), *(value for _, value in row[1:])]
                for row in choice_rows(choice, self._top, "a completion")
            ]
        return output

    async def _score_group(self, group: Any) -> list[Any]:
        blank = [0.0] * (1 + 2 * self._top)  # of context, for which TRL puts 0
        for sequence in chain.from_iterable(group.completions_sequences):
            sequence.old_log_probs = [row if isinstance(row, list) else blank for row in sequence.old_log_probs]
        return await super()._score_group(group)


class _Forwarded(Exception):
    """What ends TRL's loss behind the model's forward pass, and carries its output."""


class CorrectedAsyncGRPOTrainer(Correcting, _trainer.AsyncGRPOTrainer):
    """Is TRL's `AsyncGRPOTrainer` with one of our corrections, which its loss has none of.

    kappa, where a correction has it, is that of a micro-batch of all processes. The weights are those of the current
    policy, read in TRL's own forward pass. With `correction="none"` the loss is TRL's, to the bit.

    Args:
        args, kwargs: of TRL's trainer. With a `rollout_worker` of yours and a correction that reads Z, the
            `old_log_probs` of its samples are [T, 1 + 2K], as those of `ListingLoop`.
        correction: settings of the correction, as of `CorrectedGRPOTrainer`.
        num_top_log_probs: K that the vLLM server is asked for, where the correction reads Z.

    Raises:
        ConfigError: settings or features of TRL that the correction cannot be combined with; docs/trl.md lists them.
        ModelError: a model whose output layer is not supported.
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
        is_plain = correction in ("none", {"name": "none"})
        self._choose({"name": "none", "proximal": "rollout"} if is_plain else correction)
        refuse_anywhere(self._correction_name, self._objective)

        super().__init__(*args, rollout_worker=rollout_worker, weight_transfer=weight_transfer, **kwargs)
        self._policy = plain_model(self.accelerator.unwrap_model(self.model))
        if isinstance(weight_transfer, ServerWeights):
            refuse_placement(self)  # one process alone writes the file
            weight_transfer.of(self.accelerator.unwrap_model(self.model), self.args.vllm_server_base_url)

        if self._reads_z:
            refuse_placement(self)
            self._head = LinearHead(output_layer(self._policy), policy_soft_cap=logit_softcap(self._policy))
            if isinstance(self.rollout_worker, _worker.AsyncRolloutWorker) and rollout_worker is None:
                self.rollout_worker._loop_cls = partial(ListingLoop, num_top_log_probs=num_top_log_probs)

    def get_train_dataloader(self) -> Any:
        """Check the server, and return TRL's data loader of rollouts.

        Raises:
            ConfigError: the server reports other log-probs than of what it samples from.
        """
        if isinstance(self.rollout_worker, _worker.AsyncRolloutWorker):
            self.vllm_client.wait_for_server_ready()
            check_server(self.vllm_client)
        return super().get_train_dataloader()

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Compute TRL's loss of a micro-batch, by corrected advantages and from the proximal point."""
        outputs, states = self._forward(model, inputs)
        corrected = inputs | self._corrected(inputs, outputs.log_probs.detach().flatten(), states)
        return super().compute_loss(lambda **_: outputs, corrected, return_outputs, num_items_in_batch)

    def _forward(self, model: Any, inputs: Batch) -> Any:
        """Run the forward pass that TRL's loss makes; return its output, and the last hidden states [1, N, H].

        TRL prepares what the model gets and computes the loss in one function, so that is called twice: it ends at the
        model first, and gets the output of this very pass then.
        """

        def run(**given: Any) -> None:
            raise _Forwarded(model(**given))

        try:
            with caught_states(self._policy) as states:
                super().compute_loss(run, inputs)
        except _Forwarded as forwarded:
            return forwarded.args[0], states[0].detach()

    @torch.no_grad()
    def _corrected(self, inputs: Batch, log_probs: Tensor, states: Tensor) -> Batch:
        """Return the advantages and proximal log-probs of a micro-batch, where TRL's loss looks for them."""
        selected = inputs["token_index"] >= 0
        index, rollout = inputs["token_index"][selected], inputs["old_log_probs"][selected]
        rollout = rollout.reshape(len(index), -1)  # [M, 1 + 2K]
        labels, top = inputs["shift_labels"][inputs["attention_mask"].bool()][index], rollout.shape[1] // 2
        if self._reads_z and not top:
            raise ConfigError(
                f"correction {self._correction_name} needs the top-k of every token, and the old_log_probs of the "
                f"rollout worker's samples are [T]; make them [T, 1 + 2K] as `ListingLoop` does, or use correction tis"
            )

        lengths = inputs["segment_id"][selected].bincount().tolist()  # TRL has one sample behind another
        columns = {
            "completion_ids": labels,
            "completion_mask": torch.ones_like(labels, dtype=torch.bool),
            "sampling_per_token_logps": rollout[:, 0],
            "jackpot_advantages": inputs["advantages"][selected],
            "jackpot_top_ids": rollout[:, 1 : 1 + top].long(),
            "jackpot_top_log_probs": rollout[:, 1 + top :],
        }

        batch = {name: pad_sequence(column.split(lengths), batch_first=True) for name, column in columns.items()}
        mask, no_prompt = batch["completion_mask"], labels.new_zeros(len(lengths), 0)
        batch |= {"prompt_ids": no_prompt, "prompt_mask": no_prompt, "jackpot_uniforms": self._uniforms(mask)}
        batch["jackpot_advantages"] = batch["jackpot_advantages"][:, 0]

        scores = self._score(batch, log_probs[index].float(), labels, states[0, index])
        measured, overlap = self._measured(batch, scores, scores)
        self._correct([(batch, measured, overlap)])

        blank = torch.zeros_like(inputs["advantages"])
        columns = {"advantages": batch["advantages"], "old_log_probs": measured.proximal_log_probs}
        return {name: blank.masked_scatter(selected, column[mask]) for name, column in columns.items()}

    def _score(self, batch: Batch, log_probs: Tensor, labels: Tensor, states: Tensor) -> OldLogProbs:
        """Return the policy's log-probs [M] of TRL, and Z by our head where the correction reads it.

        Raises:
            ModelError: the model computes more than its output layer, so that both have different log-probs.
        """
        tokens = token_batch(batch, loss_mask(batch), with_lists=True)
        empty = log_probs.new_zeros(len(log_probs), 0)
        if not self._reads_z:
            return self._scores(HeadOutput(log_probs, None, empty.long(), empty, empty), tokens, False)

        head = self._head(
            states,
            None,
            labels,
            temperature=self.temperature,
            num_top=tokens.top_ids.shape[-1],
            gather_ids=tokens.at_sampled(tokens.top_ids),
            only_log_probs=True,
        )
        if (apart := float((head.log_probs - log_probs).abs().mean())) > _APART:
            raise ModelError(
                f"TRL's log-probs of the policy are {apart:.3g} nats from those of its output layer: "
                f"{type(self._policy).__name__} computes more; use a correction that reads the ratio alone, such as tis"
            )
        return self._scores(HeadOutput(log_probs, None, head.top_ids, head.top_log_probs, head.gathered), tokens, True)
