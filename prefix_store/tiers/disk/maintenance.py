"""The thread that maintains a folder: joins it, lists it, and evicts if this process holds the evictor's lock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from prefix_store.eviction.policy import Policy
from prefix_store.tiers.counts import FailureLog
from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.evictor import Evictor, lock_evictor
from prefix_store.tiers.disk.folder import Folder
from prefix_store.tiers.disk.folder_session import FolderSession
from prefix_store.tiers.disk.inventory import Scan, ScanResult

log = logging.getLogger(__name__)

_TURN_SECONDS = 0.05
_LOOK_SECONDS = 0.5
LIST_SECONDS = 30.0
_LIST_AT_ONCE_SECONDS = 0.005
_AFTER_FAULT_SECONDS = 5.0
_CLOSE_SECONDS = 5.0


class Ended(NamedTuple):
    """An access, by its number in this process, whose answer is complete."""

    access: int
    last: BlockName
    output_length: int


class MaintenanceThread:
    """Joins the folder, again if it vanished and came back; evicts while this process is the evictor.

    ``session`` is None while there is no folder. Any call on it may raise OSError.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        frame_bytes: int,
        policy: Callable[[], Policy],
        on_removed: Callable[[list[bytes]], None],
        on_listed: Callable[[ScanResult], None],
        faults: Counter[str],
    ) -> None:
        """Raises FolderUnusable, or another OSError, where the folder cannot be used to begin with."""
        self.session: FolderSession | None = FolderSession(Folder.open(path))
        self.ended: deque[Ended] = deque(maxlen=10_000)
        """Ended accesses, to be reported to the evictor."""
        self.evictor: Evictor | None = None
        """Set if this process is the evictor. Used by this thread and by tests."""
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._frame_bytes = frame_bytes
        self._policy = policy
        self._on_removed = on_removed
        self._on_listed = on_listed
        self._faults = FailureLog(f"keeping the KV blocks in {path}", faults)
        self._closing = threading.Event()
        self._wanted = threading.Event()
        self._next_look = self._next_list = 0.0
        self._listing: Scan | None = None
        self._look_through: Iterator[ScanResult | None] | None = None
        self._end: Future[None] = Future()
        threading.Thread(target=self._run, name="kv-disk-attend", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait while the evictor works; False when the tier is closing."""
        self._wanted.set()
        return not self._closing.wait(seconds)

    async def close(self) -> None:
        """Leaves the folder; another process may evict then. Waits at most a few seconds if the disk hangs.

        It waits for no other thread than this one: at the end of a process none can be started.
        """
        self._closing.set()
        self._wanted.set()
        await asyncio.wait([asyncio.wrap_future(self._end)], timeout=_CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            is_closing = self._closing.is_set()
            try:
                self._run_once()
                self._faults.recovered()
            except OSError as error:
                self._faults.failed(error)
                self._stop_evicting()
                self._next_look = time.monotonic() + _LOOK_SECONDS
            except Exception:  # a fault of the evictor's state must not end in a folder without eviction
                log.exception("rebuilding the evictor's state of %s", self._path)
                self._stop_evicting()
                self._next_look = time.monotonic() + _AFTER_FAULT_SECONDS
            if is_closing:
                break
            self._wanted.wait(_TURN_SECONDS if self._look_through is None else _LIST_AT_ONCE_SECONDS)
            self._wanted.clear()
        try:
            self._stop_evicting()
            self._leave()
        finally:
            self._end.set_result(None)

    def _run_once(self) -> None:
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            self._check_folder()
        while self.ended and self.session is not None:
            access, last, output_length = self.ended.popleft()
            self.session.ended(last, access, output_length)
        if self.evictor is not None:
            self.evictor.turn()
        if self.session is not None:
            self._list(self.session.folder)

    def _list(self, folder: Folder) -> None:
        """Continues the listing of the folder for a few milliseconds, if one is due."""
        if self._listing is None:
            self._listing = Scan(folder, self._frame_bytes)
        if self._look_through is None:
            if time.monotonic() < self._next_list:
                return
            self._next_list = time.monotonic() + LIST_SECONDS
            self._look_through = self._listing.look()
        until = time.monotonic() + _LIST_AT_ONCE_SECONDS
        steps, self._look_through = self._look_through, None  # a step that fails is the last
        for listed in steps:
            if listed is not None:
                self._on_listed(listed)
                return
            if time.monotonic() > until:
                break
            time.sleep(0)  # releases the GIL to the event loop
        self._look_through = steps

    def _check_folder(self) -> None:
        """Joins the folder again if it was replaced, and takes the evictor's lock if it is free."""
        if self.session is not None and not self.session.is_current():
            self._stop_evicting()
            self._leave()
        if self.session is None:
            self.session = FolderSession(Folder.find(self._path))
        folder = self.session.folder
        if self.evictor is None and (lock := lock_evictor(folder)) is not None:
            self.evictor = Evictor(folder, lock, self._capacity_bytes, self._policy(), self._on_removed)

    def _stop_evicting(self) -> None:
        if self.evictor is not None:
            self.evictor.close()
            self.evictor = None

    def _leave(self) -> None:
        self._listing, self._look_through, self._next_list = None, None, 0.0
        session, self.session = self.session, None
        if session is not None:
            # Another thread may be using it; its next call raises OSError, which it handles.
            with contextlib.suppress(OSError):
                session.close()
