"""Decode a batch with drafts: a second model proposes the next tokens of every row, and one forward pass verifies them.

Rows accept different numbers of drafts and so have different lengths. In the caches of both models a token stands in
the column of its position, where the next pass overwrites a rejected token; no query sees a column behind its position.

Shapes: `R` rows at the start, `N` of them unfinished, `k` most drafts of a row, `S` columns of a cache, `D` size of a
head, `V` vocabulary, `K` top log-probs.

Status: experimental.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config.engines import DraftConfig
from jackpot.core.prng import fold_in, key_tensor, uniforms
from jackpot.core.types import Rollout
from jackpot.models.device import upload
from jackpot.models.drafts import verify
from jackpot.models.forward import backbone, head_logits, output_layer
from jackpot.models.packed_attention import AttentionSet, layer_windows
from jackpot.models.sampling import Draw, sample_tokens, sampling_log_probs
from jackpot.objectives.kernels.topk import top_k as largest
from jackpot.rollout.engines.draft_counts import DraftCounts
from jackpot.rollout.engines.transformers.decoding import DecodingBatch, ModelRunner, pack_draw, threads_for
from jackpot.rollout.engines.transformers.kv_cache import BatchKVCache, RaggedKVLayer
from jackpot.rollout.engines.transformers.static_decoding import STATIC, layer_masks

_FIRST_DRAFTS, _MOST_DRAFTS = 4, 16  # drafts of a row at first and at most, where their number follows acceptance
_MAX_PROBS = 2**26  # most numbers in the distributions [.., V] that are verified at once


class RaggedRunner:
    """A model with a cache of rows of different lengths; it appends new tokens to each row at the row's end."""

    def __init__(self, model: PreTrainedModel, prompts: ModelRunner) -> None:
        """Take over the cache of a runner that has read the prompts, for a model that `decodes_statically`."""
        cache = prompts.cache
        assert isinstance(cache, BatchKVCache)  # every model that `decodes_statically` has such a cache
        self._model, self._windows, self._cache = model, layer_windows(model.config), cache
        self._layers: list[RaggedKVLayer] = []
        width, padding = prompts.length, prompts.length - prompts.positions  # [N]
        columns = (torch.arange(width, device=padding.device) + padding[:, None]).clamp(max=width - 1)  # [N, S]
        for index, layer in enumerate(cache.layers):
            keys, values = (
                states[: len(columns), :, :width].take_along_dim(columns[:, None, :, None], dim=2)
                for states in (layer.keys, layer.values)
            )
            self._layers.append(RaggedKVLayer(keys, values, prompts.max_length))
            cache.layers[index] = self._layers[-1]  # frees the old one

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run tokens and return the hidden states that predict the next tokens, [N, T, H].

        Args:
            tokens: [N, T].
            positions: [N, T], on the CPU.
        """
        length, positions = int(positions.max()) + 1, upload(positions, tokens.device)
        for layer in self._layers:
            layer.write_at(positions, length)
        first = torch.zeros_like(positions[:, :1])
        with AttentionSet(self._model.config.get_text_config(), STATIC):
            return backbone(self._model)(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                static_masks=layer_masks(first, positions, length, self._windows, self._model.dtype),
            ).last_hidden_state

    def reorder(self, order: Tensor) -> None:
        """Replace row i by the old row `order[i]`; rows not in `order` leave the batch."""
        self._cache.reorder_cache(order)


class DraftedBatch(DecodingBatch):
    """A `DecodingBatch` whose steps generate several tokens of a row, with drafts, from the second token on.

    Three separate uniforms, hashed from the seed and t, draw the draft of token t, decide on its acceptance, and draw
    the token in place of a rejected draft. How many tokens a row drafts depends on that row alone, so a response does
    not depend on its batch.
    """

    def __init__(self, *arguments: Any, draft: PreTrainedModel, settings: DraftConfig, counts: DraftCounts) -> None:
        """Make a batch from the arguments of a `DecodingBatch`.

        Args:
            draft: model that proposes tokens. `decodes_statically` must hold for this model and for the one that
                verifies.
            settings: how many tokens are drafted, and how drafts are accepted.
            counts: the counts of this batch's drafts are added to it.
        """
        super().__init__(*arguments)
        self._draft_model, self._lam, self._counts = draft, settings.lam, counts
        self._follows_acceptance = settings.tokens == "auto"
        wanted = _FIRST_DRAFTS if settings.tokens == "auto" else settings.tokens
        self._wanted = torch.full_like(self._limits, wanted)  # [R], number of drafts in the next step
        self._prompt_lengths = torch.tensor([len(request.prompt.token_ids) for request in self._all_requests])  # [R]
        seeds = [request.seed for request in self._all_requests]
        keys = [key_tensor([fold_in(use, seed) for seed in seeds]) for use in ("draft", "accept draft", "token")]
        self._streams = torch.stack(keys, dim=1)  # [R, 3], keys of the three streams of uniforms
        self._is_started = False

    @torch.no_grad()
    def step(self) -> list[Rollout]:
        """Generate the first token of every row, in later steps up to k + 1 tokens; return the finished rollouts."""
        with threads_for(len(self._rows) * self._model.num_parameters()):
            if not self._num_generated:
                self._counts.passes += len(self._rows)
                self._counts.tokens += len(self._rows)
                self._counts.read_alone += int(self._prompt_lengths.sum())
                self._counts.read_by_policy += int(self._prompt_lengths.sum())
                return super().step()
            if not self._is_started:
                self._start()
            room = self._limits[self._rows] - self._lengths[self._rows] - 1
            drafted = torch.minimum(self._wanted[self._rows], room)  # [N]
            records = self._verify(*self._propose(drafted)).cpu()  # the only transfer of a call to the CPU
        return self._take_verified(records, drafted)

    def _start(self) -> None:
        """Have the draft model read the prompts, and take over the KV caches of both models."""
        prompts = [request.prompt.token_ids for request in self._all_requests]
        reader = ModelRunner(self._draft_model, [prompts[row] for row in self._rows], self._runner.max_length)
        reader.prefill()
        self._last_position = min(self._runner.max_length - 1, self._max_position)
        self._policy, self._draft = RaggedRunner(self._model, self._runner), RaggedRunner(self._draft_model, reader)
        self._is_started = True
        del self._runner
        self._lengths = torch.ones_like(self._limits)  # [R], generated tokens
        self._tail = torch.stack(
            [torch.tensor([one[-1] for one in prompts]), self._records[:, 0, 0].long()], dim=1
        )  # [R, 2]
        self._counts.read_by_draft += int(self._prompt_lengths[self._rows].sum())

    def _reorder(self, order: Tensor) -> None:
        if not self._is_started:
            super()._reorder(order)
        elif len(order):
            for runner in (self._policy, self._draft):
                runner.reorder(upload(order, self._model.device))

    def _positions(self, first: int, last: int) -> Tensor:
        """Return the positions from `first` to `last`, counted from the last token of each row: [N, last - first + 1].

        A row that drafts fewer tokens than others gets positions beyond its end, whose results are not used.
        """
        ends = self._prompt_lengths[self._rows, None] + self._lengths[self._rows, None] - 1
        return (ends + torch.arange(first, last + 1)).clamp(max=self._last_position)

    def _uniforms(self, stream: int, first: int, last: int) -> Tensor:
        """Return the uniforms of a stream for the tokens from `first` to `last`: [N, last - first + 1].

        Token 0 of a row is the first that has not been generated.
        """
        tokens = self._lengths[self._rows, None] + torch.arange(first, last + 1)
        return upload(uniforms(self._streams[self._rows, stream, None], tokens), self._model.device)

    def _log_probs(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        settings = self._settings
        return sampling_log_probs(head_logits(model, hidden), settings.temperature, settings.top_k, settings.top_p)

    def _propose(self, drafted: Tensor) -> tuple[Tensor, Tensor]:
        """Draft tokens with the draft model, and return them with the distributions that they were drawn from.

        First the draft model reads the last two tokens of each row, since its cache lacks a token after a pass that
        accepted all drafts.

        Args:
            drafted: [N], the number of tokens that each row drafts, at most k.

        Returns:
            Tokens [N, k + 1] and distributions [N, k + 1, V]. A distribution is 0 where a row drafts nothing; no row
            drafts in the last column.
        """
        model, device = self._draft_model, self._model.device
        tokens = upload(self._tail[self._rows], device)
        nothing = torch.zeros(len(tokens), output_layer(model).out_features, device=device)
        drafts, probs = [torch.zeros_like(tokens[:, :1])], [nothing]
        for index in range(int(drafted.max())):
            hidden = self._draft(tokens, self._positions(index - (index == 0), index))[:, -1]
            distribution = self._log_probs(model, hidden).exp_()
            tokens = sample_tokens(distribution, self._uniforms(0, index, index)[:, 0])[:, None]
            is_drafted = upload((drafted > index)[:, None], device)
            drafts.insert(-1, tokens)
            probs.insert(-1, torch.where(is_drafted, distribution, nothing))
        return torch.cat(drafts, dim=1), torch.stack(probs, dim=1)

    def _verify(self, drafts: Tensor, probs: Tensor) -> Tensor:
        """Decide on every draft as if all drafts before it were accepted.

        Args:
            drafts, probs: as returned by `_propose`.

        Returns:
            [N, k + 1, 3 + 2K]: for each column a packed draw (`pack_draw`), and last 1 where the draw is the draft.
        """
        last = drafts.shape[1] - 1
        tokens = torch.cat([upload(self._tail[self._rows, 1:], drafts.device), drafts[:, :-1]], dim=1)
        hidden = self._policy(tokens, self._positions(0, last))
        random = torch.stack([self._uniforms(1, 0, last), self._uniforms(2, 0, last)], dim=-1)  # [N, k + 1, 2]
        flat = [
            one.flatten(0, 1).split(max(1, _MAX_PROBS // probs.shape[-1])) for one in (hidden, probs, drafts, random)
        ]
        return torch.cat([self._judge(*parts) for parts in zip(*flat, strict=True)]).unflatten(0, drafts.shape)

    def _judge(self, hidden: Tensor, probs: Tensor, drafts: Tensor, random: Tensor) -> Tensor:
        """Decide as `_verify` on some columns of some rows, flattened: returns [M, 3 + 2K] for M columns."""
        verdict = verify(self._log_probs(self._model, hidden), probs, drafts, random, self._lam)
        tokens = torch.where(verdict.accepted, drafts, verdict.replacements)
        top = largest(verdict.log_probs, self._settings.num_top_log_probs)
        log_probs = verdict.log_probs.gather(1, tokens[:, None])[:, 0]
        return torch.cat([pack_draw(Draw(tokens, log_probs, top[1], top[0])), verdict.accepted[:, None].int()], dim=1)

    def _take_verified(self, records: Tensor, drafted: Tensor) -> list[Rollout]:
        """Store each row's tokens up to the first that is not a draft; return the rollouts of finished rows.

        Args:
            records: as returned by `_verify`, on the CPU.
            drafted: [N], the number of tokens that each row drafted.
        """
        rows, positions = self._rows, torch.arange(records.shape[1])
        tokens, accepted = records[..., 0].long(), records[..., -1].cumprod(dim=1).sum(dim=1)
        is_stop = (self._stops[rows, None] == tokens[..., None]).any(dim=-1) & (positions <= accepted[:, None])
        has_stop = is_stop.any(dim=1)
        taken = torch.where(has_stop, is_stop.int().argmax(dim=1), accepted) + 1  # [N]

        row, position = (positions < taken[:, None]).nonzero(as_tuple=True)
        draws, at = records[row, position, :-1], self._lengths[rows[row]] + position
        if not (is_finite := draws[:, 1].view(torch.float32).isfinite()).all():
            first = int(is_finite.int().argmin())
            raise self._no_distribution(int(rows[row[first]]), int(at[first]))

        self._records[rows[row], at] = draws
        read = torch.cat([self._tail[rows, 1:], tokens], dim=1)
        self._tail[rows] = read.gather(1, taken[:, None] - torch.tensor([1, 0]))
        self._lengths[rows] += taken

        self._count(drafted, accepted, taken)
        if self._follows_acceptance:
            grown = torch.where(accepted == drafted, drafted + 2, drafted - 1)
            self._wanted[rows] = grown.clamp(1, _MOST_DRAFTS)

        is_finished = has_stop | (self._limits[rows] == self._lengths[rows])
        finished: list[Rollout] = []
        for length in self._lengths[rows[is_finished]].unique().tolist():
            ended = is_finished & (self._lengths[rows] == length)
            finished += self._rollouts(rows[ended], length, has_stop[ended])

        if finished:
            self._remove(is_finished)
        return finished

    def _count(self, drafted: Tensor, accepted: Tensor, taken: Tensor) -> None:
        """Count one pass of the policy. All arguments are [N]: drafts, accepted drafts, and tokens kept of a row."""
        counts, verifies = self._counts, drafted > 0
        counts.tokens += int(taken.sum())
        counts.passes += len(taken)
        counts.verifications += int(verifies.sum())
        counts.verified += int(taken[verifies].sum())
        counts.judged += int(torch.minimum(accepted + 1, drafted).sum())
        counts.accepted += int(accepted.sum())
        counts.read_alone += int(taken.sum())
        counts.read_by_policy += int(drafted.sum()) + len(drafted)
        counts.read_by_draft += int(drafted[verifies].sum() + verifies.sum())
