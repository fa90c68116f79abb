"""One request to a peer and its response, by blocking calls in a thread."""

from __future__ import annotations

import contextlib
import http.client
import socket
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType

from prefix_store.frames.segments import Bytes
from prefix_store.peers.errors import PeerFailed, PeerInvalid, PeerRefused, PeerRestarted
from prefix_store.peers.protocol import EPOCH_HEADER, FRAMES_TYPE, PATH, REQUEST_TYPE
from prefix_store.tiers.cancellation import CancelToken

_LAST_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Address:
    """The URL of a peer, and the epoch that it must have."""

    url: str
    epoch: str

    def connection(self) -> http.client.HTTPConnection:
        """Not yet connected. Raises PeerFailed for an invalid URL: peers report their own URLs."""
        try:
            parts = urllib.parse.urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise PeerFailed(f"the peer's URL is {self.url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not host:
            raise PeerFailed(f"the peer's URL is {self.url!r}, expected http://host:port or https://host:port")
        return (http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection)(host, port)


@dataclass(frozen=True, slots=True)
class Question:
    """A request, its secret, and its timeouts in seconds."""

    address: Address
    secret: str = field(repr=False)
    request: bytes
    connect: float
    first_byte: float

    def ask(self, connection: http.client.HTTPConnection, cancel: CancelToken) -> Answer:
        """The answer after its headers. Raises PeerFailed; the connection is closed then."""
        try:
            with _translated(self.address):
                return self._ask(connection, cancel)
        except PeerFailed:
            connection.close()
            raise

    def _ask(self, connection: http.client.HTTPConnection, cancel: CancelToken) -> Answer:
        if connection.sock is None:
            connection.timeout = self.connect
            connection.connect()
        # http.client drops its reference to the socket on "Connection: close", and still reads from it.
        connected: socket.socket = connection.sock
        # A peer that sends single bytes slowly passes the socket timeouts; the caller's deadline ends it here.
        cancel.set_interrupt(lambda: _shut_down(connected))
        connected.settimeout(self.first_byte)
        headers = {"authorization": f"Bearer {self.secret}", "content-type": REQUEST_TYPE}
        connection.request("POST", PATH, self.request, headers)
        response = connection.getresponse()
        url, status, kind = self.address.url, response.status, response.headers.get_content_type()
        epoch = response.headers.get(EPOCH_HEADER, "")
        if status == http.HTTPStatus.CONFLICT or (status == http.HTTPStatus.OK and epoch != self.address.epoch):
            raise PeerRestarted(f"{url} has restarted since it was in the index")
        if status != http.HTTPStatus.OK:
            raise PeerRefused(f"{url} answered with status {status}")
        if kind != FRAMES_TYPE:
            raise PeerInvalid(f"{url} answered with {kind}")
        return Answer(self.address, connection, response, connected)


@dataclass(slots=True)
class Answer:
    """The frames of a response. Leaving it closes the connection, unless it was read to its end."""

    address: Address
    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse
    connected: socket.socket
    is_whole: bool = False
    """Whether it has been read to its end, so that the connection can be reused."""

    def read(self, frame: Bytes) -> int:
        """Fills a frame; returns how many bytes came before the answer ended. Raises PeerFailed."""
        done = 0
        with _translated(self.address):
            while done < len(frame) and (read := self.response.readinto(frame[done:].data)):
                done += read
        self.is_whole = done < len(frame)
        return done

    def end(self) -> None:
        """Reads the end of an answer after its last frame. Raises PeerInvalid if more follows."""
        try:
            self.connected.settimeout(_LAST_SECONDS)
            rest = self.response.read(1)
        except (OSError, http.client.HTTPException):
            return  # all frames are here; the connection is not reused
        if rest:
            raise PeerInvalid(f"{self.address.url} sends more than it was asked for")
        self.is_whole = True

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_whole or error is not None:
            self.response.close()
            self.connection.close()


@contextlib.contextmanager
def _translated(address: Address) -> Iterator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise PeerFailed(f"{address.url}: {type(error).__name__} {error}") from error


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
