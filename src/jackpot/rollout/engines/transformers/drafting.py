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
from jackpot.models.forward import head_logits, output_layer
from jackpot.models.packed_attention import layer_windows
from jackpot.models.sampling import Draw, sample_tokens, sampling_log_probs
from jackpot.objectives.kernels.topk import top_k as largest
from jackpot.rollout.engines.draft_counts import DraftCounts
from jackpot.rollout.engines.transformers.decoding import DecodingBatch, ModelRunner, pack_draw, threads_for
from jackpot.rollout.engines.transformers.kv_cache import BatchKVCache, RaggedKVLayer
from jackpot.rollout.engines.transformers.static_decoding import layer_masks, masked_forward

_FIRST_DRAFTS, _MOST_DRAFTS = 4, 16  # with `tokens: auto`, drafts of a row in its first step, and the most in any step
_MAX_PROBS = 2**26  # largest number of probabilities, V for each draft, that are verified at once
# Streams of uniform random numbers: one draws drafts, one decides on their acceptance, and one draws all other tokens.
_DRAFT, _ACCEPT, _OTHER = range(3)


class RaggedRunner:
    """A model with a cache of rows of different lengths; a call appends new tokens at the end of each row."""

    def __init__(self, model: PreTrainedModel, prefilled: ModelRunner) -> None:
        """Take over the cache of `prefilled`, which has read the prompts of a model that `decodes_statically`."""
        cache = prefilled.cache
        assert isinstance(cache, BatchKVCache)  # every model that `decodes_statically` has such a cache
        self._model, self.cache = model, cache
        self._windows = layer_windows(model.config)
        self._layers: list[RaggedKVLayer] = []

        # Prompts are padded on the left: move the tokens of each row to the columns of their positions.
        width = prefilled.length  # columns of the prompts, padding included
        padding = width - prefilled.positions  # [N], columns of padding before each row's prompt
        # [N, width], old column of the token at each position; behind a row's end any column will do
        columns = (torch.arange(width, device=padding.device) + padding[:, None]).clamp(max=width - 1)
        for index, layer in enumerate(cache.layers):  # N rows and `width` columns of its buffers are in use
            keys, values = (
                states[: len(columns), :, :width].take_along_dim(columns[:, None, :, None], dim=2)
                for states in (layer.keys, layer.values)
            )
            self._layers.append(RaggedKVLayer(keys, values, prefilled.max_length))
            cache.layers[index] = self._layers[-1]  # frees the old one

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run the model on T new tokens of each row; return the hidden states that predict the next tokens, [N, T, H].

        Args:
            tokens: [N, T] token ids.
            positions: [N, T], position of each token in its row, on the CPU.
        """
        length, positions = int(positions.max()) + 1, upload(positions, tokens.device)
        for layer in self._layers:
            layer.write_at(positions, length)

        first = torch.zeros_like(positions[:, :1])  # a query sees the columns from 0 to its own position
        masks = layer_masks(first, positions, length, self._windows, self._model.dtype)
        return masked_forward(self._model, tokens, positions, self.cache, masks)


class DraftedBatch(DecodingBatch):
    """A `DecodingBatch` whose steps generate several tokens of a row, with drafts, from the second token on.

    Three separate uniforms for each token, hashed from the request's seed and the token's index in the response, draw
    the draft, decide on its acceptance, and draw the token where no draft is accepted. How many tokens a row drafts
    depends on that row alone, so a response does not depend on its batch.
    """

    def __init__(self, *arguments: Any, draft: PreTrainedModel, settings: DraftConfig, counts: DraftCounts) -> None:
        """Make a batch from the arguments of a `DecodingBatch`.

        Args:
            draft: model that proposes tokens. `decodes_statically` must hold for this model and for the one that
                verifies.
            settings: how many tokens are drafted, and how drafts are accepted.
            counts: counts of drafts, to which this batch adds its own.
        """
        super().__init__(*arguments)
        self._draft_model, self._lam = draft, settings.lam  # below 1 more drafts pass, which changes the distribution
        self._counts = counts
        self._follows_acceptance = settings.tokens == "auto"  # True: a row that accepts all its drafts gets more
        num_drafts = _FIRST_DRAFTS if settings.tokens == "auto" else settings.tokens
        self._num_drafts = torch.full_like(self._limits, num_drafts)  # [R], number of drafts in the next step

        self._prompt_lengths = torch.tensor([len(request.prompt.token_ids) for request in self._all_requests])  # [R]
        # [R, 3], keys from which the uniforms of the streams _DRAFT, _ACCEPT and _OTHER are made
        uses = ("draft", "accept draft", "token")
        self._streams = torch.stack(
            [key_tensor([fold_in(use, request.seed) for request in self._all_requests]) for use in uses], dim=1
        )
        self._is_started = False  # True once `_start` has taken over the caches, before the second step

    @torch.no_grad()
    def step(self) -> list[Rollout]:
        """Generate the first token of every row or, in later steps, up to k + 1 tokens, of which k can be drafts.

        Return the rollouts of the rows that finish.
        """
        with threads_for(len(self._rows) * self._model.num_parameters()):
            # The first step reads the prompts, and has no drafts.
            if not self._num_generated:
                prompt_tokens = int(self._prompt_lengths.sum())
                self._counts += DraftCounts(
                    tokens=len(self._rows),
                    passes=len(self._rows),
                    read_alone=prompt_tokens,
                    read_by_policy=prompt_tokens,
                )
                return super().step()

            if not self._is_started:
                self._start()
            # A pass gives one token beyond the accepted drafts, so a row drafts one token less than its limit allows.
            room = self._limits[self._rows] - self._lengths[self._rows] - 1
            drafted = torch.minimum(self._num_drafts[self._rows], room)  # [N]
            records = self._verify(*self._propose(drafted)).cpu()  # the only transfer of a call to the CPU
        return self._take_verified(records, drafted)

    def _start(self) -> None:
        """Have the draft model read the prompts, and take over the KV caches of both models."""
        prompts = [request.prompt.token_ids for request in self._all_requests]
        # `max_length` is an upper bound of the new tokens; the cache grows only as needed.
        reader = ModelRunner(self._draft_model, [prompts[row] for row in self._rows], self._runner.max_length)
        reader.prefill()
        # Largest position in the caches; a row's drafts beyond it are not used.
        self._last_position = min(self._runner.max_length - 1, self._max_position)
        self._policy = RaggedRunner(self._model, self._runner)
        self._draft = RaggedRunner(self._draft_model, reader)
        self._is_started = True
        del self._runner

        self._lengths = torch.ones_like(self._limits)  # [R], number of generated tokens
        prompt_ends = torch.tensor([prompt[-1] for prompt in prompts])
        first_tokens = self._records[:, 0, 0].long()  # a record begins with its token
        self._tail = torch.stack([prompt_ends, first_tokens], dim=1)  # [R, 2], the last two tokens
        self._counts.read_by_draft += int(self._prompt_lengths[self._rows].sum())

    def _reorder(self, order: Tensor) -> None:
        """Reorder the rows as `DecodingBatch._reorder` does; once drafts have started, in the caches of both models."""
        if not self._is_started:
            super()._reorder(order)
        elif len(order):
            for runner in (self._policy, self._draft):
                runner.cache.reorder_cache(upload(order, self._model.device))

    def _positions(self, first: int, last: int) -> Tensor:
        """Return the positions from `first` to `last` tokens after each row's last token: [N, last - first + 1].

        A row that drafts fewer tokens than others gets positions beyond its end, whose results are not used.
        """
        ends = self._prompt_lengths[self._rows, None] + self._lengths[self._rows, None] - 1
        return (ends + torch.arange(first, last + 1)).clamp(max=self._last_position)

    def _uniforms(self, stream: int, first: int, last: int) -> Tensor:
        """Return the uniform random numbers for the tokens from `first` to `last` of each row, [N, last - first + 1].

        Token 0 of a row is the first that has not been generated. `stream` is _DRAFT, _ACCEPT or _OTHER.
        """
        tokens = self._lengths[self._rows, None] + torch.arange(first, last + 1)
        return upload(uniforms(self._streams[self._rows, stream, None], tokens), self._model.device)

    def _log_probs(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Return the log-probs [..., V] that hidden states [..., H] give, after temperature, top-k and top-p."""
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
        # Each list has one tensor a column. It begins with the last column, which has no drafts; others go before it.
        drafts, probs = [torch.zeros_like(tokens[:, :1])], [nothing]

        for index in range(int(drafted.max())):
            # The first pass reads the last two tokens of each row, so its positions begin one before the last token.
            # Every other pass reads the newest draft.
            first = -1 if index == 0 else index
            hidden = self._draft(tokens, self._positions(first, last=index))[:, -1]
            distribution = self._log_probs(model, hidden).exp_()
            tokens = sample_tokens(distribution, self._uniforms(_DRAFT, first=index, last=index)[:, 0])[:, None]
            is_drafted = upload((drafted > index)[:, None], device)
            drafts.insert(-1, tokens)
            probs.insert(-1, torch.where(is_drafted, distribution, nothing))

        return torch.cat(drafts, dim=1), torch.stack(probs, dim=1)

    def _verify(self, drafts: Tensor, probs: Tensor) -> Tensor:
        """Decide on every draft as if all drafts before it were accepted.

        Args:
            drafts, probs: as returned by `_propose`.

        Returns:
            [N, k + 1, 3 + 2K], with K top tokens of each draw: for each column a packed draw (`pack_draw`, 2 + 2K
            numbers) and then 1 where the draft was accepted, so that the draft is the token of the draw, else 0.
        """
        last = drafts.shape[1] - 1
        # The policy reads the last token of each row (`_tail` has the last two) and then its k drafts. The last column
        # of `drafts` holds none: it stands for the token after them.
        tokens = torch.cat([upload(self._tail[self._rows, 1:], drafts.device), drafts[:, :-1]], dim=1)
        hidden = self._policy(tokens, self._positions(first=0, last=last))
        # [N, k + 1, 2], a uniform that decides on the draft, and one that draws another token
        random = torch.stack([self._uniforms(use, first=0, last=last) for use in (_ACCEPT, _OTHER)], dim=-1)

        size = max(1, _MAX_PROBS // probs.shape[-1])  # (row, column) pairs that are judged at once
        pieces = (tensor.flatten(0, 1).split(size) for tensor in (hidden, probs, drafts, random))
        judged = [self._judge(*piece) for piece in zip(*pieces, strict=True)]
        return torch.cat(judged).unflatten(0, drafts.shape)

    def _judge(self, hidden: Tensor, probs: Tensor, drafts: Tensor, random: Tensor) -> Tensor:
        """Decide on M drafts of any rows and columns; return for each the 3 + 2K numbers that `_verify` describes.

        `hidden` [M, H] are states of the policy, `probs` [M, V] distributions of the draft model, `random` [M, 2] the
        uniforms of `_verify`.
        """
        verdict = verify(self._log_probs(self._model, hidden), probs, drafts, random, self._lam)
        tokens = torch.where(verdict.accepted, drafts, verdict.replacements)
        log_probs = verdict.log_probs.gather(1, tokens[:, None])[:, 0]
        top_log_probs, top_ids = largest(verdict.log_probs, self._settings.num_top_log_probs)
        draw = Draw(tokens=tokens, log_probs=log_probs, top_ids=top_ids, top_log_probs=top_log_probs)
        return torch.cat([pack_draw(draw), verdict.accepted[:, None].int()], dim=1)

    def _take_verified(self, records: Tensor, drafted: Tensor) -> list[Rollout]:
        """Store each row's accepted drafts and the token after them; return the rollouts of rows that finish.

        Args:
            records: as returned by `_verify`, on the CPU.
            drafted: [N], the number of tokens that each row drafted.
        """
        # A row gets its first `accepted` drafts, all before the first that is rejected, and then the token drawn in the
        # column after these drafts. A stop token among them ends the row earlier.
        rows, columns = self._rows, torch.arange(records.shape[1])
        tokens = records[..., 0].long()  # [N, k + 1]
        accepted = records[..., -1].cumprod(dim=1).sum(dim=1)  # [N], number of accepted drafts
        is_drawn = columns <= accepted[:, None]  # [N, k + 1], True at the accepted drafts and the token after them
        is_stop = (self._stops[rows, None] == tokens[..., None]).any(dim=-1) & is_drawn
        has_stop = is_stop.any(dim=1)
        num_new = torch.where(has_stop, is_stop.int().argmax(dim=1), accepted) + 1  # [N], new tokens of a row

        # All new tokens of all rows in one list: the row and column of each in `records`, its draw, and the request and
        # the index in the response under which the draw is stored.
        row, column = (columns < num_new[:, None]).nonzero(as_tuple=True)
        draws = records[row, column, :-1]  # without the last number, which says whether the draft was accepted
        request = rows[row]
        token_index = self._lengths[request] + column
        if not (is_finite := draws[:, 1].view(torch.float32).isfinite()).all():  # index 1 of a draw is its log-prob
            first = int(is_finite.int().argmin())  # the first token whose log-prob is not finite
            raise self._no_distribution(int(request[first]), int(token_index[first]))

        self._records[request, token_index] = draws
        # `newest` has the last token before this pass in column 0, then the columns of `tokens`. So the last two tokens
        # of each row are now in its columns `num_new` - 1 and `num_new`.
        newest = torch.cat([self._tail[rows, 1:], tokens], dim=1)
        self._tail[rows] = newest.gather(1, num_new[:, None] - torch.tensor([1, 0]))
        self._lengths[rows] += num_new

        self._count(drafted, accepted, num_new)
        if self._follows_acceptance:  # a row whose drafts were all accepted drafts two more next time, others one less
            num_drafts = torch.where(accepted == drafted, drafted + 2, drafted - 1)
            self._num_drafts[rows] = num_drafts.clamp(1, _MOST_DRAFTS)

        is_finished = has_stop | (self._limits[rows] == self._lengths[rows])
        finished: list[Rollout] = []
        # `_rollouts` takes rows of one length.
        for length in self._lengths[rows[is_finished]].unique().tolist():
            ended = is_finished & (self._lengths[rows] == length)
            finished += self._rollouts(rows[ended], length, has_stop[ended])

        if finished:
            self._remove(is_finished)
        return finished

    def _count(self, drafted: Tensor, accepted: Tensor, num_new: Tensor) -> None:
        """Count one pass of the policy in `DraftCounts`: [N] drafts, accepted drafts and new tokens of each row."""
        verifies = drafted > 0  # [N], True for rows that have drafts

        self._counts += DraftCounts(
            tokens=int(num_new.sum()),
            passes=len(num_new),
            verifications=int(verifies.sum()),
            verified=int(num_new[verifies].sum()),
            # The accepted drafts and, if not all were accepted, the one that was rejected.
            judged=int(torch.minimum(accepted + 1, drafted).sum()),
            accepted=int(accepted.sum()),
            read_alone=int(num_new.sum()),  # what the policy would read without drafts
            # The policy reads each row's newest token and drafts. Where a row drafts, the draft model reads the last
            # two tokens and all drafts but the last: one token more than there are drafts.
            read_by_policy=int(drafted.sum()) + len(drafted),
            read_by_draft=int(drafted[verifies].sum() + verifies.sum()),
        )
