"""The interface of every engine: generate and score responses, and take new weights.

An engine owns one model, generates responses with this model and never trains it. New weights come in through
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
    """A request to an engine for one response. Requests with equal seeds get equal responses, in whatever batch."""

    uid: str  # name of the response, unique among the requests in flight
    prompt: Prompt  # token ids from which the response continues
    seed: int  # seed of the response's draws, unsigned 64 bits
    sampling: Sampling  # temperature, filters and length of the response
    exact_drafts: bool = False  # True: accept drafts by the exact rule (lam 1), without bias, whatever the settings say


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The limits of an engine and the properties of the numbers that it returns."""

    vocab_size: int  # number of token ids of the model
    num_top_log_probs: int  # largest number of top log-probs that the engine returns for a token
    max_model_len: int  # largest length of a prompt and its response together, tokens
    # True where the engine does not sample from the distribution of the weights that it was sent, because it computes
    # with quantized numbers, or accepts more drafts than the exact rule does (lam below 1)
    quantized: bool
    # Name of the number formats of the engine's linear layers and key-value cache. Training in these formats
    # (`precision: fp8`) computes the same bits on a CPU, but for rounding in the output layer. None: no
    # training computes the engine's bits.
    number_formats: str | None = None
    coded_weights: CodedWeights | None = None  # weights that may be sent quantized, as codes and scales; None: none
    dtype: torch.dtype  # dtype of the engine's weights; weights sent in another dtype are cast to it
    device: str  # kind of device that the model computes on, such as "cpu" or "cuda"
    sleeps: bool = False  # True where `sleep` releases memory


class Engine(ABC):
    """A generator of rollouts with one model, which also scores given text. One thread makes all calls."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return the limits of the engine and the properties of the numbers that it returns."""

    @property
    @abstractmethod
    def version(self) -> Version:
        """Return the version that the next generated token will carry."""

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests for generation; no request is queued if the call raises.

        Raises:
            EngineError: a uid is already in flight, a prompt leaves no room for one token in the context, or more top
                log-probs are asked for than the engine returns.
        """

    @abstractmethod
    def collect(self, n: int, timeout: float | None = None, uids: Container[str] | None = None) -> list[Rollout]:
        """Return up to `n` finished rollouts, each exactly once, in any order.

        The call waits until `n` rollouts are finished, until no request is in flight, or for `timeout` seconds (None:
        without limit). Fewer than `n` rollouts mean that the time was up or that no more requests were submitted.

        Args:
            uids: return only rollouts with these uids; None: with any uid.

        Raises:
            EngineError: the engine is closed or has failed.
        """

    @abstractmethod
    def score(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        """Return the log-probs of response tokens under the current weights, [T] float32 for each rollout.

        The log-probs are those at `temperature`, without top-p and top-k.
        """

    @abstractmethod
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: Version) -> str:
        """Replace all weights and return the `weights_digest`, in `capabilities.dtype`, of the weights received.

        The weights that `capabilities.coded_weights` names may be sent quantized, each as two tensors, codes and
        scales. Then every tensor is sent in the dtype in which the engine holds it, and the digest is that of these
        tensors.

        An engine that stores weights in another form (fused, quantized) computes the digest of the tensors from which
        it made that form. The trainer compares this digest with that of the weights it sent. Tokens generated later
        carry `version`; cached keys and values of the old weights are dropped.

        Raises:
            EngineError: rollouts are in flight, a name is missing or unknown, or a shape differs. The old weights and
                version stay.
        """

    def sleep(self) -> None:
        """Release memory until the next `update_weights`.

        Until then an engine with `capabilities.sleeps` raises EngineError when it is asked to generate or score; other
        engines do nothing here.
        """
        return  # most engines have no memory to release

    def take_events(self) -> list[dict[str, Any]]:
        """Return and forget the events since the last call, such as a server that came back, for `events.jsonl`.

        Each event has its name under `event` and its details under further keys.
        """
        return []

    def take_draft_counts(self) -> DraftCounts:
        """Return the counts of drafts over the responses finished since the last call, and begin to count anew."""
        return DraftCounts()

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of `take_draft_counts` (docs/metrics.md) and begin to count anew; empty without drafts."""
        return self.take_draft_counts().metrics()

    @abstractmethod
    def close(self) -> None:
        """Free the model. Closing twice is allowed; any other call after it raises EngineError."""

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """Submit requests, wait for all of them, and return their rollouts in the order of the requests.

        Other requests in flight stay in flight.

        Raises:
            EngineError: as `submit`, or the reason why the engine failed during generation.
        """
        self.submit(requests)
        uids = {request.uid for request in requests}
        rollouts: dict[str, Rollout] = {}

        # The loop ends for a failed engine too: `collect` returns the finished rollouts, then raises.
        while len(rollouts) < len(requests):
            if not (finished := self.collect(len(requests) - len(rollouts), uids=uids)):  # nothing more will come
                break
            rollouts |= {rollout.uid: rollout for rollout in finished}

        if missing := [request.uid for request in requests if request.uid not in rollouts]:
            raise EngineError(f"the engine returned {len(rollouts)} of {len(requests)} rollouts; missing {missing[:5]}")
        return [rollouts[request.uid] for request in requests]


def quantized_event(quantization: str, conversion: Conversion, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the event that says what share of its weights an engine quantized, and why it left tensors as they are.

    Args:
        quantization: name of the quantization, a key of `SCHEMES`.
        conversion: which parameters were quantized, and the reason for each that was not.
        sizes: number of elements of every parameter, by name.
    """
    share = sum(sizes[name] for name in conversion.converted) / sum(sizes.values())
    reasons = dict(Counter(conversion.kept.values()))  # number of tensors that were not quantized, by reason
    return {"event": "quantized", "to": quantization, "share": share, "kept": reasons}
