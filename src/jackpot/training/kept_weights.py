"""A copy of a model's weights in the host's memory, and the model computing with it for a moment.

Rollouts that were generated ahead are checked by the weights that generated them, when the model has moved on.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from jackpot.core.shards import local


class KeptWeights:
    """Keeps the newest copy of the parameters that are trained; the others never change.

    Where they are sharded, each rank keeps its part.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._copies = [torch.empty_like(one, device="cpu", pin_memory=one.is_cuda) for one in self._parts()]

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the parameters as they are now."""
        for copy, part in zip(self._copies, self._parts(), strict=True):
            copy.copy_(part)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the kept weights while the body runs, and then bit for bit its own again."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for copy, part in zip(self._copies, self._parts(), strict=True):
            now = part.to("cpu", copy=True)
            part.copy_(copy)
            copy.copy_(now)

    def _parts(self) -> list[Tensor]:
        return [local(parameter.detach()) for parameter in self._parameters]
