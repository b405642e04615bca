"""The engine's side of one server: what the engine knows about the server, and how the server gets the newest weights.

All methods run on the engine's event loop.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from jackpot.core.errors import EngineError
from jackpot.rollout.engines.pool import Peer, PeerLost, PeerRequest, PeerRestarted
from jackpot.rollout.engines.servers.http import HTTPClient
from jackpot.rollout.engines.servers.weight_sync import SavedWeights

_INITIAL_VERSION = "default"  # name that a server gives the weights it started with


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """The facts that one server reports; from those of all servers an engine makes its `Capabilities`."""

    device: str  # kind of device, such as cpu or cuda
    max_model_len: int  # largest length of a prompt and its response together, tokens
    num_top_log_probs: int  # largest number of top log-probs of a token
    quantized: bool = False  # True where weights, keys or values are not in the engine's dtype


class Replica(Peer):
    """The engine's side of one server, which tracks and updates the server's weights, and sends requests.

    A subclass knows the routes of the server's program.
    """

    kind = "server"
    program: ClassVar[str]  # program and version whose reports this class can read, named in errors
    weights: SavedWeights | None

    def __init__(self, url: str, client: HTTPClient, version_prefix: str, capacity: int) -> None:
        """Describe a server; nothing is sent before the first `sync`.

        Args:
            version_prefix: prefix of the names of all weights of this engine, which no other engine uses.
            capacity: number of requests that run at the same time.
        """
        super().__init__(url, capacity)
        self._client, self._version_prefix = client, version_prefix
        self.info: ServerInfo | None = None  # facts in the newest report of the server
        self.loading: SavedWeights | None = None  # weights that the server reads now, whose file must stay
        self._was_updated = False  # True once this engine has sent weights to the server
        self._sent_weights: SavedWeights | None = None  # weights that the server should hold; None: unknown
        # The newest weights that the server was found to hold, and the checksums that it reported then.
        self._last_check: tuple[SavedWeights, Mapping[str, str]] | None = None
        # Checks of the weights' version are numbered from 1: the newest that has begun, and the newest that has passed.
        self._checks_begun, self._checks_passed = 0, 0
        self._check_lock = asyncio.Lock()

    async def sync(self, newest: SavedWeights) -> None:
        """Make sure that the server holds the newest weights, as `Peer.sync` says.

        Raises:
            PeerLost: the server cannot be reached or updated now.
            EngineError: the server serves another model, or another run sends it weights.
        """
        self.loading = newest
        try:
            # A server in reach with weights of this engine only confirms their name; any other server reports facts.
            if self.error is None and self._sent_weights is not None:
                await self._check_version(self._sent_weights)
            else:
                await self._inspect()
            if self._sent_weights is not newest:
                self.weights = self._sent_weights = None  # until its update, the server counts as one without weights
                await self._load(newest)
                self._sent_weights, self._was_updated = newest, True
        finally:
            self.loading = None

    async def _inspect(self) -> None:
        """Read and check the facts that the server reports, and find out if it still holds the weights it was sent."""
        try:
            version = await self._weight_version()
            self.was_restarted = False
        except PeerRestarted:
            version = _INITIAL_VERSION
            self.was_restarted = True
            self._last_check = None  # it was about weights that the server has lost

        if self._sent_weights is not None and self._sent_weights.version != version:
            self._sent_weights = None
        self.info = await self._read_facts()

    @abstractmethod
    async def _read_facts(self) -> ServerInfo:
        """Ask the server for its limits and settings, and check them; return the limits.

        Raises:
            EngineError: the server's settings do not fit the run.
        """

    @contextmanager
    def _reading_facts(self) -> Iterator[None]:
        """Turn errors of the `with` block, which reads the server's reports, into an EngineError with advice."""
        try:
            yield
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.name} has settings that cannot be read ({type(error).__name__}: {error}); this engine was made "
                f"for {self.program}, see docs/vllm.md"
            ) from error

    @abstractmethod
    async def _load(self, weights: SavedWeights) -> None:
        """Replace the server's weights, drop cached keys and values, and tell the server the name of the weights.

        Stores the weights and the server's checksums in `_last_check` as soon as `check_loaded` accepts them.
        """

    @abstractmethod
    async def _ask(self, request: PeerRequest) -> Any:
        """Send a request to the server, and return the parsed answer."""

    async def _weight_version(self) -> str:
        """Return the name of the weights that the server holds.

        Raises:
            PeerRestarted: the server was sent weights, and holds the weights of its start again.
            EngineError: the server was sent weights, and holds the weights of another run now.
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
        """Raise PeerLost unless the server reports that it holds the `expected` weights.

        Raises:
            PeerRestarted, EngineError: as `_weight_version`.
        """
        if (version := await self._weight_version()) != expected.version:
            raise PeerLost(f"it holds {version!r} and not the weights {expected.version} that it was given")

    async def run(self, request: PeerRequest) -> Any:
        """Return the parsed answer to a request as `Peer.run` says, once the server confirms its weights."""
        assert self.weights is not None  # a peer without them is given no request
        answer = await self._ask(request)
        await self._confirm(self.weights)
        return answer

    async def _confirm(self, weights: SavedWeights) -> None:
        """Wait until a check that begins after this call has found that the server holds `weights`.

        Calls that wait at the same time share one check.
        """
        begun = self._checks_begun
        async with self._check_lock:
            if self._checks_passed > begun:  # the check of another call began after this call, and passed
                return
            self._checks_begun += 1
            number = self._checks_begun
            await self._check_version(weights)
            self._checks_passed = number
