"""One of an engine's vLLM servers: what it holds, and how it is brought to hold the newest weights. Layer 3.

Lives on the engine's event loop.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from jackpot.engines.vllm_facts import ServerFacts, check_facts, read_facts
from jackpot.engines.vllm_http import ServerClient, ServerLost, ServerRestarted
from jackpot.engines.vllm_weights import WrittenWeights, check_loaded
from jackpot.errors import EngineError

Result = TypeVar("Result")
_UNNAMED = "default"  # what a server calls the weights that it started with


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What every server must serve."""

    sizes: Mapping[str, int]
    parameters: frozenset[str]
    dtype: torch.dtype


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
        self._checksums: Mapping[str, str] = {}
        self._given: WrittenWeights | None = None  # what it should hold, even where that is not yet proven
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
        if self.trouble is not None or self.facts is None:
            await self._meet()
        if self._given is not newest:
            await self._give(newest)
        self.holds, self.trouble, self.lost_since = newest, None, None

    async def _meet(self) -> None:
        """Learn what it is, and whether it still holds what it was given."""
        self._name = await self._client.model_name()
        settings = await self._client.settings()
        try:
            tag, self.was_restarted = await self._tag(), False
        except ServerRestarted:
            tag, self.was_restarted = _UNNAMED, True
        if self._given is not None and self._given.tag != tag:
            self._given = None
        self._checksums = await self._client.checksums()
        try:
            facts = read_facts(settings, await self._client.structure(), self._checksums)
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url} has settings that cannot be read ({type(error).__name__}: {error}); this engine was made "
                f"for vLLM 0.32, see docs/vllm.md"
            ) from error
        model = self._model
        check_facts(facts, self.url, model.sizes, model.parameters, model.dtype)
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

    async def _give(self, weights: WrittenWeights) -> None:
        before, old = self._checksums, self._given
        self.holds = self._given = None
        client = self._client
        await client.pause()
        try:
            await client.load(str(weights.folder))
            await client.forget_states()
            self._checksums = await client.checksums()
            check_loaded(self.url, weights, old, before, self._checksums)
            await client.set_tag(weights.tag)
            if (tag := await client.tag()) != weights.tag:
                raise ServerLost(f"it was given the weights {weights.tag} and says that it holds {tag!r}")
        finally:
            with contextlib.suppress(ServerLost):  # then what happened before says why
                await client.resume()
        self._given, self._was_given = weights, True

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
            if (tag := await self._tag()) != self.holds.tag:
                raise ServerLost(f"it holds {tag!r} and not the newest weights {self.holds.tag}")
            self._checks_passed = number
