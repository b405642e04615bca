"""The engine of SGLang servers, and the checks of each server's settings.

SGLang does not report the sizes of its model, so a server of another model is noticed only when it loads the weights.

Status: experimental. Run with SGLang 0.5.23 on a CPU, in tests; not yet run on a GPU.
"""

from collections.abc import Mapping
from typing import Any

import torch

from jackpot.config.engines import SGLangServerEngineConfig
from jackpot.core.errors import EngineError
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.pool import PeerRequest
from jackpot.rollout.engines.servers.engine import ServerEngine
from jackpot.rollout.engines.servers.replica import Replica, ServerInfo
from jackpot.rollout.engines.servers.weight_sync import SavedWeights, check_loaded, unknown_norms, without_rank
from jackpot.rollout.engines.sglang import protocol
from jackpot.rollout.engines.sglang.client import SGLangClient

_DTYPES = {torch.float32: ("float32", "float"), torch.bfloat16: ("bfloat16",)}  # SGLang's names of each dtype
_PLAIN_CACHES = ("auto", "float32", "bf16", "bfloat16")  # SGLang's dtypes of a cache that is not quantized


class SGLangReplica(Replica):
    """The engine's side of one SGLang server, with the routes by which SGLang reports facts and loads weights."""

    program = "SGLang 0.5.23"
    _client: SGLangClient

    def __init__(
        self,
        url: str,
        client: SGLangClient,
        version_prefix: str,
        settings: SGLangServerEngineConfig,
        *,
        dtype: torch.dtype,
        vocab_size: int,
        parameters: frozenset[str],
    ) -> None:
        """Describe a server, as `Replica` does.

        Args:
            dtype: dtype of the weights.
            vocab_size: number of token ids of the model.
            parameters: names of the model's parameters.
        """
        super().__init__(url, client, version_prefix, settings.max_num_seqs)
        self._dtype, self._vocab_size = dtype, vocab_size
        self._parameters = parameters
        self._head_is_fp32 = settings.head_dtype == "fp32"

    async def _read_facts(self) -> ServerInfo:
        """Ask the server for its settings and the names of its parameters, check both, and return its limits."""
        settings = await self._client.server_info()
        checksums = await self._client.checksums()
        with self._reading_facts():
            refusal = self._refusal(settings)
            info = ServerInfo(
                device=str(settings["device"]),
                # SGLang's limit for prompts, which must be shorter than this. Prompt and response together could be
                # four tokens longer than this; that room is not used.
                max_model_len=int(settings["max_req_input_len"]),
                num_top_log_probs=self._vocab_size,
            )

        if refusal:
            raise EngineError(f"{self.name} {refusal}")
        if unknown := unknown_norms(map(without_rank, checksums), self._parameters):
            raise EngineError(
                f"{self.name} serves another model: {'; '.join(unknown)}. Start it with the run's rollout model"
            )
        return info

    def _refusal(self, settings: Mapping[str, Any]) -> str | None:
        """Return why a server with these settings is refused, and how to start it instead; None if it is accepted."""
        dtypes, head_is_fp32 = _DTYPES[self._dtype], bool(settings["enable_fp32_lm_head"])

        if str(settings["dtype"]).removeprefix("torch.") not in dtypes:
            return f"computes in {settings['dtype']}; start it with --dtype {dtypes[0]}, as engine.dtype says"
        if not settings["enable_deterministic_inference"] and settings["device"] != "cpu":
            return (
                "draws tokens from a generator of its own, not from the seed of a response; start it with "
                "--enable-deterministic-inference"
            )

        if settings["preferred_sampling_params"]:
            return "has --preferred-sampling-params, which would change what is asked for; start it without"
        if settings["speculative_algorithm"]:
            return "drafts tokens with a model that gets no new weights; start it without --speculative-algorithm"
        if settings["quantization"] or settings["kv_cache_dtype"] not in _PLAIN_CACHES:
            return "is quantized, which is not built for SGLang; start it without --quantization and --kv-cache-dtype"

        if head_is_fp32 != self._head_is_fp32:
            precision, remedy = ("fp32", "without") if head_is_fp32 else ("its dtype", "with")
            return (
                f"computes the output layer in {precision}, and engine.head_dtype says otherwise; start it {remedy} "
                f"--enable-fp32-lm-head"
            )

        return None

    async def _load(self, weights: SavedWeights) -> None:
        """Have the server load the file of `weights`, as `Replica._load` says, and check that it holds them."""
        await self._client.update_weights(str(weights.folder), weights.version)
        checksums = await self._client.checksums()
        # First the version: a server that was restarted just now raises PeerLost here, and is not called stale below.
        await self._check_version(weights)
        # On a GPU SGLang computes checksums with another function than SHA-256, so they differ from the file's.
        comparable = self.info is not None and self.info.device == "cpu"
        check_loaded(self.name, weights, checksums, self._last_check, comparable)
        self._last_check = (weights, checksums)

    async def _ask(self, request: PeerRequest) -> Any:
        return await self._client.generate(request.message, request.parse)


class SGLangServerEngine(ServerEngine):
    """An engine of SGLang servers that the user has started with one model."""

    client_class = SGLangClient
    protocol = protocol
    _settings: SGLangServerEngineConfig

    def _replica(self, url: str, client: SGLangClient) -> SGLangReplica:
        """Return the engine's side of the server at `url`, which `client` calls."""
        return SGLangReplica(
            url,
            client,
            version_prefix=self._id,
            settings=self._settings,
            dtype=self._dtype,
            vocab_size=self._vocab_size,
            parameters=self._parameters,
        )

    def _check(self, request: Request) -> None:
        super()._check(request)
        protocol.check_sampling(request)
