"""HTTP client of one vLLM server. aiohttp is imported when an engine is made, not before.

Every call ends in a result, in `PeerLost` (a retry, there or on another server, may help) or in an EngineError (only
a change by the user can help).
"""

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

from jackpot.core.errors import EngineError
from jackpot.core.package import install
from jackpot.rollout.engines.pool import PeerLost
from jackpot.rollout.engines.vllm.protocol import completion_bytes

Result = TypeVar("Result")
_ANSWER_BYTES = 1 << 26  # most of an answer other than a completion: a model's modules, checksums
_CHUNK_BYTES = 1 << 16  # read at once, so that an answer is never much larger in memory than it may be
_MESSAGE_LENGTH = 500  # characters of a server's error that are shown
_LARGE = 1 << 16  # bytes; larger bodies are parsed on another thread than the event loop's
_CONNECT_SECONDS = 10.0
API_KEY_VAR = "VLLM_API_KEY"  # environment variable that holds the key of the servers, vLLM's own
_KEEP_SECONDS = 2.0  # for an idle connection; vLLM closes one after 5, which must not look like a lost server
_SHORT_SECONDS = 60.0  # for a call without generation; vLLM takes some seconds for the first about its configuration
_DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, and with vLLM 0.32 or later"


class ServerRefused(PeerLost):
    """A server answered that it cannot serve the call, at least now."""


def open_session(urls: Sequence[str]) -> Any:
    """Return the aiohttp session that all clients share; called on the event loop that uses it.

    Raises:
        EngineError: aiohttp is not installed, the key has characters that cannot be sent, or there is none and a server
            listens elsewhere than on this machine's loopback interface.
    """
    aiohttp = _import_aiohttp()
    api_key = os.environ.get(API_KEY_VAR)
    elsewhere = [url for url in urls if not _is_loopback(url)]
    if elsewhere and not api_key:
        raise EngineError(
            f"{', '.join(elsewhere)}: not on this machine's loopback interface, so others may reach it, and there is "
            f"no API key; start all servers with --api-key, and set {API_KEY_VAR} to the same key (docs/vllm.md)"
        )
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise EngineError(
            f"the API key in the environment variable {API_KEY_VAR} has a line break or another character that cannot "
            f"be sent; set it without"
        )
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_SECONDS),
        headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        auto_decompress=False,  # a small answer must not become a huge one
    )


def _is_loopback(url: str) -> bool:
    """Return whether an address leads to this machine by its loopback interface."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


class ServerClient:
    """Calls the HTTP routes of one vLLM server."""

    def __init__(self, url: str, session: Any, *, timeout: float) -> None:
        """Prepare calls of one server; nothing is sent yet.

        Args:
            timeout: longest time of a completion or a weight update, seconds.
        """
        self._aiohttp = _import_aiohttp()
        self._url, self._session = url.rstrip("/"), session
        self._long, self._short = timeout, min(timeout, _SHORT_SECONDS)

    async def model_name(self) -> str:
        """Return the model name that completions have to give."""
        return await self._call("GET", "/v1/models", parse=lambda body: str(body["data"][0]["id"]))

    async def vllm_config(self) -> dict[str, Any]:
        """Return vLLM's whole configuration."""
        return await self._call(
            "GET", "/server_info?config_format=json", parse=lambda body: dict(body["vllm_config"]), missing=_DEV_MODE
        )

    async def model_inspection(self) -> str:
        """Return the model's modules and their sizes as PyTorch prints them."""
        body = {"method": "get_model_inspection"}
        return await self._call(
            "POST", "/collective_rpc", body, parse=lambda body: str(body["results"][0]), missing=_DEV_MODE
        )

    async def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of the bytes of every parameter, by rank and vLLM's name."""
        return await self._call(
            "POST",
            "/weight_checker",
            {"action": "checksum"},
            parse=lambda body: dict(body["checksums"]),
            seconds=self._long,
            missing=_DEV_MODE,
        )

    async def weight_version(self) -> str:
        """Return the name of the weights that the server holds; "default" after a start."""
        return await self._call(
            "GET", "/weight_info", parse=lambda body: str(body["weight_version"]), missing=_DEV_MODE
        )

    async def pause(self) -> None:
        """Wait until the server generates nothing; later completions wait for `resume`."""
        await self._call("POST", "/pause?mode=wait", seconds=self._long, missing=_DEV_MODE)

    async def resume(self) -> None:
        """End a `pause`."""
        await self._call("POST", "/resume", missing=_DEV_MODE)

    async def reload_weights(self, folder: str) -> None:
        """Replace the server's weights by those in `folder`.

        Raises:
            EngineError: the server refuses, and is healthy otherwise.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        try:
            await self._call("POST", "/collective_rpc", body, seconds=self._long, missing=_DEV_MODE)
        except ServerRefused as refused:
            await self._call("GET", "/health", parse=None)
            raise EngineError(
                f"{self._url} cannot load the weights in {folder}: {refused}. Every server must see "
                f"engine.weights_folder under the same path as the trainer, and serve the same model. Where it is "
                f"null, the server must run under the same user and in no container of its own"
            ) from refused

    async def reset_prefix_cache(self) -> None:
        """Drop the cached keys and values of the old weights."""
        await self._call("POST", "/reset_prefix_cache", parse=_check_success, missing=_DEV_MODE)

    async def set_weight_version(self, version: str) -> None:
        """Name the weights that the server holds."""
        await self._call(
            "POST", "/update_weight_version", {"new_version": version}, parse=_check_success, missing=_DEV_MODE
        )

    async def complete(self, body: Mapping[str, Any], parse: Callable[[Any], Result]) -> Result:
        """Return the completion of one prompt, converted by `parse`, which may run on another thread."""
        most = completion_bytes(body)
        return await self._call("POST", "/v1/completions", body, parse=parse, seconds=self._long, most=most)

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        parse: Callable[[Any], Result] | None = lambda body: body,
        seconds: float | None = None,
        most: int = _ANSWER_BYTES,
        missing: str = "is engine.urls right? It takes addresses without a path, such as http://127.0.0.1:8000",
    ) -> Result:
        """Send a request and return its parsed JSON.

        Args:
            parse: function of the response's JSON; None: the body is not parsed.
            most: largest size of the response, bytes.
            missing: advice where the route does not exist.
        """
        seconds = seconds or self._short
        limits = self._aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.request(
                method, self._url + path, json=body, timeout=limits, allow_redirects=False
            ) as response:
                status, data = response.status, await _read(response, path, most)
        except TimeoutError:
            raise PeerLost(f"{path} took longer than {seconds:g} seconds") from None
        except (self._aiohttp.ClientError, OSError) as error:
            raise PeerLost(f"{type(error).__name__}: {error}") from error
        if status != 200:
            self._raise_for_status(path, status, data, missing)
        if parse is None:
            return None
        return await asyncio.to_thread(_parse, path, data, parse) if len(data) > _LARGE else _parse(path, data, parse)

    def _raise_for_status(self, path: str, status: int, data: bytes, missing: str) -> None:
        reply = f"HTTP {status} to {path}: {_error_message(data)}"
        if status == 429 or status >= 500:
            raise ServerRefused(reply)
        if status in (401, 403):
            raise EngineError(
                f"{self._url} refuses the API key ({reply}); put the key that it was started with into the environment "
                f"variable {API_KEY_VAR}"
            )
        advice = {404: missing, 405: missing}.get(status, "")
        if 300 <= status < 400:
            advice = "redirects are not followed; put the address of the server itself into engine.urls"
        raise EngineError(f"{self._url} answered {reply}" + (f"; {advice}" if advice else ""))


async def _read(response: Any, path: str, most: int) -> bytes:
    """Return the body of a response.

    Raises:
        PeerLost: it has more than `most` bytes, or is compressed, which no request asks for.
    """
    if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise PeerLost(f"an answer to {path} in the encoding {encoding[:20]!r}, which was not asked for")
    data = bytearray()
    if (response.content_length or 0) <= most:
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            data += chunk
            if len(data) > most:
                break
        else:
            return bytes(data)
    raise PeerLost(f"an answer to {path} of more than {most:,} bytes, the most that it can have")


def _parse(path: str, data: bytes, parse: Callable[[Any], Result]) -> Result:
    try:
        return parse(json.loads(data))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        reply = data[:200].decode(errors="replace")
        raise PeerLost(f"an answer to {path} that cannot be read ({type(error).__name__}: {error}): {reply}") from error


def _check_success(body: Any) -> None:
    if body["success"] is not True:
        raise ValueError("no success")


def _error_message(data: bytes) -> str:
    """Return the message in the body of an error, or the start of the body."""
    try:
        error = json.loads(data)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:_MESSAGE_LENGTH]
    except (ValueError, TypeError, LookupError):
        return data[:200].decode(errors="replace")


def _import_aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise EngineError(
            f"aiohttp cannot be imported: {error}. Install it with {install('vllm-server')}, or use engine=transformers"
        ) from error
    return aiohttp
