"""The client side."""

from __future__ import annotations

import asyncio
import http.client
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.frame import BadFrame
from prefix_store.frames.segments import Segments, buffer
from prefix_store.peers.errors import PeerFailed, PeerInvalid
from prefix_store.peers.exchange import Address, Answer, Question
from prefix_store.peers.health import PeerHealth
from prefix_store.peers.protocol import MAX_BLOCKS, BlocksRequest
from prefix_store.tiers.cancellation import Cancelled, CancelToken
from prefix_store.tiers.counts import Progress, TierCounts
from prefix_store.tiers.worker import Worker

log = logging.getLogger(__name__)

_THREADS = 4
_IDLE_CONNECTIONS = 16
_MAX_PEERS = 1_024
_CONNECT_SECONDS, _FIRST_BYTE_SECONDS = 0.25, 0.5
_ANSWER_SECONDS = 5.0


class PeerClient:
    """Restores blocks from other engines. One event loop uses it; four threads receive, verify and copy.

    Peers are not trusted: each frame is verified against the request before it is copied. A peer that fails, is slow,
    sends a wrong frame or has restarted is skipped for a while (see `PeerHealth`).

    Args:
        secret: shared by all engines.

    Raises:
        ValueError: the secret is empty.
    """

    def __init__(self, secret: str) -> None:
        if not secret:
            raise ValueError("the secret of the peers is empty, expected one")
        self.counts = TierCounts()
        self._secret = secret
        self._healths: OrderedDict[Address, PeerHealth] = OrderedDict()
        self._worker = Worker("kv-peers", _THREADS)
        # Least recently used first.
        self._idle: list[tuple[str, http.client.HTTPConnection]] = []
        self._idle_lock = threading.Lock()

    def may_ask(self, peer: Address) -> bool:
        """Whether a peer is not skipped now."""
        health = self._healths.get(peer)
        return health is None or health.is_available()

    async def read(
        self,
        peer: Address,
        wanted: Sequence[BlockId],
        into: Sequence[Segments],
        frame_format: FrameFormat,
        within: float = _ANSWER_SECONDS,
        cancel: CancelToken | None = None,
    ) -> int:
        """Restores blocks of a chain, in order, up to the first that the peer does not send.

        Args:
            frame_format: of the peer's blocks; the index has its codec.
            within: seconds, 5 at most.
            cancel: see `Tier.read`. A cancellation does not count against the peer.

        Returns:
            How many were restored; the other segments are unchanged. 0 at once for a peer that is skipped. After a
            cancellation the memory may be used again at once.
        """
        if not self.may_ask(peer) or not wanted:
            self.counts.misses += len(wanted)
            return 0
        wanted = wanted[:MAX_BLOCKS]
        progress = Progress()
        began = time.perf_counter()
        try:
            async with asyncio.timeout(min(within, _ANSWER_SECONDS)):
                await self._worker.run(
                    lambda cancel: self._fetch(peer, wanted, into, frame_format, progress, cancel), cancel
                )
            self._health(peer).succeeded()
        except Cancelled:
            pass  # progress.done is the number of restored blocks
        except TimeoutError:
            self._note_failure(peer, PeerFailed(f"{peer.url} took too long"))
        except PeerFailed as error:
            self._note_failure(peer, error)
        self.counts.hits += progress.done
        self.counts.misses += len(wanted) - progress.done
        self.counts.bytes_read += progress.done * frame_format.frame_bytes
        self.counts.read_seconds += time.perf_counter() - began
        return progress.done

    async def close(self) -> None:
        """Ends the threads and the connections."""
        await self._worker.close()
        for _, connection in self._idle:
            connection.close()

    def _fetch(
        self,
        peer: Address,
        wanted: Sequence[BlockId],
        into: Sequence[Segments],
        frame_format: FrameFormat,
        progress: Progress,
        cancel: CancelToken,
    ) -> None:
        names = [(frame_format.stored_key(block.key), frame_format.stored_key(block.parent)) for block in wanted]
        request = msgspec.msgpack.encode(BlocksRequest(peer.epoch, names))
        question = Question(peer, self._secret, request, _CONNECT_SECONDS, _FIRST_BYTE_SECONDS)
        try:
            with self._ask(question, cancel) as answer:
                self._receive(answer, wanted, into, frame_format, progress, cancel)
        except PeerFailed:
            with cancel:  # a cancelled request is no fault of the peer
                raise
        cancel.set_interrupt(None)
        if answer.is_whole:
            self._keep(peer.url, answer.connection)

    def _receive(
        self,
        answer: Answer,
        wanted: Sequence[BlockId],
        into: Sequence[Segments],
        frame_format: FrameFormat,
        progress: Progress,
        cancel: CancelToken,
    ) -> None:
        """Raises PeerFailed."""
        frame = buffer(frame_format.frame_bytes)
        for block, segments in zip(wanted, into, strict=False):
            size = answer.read(frame)
            if not size:
                return
            try:
                frame_format.verify(block, frame[:size])
            except BadFrame as error:
                self.counts.bad_frames[error.field] += 1
                raise PeerInvalid(f"{answer.address.url} sent a frame that is not the block's: {error}") from error
            with cancel:
                frame_format.decode(frame, segments)
                progress.done += 1
        answer.end()

    def _ask(self, question: Question, cancel: CancelToken) -> Answer:
        """Raises PeerFailed."""
        kept = self._take(question.address.url)
        if kept is not None:
            try:
                return question.ask(kept, cancel)
            except PeerFailed as error:
                if not isinstance(error.__cause__, ConnectionError):
                    raise
                # The peer closed the idle connection, which is no failure.
        return question.ask(question.address.connection(), cancel)

    def _take(self, url: str) -> http.client.HTTPConnection | None:
        """An idle connection, which may still be open."""
        with self._idle_lock:
            place = next((n for n, (of, _) in enumerate(self._idle) if of == url), None)
            return None if place is None else self._idle.pop(place)[1]

    def _keep(self, url: str, connection: http.client.HTTPConnection) -> None:
        with self._idle_lock:
            self._idle.append((url, connection))
            if len(self._idle) > _IDLE_CONNECTIONS:
                self._idle.pop(0)[1].close()

    def _health(self, peer: Address) -> PeerHealth:
        if peer not in self._healths:
            if len(self._healths) >= _MAX_PEERS:
                self._healths.popitem(last=False)
            self._healths[peer] = PeerHealth()
        return self._healths[peer]

    def _note_failure(self, peer: Address, error: PeerFailed) -> None:
        self.counts.io_errors[type(error).__name__] += 1
        log.warning("leaving a peer alone for a while: %s", error)
        self._health(peer).failed(error)
