"""Decode a batch with fixed shapes, so that a GPU replays a step as a CUDA graph, and the CPU waits once in 8 steps.

All tensors that a step reads and writes stay at their addresses: tokens, the column of the cache, keys and values, the
newest draws. Attention reads all columns of the cache, and a mask hides those that are not written yet. Steps go on to
compute a finished row, whose tokens are ignored, until half of the rows have finished; then, or when the cache is full,
the unfinished rows move to new memory and the step is captured again. On a CPU the step runs without a graph.

Status: experimental. On one H200 a step has taken twelve times as long as reading weights and cache once would take.

Shapes: `N` rows, `n` of them unfinished, `S` columns of the cache, `D` size of a head, `K` top log-probs.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from jackpot.core.prng import uniforms
from jackpot.core.types import Rollout
from jackpot.models.device import upload
from jackpot.models.forward import backbone, can_pack, head_logits
from jackpot.models.packed_attention import AttentionSet, layer_windows
from jackpot.models.sampling import draw_tokens
from jackpot.rollout.engines.transformers.attention import GROUPED, grouped_attention
from jackpot.rollout.engines.transformers.decoding import DecodingBatch, pack_draw, threads_for
from jackpot.rollout.engines.transformers.kv_cache import BatchKVCache, RaggedKVLayer, grown_length

STEPS = 8  # number of decoding steps between two waits for the device
_FEW_ROWS = 8  # batches of at most so many rows keep finished rows: most of a step's time goes to reading the weights
STATIC = "jackpot_static"  # value of `config._attn_implementation`, for which transformers makes no attention mask

Step = Callable[[], None]


def static_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    static_masks: list[Tensor],
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute `grouped_attention` with that one of `static_masks` which belongs to the module's layer.

    Args:
        query, key, value: as in `grouped_attention`.
        static_masks: the masks of all layers, from `layer_masks`; `attention_mask` is not read.
    """
    options.pop("sliding_window", None)  # the mask contains the window
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]  torch has no types of a module's attributes
    return grouped_attention(module, query, key, value, static_masks[layer], **options)


AttentionInterface.register(STATIC, static_attention)


def layer_masks(
    first: Tensor, last: Tensor, columns: int, windows: list[int | None], dtype: torch.dtype
) -> list[Tensor]:
    """Return for each layer the mask that attention adds to its scores, [N, 1, T, S]: 0, or -inf for hidden keys.

    Args:
        first, last: first and last column whose key a query sees, [N or 1, T or 1].
        columns: S, the number of columns.
        windows: sliding window of each layer, from `layer_windows`, which hides keys too; layers with equal windows
            share one tensor.
    """
    positions, last = torch.arange(columns, device=last.device), last[..., None]
    hidden = (positions < first[..., None]) | (positions > last)  # [N or 1, T or 1, S]

    by_window: dict[int | None, Tensor] = {}
    for window in set(windows):
        is_hidden = hidden if window is None else hidden | (positions <= last - window)
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device).masked_fill_(is_hidden, -torch.inf)
        by_window[window] = mask[:, None]
    return [by_window[window] for window in windows]


def masked_forward(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, cache: BatchKVCache, masks: list[Tensor]
) -> Tensor:
    """Run tokens through a model whose attention adds `masks` to its scores; return the last hidden states, [N, T, H].

    Args:
        tokens, positions: [N, T].
        masks: the masks of all layers, from `layer_masks`.
    """
    with AttentionSet(model.config.get_text_config(), STATIC):  # the model calls `static_attention` meanwhile
        return backbone(model)(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, static_masks=masks
        ).last_hidden_state


def decodes_statically(model: PreTrainedModel) -> bool:
    """Tell whether `StaticBatch` can decode a model: it needs `grouped_attention` and one cached key for each token."""
    return model.config._attn_implementation == GROUPED and can_pack(model)


def decoding_event(
    shapes: Literal["static", "growing"], cuda_graphs: bool, obstacle: str | None = None
) -> dict[str, Any]:
    """Return the event that reports whether an engine decodes with fixed shapes, and whether with CUDA graphs.

    Args:
        shapes: "static" for the fixed shapes of `StaticBatch`, "growing" for those of other batches.
        obstacle: why the engine does not decode with fixed shapes and CUDA graphs; None: no reason is given.
    """
    event = {"event": "decoding", "shapes": shapes, "cuda_graphs": cuda_graphs}
    return event | ({"why": obstacle} if obstacle else {})


class GraphCapture:
    """A function that captures a decoding step as a CUDA graph, and returns a function that replays the graph.

    Without a GPU, or after a capture has failed, it returns the step itself, unchanged.
    """

    def __init__(self, device_type: str, events: list[dict[str, Any]]) -> None:
        """Prepare captures on a device.

        Args:
            events: list to which events about captures are added.
        """
        self._captures = device_type == "cuda"  # whether steps are captured; False also after a failure
        self._events = events
        events.append(decoding_event("static", cuda_graphs=self._captures))

    def __call__(self, step: Step) -> Step:
        """Return a function that does what `step` does, in the same memory; it is `step` itself if nothing is captured.

        Args:
            step: step of decoding, which has run once before.
        """
        if not self._captures:
            return step

        pool = None
        try:
            graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            stream = torch.cuda.stream(torch.cuda.current_stream())  # restores the stream that a failed capture changes
            with stream, torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                step()

        except RuntimeError as error:
            if pool is not None:
                with suppress(RuntimeError):  # only this frees the pool before torch 2.12 (pytorch/pytorch#180395)
                    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)  # pyright: ignore[reportPrivateUsage]
            self._captures = False
            self._events.append(decoding_event("static", cuda_graphs=False, obstacle=str(error).split("\n")[0]))
            return step
        return graph.replay


class StaticKVLayer(RaggedKVLayer):
    """The keys and values of one layer, [N, heads, S, D]; a step writes one column, whose index a tensor holds."""

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        """Take over keys and values; `column` [1] is the index of the column that the next step writes."""
        super().__init__(keys, values, max_length=keys.shape[2])
        self._column = column

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write new keys and values, [N, heads, 1, D], to the column of this step; return those of all columns."""
        self.keys.index_copy_(2, self._column, key_states)
        self.values.index_copy_(2, self._column, value_states)
        return self.keys, self.values


class StaticBatch(DecodingBatch):
    """A `DecodingBatch` of fixed shapes; each `step` but the first generates up to `STEPS` tokens of every row."""

    def __init__(self, *arguments: Any, capture: GraphCapture) -> None:
        """Make a batch from the arguments of a `DecodingBatch`; `decodes_statically` must hold for the model."""
        super().__init__(*arguments)
        self._capture = capture
        self._windows = layer_windows(self._model.config)
        self._is_started = False  # True once `_start` has taken over the cache
        self._run: Step | None = None  # a step of the current shapes, captured; None before it has run once

    @torch.no_grad()
    def step(self) -> list[Rollout]:
        """Generate up to `STEPS` tokens in every row; remove the rows that finish and return their rollouts."""
        if not self._num_generated:  # the first step, which reads the prompts
            return super().step()

        # The number of rows counts finished ones too, which stay until `_move`.
        num_rows, num_unfinished = len(self._last_tokens), len(self._rows)
        if not self._is_started:
            self._start()
        # Get more room if the cache is full, or drop finished rows where at least half of the rows have finished.
        elif self._length == self._room or (num_rows > _FEW_ROWS and num_rows >= 2 * num_unfinished):
            self._move()

        longest = int(self._limits[self._rows].max()) - self._num_generated  # most tokens that a row still needs
        count = min(STEPS, longest, self._room - self._length)
        # On new memory the first step runs uncaptured; then the step is captured as `_run`, which later steps call.
        with threads_for(len(self._last_tokens) * self._model.num_parameters()):
            for _ in range(count):
                if self._run is None:
                    self._advance()
                    self._run = self._capture(self._advance)
                else:
                    self._run()
        self._length += count

        records = self._draws[-count:].cpu()  # [count, N, 2 + 2K], with K top tokens; the only wait for the device
        rows, finished = self._rows, []
        self._check_finite(records[:, self._slots])

        # `_slots` has the row of each unfinished request; `_take` drops the requests that finish.
        try:
            for drawn in records:
                finished += self._take(drawn[self._slots]) if len(self._rows) else []  # []: all have finished
        except BaseException:
            self._rows = rows  # so that `requests` has all rows of this call, which are generated once more
            raise
        return finished

    def _reorder(self, order: Tensor) -> None:
        """Reorder the requests: as `DecodingBatch` does or, after `_start`, in `_slots` alone, while no row moves."""
        if not self._is_started:
            super()._reorder(order)
        else:
            self._slots = self._slots[order]

    def _start(self) -> None:
        """Take over the KV cache with the prompts, and make the tensors that all steps read and write."""
        runner, cache = self._runner, self._runner.cache
        assert isinstance(cache, BatchKVCache)  # every model that `decodes_statically` has such a cache
        self._cache, self._max_length = cache, runner.max_length
        self._prompt_length = runner.length  # number of columns of the prompts
        self._length = runner.length  # number of columns that are written
        self._room = runner.length  # number of all columns
        self._padding = runner.length - runner.positions  # [N], columns of padding before each row's prompt
        self._column = torch.full_like(runner.positions[:1], runner.length)  # [1], the column that the next step writes
        self._slots = torch.arange(len(self._rows))  # [n], on the CPU: row of each unfinished request
        self._is_started = True
        del self._runner
        self._move()  # moves the cache to memory with room for new tokens, and makes `_draws`

    def _move(self) -> None:
        """Move the unfinished rows to new memory, with room for more tokens where the cache is full."""
        device, room = self._column.device, self._room
        order = upload(self._slots, device)  # the unfinished rows
        if self._length == room:
            # Rounded up to a multiple of 16, since kernels read masks in pieces of 16.
            room = -(-grown_length(room, self._max_length) // 16) * 16

        self._run = None  # frees the memory of the last graph
        for index, layer in enumerate(self._cache.layers):
            keys, values = (self._moved(states, order, room) for states in (layer.keys, layer.values))
            self._cache.layers[index] = StaticKVLayer(keys, values, self._column)

        self._last_tokens, self._keys = self._last_tokens[order], self._keys[order]
        self._padding, self._room = self._padding[order], room
        self._slots = torch.arange(len(order))

        # For each of the newest steps, the draw of every row (token, log-prob and top-k list), packed by `pack_draw`.
        self._draws = torch.empty(STEPS, len(order), self._records.shape[-1], dtype=torch.int32, device=device)

    def _moved(self, states: Tensor, order: Tensor, room: int) -> Tensor:
        """Return the rows `order` of keys or values, [N, heads, S, D], in new memory for `room` columns."""
        buffer = states.new_zeros(len(order), states.shape[1], room, states.shape[3])  # hidden columns must be finite
        buffer[:, :, : self._length] = states[:, :, : self._length].index_select(0, order)
        return buffer

    def _advance(self) -> None:
        """Generate one token in every row; read and write in place and never wait for the device, as captures need."""
        column, model = self._column, self._model  # [1], the column that this step writes
        positions = (column - self._padding).clamp(max=self._max_position)  # finished rows may run past the context

        masks = layer_masks(self._padding[:, None], column[None], self._room, self._windows, model.dtype)
        states = masked_forward(model, self._last_tokens[:, None], positions[:, None], self._cache, masks)

        # The token that is drawn has the index column + 1 - prompt length in its response.
        random = uniforms(self._keys, column + (1 - self._prompt_length))
        draw = draw_tokens(head_logits(model, states[:, -1]), random, **self._settings._asdict())
        self._last_tokens.copy_(draw.tokens)
        self._draws.copy_(torch.cat([self._draws[1:], pack_draw(draw)[None]]))  # the oldest draw is dropped
        column.add_(1)
