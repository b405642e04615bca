"""The interface of every engine: generate and score responses, and take new weights.

An engine owns one model and generates responses with it. It never trains: new weights come in through
`update_weights`, and every generated token carries the version of the weights that generated it.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jackpot.config.sampling import Sampling
from jackpot.core.errors import EngineError
from jackpot.core.types import Prompt, Rollout, Version
from jackpot.models.quantization.convert import CodedWeights, Conversion
from jackpot.rollout.engines.draft_counts import DraftCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Asks an engine for one response. The same `seed` gives the same response in every batch."""

    uid: str  # name of the response, unique among the requests in flight
    prompt: Prompt  # token ids from which the response continues
    seed: int  # seed of the response's draws, unsigned 64 bits
    sampling: Sampling  # temperature, filters and length of the response
    exact_drafts: bool = False  # accept drafts with lam 1, whatever the settings say: the response is the model's own


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The limits of an engine and the properties of the numbers that it returns."""

    vocab_size: int  # number of token ids of the model
    num_top_log_probs: int  # largest number of top log-probs that the engine returns for a token
    max_model_len: int  # largest length of a prompt and its response together, tokens
    quantized: bool  # True where the engine samples from another distribution than that of the weights it was sent:
    # it computes with other numbers, or accepts drafts with lam below 1
    # Number formats of linear layers and cache, where training with the same ones (`precision: fp8`) computes bit for
    # bit the same on a CPU, but for rounding in the output layer
    number_formats: str | None = None
    coded_weights: CodedWeights | None = None  # those that are sent as codes and scales; None: all are sent as they are
    dtype: torch.dtype  # dtype of the engine's weights; weights sent in another dtype are cast to it
    device: str  # kind of device that the model computes on: "cpu", "cuda"
    sleeps: bool = False  # True where `sleep` releases memory


class Engine(ABC):
    """Generates rollouts and scores given text with one model. All calls come from one thread."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return the limits of the engine and the properties of its numbers."""

    @property
    @abstractmethod
    def version(self) -> Version:
        """Return the version that the next generated token will carry."""

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests for generation.

        Raises:
            EngineError: a uid is already in flight, a prompt leaves no room for one token in the context, or more top
                log-probs are asked for than the engine returns. Then no request of the call is queued.
        """

    @abstractmethod
    def collect(self, n: int, timeout: float | None = None, uids: Container[str] | None = None) -> list[Rollout]:
        """Return up to `n` finished rollouts, each exactly once, in any order.

        The call waits until `n` rollouts are finished, until no request is in flight, or for `timeout` seconds (None:
        without limit). Fewer than `n` rollouts mean that the time was up or that no more requests were submitted.

        Args:
            uids: return only rollouts with these uids; None: any.
        """

    @abstractmethod
    def score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        """Return the untruncated log-probs of response tokens under the current weights: [T] float32 per rollout."""

    @abstractmethod
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: Version) -> str:
        """Replace all weights and return the `weights_digest`, in `capabilities.dtype`, of the weights received.

        All weights of `capabilities.coded_weights` may come as two tensors, codes and scales. Then every tensor comes
        in the dtype in which it is held, and the digest takes each in its own.

        An engine that stores weights in another form (fused, quantized) computes the digest of the tensors from which
        that form was made. The trainer compares the digest with that of the weights it sent. Tokens generated later
        carry `version`; cached keys and values of the old weights are dropped.

        Raises:
            EngineError: rollouts are in flight, a name is missing or unknown, or a shape differs. The old weights and
                version stay.
        """

    def sleep(self) -> None:
        """Release memory until the next `update_weights`, before which an engine that `sleeps` raises EngineError where
        it is to generate or score."""
        return  # most engines have no memory to release

    def take_events(self) -> list[dict[str, Any]]:
        """Return and forget the events since the last call, such as a server that came back, for `events.jsonl`.

        Each has a name under `event` and its details under further keys.
        """
        return []

    def take_draft_counts(self) -> DraftCounts:
        """Return and forget what drafts were worth since the last call, over responses that are finished."""
        return DraftCounts()

    def take_metrics(self) -> dict[str, float]:
        """Return and forget the metrics of drafts (docs/metrics.md) since the last call; none where nothing drafts."""
        return self.take_draft_counts().metrics()

    @abstractmethod
    def close(self) -> None:
        """Free the model. Closing twice is allowed; any other call after it raises EngineError."""

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """Submit requests, wait for all of them, and return their rollouts in the same order.

        Other requests in flight stay in flight.

        Raises:
            EngineError: as `submit`, or the reason why the engine failed during generation.
        """
        self.submit(requests)
        uids, rollouts = {request.uid for request in requests}, {}
        while len(rollouts) < len(requests):  # of a failed engine, `collect` returns what had finished, then it raises
            if not (finished := self.collect(len(requests) - len(rollouts), uids=uids)):
                break
            rollouts |= {rollout.uid: rollout for rollout in finished}
        if missing := [request.uid for request in requests if request.uid not in rollouts]:
            raise EngineError(f"the engine returned {len(rollouts)} of {len(requests)} rollouts; missing {missing[:5]}")
        return [rollouts[request.uid] for request in requests]


def quantized_event(quantization: str, conversion: Conversion, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the event that reports which share of the weights an engine quantized and how many tensors it did not.

    Args:
        quantization: key of `SCHEMES`.
        sizes: number of elements of every parameter, by name.
    """
    share = sum(sizes[name] for name in conversion.converted) / sum(sizes.values())
    kept = dict(Counter(conversion.kept.values()))  # reason: number of tensors
    return {"event": "quantized", "to": quantization, "share": share, "kept": kept}
