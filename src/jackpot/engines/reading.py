"""What the rows of a decoding batch have read: their cache, positions and padding. Layer 3.

Shapes: `R` rows at the start, `N` of them left, `U` unique prompts of `P` tokens, `S` tokens read, `H` hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.engines.attention import TAKE_MASKS
from jackpot.engines.cache import RowsCache, make_cache
from jackpot.models.forward import backbone, pad_tokens, position_ids

# Architectures that do nothing with an attention mask but hand it to attention, so that one that is ready serves them.
_TAKE_READY_MASKS = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
    }
)


class Reading:
    """One forward pass a call. Prompts are padded on the left, so that every row writes to the same column."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], num_new: int) -> None:
        """
        Args:
            prompts: of each row. One that several rows share is read once.
            num_new: tokens, the most that any row will read after its prompt.
        """
        self._model, self._prompts = model, prompts
        self._longest = max(map(len, prompts)) + num_new
        self._cache = make_cache(model.config, self._longest)

    def read_prompts(self) -> Tensor:
        """Comes first. The hidden states that predict the first tokens: [R, H]."""
        unique = {prompt: index for index, prompt in enumerate(dict.fromkeys(self._prompts))}
        device = self._model.device
        ids, mask = pad_tokens(list(unique), "left", device)  # [U, P]
        hidden = self._forward(ids, mask, position_ids(mask))[:, -1]
        index = torch.tensor([unique[prompt] for prompt in self._prompts], device=device)
        self._cache.reorder_cache(index)
        self._length = ids.shape[1]
        self._positions = mask.sum(dim=1)[index]  # [N], of the token that is read next
        self._exists = torch.ones(len(index), self._longest, dtype=torch.bool, device=device)
        self._exists[:, : self._length] = mask[index]
        self._is_padded = not mask.all()
        self._bias = self._ready_mask() if self._is_padded else None
        return hidden[index]

    def read(self, tokens: Tensor) -> Tensor:
        """Read one more token in every row, [N]. The hidden states that predict the next: [N, H]."""
        self._length += 1
        hidden = self._forward(tokens[:, None], self._mask(), self._positions[:, None])
        self._positions = self._positions + 1
        return hidden[:, -1]

    def keep(self, order: Tensor) -> None:
        """Row i becomes what row `order[i]` was; rows not named leave. [N] int64, on the device of the model."""
        self._cache.reorder_cache(order)
        self._positions, self._exists = self._positions[order], self._exists[order]
        self._bias = None if self._bias is None else self._bias[order]

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        return backbone(self._model)(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self._cache, use_cache=True
        ).last_hidden_state

    def _mask(self) -> Tensor | None:
        """What the new token of each row sees; None is everything, up to a window.

        Of one with two dimensions transformers makes its own, at every step, and knows where windows end. It takes one
        with four as it is.
        """
        if not isinstance(self._cache, RowsCache):
            return self._exists[:, : self._length]
        if not self._is_padded:
            return None
        window = self._cache.window
        if self._bias is None or (window is not None and self._length > window):
            return self._exists[:, : self._length]
        return self._bias[..., : self._length]

    def _ready_mask(self) -> Tensor | None:
        """What attention adds to its scores, [N, 1, 1, S]: 0 or the lowest number; None where it must not be given."""
        config, dtype = self._model.config, self._model.dtype
        if config.model_type not in _TAKE_READY_MASKS or config._attn_implementation not in TAKE_MASKS:
            return None
        bias = torch.zeros(self._exists.shape, dtype=dtype, device=self._exists.device)
        return bias.masked_fill_(~self._exists, torch.finfo(dtype).min)[:, None, None]
