"""The engine of vLLM servers that the user has started; it shares `servers/engine.py` with the engine of SGLang.

Status: experimental. Tested with vLLM 0.32 on CPUs; not yet run on a GPU.
"""

from transformers import PreTrainedModel

from jackpot.config.engines import VLLMServerEngineConfig
from jackpot.core.errors import EngineError
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.servers.engine import ServerEngine
from jackpot.rollout.engines.servers.weight_sync import Format
from jackpot.rollout.engines.vllm import protocol
from jackpot.rollout.engines.vllm.client import VLLMClient
from jackpot.rollout.engines.vllm.replica import VLLMReplica
from jackpot.rollout.engines.vllm.server_info import ExpectedModel, model_sizes
from jackpot.rollout.engines.vllm.weight_format import WeightFormat


class VLLMServerEngine(ServerEngine):
    """An engine of vLLM servers that the user has started with one model."""

    client_class = VLLMClient
    protocol = protocol
    _settings: VLLMServerEngineConfig

    def _expect(self, model: PreTrainedModel, parameters: frozenset[str]) -> Format:
        """Store what servers of this model must report; return the format in which the servers get weights.

        `parameters` are the names of the model's parameters, tied ones under each of their names.
        """
        settings = self._settings
        weight_format = WeightFormat.of_model(model, settings.quantization)
        self._expected = ExpectedModel(
            sizes=model_sizes(model),
            parameters=parameters,
            dtype=self._dtype,
            head_dtype="float32" if settings.head_dtype == "fp32" else None,
            quant_method=weight_format.quant_method,
            kv_cache_dtype=settings.kv_cache_dtype,
        )
        return weight_format

    def _replica(self, url: str, client: VLLMClient) -> VLLMReplica:
        """Return the engine's side of the server at `url`, which `client` calls."""
        return VLLMReplica(url, client, self._expected, version_prefix=self._id, capacity=self._settings.max_num_seqs)

    def _check(self, request: Request) -> None:
        """Raise EngineError for a request that is refused, such as one for more top log-probs than a server returns."""
        num_top, limit = request.sampling.num_top_log_probs, self.capabilities.num_top_log_probs
        if limit < min(num_top, self.capabilities.vocab_size):
            raise EngineError(
                f"{request.uid} asks for {num_top} top log-probs, and a server returns at most {limit}; start the "
                f"servers with --max-logprobs -1, or ask for fewer with sampling.num_top_log_probs"
            )
        super()._check(request)
