"""What every engine promises.

An engine owns one model and writes responses with it. It never trains: new weights come in through `update_weights`,
and every token that it writes carries the version of the weights that wrote it.
"""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jackpot.config.run import Sampling
from jackpot.core.errors import EngineError
from jackpot.core.types import Prompt, Rollout, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Asks an engine for one response. The same `seed` gives the same response in every batch."""

    uid: str
    prompt: Prompt
    seed: int  # 64 bits, unsigned
    sampling: Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What an engine can do and what its numbers mean."""

    vocab_size: int
    num_top_log_probs: int  # the most it returns for a token
    context_length: int  # tokens of a prompt and its response together
    quantised: bool  # True where it computes with other numbers than the weights it was sent
    streaming: bool  # True where `collect` returns finished rollouts while others are still being written
    updates_in_flight: bool  # True where weights may change while rollouts are written: tokens carry their own version
    dtype: torch.dtype  # of its weights; weights arrive in the learner's dtype and are cast to this


class Engine(ABC):
    """Writes rollouts and scores text with one model. Used from one thread."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @property
    @abstractmethod
    def version(self) -> Version:
        """The version that the next token will carry."""

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue responses to write.

        Raises:
            EngineError: a uid already in flight, a prompt that leaves no room for one token in the context (nothing
                of the call is queued), or more top log-probs asked for than the engine returns.
        """

    @abstractmethod
    def collect(self, n: int, timeout: float | None = None, uids: Container[str] | None = None) -> list[Rollout]:
        """Up to `n` finished rollouts, each exactly once, in any order; only those named by `uids` where it is given.

        Waits until `n` are there, until nothing is in flight, or for `timeout` seconds; None waits for as long as it
        takes. Fewer than `n` means that the time was up or that no more were submitted.
        """

    @abstractmethod
    def score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        """Log-probs of the response tokens under the engine's current weights, untruncated: [T] float32 for each."""

    @abstractmethod
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: Version) -> str:
        """Replace all weights and return the `weights_digest` of what the engine took over, in `capabilities.dtype`.

        Where it keeps them in another form (fused, quantised), of what that form was made from. The trainer compares it
        with the digest of what it sent. Tokens written later carry `version`; cached states of the old weights are
        dropped.

        Raises:
            EngineError: rollouts are in flight (unless `capabilities.updates_in_flight`), a name is missing or unknown,
                or a shape differs. The old weights and version stay.
        """

    def rest(self) -> None:  # noqa: B027  most engines have nothing to give back
        """Nothing will be written before the next `update_weights`: give back what can be given back meanwhile."""

    def take_events(self) -> list[dict[str, Any]]:
        """What happened since the last call and a person should know of, such as a server that came back: an `event`
        each, with its details."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Free the model. Closing twice is allowed; any other call after it raises EngineError."""

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """Submit, wait for all, and return them in the order of `requests`. What else is in flight stays there.

        Raises:
            EngineError: as `submit`, or what made the engine fail while it wrote.
        """
        self.submit(requests)
        uids, rollouts = {request.uid for request in requests}, {}
        while len(rollouts) < len(requests):  # when it fails, the first `collect` gives what had ended, the next raises
            if not (ended := self.collect(len(requests) - len(rollouts), uids=uids)):
                break
            rollouts |= {rollout.uid: rollout for rollout in ended}
        if missing := [request.uid for request in requests if request.uid not in rollouts]:
            raise EngineError(f"the engine returned {len(rollouts)} of {len(requests)} rollouts; missing {missing[:5]}")
        return [rollouts[request.uid] for request in requests]
