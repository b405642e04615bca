"""The engine's side of one vLLM server: reading the server's settings, completions, and loading weights."""

import asyncio
import contextlib
from typing import Any

from jackpot.rollout.engines.pool import PeerLost, PeerRequest
from jackpot.rollout.engines.servers.replica import Replica
from jackpot.rollout.engines.servers.weight_sync import SavedWeights, check_loaded
from jackpot.rollout.engines.vllm.client import VLLMClient
from jackpot.rollout.engines.vllm.server_info import ExpectedModel, VLLMServerInfo, check_server, parse_server_info

_RESUME_SECONDS = 5.0  # longest wait for a server to resume after a failed update


class VLLMReplica(Replica):
    """The engine's side of one vLLM server, with the routes by which vLLM reports facts and loads weights."""

    program = "vLLM 0.32"
    _client: VLLMClient

    def __init__(
        self, url: str, client: VLLMClient, expected: ExpectedModel, version_prefix: str, capacity: int
    ) -> None:
        """Begin with a server to which nothing has been sent yet.

        Args:
            expected: model that the server has to serve.
            version_prefix: what the name of every version of this engine's weights begins with.
            capacity: number of requests that run at the same time.
        """
        super().__init__(url, client, version_prefix, capacity)
        self._expected = expected
        self._model_name = ""  # name of the server's model, which every request for a completion gives

    async def _read_facts(self) -> VLLMServerInfo:
        """Ask the server for facts: store the name of its model; return its settings, sizes and parameters.

        Raises:
            EngineError: the facts have an unknown form, or do not fit the run.
        """
        client = self._client
        self._model_name = await client.model_name()
        vllm_config = await client.vllm_config()
        inspection, checksums = await client.model_inspection(), await client.checksums()

        with self._reading_facts():  # turns an error of form into an EngineError
            info = parse_server_info(vllm_config, inspection, checksums)
        check_server(info, self.name, self._expected)
        return info

    async def _load(self, weights: SavedWeights) -> None:
        """Replace the weights while the server is paused; resume the server afterwards, also after a failure."""
        client = self._client

        try:
            await client.pause()
            await client.reload_weights(str(weights.folder))
            await client.reset_prefix_cache()
            checksums = await client.checksums()
            check_loaded(self.name, weights, checksums, self._last_check)
            await client.set_weight_version(weights.version)
            await self._check_version(weights)
            self._last_check = (weights, checksums)  # the next load compares its checksums with these
        except BaseException:
            with contextlib.suppress(PeerLost, TimeoutError):  # the first error says why
                await asyncio.wait_for(client.resume(), _RESUME_SECONDS)
            raise

        await client.resume()

    async def _ask(self, request: PeerRequest) -> Any:
        """Have the server complete a request, and return what the request's `parse` makes of the answer."""
        return await self._client.complete({**request.message, "model": self._model_name}, request.parse)
