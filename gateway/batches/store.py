"""The batches of all tenants on disk: a folder each, in `unfinished` until it has ended and then in `ended`.

    record.json     the batch, as clients get it
    private.json    the headers of its requests, for this user alone; only while it is unfinished
    input.jsonl     a second name of the input file, which may be deleted; only while it is unfinished
    results.jsonl   what has been answered; only while it is unfinished
    lock            held while record.json is replaced

The process that runs a batch holds the lock of its folder. Everything here blocks, and is called in threads.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gateway.batches.batch import PREFIX, Batch, NewBatch
from gateway.batches.files import MONTH, FileStore
from gateway.batches.folders import Folders, Page, is_id, page_of, write_durably
from gateway.errors import InvalidRequest, NotFound

log = logging.getLogger(__name__)

_RECORD = "record.json"
_PRIVATE = "private.json"
_INPUT = "input.jsonl"
_RESULTS = "results.jsonl"
_LOCK = "lock"


class Private(msgspec.Struct, frozen=True):
    """What no client sees of a batch: the headers of its requests, and how long its output is kept, in seconds."""

    headers: list[list[str]]
    output_lifetime: int


class UnfinishedBatch:
    """The folder of a batch that has not ended."""

    def __init__(self, namespace: str, batch_id: str, path: Path) -> None:
        self.namespace = namespace
        self.id = batch_id
        self.input_path = path / _INPUT
        self.results_path = path / _RESULTS
        self._path = path
        self._lock: int | None = None

    def acquire(self) -> bool:
        """Whether this process runs the batch from now on, until `release`: no other does, and it has not ended."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):  # else it was moved meanwhile
                self._lock, descriptor = descriptor, -1
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return self._lock is not None

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def load(self) -> Batch:
        """Raises FileNotFoundError if it is not there any more."""
        return msgspec.json.decode((self._path / _RECORD).read_bytes(), type=Batch)

    def private(self) -> Private:
        return msgspec.json.decode((self._path / _PRIVATE).read_bytes(), type=Private)

    def update(self, change: Callable[[Batch], Batch]) -> Batch:
        """Replace the record by what `change` makes of it. Raises OSError, and what `change` raises."""
        with open(os.open(self._path / _LOCK, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self.load()
            batch = change(before)
            if batch != before:
                write_durably(self._path / _RECORD, msgspec.json.encode(batch))
            return batch

    def forget(self) -> None:
        """Remove all that an ended batch does not need."""
        for name in (_PRIVATE, _INPUT, _RESULTS, _LOCK):
            (self._path / name).unlink(missing_ok=True)


class BatchStore:
    """The batches and the files that they read and write. `created` is set when this process has made a batch."""

    def __init__(self, state: Path, max_file: int) -> None:
        self.files = FileStore(state / "files", max_file)
        self.created = asyncio.Event()
        self._unfinished = Folders(state / "batches" / "unfinished")
        self._ended = Folders(state / "batches" / "ended")

    def create(self, namespace: str, new: NewBatch, headers: list[list[str]]) -> Batch:
        """Raises InvalidRequest if the input file has another purpose than batch, and NotFound if there is none."""
        try:
            purpose = self.files.get(namespace, new.input_file_id).purpose
        except NotFound as error:
            raise NotFound(error.message, param="input_file_id") from error
        if purpose != "batch":
            raise InvalidRequest(
                f"'input_file_id' names a file with purpose {purpose}; upload it with purpose batch.",
                param="input_file_id",
            )
        batch = new.batch(int(time.time()))
        private = Private(headers, new.output_lifetime or MONTH)
        with self._unfinished.draft() as draft:
            self.files.link(namespace, new.input_file_id, draft / _INPUT)
            write_durably(draft / _PRIVATE, msgspec.json.encode(private))
            write_durably(draft / _RECORD, msgspec.json.encode(batch))
            self._unfinished.publish(draft, namespace, batch.id)
        return batch

    def get(self, namespace: str, batch_id: str) -> Batch:
        """Raises NotFound, also for another tenant's."""
        if is_id(PREFIX, batch_id) and (batch := self._read(namespace, batch_id)) is not None:
            return batch
        raise NotFound(f"There is no batch {batch_id[:100]!r}.", param="id")

    def page(self, namespace: str, limit: int, after: str | None) -> Page[Batch]:
        """The newest first. Raises InvalidRequest if `after` is no batch's identifier."""
        if after is not None and not is_id(PREFIX, after):
            raise InvalidRequest("'after' must be the id of a batch.", param="after")
        ids = {*self._unfinished.ids(namespace), *self._ended.ids(namespace)}
        return page_of(ids, lambda each: self._read(namespace, each), limit, after, newest_first=True)

    def cancel(self, namespace: str, batch_id: str) -> Batch:
        """Have the process that runs it stop. Raises NotFound, and InvalidRequest where nothing runs any more."""
        self.get(namespace, batch_id)
        with contextlib.suppress(FileNotFoundError):  # it has ended
            return self._folder(namespace, batch_id).update(_cancelling)
        return _cancelling(self.get(namespace, batch_id))

    def unfinished(self) -> list[UnfinishedBatch]:
        """All, the oldest first."""
        folders = sorted(self._unfinished.all(), key=lambda folder: folder[1])
        return [self._folder(namespace, batch_id) for namespace, batch_id in folders]

    def end(self, unfinished: UnfinishedBatch) -> None:
        """Move a batch whose record says that it has ended to those that have."""
        unfinished.forget()
        self._unfinished.move(unfinished.namespace, unfinished.id, self._ended)

    def clean(self) -> None:
        """Remove what nobody asks for any more: expired files, batches that ended long ago, and half-written ones."""
        self.files.clean()
        self._unfinished.remove_abandoned()
        self._ended.remove_abandoned()
        for namespace, batch_id in self._ended.all():
            batch = self._read(namespace, batch_id)
            if batch is not None and batch.expires_at + MONTH < time.time():
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    self._ended.remove(namespace, batch_id)

    def _folder(self, namespace: str, batch_id: str) -> UnfinishedBatch:
        return UnfinishedBatch(namespace, batch_id, self._unfinished.path(namespace, batch_id))

    def _read(self, namespace: str, batch_id: str) -> Batch | None:
        # In this order: it moves from the first to the second.
        for folders in (self._unfinished, self._ended):
            path = folders.path(namespace, batch_id) / _RECORD
            try:
                return msgspec.json.decode(path.read_bytes(), type=Batch)
            except FileNotFoundError:
                continue
            except msgspec.DecodeError:
                log.error("%s cannot be read", path)
                break
        return None


def _cancelling(batch: Batch) -> Batch:
    if batch.status == "cancelling":
        return batch
    if batch.status not in ("validating", "in_progress"):
        raise InvalidRequest(f"A batch that is {batch.status} cannot be cancelled.", code="batch_not_cancellable")
    return replace(batch, status="cancelling", cancelling_at=int(time.time()))
