"""One vLLM server as seen over HTTP. aiohttp is imported when an engine is made, not before.

Every question ends in an answer, in `ServerLost` (another server or another time may do better) or in an EngineError
(nobody but a person can help).
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jackpot.core.errors import EngineError

Result = TypeVar("Result")
_LARGE = 1 << 16  # bytes; more than this are not read on the event loop
_CONNECT_SECONDS = 10.0
_KEEP_SECONDS = 2.0  # an idle connection; vLLM closes one after 5, which must not look like a server that died
_SHORT_SECONDS = 60.0  # for a question that needs no work; the first about its settings takes vLLM some seconds
_DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, and with vLLM 0.32 or later"


class ServerLost(Exception):
    """A server did not answer, or not with an answer to what was asked."""


class ServerRestarted(ServerLost):
    """A server no longer holds what it was given: it has been started anew."""


def open_session(api_key: str | None, variable: str) -> Any:
    """What all servers are asked through; made on the event loop that uses it.

    Args:
        variable: of the environment, which has the key.

    Raises:
        EngineError: aiohttp is not installed, or the key cannot be sent.
    """
    aiohttp = _import_aiohttp()
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise EngineError(
            f"the API key in the environment variable {variable} has a line break or another character that cannot be "
            f"sent; set it without"
        )
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_SECONDS),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
    )


class ServerClient:
    """Asks one server."""

    def __init__(self, url: str, session: Any, *, timeout: float, api_key_var: str) -> None:
        """
        Args:
            timeout: seconds for a response or for new weights.
            api_key_var: named in the advice where the server refuses the key.
        """
        self._aiohttp = _import_aiohttp()
        self._url, self._session, self._api_key_variable = url.rstrip("/"), session, api_key_var
        self._long, self._short = timeout, min(timeout, _SHORT_SECONDS)

    async def model_name(self) -> str:
        """The name to ask for in completions."""
        return await self._ask("GET", "/v1/models", read=lambda answer: str(answer["data"][0]["id"]))

    async def settings(self) -> dict[str, Any]:
        """vLLM's whole configuration."""
        return await self._ask(
            "GET", "/server_info?config_format=json", read=lambda answer: dict(answer["vllm_config"]), missing=_DEV_MODE
        )

    async def structure(self) -> str:
        """The model's modules and their sizes, as PyTorch prints them."""
        body = {"method": "get_model_inspection"}
        return await self._ask(
            "POST", "/collective_rpc", body, read=lambda answer: str(answer["results"][0]), missing=_DEV_MODE
        )

    async def checksums(self) -> dict[str, str]:
        """SHA-256 of the bytes of every parameter, by rank and vLLM's name."""
        return await self._ask(
            "POST",
            "/weight_checker",
            {"action": "checksum"},
            read=lambda answer: dict(answer["checksums"]),
            seconds=self._long,
            missing=_DEV_MODE,
        )

    async def tag(self) -> str:
        """The name of the weights that it holds; "default" after a start."""
        return await self._ask(
            "GET", "/weight_info", read=lambda answer: str(answer["weight_version"]), missing=_DEV_MODE
        )

    async def pause(self) -> None:
        """Returns when nothing is being written; what is asked from now on waits."""
        await self._ask("POST", "/pause?mode=wait", seconds=self._long, missing=_DEV_MODE)

    async def resume(self) -> None:
        await self._ask("POST", "/resume", missing=_DEV_MODE)

    async def load(self, folder: str) -> None:
        """Replace the weights by those in `folder`.

        Raises:
            EngineError: it says that it cannot, and is well otherwise.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        try:
            await self._ask("POST", "/collective_rpc", body, seconds=self._long, missing=_DEV_MODE)
        except ServerRefused as refused:
            await self._ask("GET", "/health", read=None)
            raise EngineError(
                f"{self._url} cannot load the weights in {folder}: {refused}. Every server must see "
                f"engine.weights_folder under the same path as the trainer, and serve the same model"
            ) from refused

    async def forget_states(self) -> None:
        """Drop the cached keys and values of the old weights."""
        await self._ask("POST", "/reset_prefix_cache", read=_check_success, missing=_DEV_MODE)

    async def set_tag(self, tag: str) -> None:
        await self._ask("POST", "/update_weight_version", {"new_version": tag}, read=_check_success, missing=_DEV_MODE)

    async def complete(self, body: Mapping[str, Any], read: Callable[[Any], Result]) -> Result:
        """The answer to one prompt, as `read` makes of it; it may run on another thread."""
        return await self._ask("POST", "/v1/completions", body, read=read, seconds=self._long)

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        read: Callable[[Any], Result] | None = lambda answer: answer,
        seconds: float | None = None,
        missing: str = "is engine.urls right? It takes addresses without a path, such as http://127.0.0.1:8000",
    ) -> Result:
        """
        Args:
            read: of the JSON of the answer; None where nothing is to be read.
            missing: what to do about a route that does not exist.
        """
        seconds = seconds or self._short
        limits = self._aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.request(method, self._url + path, json=body, timeout=limits) as response:
                status, data = response.status, await response.read()
        except TimeoutError:
            raise ServerLost(f"{path} took longer than {seconds:g} seconds") from None
        except (self._aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{type(error).__name__}: {error}") from error
        if status != 200:
            self._refuse(path, status, data, missing)
        if read is None:
            return None
        return await asyncio.to_thread(_read, path, data, read) if len(data) > _LARGE else _read(path, data, read)

    def _refuse(self, path: str, status: int, data: bytes, missing: str) -> None:
        said = f"HTTP {status} to {path}: {_message(data)}"
        if status == 429 or status >= 500:
            raise ServerRefused(said)
        if status in (401, 403):
            raise EngineError(
                f"{self._url} refuses the API key ({said}); put the key that it was started with into the environment "
                f"variable {self._api_key_variable}, or name another one in engine.api_key_var"
            )
        raise EngineError(f"{self._url} answered {said}" + (f"; {missing}" if status in (404, 405) else ""))


class ServerRefused(ServerLost):
    """A server answered that it cannot, at least now."""


def _read(path: str, data: bytes, read: Callable[[Any], Result]) -> Result:
    try:
        return read(json.loads(data))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        said = data[:200].decode(errors="replace")
        raise ServerLost(
            f"an answer to {path} that cannot be read ({type(error).__name__}: {error}): {said}"
        ) from error


def _check_success(answer: Any) -> None:
    if answer["success"] is not True:
        raise ValueError("no success")


def _message(data: bytes) -> str:
    """What a server says about its error."""
    try:
        error = json.loads(data)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, TypeError, LookupError):
        return data[:200].decode(errors="replace")


def _import_aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise EngineError(
            f"aiohttp cannot be imported: {error}. Install it with pip install 'jackpot-rl[vllm-server]', or use "
            f"engine=transformers"
        ) from error
    return aiohttp
