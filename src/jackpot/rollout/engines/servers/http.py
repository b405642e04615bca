"""The HTTP client of an inference server, for servers of every program. aiohttp is imported when an engine is made.

Every call ends in a result, in `PeerLost` (a retry, there or on another server, may help) or in an EngineError (only
a change by the user can help).
"""

import asyncio
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jackpot.config.engines import is_loopback
from jackpot.core.errors import EngineError
from jackpot.core.package import install
from jackpot.rollout.engines.pool import PeerLost, Result

_ANSWER_BYTES = 1 << 26  # largest answer other than a completion, such as a list of checksums
_CHUNK_BYTES = 1 << 16  # bytes read at once, so that an answer is dropped soon after it is larger than allowed
_MESSAGE_LENGTH = 500  # largest number of characters of a server's error that are shown
_LARGE_BYTES = 1 << 16  # larger bodies are parsed on another thread than the event loop's
_CONNECT_SECONDS = 10.0  # longest time to open a connection to a server
URLS_ADVICE = "is engine.urls right? It takes addresses without a path, such as http://127.0.0.1:8000"
FOLDER_ADVICE = (
    "Every server must see engine.weights_folder under the same path as the trainer, and serve the same model. Where "
    "it is null, the server must run under the same user and in no container of its own"
)
_SHORT_SECONDS = 60.0  # longest time of a call that generates nothing; a new vLLM reports its configuration slowly


class ServerRefused(PeerLost):
    """The error of a call that a server refused, perhaps only for now (HTTP 429, or 500 and above)."""


def open_session(urls: Sequence[str], api_key_var: str) -> Any:
    """Open the aiohttp session that all clients share; to be called on the event loop that uses the session.

    Args:
        api_key_var: environment variable that holds the key of all servers.

    Raises:
        EngineError: aiohttp is not installed, the key has characters that cannot be sent, or there is no key although a
            server listens elsewhere than on this machine's loopback interface.
    """
    aiohttp = _import_aiohttp()
    api_key = os.environ.get(api_key_var)

    elsewhere = [url for url in urls if not is_loopback(url)]
    if elsewhere and not api_key:
        raise EngineError(
            f"{', '.join(elsewhere)}: not on this machine's loopback interface, so others may reach it, and there is "
            f"no API key; start all servers with --api-key, and set {api_key_var} to the same key (docs/vllm.md)"
        )

    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise EngineError(
            f"the API key in the environment variable {api_key_var} has a line break or another character that cannot "
            f"be sent; set it without"
        )

    return aiohttp.ClientSession(
        # One request a connection: on a kept connection an answer sent twice would be taken for the next request's.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        auto_decompress=False,  # a small compressed answer could become a huge one
    )


class HTTPClient(ABC):
    """A client of one server. A subclass has a method for each HTTP route."""

    api_key_var: ClassVar[str]  # environment variable that holds the servers' key
    missing_route_advice: ClassVar[str]  # text with advice that ends the error of a server without the route

    def __init__(self, url: str, session: Any, *, timeout: float) -> None:
        """Prepare calls of one server; nothing is sent yet.

        Args:
            session: aiohttp session of `open_session`.
            timeout: longest time of a response or a weight update, seconds.
        """
        self._aiohttp = _import_aiohttp()
        self._url, self._session = url.rstrip("/"), session
        self._long_seconds, self._short_seconds = timeout, min(timeout, _SHORT_SECONDS)

    @abstractmethod
    async def weight_version(self) -> str:
        """Return the name of the weights that the server holds; "default" after a start."""

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        parse: Callable[[Any], Result] = lambda body: body,
        **options: Any,
    ) -> Result:
        """Send a request and return the response's JSON as `parse` converts it; raise PeerLost if it cannot be read.

        Other errors are those of `_request`.

        Args:
            parse: function that converts the response's JSON to the result.
            options: further arguments of `_request`.
        """
        data = await self._request(method, path, body, **options)
        if len(data) > _LARGE_BYTES:  # parsed on another thread, so that the event loop goes on
            return await asyncio.to_thread(_parse, path, data, parse)
        return _parse(path, data, parse)

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        seconds: float | None = None,
        max_bytes: int = _ANSWER_BYTES,
        bad_request_advice: str = "",
        missing_route_advice: str | None = None,
    ) -> bytes:
        """Send a request and return the body of the response.

        Args:
            seconds: time limit; None: the limit of a call without generation, `_SHORT_SECONDS` or less.
            max_bytes: largest size of the response.
            bad_request_advice: end of the error if the server answers 400, bad request.
            missing_route_advice: end of the error if the route does not exist; None: the advice of the client's class.

        Raises:
            PeerLost: the server was not reached, took too long or failed.
            EngineError: the server refuses for a reason that only the user can mend.
        """
        seconds = seconds or self._short_seconds
        limits = self._aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)

        try:
            async with self._session.request(
                method, self._url + path, json=body, timeout=limits, allow_redirects=False
            ) as response:
                status, data = response.status, await _read(response, path, max_bytes)
        except TimeoutError:
            raise PeerLost(f"{path} took longer than {seconds:g} seconds") from None
        except (self._aiohttp.ClientError, OSError) as error:
            raise PeerLost(f"{type(error).__name__}: {error}") from error

        if status != 200:
            no_route = missing_route_advice or self.missing_route_advice
            self._raise_for_status(path, status, data, {400: bad_request_advice, 404: no_route, 405: no_route})
        return data

    def _raise_for_status(self, path: str, status: int, data: bytes, advices: Mapping[int, str]) -> None:
        """Raise the error of a response that is not a success: ServerRefused where another attempt may help.

        Args:
            advices: by HTTP status, a text with advice that ends the EngineError.
        """
        reply = f"HTTP {status} to {path}: {_error_message(data)}"
        if status == 429 or status >= 500:
            raise ServerRefused(reply)
        if status in (401, 403):
            raise EngineError(
                f"{self._url} refuses the API key ({reply}); put the key that it was started with into the environment "
                f"variable {self.api_key_var}"
            )
        advice = advices.get(status, "")
        if 300 <= status < 400:
            advice = "redirects are not followed; put the address of the server itself into engine.urls"
        raise EngineError(f"{self._url} answered {reply}" + (f"; {advice}" if advice else ""))


async def _read(response: Any, path: str, max_bytes: int) -> bytes:
    """Read the body of a response.

    Raises:
        PeerLost: the body has more than `max_bytes` bytes, or is compressed, which no request asks for.
    """
    if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise PeerLost(f"an answer to {path} in the encoding {encoding[:20]!r}, which was not asked for")
    data = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        data += chunk
        if max(len(data), response.content_length or 0) > max_bytes:  # None: the server announces no size
            raise PeerLost(f"an answer to {path} of more than {max_bytes:,} bytes, the most that it can have")
    return bytes(data)


def _parse(path: str, data: bytes, parse: Callable[[Any], Result]) -> Result:
    """Return the result that `parse` makes of the JSON in a body; raise PeerLost if the body cannot be read."""
    try:
        return parse(json.loads(data))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        reply = data[:200].decode(errors="replace")
        raise PeerLost(f"an answer to {path} that cannot be read ({type(error).__name__}: {error}): {reply}") from error


def check_success(body: Any) -> None:
    """Raise ValueError for an answer that does not report success."""
    if body["success"] is not True:
        raise ValueError("no success")


def _error_message(data: bytes) -> str:
    """Return the error message in the body of an HTTP response, or the start of the body if there is none."""
    try:
        body = json.loads(data)
        error = body["error"] if "error" in body else body["message"]
        return str(error["message"] if isinstance(error, dict) else error)[:_MESSAGE_LENGTH]
    except (ValueError, TypeError, LookupError):
        return data[:200].decode(errors="replace")


def _import_aiohttp() -> Any:
    """Return the module aiohttp; raise EngineError with advice where it is not installed."""
    try:
        import aiohttp
    except ImportError as error:
        raise EngineError(
            f"aiohttp cannot be imported: {error}. Install it with {install('servers')}, or use engine=transformers"
        ) from error
    return aiohttp
