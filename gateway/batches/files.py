"""The files of OpenAI's Files API, on disk: `<root>/<namespace>/<id>/` with the content and the record of each.

Everything here blocks, and is called in threads.
"""

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import msgspec

from gateway.batches.folders import Folders, Page, is_id, new_id, page_of, write_all, write_durably
from gateway.errors import GatewayError, InvalidRequest, NotFound

log = logging.getLogger(__name__)

PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
MONTH = 30 * 86_400
"""How long OpenAI keeps the files of batches, in seconds."""

_PREFIX = "file-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StorageFull(GatewayError):
    """The disk of the gateway holds no more."""

    status = 507
    code = "storage_full"


@contextmanager
def reporting_full_disk() -> Iterator[None]:
    """Raises StorageFull for the OSErrors that say so."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StorageFull("The gateway's disk is full: nothing of this was kept.") from error


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's file object. Times are Unix seconds; `size` is in bytes."""

    id: str
    object: str = "file"
    size: int = msgspec.field(name="bytes")
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"
    status_details: str | None = None

    @property
    def has_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= time.time()


class FileDraft:
    """A file that is being written; `commit` makes it one of a tenant's. `size` is what it has so far, in bytes."""

    def __init__(self, folders: Folders, folder: Path, content: FileIO) -> None:
        self._folders = folders
        self._folder = folder
        self._content = content
        self.size = 0

    def write(self, data: bytes) -> None:
        """Raises OSError."""
        write_all(self._content, data)
        self.size += len(data)

    def commit(
        self, namespace: str, filename: str, purpose: str, lifetime: int | None, file_id: str = "", created_at: int = 0
    ) -> FileObject:
        """Publish the file, which expires after `lifetime` seconds. One with this `file_id` stays as it is."""
        created_at = created_at or int(time.time())
        record = FileObject(
            id=file_id or new_id(_PREFIX),
            size=self.size,
            created_at=created_at,
            expires_at=None if lifetime is None else created_at + lifetime,
            filename=filename,
            purpose=purpose,
        )
        if not self._folders.path(namespace, record.id).exists():
            os.fsync(self._content.fileno())
            write_durably(self._folder / "record.json", msgspec.json.encode(record))
            self._folders.publish(self._folder, namespace, record.id)
        return record


class FileStore:
    """The files of all tenants. An upload has at most `max_bytes`."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._folders = Folders(root)
        self.max_bytes = max_bytes

    @contextmanager
    def draft(self) -> Iterator[FileDraft]:
        """A new file; without a commit nothing of it stays."""
        with self._folders.draft() as folder, (folder / "content").open("xb", buffering=0) as content:
            yield FileDraft(self._folders, folder, content)

    def get(self, namespace: str, file_id: str) -> FileObject:
        """Raises NotFound, also for another tenant's file and for one that has expired."""
        if is_id(_PREFIX, file_id) and (record := self._current(namespace, file_id)) is not None:
            return record
        raise NotFound(f"There is no file {file_id[:100]!r}.", param="id")

    def page(
        self, namespace: str, limit: int, after: str | None, purpose: str | None, newest_first: bool
    ) -> Page[FileObject]:
        """Raises InvalidRequest if `after` is no file's identifier."""
        if after is not None and not is_id(_PREFIX, after):
            raise InvalidRequest("'after' must be the id of a file.", param="after")

        def read(file_id: str) -> FileObject | None:
            record = self._current(namespace, file_id)
            return None if record is None or purpose not in (None, record.purpose) else record

        return page_of(self._folders.ids(namespace), read, limit, after, newest_first)

    def open(self, namespace: str, file_id: str) -> tuple[FileObject, FileIO]:
        """The file, and its content to be read and closed. Raises NotFound."""
        record = self.get(namespace, file_id)
        try:
            return record, (self._folders.path(namespace, file_id) / "content").open("rb", buffering=0)
        except FileNotFoundError as error:
            raise NotFound(f"There is no file {file_id!r}.", param="id") from error

    def link(self, namespace: str, file_id: str, path: Path) -> None:
        """Give the content a second name, under which it outlives the file. Raises NotFound."""
        try:
            os.link(self._folders.path(namespace, file_id) / "content", path)
        except FileNotFoundError as error:
            raise NotFound(f"There is no file {file_id!r}.", param="input_file_id") from error

    def delete(self, namespace: str, file_id: str) -> None:
        """Raises NotFound."""
        self.get(namespace, file_id)
        try:
            self._folders.remove(namespace, file_id)
        except FileNotFoundError as error:
            raise NotFound(f"There is no file {file_id!r}.", param="id") from error

    def clean(self) -> None:
        """Remove the files that have expired, and what killed processes have left half-written."""
        self._folders.remove_abandoned()
        for namespace, file_id in self._folders.all():
            record = self._record(namespace, file_id)
            if record is not None and record.has_expired:
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    self._folders.remove(namespace, file_id)

    def _current(self, namespace: str, file_id: str) -> FileObject | None:
        record = self._record(namespace, file_id)
        return None if record is None or record.has_expired else record

    def _record(self, namespace: str, file_id: str) -> FileObject | None:
        path = self._folders.path(namespace, file_id) / "record.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=FileObject)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            log.error("%s cannot be read", path)
            return None
