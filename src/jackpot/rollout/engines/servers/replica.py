"""One of an engine's servers: what the engine knows about it, and how it gets the newest weights.

All methods run on the engine's event loop.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from jackpot.core.errors import EngineError
from jackpot.rollout.engines.pool import Peer, PeerLost, PeerRestarted
from jackpot.rollout.engines.servers.http import HTTPClient
from jackpot.rollout.engines.servers.weight_sync import SavedWeights

_INITIAL_VERSION = "default"  # a server's name of the weights that it started with


class ServerRequest(NamedTuple):
    """One response, or log-probs, that a server is asked for."""

    body: Mapping[str, Any]  # of the request
    parse: Callable[[Any], Any]  # converts the JSON of the answer to the result


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """Facts that one server reports, of which an engine makes its `Capabilities`."""

    device: str  # kind of device, such as cpu or cuda
    max_model_len: int  # largest length of a prompt and its response together, tokens
    num_top_log_probs: int  # largest number of top log-probs of a token
    quantized: bool = False  # True where weights, keys or values are not in the engine's dtype


class Replica(Peer):
    """Tracks which weights one server holds, updates them, and sends it requests. A subclass knows its routes."""

    kind = "server"
    made_for: ClassVar[str]  # program and version whose reports it can read
    weights: SavedWeights | None

    def __init__(self, url: str, client: HTTPClient, version_prefix: str, capacity: int) -> None:
        """Track a server; nothing is sent before the first `sync`.

        Args:
            version_prefix: start of the names of all weights of this engine, unique to it.
            capacity: requests that run at once.
        """
        super().__init__(url, capacity)
        self._client, self._version_prefix = client, version_prefix
        self.info: ServerInfo | None = None  # facts in the last report of the server
        self.loading: SavedWeights | None = None  # weights being sent, whose file must stay
        self._was_updated = False  # True once this engine has sent weights to the server
        self._sent: SavedWeights | None = None  # weights the server should hold; None: unknown
        self._verified: tuple[SavedWeights, Mapping[str, str]] | None = None  # last weights checked, and checksums then
        self._checks_begun = self._checks_passed = 0  # numbers of the last check begun and of the last one passed
        self._check_lock = asyncio.Lock()

    async def sync(self, newest: SavedWeights) -> None:
        """Make sure that the server holds the newest weights, as `Peer.sync` says.

        Raises:
            PeerLost: as there.
            EngineError: it serves something else, or another run sends it weights.
        """
        self.loading = newest
        try:
            if self.error is None and self._sent is not None:
                await self._check_version(self._sent)
            else:
                await self._inspect()
            if self._sent is not newest:
                await self._update(newest)
        finally:
            self.loading = None

    async def _inspect(self) -> None:
        """Read and check the server's facts, and find out whether it still holds the weights that it was sent."""
        try:
            version, self.was_restarted = await self._weight_version(), False
        except PeerRestarted:
            version, self.was_restarted, self._verified = _INITIAL_VERSION, True, None
        if self._sent is not None and self._sent.version != version:
            self._sent = None
        self.info = await self._read_facts()

    @abstractmethod
    async def _read_facts(self) -> ServerInfo:
        """Return the server's facts.

        Raises:
            EngineError: they do not fit the run.
        """

    @contextmanager
    def _reading_facts(self) -> Iterator[None]:
        """Raise EngineError where the body cannot read what the server reports."""
        try:
            yield
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.name} has settings that cannot be read ({type(error).__name__}: {error}); this engine was made "
                f"for {self.made_for}, see docs/vllm.md"
            ) from error

    @abstractmethod
    async def _load(self, weights: SavedWeights) -> None:
        """Replace the server's weights and cached keys and values, and have it call the weights by their name.

        `_verified` has them and the server's checksums as soon as it is known to hold them (`check_loaded`).
        """

    @abstractmethod
    async def _ask(self, request: ServerRequest) -> Any:
        """Return the server's parsed answer."""

    async def _weight_version(self) -> str:
        """Return the name of the weights that the server holds.

        Raises:
            PeerRestarted: it was sent weights and holds those of its start again.
            EngineError: it was sent weights and holds those of another run now.
        """
        version = await self._client.weight_version()
        if self._was_updated:
            if version == _INITIAL_VERSION:
                raise PeerRestarted("it was restarted")
            if not version.startswith(self._version_prefix):
                raise EngineError(
                    f"another run updates the weights of {self.name}: it holds {version!r}, not what this run sent; "
                    f"one server serves one run at a time"
                )
        return version

    async def _check_version(self, expected: SavedWeights) -> None:
        """Raise PeerLost unless the server reports that it holds these weights; else as `_weight_version`."""
        if (version := await self._weight_version()) != expected.version:
            raise PeerLost(f"it holds {version!r} and not the weights {expected.version} that it was given")

    async def _update(self, weights: SavedWeights) -> None:
        """Replace the server's weights."""
        self.weights = self._sent = None
        await self._load(weights)
        self._sent, self._was_updated = weights, True

    async def run(self, request: ServerRequest) -> Any:
        """Return a parsed answer that was made by `weights`, as `Peer.run` says."""
        assert self.weights is not None  # a peer without them is given no request
        answer = await self._ask(request)
        await self._confirm(self.weights)
        return answer

    async def _confirm(self, weights: SavedWeights) -> None:
        """Return once a check begun after this call finds that the server holds these weights.

        One check serves all calls that wait for it.
        """
        begun = self._checks_begun
        async with self._check_lock:
            if self._checks_passed > begun:
                return
            self._checks_begun += 1
            index = self._checks_begun
            await self._check_version(weights)
            self._checks_passed = index
