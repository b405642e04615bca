"""A host of engines in a separate process on this machine, which is reached over a socket and not over a port.

Both processes send frames: a number, the length of a message in bytes, and the message. An answer has the number of its
question. A frame of length 0 is the sign of life of a host that generates. A frame that comes a second time is ignored.
The host's process ends when this process ends, because the socket then closes. A host that is silent for too long is
killed, with all that it started.
"""

import asyncio
import os
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from jackpot.core.errors import JackpotError
from jackpot.core.messages import MessageError, pack, unpack
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.engines.hosted import EngineHost, Link
from jackpot.rollout.engines.pool import PeerLost

_HEAD = struct.Struct("<QQ")  # number of a frame (0 is the setup) and length of its message in bytes
_BUFFER = 2**22  # largest number of bytes that asyncio reads ahead
_END_SECONDS = 5.0  # longest wait for the end of a process that has closed its socket
# Prefixes and names of the environment variables by which a launcher such as torchrun tells a process its rank.
_LAUNCHERS = ("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_")
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


# A function that is given a socket and starts a process that calls `serve` on this socket.
Start = Callable[[socket.socket], Awaitable[asyncio.subprocess.Process]]


def make_starter(entry: str, environment: Mapping[str, str]) -> Start:
    """Return a function that starts a Python program and hands a socket over to it.

    Args:
        entry: text of the program, whose one argument is the number of the socket's descriptor.
        environment: variables that are set besides those of this process. Variables of this process that tell it its
            rank are not handed on.
    """

    async def start(far_end: socket.socket) -> asyncio.subprocess.Process:
        """Start the program in a new process that inherits the socket `far_end`."""
        # The new process gets no variables by which a launcher such as torchrun tells this process its rank.
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS) and name not in _RANK
        }
        paths = os.pathsep.join(path for path in sys.path if path)  # where this process finds its packages
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", entry, str(far_end.fileno())),
            env={**inherited, "PYTHONPATH": paths, **environment},
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[far_end.fileno()],
            start_new_session=True,  # Ctrl-C does not reach it, and it is killed with all that it starts
        )

    return start


class ProcessLink(Link):
    """A link to a host in a process of this machine; the link starts, kills and replaces the process.

    Args:
        start: starts the process, from `make_starter`.
        setup: first message to every process, from which the process makes its engines.
        silence: seconds without any sign of life after which a process counts as lost.
    """

    def __init__(self, start: Start, setup: Any, silence: float) -> None:
        """Describe the process, which `open` starts; the arguments are those of the class."""
        self._start, self._setup = start, setup
        self.silence = silence
        self.child: asyncio.subprocess.Process | None = None  # the process; None before `open` and after `close`
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Start a new process in place of the old one, if there is one, and send it the setup.

        Raises:
            PeerLost: the process cannot be started, or does not take the setup.
        """
        await self.close()
        near_end, far_end = socket.socketpair()
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=near_end, limit=_BUFFER)
            self.child = await self._start(far_end)
        except OSError as error:
            raise PeerLost(f"its process cannot be started: {error}") from error
        finally:
            far_end.close()
        self._newest = 0  # number of the newest frame that was sent
        await self._send(pack(self._setup))

    async def ask(self, message: Tensor) -> Tensor:
        """Send a message, wait for the answer as long as signs of life come in time, and return the answer.

        PeerLost is raised where no sign comes in time or the process ends.
        """
        self._newest += 1
        await self._send(message)

        try:
            while True:
                async with asyncio.timeout(self.silence):
                    number, size = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
                    data = await self._reader.readexactly(size)
                    if size and number == self._newest:  # else a sign of life, or an answer that has come before
                        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

        except TimeoutError:
            raise PeerLost(f"its process gave no sign of life for {self.silence:g} seconds") from None
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise PeerLost(await self._end()) from error

    async def close(self) -> None:
        """Close the socket, and kill the process with all that it started."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self.child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            await self.child.wait()
            self.child = None

    async def _send(self, message: Tensor) -> None:
        """Send a message in a frame of the number `_newest`; raise PeerLost if the process does not take it in time."""
        assert self._writer is not None  # `open` comes first
        try:
            self._writer.write(_HEAD.pack(self._newest, len(message)))
            self._writer.write(message.numpy().data)
            async with asyncio.timeout(self.silence):
                await self._writer.drain()
        except (TimeoutError, ConnectionError) as error:
            raise PeerLost(await self._end()) from error

    async def _end(self) -> str:
        """Wait `_END_SECONDS` for the process to end, and return a text that says how it ended, or that it did not."""
        assert self.child is not None  # `open` comes first
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self.child.wait()
        code = self.child.returncode
        if code is None:
            return "its process does not take messages"
        return f"its process was killed by signal {-code}" if code < 0 else f"its process ended with status {code}"


def serve(connection: socket.socket, make: Callable[[Any], Mapping[str, Engine]]) -> None:
    """Answer messages until the other side ends: the main function of a process behind a `ProcessLink`.

    Args:
        connection: this process's end of the socket.
        make: makes the engines from the setup (the first message); their keys are the names of the settings that
            describe them.
    """
    stream = connection.makefile("rwb")
    newest = -1  # number of the newest frame that was received; the first is 0

    def send(message: Tensor | None) -> None:
        """Send the answer to the newest frame received; for None, an empty frame instead, as a sign of life."""
        data = b"" if message is None else message.numpy().data
        stream.write(_HEAD.pack(newest, len(data)))
        stream.write(data)
        stream.flush()

    def receive() -> Tensor:
        """Wait for a frame with a number above all before, and return its message; raise EOFError if none can come."""
        nonlocal newest
        while True:
            try:
                number, size = _HEAD.unpack(stream.read(_HEAD.size))
                data = bytearray(size)
            except (struct.error, MemoryError, OverflowError):  # the other process has ended, or `size` is damaged
                raise EOFError from None
            if stream.readinto(data) < size:
                raise EOFError
            if number > newest:
                newest = number
                return torch.frombuffer(data, dtype=torch.uint8)

    with suppress(EOFError, ConnectionError):
        try:
            setup = unpack(receive())
            answer = EngineHost(make(setup), lambda: send(None)).answer
        except MessageError:  # the link is damaged: the other side starts this process again
            return
        except JackpotError as error:
            refusal = pack({"refused": str(error)})
            answer = lambda message: refusal  # noqa: E731  without engines every message gets the same answer
        while True:
            send(answer(receive()))
