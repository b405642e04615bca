"""A server with vLLM's HTTP routes that fails on demand, in ways that a real one cannot be made to."""

import asyncio
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from safetensors.numpy import load_file

from helpers.engines.reference import CONTEXT, EOS, VOCAB_SIZE

Script = Callable[[dict[str, Any], dict[str, Any]], Awaitable[Any]]
_CHANGING = ("reload_weights", "/update_weight_version")  # a script does or leaves undone what these do
_STRUCTURE = """Qwen3ForCausalLM()(
  (model): Qwen3Model()(
    (embed_tokens): VocabParallelEmbedding(num_embeddings=24, embedding_dim=64, org_vocab_size=24, tp_size=1)
    (layers): ModuleList()(
      (0-1): 2 x Qwen3DecoderLayer()(
        (self_attn): Qwen3Attention()(
          (attn): Attention(head_size=32, num_heads=2, num_kv_heads=1, scale=0.17, backend=CPUAttentionBackendImpl)
        )
        (mlp): Qwen2MLP()(
          (down_proj): RowParallelLinear(in_features=96, output_features=64, bias=False, tp_size=1)
"""


class ScriptedServer:
    """Serves from a thread of its own. `script` replaces the response of a path; `asked` records the calls.

    Its log-probs are those of a uniform distribution, less the mean of the final norm that it was last given.
    """

    def __init__(self) -> None:
        self.script: dict[str, Script] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.settings: dict[str, Any] = {
            "model_config": {
                "dtype": "torch.float32",
                "quantization": None,
                "max_logprobs": -1,
                "logprobs_mode": "processed_logprobs",
                "max_model_len": CONTEXT,
            },
            "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
            "cache_config": {"cache_dtype": "auto"},
            "device_config": {"device": "cpu"},
            "scheduler_config": {"enable_chunked_prefill": False},
        }
        self.structure = _STRUCTURE
        self.restart()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._do(self._listen())

    def restart(self) -> None:
        """Return to the weights of a start."""
        self.tag = "default"
        self.weights = {"model.norm.weight": np.zeros(64, np.float32), "lm_head.weight": np.zeros((24, 64), np.float32)}

    def count(self, path: str) -> int:
        """Return how often a path was called."""
        return Counter(call_path for call_path, _ in self.asked)[path]

    def close(self) -> None:
        self._do(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _do(self, work: Any) -> Any:
        """Run a coroutine on the server's thread and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30.0)

    async def _listen(self) -> None:
        """Serve all paths at a free port."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Record a call and answer it, as the script of its path has it."""
        body = json.loads(await request.text() or "{}")
        path = request.path
        if path == "/collective_rpc":
            path = body["method"]
        self.asked.append((path, body))
        self.headers.append(dict(request.headers))
        self.request = request  # the newest one, for scripts that stream their answer
        scripted = self.script.get(path)
        usual = {} if scripted is not None and path in _CHANGING else self._usual(path, body)
        answer = usual if scripted is None else await scripted(body, usual)
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    def _usual(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Do what a call asks for, and return the answer of a server that works."""
        if path == "reload_weights":
            self.load(body["kwargs"]["weights_path"])
        if path == "/update_weight_version":
            self.tag = body["new_version"]
        usual = {
            "/v1/models": {"data": [{"id": "scripted"}]},
            "/server_info": {"vllm_config": self.settings},
            "get_model_inspection": {"results": [self.structure]},
            "/weight_checker": {"checksums": {f"tp0:{k}": _checksum(v) for k, v in self.weights.items()}},
            "/weight_info": {"weight_version": self.tag},
            "/v1/completions": self._completion(body) if path == "/v1/completions" else {},
        }
        return usual.get(path, {"success": True})

    def load(self, folder: str) -> None:
        """Take the weights of a folder."""
        self.weights = load_file(Path(folder) / "model.safetensors")

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return tokens counted up from the seed; the top tokens are others, so the sampled one has its own entry."""
        log_prob = float(-np.log(VOCAB_SIZE) - self.weights["model.norm.weight"].mean())
        tokens = [2 + (body["seed"] + index) % (VOCAB_SIZE - 2) for index in range(body["max_tokens"])]
        assert EOS not in tokens
        tops = [
            {f"token_id:{token}": log_prob}
            | {f"token_id:{(token + k) % VOCAB_SIZE}": log_prob + 0.001 * k for k in range(1, body["logprobs"] + 1)}
            for token in tokens
        ]
        choice = {
            "finish_reason": "length",
            "token_ids": tokens,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": [log_prob] * len(tokens), "top_logprobs": tops},
        }
        return {"choices": [choice]}


def _checksum(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
