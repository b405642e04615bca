"""The HTTP routes of one vLLM server, as vLLM 0.32 has them."""

from collections.abc import Callable, Mapping
from typing import Any

from jackpot.core.errors import EngineError
from jackpot.rollout.engines.servers.http import (
    FOLDER_ADVICE,
    URLS_ADVICE,
    HTTPClient,
    Result,
    ServerRefused,
    check_success,
)
from jackpot.rollout.engines.servers.protocol import answer_bytes


class VLLMClient(HTTPClient):
    """A client of one vLLM server, with a method for each HTTP route."""

    api_key_var = "VLLM_API_KEY"  # the name that vLLM itself uses
    missing_route_advice = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, and with vLLM 0.32 or later"

    async def model_name(self) -> str:
        """Return the name of the model, which every request for a completion must give."""
        return await self._call(
            "GET",
            "/v1/models",
            parse=lambda body: str(body["data"][0]["id"]),
            missing_route_advice=URLS_ADVICE,
        )

    async def vllm_config(self) -> dict[str, Any]:
        """Return the whole configuration of the server's vLLM, by section."""
        return await self._call("GET", "/server_info?config_format=json", parse=lambda body: dict(body["vllm_config"]))

    async def model_inspection(self) -> str:
        """Return the model's modules and their sizes as PyTorch prints them."""
        body = {"method": "get_model_inspection"}
        return await self._call("POST", "/collective_rpc", body, parse=lambda body: str(body["results"][0]))

    async def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of the bytes of every parameter, by rank and vLLM's name of the parameter."""
        return await self._call(
            "POST",
            "/weight_checker",
            {"action": "checksum"},
            parse=lambda body: dict(body["checksums"]),
            seconds=self._long_seconds,
        )

    async def weight_version(self) -> str:
        """Return the name of the weights that the server holds; "default" after a start."""
        return await self._call("GET", "/weight_info", parse=lambda body: str(body["weight_version"]))

    async def pause(self) -> None:
        """Wait until the server generates nothing; later completions wait for `resume`."""
        await self._call("POST", "/pause?mode=wait", seconds=self._long_seconds)

    async def resume(self) -> None:
        """Let the server generate again after `pause`."""
        await self._call("POST", "/resume")

    async def reload_weights(self, folder: str) -> None:
        """Replace the server's weights by those in `folder`.

        Raises:
            EngineError: the server refuses the weights, although it answers other calls.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        try:
            await self._call("POST", "/collective_rpc", body, seconds=self._long_seconds)
        except ServerRefused as refusal:
            # Raises PeerLost if the server does not answer this call either; otherwise the weights are at fault.
            await self._request("GET", "/health", missing_route_advice=URLS_ADVICE)
            raise EngineError(
                f"{self._url} cannot load the weights in {folder}: {refusal}. {FOLDER_ADVICE}"
            ) from refusal

    async def reset_prefix_cache(self) -> None:
        """Drop the cached keys and values of the old weights."""
        await self._call("POST", "/reset_prefix_cache", parse=check_success)

    async def set_weight_version(self, version: str) -> None:
        """Tell the server the name of the weights that it holds."""
        await self._call("POST", "/update_weight_version", {"new_version": version}, parse=check_success)

    async def complete(self, body: Mapping[str, Any], parse: Callable[[Any], Result]) -> Result:
        """Return the completion of one prompt, converted by `parse`, which may run on another thread."""
        return await self._call(
            "POST",
            "/v1/completions",
            body,
            parse=parse,
            seconds=self._long_seconds,
            max_bytes=answer_bytes(
                num_prompt=len(body["prompt"]), num_response=body["max_tokens"], num_top=body.get("logprobs") or 0
            ),
            missing_route_advice=URLS_ADVICE,
        )
