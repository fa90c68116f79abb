"""The results of an unfinished batch: a file to which each is appended as it arrives.

A result that `append` has written survives a kill of the process, and one that `sync` has synced a loss of power. A
line that is torn or damaged is noticed by its checksum, and its request is run again.

Everything here blocks, and is called in threads.
"""

import logging
import os
from collections.abc import Generator
from io import FileIO
from pathlib import Path

import msgspec
import xxhash

from gateway.batches.folders import write_all

log = logging.getLogger(__name__)


class Response(msgspec.Struct, frozen=True):
    """What a server answered; `body` is a JSON object without line breaks."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True):
    """Why there is no answer."""

    code: str
    message: str


class Outcome(msgspec.Struct, frozen=True):
    """What became of a request: an answer or a failure, as OpenAI's output lines have it."""

    response: Response | None = None
    error: Failure | None = None

    @property
    def succeeded(self) -> bool:
        return self.response is not None and 200 <= self.response.status_code < 300


class _Line(msgspec.Struct, frozen=True, array_like=True):
    digest: str
    checksum: str
    outcome: msgspec.Raw


_encode = msgspec.json.Encoder().encode
_decode_line = msgspec.json.Decoder(_Line).decode
_decode_outcome = msgspec.json.Decoder(Outcome).decode


class ResultsFile:
    """The outcomes of the requests of one batch, by the digests of their bodies.

    `succeeded` has for each whether it is a success. Only one thread at a time may use it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")
        self._end = 0
        self._unsynced = 0
        self._lines: dict[bytes, tuple[int, int]] = {}
        self.succeeded: dict[bytes, bool] = {}

    def close(self) -> None:
        self._file.close()

    def recover(self) -> Generator[None, None, None]:
        """Read what an earlier process has written, a line in each step, and cut off a torn last line."""
        with self._path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                outcome = _outcome_in(line)
                if outcome is None:
                    log.warning("%s has a damaged line; its request is run again", self._path)
                else:
                    self._add(*outcome, len(line))
                self._end += len(line)
                yield
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def append(self, digest: bytes, outcome: Outcome) -> None:
        """Add a result. Raises OSError, and then nothing has been added."""
        encoded = _encode(outcome)
        line = _encode(_Line(digest.hex(), xxhash.xxh3_64_hexdigest(encoded), msgspec.Raw(encoded))) + b"\n"
        try:
            write_all(self._file, line)
        except OSError:
            self._file.truncate(self._end)
            self._file.seek(self._end)
            raise
        self._add(digest, outcome.succeeded, len(line))
        self._end += len(line)
        self._unsynced += 1

    def sync(self, least: int = 1) -> None:
        """Sync if as many results as `least` have been added since the last time. Raises OSError."""
        if self._unsynced >= least:
            os.fsync(self._file.fileno())
            self._unsynced = 0

    def outcome(self, digest: bytes) -> Outcome | None:
        """None if there is none yet. Raises OSError for one that cannot be read any more."""
        if digest not in self._lines:
            return None
        offset, length = self._lines[digest]
        return _decode_outcome(_decode_line(os.pread(self._file.fileno(), length, offset)).outcome)

    def _add(self, digest: bytes, succeeded: bool, length: int) -> None:
        self._lines[digest] = (self._end, length)
        self.succeeded[digest] = succeeded


def _outcome_in(line: bytes) -> tuple[bytes, bool] | None:
    """The digest of a line and whether it is a success; None for a damaged line."""
    try:
        found = _decode_line(line)
        if xxhash.xxh3_64_hexdigest(found.outcome) != found.checksum:
            return None
        return bytes.fromhex(found.digest), _decode_outcome(found.outcome).succeeded
    except (ValueError, RecursionError):  # msgspec.DecodeError is a ValueError
        return None
