"""One of an engine's vLLM servers: what the engine knows about it, and how it gets the newest weights.

All methods run on the engine's event loop.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jackpot.core.errors import EngineError
from jackpot.rollout.engines.pool import Peer, PeerLost, PeerRestarted
from jackpot.rollout.engines.vllm.client import ServerClient
from jackpot.rollout.engines.vllm.server_info import ExpectedModel, ServerInfo, check_server, parse_server_info
from jackpot.rollout.engines.vllm.weight_sync import SavedWeights, check_loaded

_INITIAL_VERSION = "default"  # a server's name of the weights that it started with
_RESUME_SECONDS = 5.0  # longest wait for a server to resume after a failed update


class Job(NamedTuple):
    """One completion that a server is asked for."""

    body: Mapping[str, Any]  # of the completions call, without the model's name
    parse: Callable[[Any], Any]  # converts the JSON of the completion to the result


class Replica(Peer):
    """Tracks which weights one server holds, updates them, and sends it completions."""

    kind = "server"
    weights: SavedWeights | None

    def __init__(
        self, url: str, client: ServerClient, expected: ExpectedModel, version_prefix: str, capacity: int
    ) -> None:
        """Track a server; nothing is sent before the first `sync`.

        Args:
            version_prefix: start of the names of all weights of this engine, unique to it.
            capacity: completions that run at once.
        """
        super().__init__(url, capacity)
        self._client, self._expected, self._version_prefix = client, expected, version_prefix
        self.info: ServerInfo | None = None  # facts in the last report of the server
        self.loading: SavedWeights | None = None  # weights being sent, whose file must stay
        self._model_name = ""  # name that completions have to give
        self._was_updated = False  # True once this engine has sent weights to the server
        self._sent: SavedWeights | None = None  # weights the server should hold; None: unknown
        self._verified: tuple[SavedWeights, Mapping[str, str]] | None = None  # last weights loaded, and checksums then
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
        self._model_name = await self._client.model_name()
        vllm_config = await self._client.vllm_config()
        try:
            version, self.was_restarted = await self._weight_version(), False
        except PeerRestarted:
            version, self.was_restarted, self._verified = _INITIAL_VERSION, True, None
        if self._sent is not None and self._sent.version != version:
            self._sent = None
        try:
            inspection, checksums = await self._client.model_inspection(), await self._client.checksums()
            info = parse_server_info(vllm_config, inspection, checksums)
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.name} has settings that cannot be read ({type(error).__name__}: {error}); this engine was made "
                f"for vLLM 0.32, see docs/vllm.md"
            ) from error
        check_server(info, self.name, self._expected)
        self.info = info

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
        """Replace the server's weights while it is paused. It is resumed afterwards, also after a failure."""
        self.weights = self._sent = None
        try:
            await self._client.pause()
            await self._load(weights)
        except BaseException:
            with contextlib.suppress(PeerLost, TimeoutError):  # the first error says why
                await asyncio.wait_for(self._client.resume(), _RESUME_SECONDS)
            raise
        await self._client.resume()
        self._sent, self._was_updated = weights, True

    async def _load(self, weights: SavedWeights) -> None:
        """Have the server load the weights, and check by its checksums that it did."""
        client = self._client
        await client.reload_weights(str(weights.folder))
        await client.reset_prefix_cache()
        checksums = await client.checksums()
        check_loaded(self.name, weights, checksums, self._verified)
        await client.set_weight_version(weights.version)
        await self._check_version(weights)
        self._verified = (weights, checksums)

    async def run(self, job: Job) -> Any:
        """Return a parsed completion that was generated by `weights`, as `Peer.run` says."""
        completion = await self._client.complete({**job.body, "model": self._model_name}, job.parse)
        await self._confirm_weights()
        return completion

    async def _confirm_weights(self) -> None:
        """Return once a check begun after this call finds that the server holds `weights`.

        One check serves all calls that wait for it.
        """
        begun = self._checks_begun
        async with self._check_lock:
            if self._checks_passed > begun:
                return
            self._checks_begun += 1
            number = self._checks_begun
            await self._check_version(self.weights)
            self._checks_passed = number
