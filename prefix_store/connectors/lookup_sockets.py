"""Look-ups ahead of the steps: the scheduler's side asks the workers of its host through sockets.

Each look-up goes out with the next step as well. But its answer comes back with the end of that step, and where two
steps are under way the scheduler has made the next one by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import struct
from collections.abc import Callable, Iterable

import msgspec

from prefix_store.connectors.transfers import Found, Lookup

log = logging.getLogger(__name__)

_LARGEST = 2**18
"""Bytes of a message. Linux sends no larger ones by default: such a look-up goes with its step alone."""
_CREDENTIALS = struct.Struct("3i")
"""Of a peer: process, user, group (unix(7), SO_PEERCRED)."""


class LookupClient:
    """Asks the workers; for one thread.

    Args:
        workers: how many there are. Nothing is asked before all have connected, which those on other hosts never do.

    Raises:
        OSError: this system has no such sockets.
    """

    def __init__(self, workers: int) -> None:
        self._expected = workers
        self._workers: dict[int, socket.socket] = {}
        self._poll = select.poll()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("")  # Linux chooses a name that is nobody's, and is free with the socket's end
        self._listener.listen(workers)
        self._listener.setblocking(False)

    @property
    def address(self) -> bytes:
        """Where workers shall connect; empty once they have."""
        return b"" if len(self._workers) == self._expected else self._listener.getsockname()

    def ask(self, lookup: Lookup) -> bool:
        """Whether all workers were asked. Waits for none."""
        self._accept()
        if len(self._workers) < self._expected:
            return False
        message = msgspec.msgpack.encode(lookup)
        try:
            for worker in self._workers.values():
                worker.send(message)
        except OSError:  # too large, or a worker that does not read
            return False
        return True

    def answers(self, within: float) -> Iterable[tuple[str, Found]]:
        """Answers of single workers, by request: those that have come, or the first to come within some seconds."""
        for number, _ in self._poll.poll(within * 1_000):
            worker = self._workers[number]
            try:
                message = worker.recv(_LARGEST)
            except OSError:
                message = b""
            if message:
                yield msgspec.msgpack.decode(message, type=tuple[str, Found])
            else:
                self._poll.unregister(number)
                self._workers.pop(number).close()

    def close(self) -> None:
        """Ends the connections."""
        for one in (self._listener, *self._workers.values()):
            one.close()

    def _accept(self) -> None:
        while len(self._workers) < self._expected:
            try:
                worker, _ = self._listener.accept()
            except OSError:  # nobody is waiting
                return
            if not _is_own(worker):
                worker.close()
                continue
            worker.setblocking(False)
            self._workers[worker.fileno()] = worker
            self._poll.register(worker, select.POLLIN)


def connect(address: bytes) -> socket.socket | None:
    """A worker's connection to the scheduler's side; None if it is on another host."""
    to = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        to.connect(address)
        if _is_own(to):
            to.setblocking(False)
            return to
    except OSError as error:
        log.info("look-ups go with the engine's steps alone: %s", error)
    to.close()
    return None


async def receive(asked: socket.socket, begin: Callable[[Lookup, socket.socket], None]) -> None:
    """Begins each look-up that comes, with where its answer goes, until the connection ends."""
    loop = asyncio.get_running_loop()
    try:
        while message := await loop.sock_recv(asked, _LARGEST):
            begin(msgspec.msgpack.decode(message, type=Lookup), asked)
    except ConnectionError:
        pass  # the other side has ended
    finally:
        shut_down(asked)


def shut_down(asked: socket.socket) -> None:
    """Ends a connection: the scheduler's side asks no more. Any thread."""
    with contextlib.suppress(OSError):  # it has ended already
        asked.shutdown(socket.SHUT_RDWR)


async def send(asked: socket.socket, request_id: str, found: Found) -> None:
    """Answers a look-up."""
    with contextlib.suppress(OSError):  # the other side has ended: nobody waits
        await asyncio.get_running_loop().sock_sendall(asked, msgspec.msgpack.encode((request_id, found)))


def _is_own(peer: socket.socket) -> bool:
    """Whether the other side is a process of the same user: names of such sockets have no permissions."""
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1]) == os.getuid()
