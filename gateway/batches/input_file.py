"""The input of a batch: a line of JSON for each request. It is read a line at a time, and never held in memory.

Everything here blocks, and is called in threads.
"""

import hashlib
import os
from array import array
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gateway.batches.batch import BatchError
from gateway.errors import InvalidRequest
from gateway.http.json_object import decode_object

MAX_LINES = 50_000
MAX_ERRORS = 100
"""Errors that a batch lists; further ones are counted."""

_FIELDS = ("custom_id", "method", "url", "body")
_SKIPPED_AT_ONCE = 2**20
_canonical = msgspec.json.Encoder(order="deterministic").encode


class _Line(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


_decode_line = msgspec.json.Decoder(_Line).decode


class InvalidLine(Exception):
    """Why a line cannot be run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class InputFile:
    """The requests of a batch for `endpoint`; a line has at most `max_line` bytes.

    Lines whose bodies are the same JSON are one request, with a number from 0. `digests` are those of the requests'
    bodies, and `copies` the number of lines of each. `scan` fills them in, and `errors` and `model`.
    """

    def __init__(self, path: Path, endpoint: str, max_line: int) -> None:
        self._file = path.open("rb")
        self._endpoint = endpoint
        self._max_line = max_line
        self._offsets = array("Q")
        self._lengths = array("Q")
        self._requests = array("L")  # of each line
        self._first_lines = array("L")  # of each request
        self._invalid = 0
        self.copies = array("L")
        self.digests: list[bytes] = []
        self.errors: list[BatchError] = []
        self.model: str | None = None
        """The model of all lines, if they have one in common."""

    def close(self) -> None:
        self._file.close()

    @property
    def total(self) -> int:
        return len(self._offsets)

    def scan(self) -> Generator[None, None, None]:
        """Read and check every line, in a step each."""
        custom_ids: set[bytes] = set()
        numbers: dict[bytes, int] = {}
        models: set[str | None] = set()
        for number, offset, line in self._lines():
            if self.total == MAX_LINES:
                self._add_error(InvalidLine("too_many_lines", f"A batch has at most {MAX_LINES} requests."), number)
                break
            try:
                fields = self._checked(line)
                identity = hashlib.blake2b(fields["custom_id"].encode(), digest_size=16).digest()
                if identity in custom_ids:
                    raise InvalidLine("duplicate_custom_id", "An earlier line has the same custom_id.", "custom_id")
                custom_ids.add(identity)
                digest = _digest_of(fields["body"])
            except InvalidLine as error:
                self._add_error(error, number)
            else:
                request = numbers.setdefault(digest, len(numbers))
                if request == len(self.digests):
                    self.digests.append(digest)
                    self.copies.append(0)
                    self._first_lines.append(self.total)
                self.copies[request] += 1
                self._offsets.append(offset)
                self._lengths.append(len(line))
                self._requests.append(request)
                model = fields["body"].get("model")
                models.add(model if isinstance(model, str) else None)
            yield
        if not self.total and not self._invalid:
            self.errors.append(BatchError("empty_file", "The input file has no requests."))
        if self._invalid > MAX_ERRORS:
            self.errors.append(BatchError("more_errors", f"{self._invalid - MAX_ERRORS} more lines are invalid."))
        if len(models) == 1:
            self.model = models.pop()

    def body(self, request: int) -> bytes:
        """The body of a request, as its first line has it."""
        return bytes(self._read(self._first_lines[request]).body)

    def requests(self) -> Iterator[tuple[int, str, int]]:
        """For each line its number from 0, its custom_id and the number of its request."""
        for line, request in enumerate(self._requests):
            yield line, self._read(line).custom_id, request

    def _read(self, line: int) -> _Line:
        # Several threads read at the same time: nothing here moves the file's position.
        return _decode_line(os.pread(self._file.fileno(), self._lengths[line], self._offsets[line]))

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Number from 1, offset and text of each line that is not blank; of one that is too long only the beginning."""
        number = offset = 0
        self._file.seek(0)
        while line := self._file.readline(self._max_line + 2):
            number += 1
            start, rest = offset, line
            offset += len(line)
            while rest and not rest.endswith(b"\n"):
                rest = self._file.readline(_SKIPPED_AT_ONCE)
                offset += len(rest)
            if line.strip():
                yield number, start, line

    def _checked(self, line: bytes) -> dict[str, Any]:
        """The fields of a line. Raises InvalidLine."""
        if len(line.rstrip(b"\r\n")) > self._max_line:
            raise InvalidLine("line_too_long", f"The line is longer than {self._max_line} bytes.")
        try:
            fields = decode_object(line)
        except InvalidRequest as error:
            raise InvalidLine("invalid_json_line", error.message) from error
        for name in _FIELDS:
            if fields.get(name) is None:
                raise InvalidLine("missing_required_parameter", f"The line has no {name}.", name)
        if unknown := next((name for name in fields if name not in _FIELDS), None):
            raise InvalidLine("unknown_parameter", f"A line has only {', '.join(_FIELDS)}.", unknown[:100])
        custom_id, body = fields["custom_id"], fields["body"]
        if not isinstance(custom_id, str) or not custom_id:
            raise InvalidLine("invalid_custom_id", "custom_id must be text that is not empty.", "custom_id")
        if fields["method"] != "POST":
            raise InvalidLine("invalid_method", "method must be POST.", "method")
        if fields["url"] != self._endpoint:
            raise InvalidLine("invalid_url", f"url must be {self._endpoint}, the endpoint of the batch.", "url")
        if not isinstance(body, dict):
            raise InvalidLine("invalid_body", "body must be an object.", "body")
        if body.get("stream"):
            raise InvalidLine("stream_not_supported", "A batch does not stream: leave out stream.", "body.stream")
        return fields

    def _add_error(self, error: InvalidLine, line: int) -> None:
        self._invalid += 1
        if self._invalid <= MAX_ERRORS:
            self.errors.append(BatchError(error.code, error.message, error.param, line))


def _digest_of(body: dict[str, Any]) -> bytes:
    """Equal for equal JSON, in whichever order its keys are. Raises InvalidLine."""
    try:
        return hashlib.blake2b(_canonical(body), digest_size=16).digest()
    except RecursionError as error:
        raise InvalidLine("invalid_body", "body is nested too deeply.", "body") from error
