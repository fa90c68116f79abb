"""What rank 0 and another rank say to each other over a pair of sockets, which only these two have.

    rank 0 → rank    RankJob, Connect, then a StepInput for each step, or MoveKv; the end of the stream ends the rank
    rank → rank 0    Beat all the time; Loaded, Connected, or RankError once

A message is its length, eight bytes, and a pickle: it comes from a process of the same engine.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.models.config import ModelConfig
from backend.models.partition import ModelPart
from backend.runners.parallel.settings import ParallelSettings

BEAT_SECONDS = 0.5
"""Between two signs of life of a rank."""
_LENGTH = struct.Struct("<Q")
_READ_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class RankJob:
    """All that a rank needs to compute its part."""

    directory: Path
    config: ModelConfig
    part: ModelPart
    settings: ParallelSettings
    rendezvous: Path
    """Of the communicator."""
    shared: SharedDescriptors | None
    """None: ranks share no memory, for each has a device."""


@dataclass(frozen=True, slots=True)
class SharedDescriptors:
    """File descriptors of memory that all ranks share."""

    kv: int
    exchange: int
    """By which the ranks of a stage exchange tensors: a part for each stage, one after the other."""


@dataclass(frozen=True, slots=True)
class Connect:
    """All ranks have loaded their weights: connect with them."""


@dataclass(frozen=True, slots=True)
class MoveKv:
    """Copy keys and values, which each rank has of its own, as ``ModelRunner.move_kv`` says."""

    moves: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Beat:
    """The rank's process runs."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rank has its weights."""

    about: object
    """Whatever the one who loads them has to say of them."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The rank is ready for steps."""


@dataclass(frozen=True, slots=True)
class RankError:
    """The rank cannot go on, and ends."""

    message: str
    is_peer_lost: bool
    """Whether another rank is the cause."""


class Channel:
    """One end of the sockets. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()
        self._received = bytearray()

    def send(self, message: object) -> None:
        """Waits while the other end has not read what was sent before. Raises OSError: it is gone."""
        self.send_packed(pack(message))

    def send_packed(self, packed: bytes) -> None:
        """The same with the result of `pack`."""
        with self._sending:
            self.sock.sendall(packed)

    def receive(self) -> Any:
        """Waits for a message, for ever. Raises EOFError or OSError: the other end is gone."""
        while (message := self._next()) is None:
            self._read()
        return message

    def arrived(self) -> list[Any]:
        """The messages that are complete, after a read, when there is something to read. Raises as `receive`."""
        self._read()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        """The other end sees the end of the stream."""
        self.sock.close()

    def _read(self) -> None:
        some = self.sock.recv(_READ_BYTES)
        if not some:
            raise EOFError
        self._received += some

    def _next(self) -> Any:
        """A message; None: none is complete."""
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        message = pickle.loads(memoryview(self._received)[_LENGTH.size : end])  # noqa: S301 - see above
        del self._received[:end]
        return message


def pack(message: object) -> bytes:
    """A message as it is sent."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body
