"""The HTTP routes of one SGLang server, as SGLang 0.5.23 has them.

Status: experimental. Run with SGLang 0.5.23 on a CPU, in tests; not yet run on a GPU.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jackpot.rollout.engines.servers.http import FOLDER_ADVICE, HTTPClient, Result, check_success
from jackpot.rollout.engines.servers.protocol import answer_bytes


class SGLangClient(HTTPClient):
    """A client of one SGLang server, with a method for each HTTP route."""

    api_key_var = "SGLANG_API_KEY"  # our name; SGLang itself takes the key from --api-key alone
    missing_route_advice = "this engine was made for SGLang 0.5.23 (docs/vllm.md)"

    async def weight_version(self) -> str:
        return await self._call("GET", "/model_info", parse=lambda body: str(body["weight_version"]))

    async def server_info(self) -> dict[str, Any]:
        """Return the settings that the server was started with, as SGLang resolved them, and the server's limits."""
        return await self._call("GET", "/server_info", parse=dict)

    async def checksums(self) -> dict[str, str]:
        """Return a checksum of every parameter and buffer, by rank and SGLang's name of the tensor."""

        def parse(body: Any) -> dict[str, str]:
            """Join the checksums of all ranks, under keys RANK:NAME."""
            check_success(body)
            return {
                f"{rank}:{name}": checksum
                for rank, info in enumerate(body["ranks"])
                for name, checksum in dict(info["checksums"]).items()
            }

        body = {"action": "checksum"}
        return await self._call("POST", "/weights_checker", body, parse=parse, seconds=self._long_seconds)

    async def update_weights(self, folder: str, version: str) -> None:
        """Replace the server's weights by those in `folder`, name them `version` and drop cached keys and values.

        SGLang waits until it generates nothing, and generates nothing until the update is done.

        Raises:
            EngineError: the server refuses, and has its old weights again.
        """
        body = {"model_path": folder, "load_format": "auto", "weight_version": version, "flush_cache": True}
        await self._call(
            "POST",
            "/update_weights_from_disk",
            body,
            parse=check_success,
            seconds=self._long_seconds,
            bad_request_advice=f"it cannot load the weights in {folder}. {FOLDER_ADVICE}",
        )

    async def generate(self, body: Mapping[str, Any], parse: Callable[[Any], Result]) -> Result:
        """Return the response to one prompt, converted by `parse`, which may run on another thread."""
        sampling = body["sampling_params"]
        return await self._call(
            "POST",
            "/generate",
            body,
            parse=parse,
            seconds=self._long_seconds,
            max_bytes=answer_bytes(
                num_prompt=len(body["input_ids"]),
                num_response=sampling["max_new_tokens"],
                num_top=body["top_logprobs_num"],
            ),
        )
