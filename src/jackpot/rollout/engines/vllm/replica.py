"""One of an engine's vLLM servers: what it holds, and how it is brought to hold the newest weights.

Lives on the engine's event loop.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from jackpot.core.errors import EngineError
from jackpot.rollout.engines.vllm.client import ServerClient, ServerLost, ServerRestarted
from jackpot.rollout.engines.vllm.server_info import ServerFacts, check_bits, check_facts, read_facts
from jackpot.rollout.engines.vllm.weight_sync import WrittenWeights, check_loaded

Result = TypeVar("Result")
_UNNAMED = "default"  # what a server calls the weights that it started with
_RESUME_SECONDS = 5.0  # for a server to be told to go on, where something has gone wrong before


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What every server must serve."""

    sizes: Mapping[str, int]
    parameters: frozenset[str]
    dtype: torch.dtype
    method: str | None  # of quantisation
    kv_cache_dtype: str | None


class Peer:
    """A server and what the engine knows of it."""

    def __init__(self, url: str, client: ServerClient, model: ModelFacts, nonce: str) -> None:
        """
        Args:
            nonce: how the tags of this engine's weights begin.
        """
        self.url, self._client, self._model, self._nonce = url, client, model, nonce
        self.facts: ServerFacts | None = None
        self.holds: WrittenWeights | None = None  # by which it may be given requests
        self.load = 0  # requests that it is answering
        self.trouble: ServerLost | None = None  # why it is given no more requests
        self.failures = 0  # in a row
        self.lost_since: float | None = None
        self.sent_again = 0  # requests, since it last failed
        self.was_restarted = False  # when it was last met
        self._name = ""
        self._was_given = False  # weights of ours, ever
        self.reads: WrittenWeights | None = None  # what it is being given: their file must stay
        self._given: WrittenWeights | None = None  # what it should hold; None where nobody knows
        self._proven: tuple[WrittenWeights, Mapping[str, str]] | None = None  # what it last held, and its checksums
        self._checks_begun = self._checks_passed = 0
        self._checking = asyncio.Lock()

    @property
    def is_lost(self) -> bool:
        return self.lost_since is not None

    def lose(self, why: ServerLost) -> None:
        self.trouble, self.holds = why, None
        self.failures += 1
        self.lost_since = self.lost_since or time.monotonic()

    async def prepare(self, newest: WrittenWeights) -> None:
        """Have it hold the newest weights. It answers nothing meanwhile.

        Raises:
            ServerLost: try again later.
            EngineError: it serves something else, or somebody else gives it weights.
        """
        self.reads = newest
        try:
            if self.trouble is None and self._given is not None:
                await self._check_tag(self._given)
            else:
                await self._meet()
            if self._given is not newest:
                await self._give(newest)
        finally:
            self.reads = None
        self.holds, self.trouble, self.lost_since = newest, None, None

    async def _meet(self) -> None:
        """Learn what it is, and whether it still holds what it was given."""
        self._name = await self._client.model_name()
        settings = await self._client.settings()
        try:
            tag, self.was_restarted = await self._tag(), False
        except ServerRestarted:
            tag, self.was_restarted, self._proven = _UNNAMED, True, None
        if self._given is not None and self._given.tag != tag:
            self._given = None
        try:
            facts = read_facts(settings, await self._client.structure(), await self._client.checksums())
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url} has settings that cannot be read ({type(error).__name__}: {error}); this engine was made "
                f"for vLLM 0.32, see docs/vllm.md"
            ) from error
        model = self._model
        check_facts(facts, self.url, model.sizes, model.parameters, model.dtype)
        check_bits(facts, self.url, model.method, model.kv_cache_dtype)
        self.facts = facts

    async def _tag(self) -> str:
        """The tag of the weights that it holds.

        Raises:
            ServerRestarted: it has the weights that it was started with.
            EngineError: it once had ours and has somebody else's now.
        """
        tag = await self._client.tag()
        if self._was_given:
            if tag == _UNNAMED:
                raise ServerRestarted("it was restarted")
            if not tag.startswith(self._nonce):
                raise EngineError(
                    f"somebody else updates the weights of {self.url}: it holds {tag!r}, not what this run gave it; "
                    f"one server serves one run at a time"
                )
        return tag

    async def _check_tag(self, expected: WrittenWeights) -> None:
        """Raises ServerLost unless it holds these weights, as far as it tells; otherwise as `_tag`."""
        if (tag := await self._tag()) != expected.tag:
            raise ServerLost(f"it holds {tag!r} and not the weights {expected.tag} that it was given")

    async def _give(self, weights: WrittenWeights) -> None:
        """Replace its weights. Whatever happens, it is told to go on writing afterwards."""
        self.holds = self._given = None
        try:
            await self._client.pause()
            await self._load(weights)
        except BaseException:
            with contextlib.suppress(ServerLost, TimeoutError):  # what happened before says why
                await asyncio.wait_for(self._client.resume(), _RESUME_SECONDS)
            raise
        await self._client.resume()
        self._given, self._was_given = weights, True

    async def _load(self, weights: WrittenWeights) -> None:
        """Have it read the weights, and prove that it did."""
        client = self._client
        await client.load(str(weights.folder))
        await client.forget_states()
        checksums = await client.checksums()
        check_loaded(self.url, weights, checksums, self._proven)
        await client.set_tag(weights.tag)
        await self._check_tag(weights)
        self._proven = (weights, checksums)

    async def ask(self, body: Mapping[str, Any], read: Callable[[Any], Result]) -> Result:
        """An answer that the weights which it `holds` wrote. Nobody prepares it while it is asked.

        Raises:
            ServerLost: none, or one that other weights may have written.
        """
        answer = await self._client.complete({**body, "model": self._name}, read)
        await self._confirm()
        return answer

    async def _confirm(self) -> None:
        """Returns when a check that began after this call has found it to hold the tag; one serves all who wait."""
        begun = self._checks_begun
        async with self._checking:
            if self._checks_passed > begun:
                return
            self._checks_begun += 1
            number = self._checks_begun
            await self._check_tag(self.holds)
            self._checks_passed = number
