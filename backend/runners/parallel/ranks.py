"""Starts the processes of the other ranks, sends them every step, and watches them."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from backend.engine.model_runner import StepInput
from backend.errors import EngineLost
from backend.models.partition import ModelPart
from backend.runners.parallel.messages import Channel, Connect, Connected, Loaded, MoveKv, RankError, RankJob, pack

_SILENT_SECONDS = 5.0
"""A rank that has been silent for so long is stopped, or its machine is out of memory or of processor time."""
_SILENT_SECONDS_LOADING = 120.0
"""The same before it is ready: libraries and weights are read without a pause for anything else."""
_START_SECONDS = 3600.0
"""For loading: the largest models come from disks at some hundred MB a second."""
_CONNECT_SECONDS = 900.0
"""For connecting, and on devices for moving the weights there and recording decode steps. What an operation with
another rank waits is less."""
_JOIN_SECONDS = 120.0
"""For rank 0 to reach all of the others; gloo ends its own waits in half of it, NCCL never."""
_LOOK_SECONDS = 0.2
_SETTLE_SECONDS = 2.0
"""When a rank loses another one, so long that one's own end is waited for, which says more."""
_STOP_SECONDS = 2.0
_STDERR = 2
_Connection = TypeVar("_Connection")
_PROGRAM = ("-P", "-m", "backend.commands.rank")


class _Rank:
    """The process of one rank, and what is known of it."""

    def __init__(self, part: ModelPart, inherited: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        self.part = part
        self.channel = Channel(ours)
        self.last_heard = time.monotonic()
        self.about: object = None
        self.is_loaded = self.is_connected = self.is_gone = False
        with theirs:
            # In a session of its own: Ctrl-C reaches rank 0 alone, which ends the others in order.
            self.process = subprocess.Popen(  # noqa: S603 - this package
                (sys.executable, *_PROGRAM, str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                pass_fds=(theirs.fileno(), *inherited),
                start_new_session=True,
            )

    @property
    def ended(self) -> str | None:
        """How its process has ended; None: it runs."""
        status = self.process.poll()
        if status is None:
            return None
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


class RankProcesses:
    """The ranks beside rank 0, each a process on this host.

    A thread watches them. When one dies, says nothing any more or reports an error, all are killed, and ``failure``
    says which one it was and why.

    Args:
        inherited: file descriptors that the processes get too.
    """

    def __init__(self, jobs: Sequence[RankJob], inherited: Sequence[int]) -> None:
        self.failure: str | None = None
        self._failed = threading.Condition()
        self._listeners: list[Callable[[str], None]] = []
        self._closing = False
        self._lost: tuple[float, str] | None = None
        self._ranks = [_Rank(job.part, inherited) for job in jobs]
        self._watcher = threading.Thread(target=self._watch, name="rank-watcher", daemon=True)
        self._watcher.start()
        for rank, job in zip(self._ranks, jobs, strict=True):
            self._send(rank, pack(job))

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each rank but 0."""
        return {rank.part.rank: rank.process.pid for rank in self._ranks}

    def wait_loaded(self) -> list[object]:
        """What each rank says of its weights.

        Raises:
            EngineLost: a rank has ended or takes too long.
        """
        self._wait(lambda rank: rank.is_loaded, _START_SECONDS, "loaded its weights")
        return [rank.about for rank in self._ranks]

    def connect(self, title: str, own: Callable[[], _Connection], seconds: float = _JOIN_SECONDS) -> _Connection:
        """Tells them to connect, and returns what rank 0 gets when it does so as well.

        Args:
            title: of rank 0.
            own: connects rank 0, in a thread of its own, for it may wait for a lost rank for ever.

        Raises:
            EngineLost: a rank has ended meanwhile, or it takes longer than ``seconds``.
        """
        self.broadcast(Connect())
        connected: Future[_Connection] = Future()

        def work() -> None:
            try:
                connected.set_result(own())
            except Exception as error:  # noqa: BLE001 - the caller gets it
                connected.set_exception(error)
            with self._failed:
                self._failed.notify_all()

        threading.Thread(target=work, name="connect", daemon=True).start()
        with self._failed:
            self._failed.wait_for(lambda: self.failure is not None or connected.done(), seconds)
        if not connected.done():
            self.fail(f"{title} has not reached the other ranks within {seconds:g} s")
            raise EngineLost(self.failure or title)
        return connected.result()

    def wait_connected(self) -> None:
        """Waits until each rank is ready for steps. Raises as `wait_loaded`."""
        self._wait(lambda rank: rank.is_connected, _CONNECT_SECONDS, "connected")

    def broadcast(self, message: StepInput | MoveKv | Connect) -> None:
        """Sends a message to all of them, with all of its fields. Raises EngineLost: they have failed."""
        packed = pack(message)
        for rank in self._ranks:
            self._send(rank, packed)

    def fail(self, message: str) -> None:
        """Ends all ranks for a reason that is not theirs; no effect after the first failure."""
        with self._failed:
            if self.failure is not None or self._closing:
                return
            self.failure = message
            self._kill()
            self._failed.notify_all()
        for listener in self._listeners:
            listener(message)

    def lost(self, message: str) -> EngineLost:
        """The error for an operation that another rank did not take part in, with the cause once that is known."""
        with self._failed:
            self._failed.wait_for(lambda: self.failure is not None, _SILENT_SECONDS + 2 * _SETTLE_SECONDS)
        self.fail(f"rank 0 has lost another rank: {message}")
        return EngineLost(self.failure or message)

    def on_failure(self, listener: Callable[[str], None]) -> None:
        """Calls a function with ``failure``, once, in any thread, when there is one."""
        with self._failed:
            known = self.failure
            if known is None:
                self._listeners.append(listener)
        if known is not None:
            listener(known)

    def close(self) -> None:
        """Ends all ranks and waits for them."""
        with self._failed:
            self._closing = True
        for rank in self._ranks:
            # The end of the stream ends a rank that waits for a step; its watcher must not see the same.
            with contextlib.suppress(OSError):
                rank.channel.sock.shutdown(socket.SHUT_RDWR)
        self._watcher.join()
        deadline = time.monotonic() + _STOP_SECONDS
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.channel.close()

    def _send(self, rank: _Rank, packed: bytes) -> None:
        try:
            rank.channel.send_packed(packed)
        except OSError as error:
            raise self.lost(f"{rank.part.title} does not listen ({error.strerror})") from error

    def _wait(self, is_done: Callable[[_Rank], bool], seconds: float, what: str) -> None:
        with self._failed:
            self._failed.wait_for(lambda: self.failure is not None or all(map(is_done, self._ranks)), seconds)
        if late := [rank for rank in self._ranks if not is_done(rank)]:
            self.fail(f"{late[0].part.title} has not {what} within {seconds:g} s")
        if self.failure is not None:
            raise EngineLost(self.failure)

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.kill()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.channel.sock, selectors.EVENT_READ, rank)
            while not self._closing and self.failure is None:
                for key, _ in selector.select(_LOOK_SECONDS):
                    self._listen(key.data)
                    if key.data.is_gone:
                        selector.unregister(key.fileobj)
                self._judge(time.monotonic())

    def _listen(self, rank: _Rank) -> None:
        try:
            messages = rank.channel.arrived()
        except (EOFError, OSError):
            rank.is_gone = True
            return
        rank.last_heard = time.monotonic()
        for message in messages:
            with self._failed:
                match message:
                    case Loaded():
                        rank.is_loaded, rank.about = True, message.about
                    case Connected():
                        rank.is_connected = True
                self._failed.notify_all()
            if isinstance(message, RankError):
                text = f"{rank.part.title}: {message.message}"
                if not message.is_peer_lost:
                    self.fail(text)
                elif self._lost is None:
                    self._lost = (time.monotonic(), text)

    def _judge(self, now: float) -> None:
        """Looks whether a rank has failed. One that has reported another one's loss ends too, and is not the cause."""
        for rank in self._ranks:
            patience = _SILENT_SECONDS if rank.is_connected else _SILENT_SECONDS_LOADING
            ended = rank.ended
            # What it said before it ended by itself says more; a signal leaves no time for that.
            if ended is not None and (rank.process.returncode < 0 or (rank.is_gone and self._lost is None)):
                self.fail(f"{rank.part.title} {ended}")
            elif now - rank.last_heard > patience and ended is None:
                self.fail(f"{rank.part.title} has not answered for {patience:g} s")
        if self._lost is not None and now - self._lost[0] > _SETTLE_SECONDS + _SILENT_SECONDS:
            self.fail(self._lost[1])
