"""Taps on the sockets between processes: the n-th message of a kind ends its sender, is late, cut, repeated or fuzzed.

A tap stands between the two ends of a real socket and hands on whole messages, all but one of them as they are.
"""

import asyncio
import json
import os
import random
import signal
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from jackpot import training
from jackpot.core.messages import unpack
from jackpot.rollout.engines import process
from jackpot.training.ranks import Ranks

FAULTS = ("last", "late", "cut", "stalled", "repeated", "fuzzed", "noise")
_REPEAT_SECONDS = 0.05  # after which a message comes a second time
Send = Callable[[bytes], Any]


def sealed(body: bytes) -> Tensor:
    """Return a forged message with the checksum that `pack` would give it."""
    return torch.frombuffer(bytearray(zlib.crc32(body).to_bytes(8, "little") + body), dtype=torch.uint8)


def fuzzed(message: bytes, seed: int = 0) -> bytes:
    """Return a message in which some bytes of its second half are others."""
    draw, data = random.Random(seed), bytearray(message)
    for index in draw.choices(range(len(data) // 2, len(data)), k=3):
        data[index] ^= draw.randrange(1, 256)
    return bytes(data)


class Tap:
    """Does something to one message.

    Args:
        kind: of the message.
        fault: one of `FAULTS`; `stalled` is half of a message on a connection that stays open, `noise` other bytes in
            place of the whole message.
        number: which message of its kind.
        late: seconds that a late message takes.
        seed: of what is random.
        note: file that is made when it happens.
    """

    def __init__(
        self, kind: str, fault: str, number: int = 1, *, late: float = 5.0, seed: int = 0, note: Path | None = None
    ) -> None:
        self.kind, self.number = kind, number
        self.fault, self.late, self.seed = fault, late, seed
        self.seen: Counter[str] = Counter()  # messages by kind
        self.note = note
        self._turn = threading.Lock()

    def hits(self, kind: str) -> bool:
        """Count a message; return whether it is the one."""
        with self._turn:
            self.seen[kind] += 1
            is_hit = kind == self.kind and self.seen[kind] == self.number
            if is_hit and self.note:
                self.note.touch()
            return is_hit

    def hand_on(self, kind: str, message: bytes, send: Send, end: Callable[[], None]) -> None:
        """Send a message, altered where it is the one.

        Args:
            end: ends the sender.
        """
        if not self.hits(kind):
            send(message)
            return
        half = message[: (len(message) + 1) // 2]
        match self.fault:
            case "last":
                send(message)
                end()
            case "late":
                time.sleep(self.late)
                send(message)
            case "cut":
                send(half)
                end()
            case "stalled":
                send(half)
                time.sleep(self.late)
                raise ConnectionError
            case "repeated":
                send(message)
                time.sleep(_REPEAT_SECONDS)
                send(message)
            case "fuzzed":
                send(fuzzed(message, self.seed))
            case "noise":
                send(random.Random(self.seed).randbytes(len(message)))


def die() -> None:
    """End this process as abruptly as can be."""
    os.kill(os.getpid(), signal.SIGKILL)


def _relay(read: Callable[[], tuple[str, bytes]], send: Send, tap: Tap, end: Callable[[], None], ends: tuple) -> None:
    """Hand on messages until one side ends; then both do."""
    with suppress(OSError, EOFError):
        while True:
            tap.hand_on(*read(), send, end)
    for connection in ends:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


# Engine processes


def tapped(start: process.Start, tap: Tap) -> process.Start:
    """Return what starts a process of engines whose socket has a tap.

    Kinds of messages are `setup`, what is asked for (`generate`), `answer to generate` and so on, and `sign`.
    """

    async def begin(child_end: socket.socket) -> asyncio.subprocess.Process:
        # the child gets the far end of a new pair; messages go from `parent_side` to `child_side` and back
        child_side, far_end = socket.socketpair()
        parent_side = child_end.dup()
        child = await start(far_end)
        far_end.close()
        ask_kind = ["setup"]  # of what was asked last

        def frame(stream: Any) -> bytes:
            head = stream.read(process._HEAD.size)
            body = stream.read(int.from_bytes(head[-8:], "little"))
            if len(head) < process._HEAD.size:
                raise EOFError
            return head + body

        def ask(stream: Any) -> tuple[str, bytes]:
            message = frame(stream)
            value = unpack(torch.frombuffer(bytearray(message[process._HEAD.size :]), dtype=torch.uint8))
            ask_kind[0] = value["do"] if isinstance(value, dict) and "do" in value else "setup"
            return ask_kind[0], message

        def answer(stream: Any) -> tuple[str, bytes]:
            message = frame(stream)
            return f"answer to {ask_kind[0]}" if len(message) > process._HEAD.size else "sign", message

        def kill() -> None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

        directions = ((parent_side, child_side, ask, die), (child_side, parent_side, answer, kill))
        for source, target, read, end in directions:
            stream = source.makefile("rb")
            relay = (partial(read, stream), target.sendall, tap, end, (parent_side, child_side))
            threading.Thread(target=_relay, args=relay, daemon=True).start()
        return child

    return begin


# Servers


class TCPTap:
    """A server that hands bytes on to another one, `sent`, and `received` ones back, as they come.

    Args:
        restart: has the server end and start again.
    """

    def __init__(self, port: int, tap: Tap, restart: Callable[[], None] = lambda: None) -> None:
        self._server, self._tap, self._restart = port, tap, restart
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        """Connect each client to the server, with a thread for each direction."""
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._server))
            ask, answer = self._readers()
            directions = ((client, server, ask, die), (server, client, answer, self._end))
            for source, target, read, end in directions:
                stream = source.makefile("rb")
                relay = (partial(read, stream), target.sendall, self._tap, end, (client, server))
                threading.Thread(target=_relay, args=relay, daemon=True).start()

    def _end(self) -> None:
        self._restart()
        raise ConnectionError

    def _readers(self) -> tuple[Callable, Callable]:
        """Return what reads a message and its kind from each side of a new connection."""

        def read_some(kind: str, stream: Any) -> tuple[str, bytes]:
            if not (data := stream.read1()):
                raise EOFError
            return kind, data

        return partial(read_some, "sent"), partial(read_some, "received")


class HTTPTap(TCPTap):
    """A server that hands requests on to another one, and its answers back.

    Kinds of messages are the paths, a remote call's the name of the method, and `answer to ` these.
    """

    def _readers(self) -> tuple[Callable, Callable]:
        ask_kind = [""]  # of what was asked last

        def message(stream: Any) -> tuple[bytes, bytes]:
            lines = []
            while (line := stream.readline()) not in (b"\r\n", b""):
                lines.append(line)
            if not line:
                raise EOFError
            sizes = [header for header in lines if header.lower().startswith(b"content-length:")]
            body = stream.read(int(sizes[0].partition(b":")[2])) if sizes else b""
            return b"".join([*lines, line]), body

        def ask(stream: Any) -> tuple[str, bytes]:
            head, body = message(stream)
            path = head.split()[1].decode().partition("?")[0]
            ask_kind[0] = json.loads(body)["method"] if path == "/collective_rpc" else path
            return ask_kind[0], head + body

        def answer(stream: Any) -> tuple[str, bytes]:
            data = b"".join(message(stream))
            return f"answer to {ask_kind[0]}", data

        return ask, answer


# Engine actors of Ray


class TappedActor:
    """Alters what a handle of an engine actor sends and gets, once it has replaced the handle's methods.

    Kinds of messages are `begin`, what is asked for (`generate`), `answer to begin` and so on, and `sign`. A late one
    arrives when nobody waits for it any more. In place of an answer that is cut the actor ends. The actor counts as one
    of another machine, so that weights go with messages.

    Args:
        end: ends the actor's process.
    """

    def __init__(self, actor: Any, tap: Tap, end: Callable[[], None]) -> None:
        self._tap, self._end = tap, end
        self._begin, self._node = actor.begin, actor.node
        self._answer = actor.answer.options(num_returns="streaming")
        actor.begin, actor.node = SimpleNamespace(remote=self._begins), SimpleNamespace(remote=self._elsewhere)
        actor.answer = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._answers))

    async def _elsewhere(self) -> str:
        return "another machine"

    async def _begins(self, setup: np.ndarray) -> None:
        await (await self._sent("begin", setup, self._begin.remote))
        await self._received("answer to begin", None, self._node.remote)

    def _answers(self, message: np.ndarray, weights: Any) -> "_Answers":
        kind = unpack(torch.from_numpy(message.copy()))["do"]
        return _Answers(self, kind, self._sent(kind, message, lambda message: self._answer.remote(message, weights)))

    async def _sent(self, kind: str, message: np.ndarray, call: Callable[[np.ndarray], Any]) -> Any:
        """Send a message by a call, altered where it is the one."""
        if self._tap.hits(kind):
            match self._tap.fault:
                case "late":
                    asyncio.get_running_loop().call_later(self._tap.late, call, message)
                    await asyncio.Event().wait()
                case "repeated":
                    call(message)
                case _:
                    message = self._altered(message)
        return call(message)

    async def _received(self, kind: str, data: Any, more: Callable[[], Any]) -> Any:
        """Return what was received, altered where it is the one; `more` waits for what comes next."""
        if self._tap.hits(kind):
            match self._tap.fault:
                case "last":
                    self._end()
                case "cut":
                    self._end()
                    return await more()
                case "late":
                    await asyncio.sleep(self._tap.late)
                case _:
                    return self._altered(data)
        return data

    def _altered(self, data: np.ndarray) -> np.ndarray:
        if self._tap.fault == "fuzzed":
            return np.frombuffer(fuzzed(data.tobytes(), self._tap.seed), np.uint8)
        return np.frombuffer(random.Random(self._tap.seed).randbytes(len(data) or 64), np.uint8)


class _Answers:
    """The signs of life and the answer of a tapped actor."""

    def __init__(self, actor: TappedActor, ask_kind: str, sending: Coroutine[Any, Any, Any]) -> None:
        self._actor, self._ask_kind, self._sending = actor, ask_kind, sending
        self._stream: Any = None

    async def _more(self) -> np.ndarray:
        return await (await anext(self._stream))

    async def __anext__(self) -> Any:
        self._stream = self._stream or await self._sending
        data = await self._more()
        kind = f"answer to {self._ask_kind}" if len(data) else "sign"
        altered = asyncio.get_running_loop().create_future()
        altered.set_result(await self._actor._received(kind, data, self._more))
        return altered


# Ranks


def tap_ranks(monkeypatch: pytest.MonkeyPatch, tap: Tap) -> None:
    """Alter what the ranks that are forked from now on send each other: the parts of a message that gloo sends.

    Kinds are the names of commands, `reply to ` these, `end`, and `sign`; `setup` is what rank 0 puts into the store. A
    message that is cut or stalled ends after its length; `noise` is another length. `connection` is rank 1's share of a
    sum of all ranks, which comes when rank 0 waits for it: the connection is shut, or half of a frame comes before it.
    """
    send_message = Ranks._send
    send, all_gather = dist.send, dist.all_gather

    def tapped_send(ranks: Ranks, value: Any, rank: int) -> None:
        kind = f"reply to {ranks._last.name}" if ranks.rank else value[1] if value else "end"
        if not tap.hits(kind):
            send_message(ranks, value, rank)
            return
        parts: list[tuple[Tensor, int, Any]] = []
        dist.send = lambda tensor, rank, group=None: parts.append((tensor, rank, group))
        send_message(ranks, value, rank)
        dist.send = send
        _replay(parts)

    def tapped_sign(tensor: Tensor, rank: int, group: Any = None) -> None:
        if tensor is training.ranks._ALIVE and tap.hits("sign"):
            _replay([(tensor, rank, group)])
        else:
            send(tensor, rank, group)

    def _replay(parts: list[tuple[Tensor, int, Any]]) -> None:
        """Send the parts of the message with its fault."""
        draw = random.Random(tap.seed)
        if tap.fault == "late":
            time.sleep(tap.late)
        if tap.fault == "noise":
            other_length = torch.tensor([draw.randrange(-(2**63), 2**63) for _ in range(2)])
            parts[0] = (other_length, *parts[0][1:])
        if tap.fault == "fuzzed":
            tensor, *target = parts[-1]
            data = fuzzed(tensor.numpy().tobytes(), tap.seed)
            parts[-1] = (torch.frombuffer(bytearray(data), dtype=tensor.dtype), *target)
        for index, part in enumerate(parts):
            send(*part)
            if index == 0 and tap.fault == "cut":
                die()
            if index == 0 and tap.fault == "stalled":
                time.sleep(tap.late)
        if tap.fault == "repeated":
            for part in parts:
                send(*part)
        if tap.fault == "last":
            die()

    def tapped_gather(rows: list[Tensor], message: Tensor) -> None:
        if dist.get_rank() == 1 and tap.hits("connection"):
            time.sleep(0.3)
            for descriptor in _connections():
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if tap.fault == "stalled":
                        connection.send(bytes(5))  # half of a frame
                    else:
                        connection.shutdown(socket.SHUT_RDWR)
        all_gather(rows, message)

    def _connections() -> list[int]:
        """Return the descriptors of gloo's connections to the other ranks."""
        store_port = int(os.environ["MASTER_PORT"])
        connections = [each for each in psutil.Process().net_connections("tcp") if each.raddr]
        return [each.fd for each in connections if store_port not in (each.laddr.port, each.raddr.port)]

    class Store(dist.PrefixStore):
        def set(self, key: str, value: bytes) -> None:
            tap.hand_on("setup", value, lambda message: super(Store, self).set(key, message), die)

    monkeypatch.setattr(Ranks, "_send", tapped_send)
    monkeypatch.setattr(dist, "send", tapped_sign)
    monkeypatch.setattr(dist, "PrefixStore", Store)
    monkeypatch.setattr(dist, "all_gather", tapped_gather)
