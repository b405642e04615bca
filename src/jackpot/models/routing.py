"""A record of the experts that the tokens of a forward pass are sent to, in models that are mixtures of experts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ARGUMENTS = ("top_k_index", "router_indices")  # transformers' names of the argument with each token's experts


def expert_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of transformers that hold the experts of a layer, in the order of the layers."""
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


@contextmanager
def recorded_experts(model: nn.Module) -> Iterator[Callable[[], Tensor | None]]:
    """Record the experts of each token while the block runs, and yield a function that returns and empties the record.

    The function returns the experts of all tokens since its last call, [tokens, layers, experts of a token] int64, in
    ascending order; None for a model without experts. The tokens of each forward pass are in the order of its ids, row
    by row.
    """
    records: dict[nn.Module, list[Tensor]] = {layer: [] for layer in expert_layers(model)}  # a tensor of every pass

    def note(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Record each token's experts, which a layer gets by a name in `_ARGUMENTS` or else as its second argument."""
        experts = next((kwargs[name] for name in _ARGUMENTS if name in kwargs), None)
        records[layer].append((args[1] if experts is None else experts).sort(dim=-1).values)

    def take() -> Tensor | None:
        """Return the record and empty it."""
        experts = [torch.cat(record).flatten(0, -2) for record in records.values()]  # [tokens, experts of a token] each
        for record in records.values():
            record.clear()
        return torch.stack(experts, dim=1) if experts else None

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in records]
    try:
        yield take
    finally:
        for hook in hooks:
            hook.remove()
