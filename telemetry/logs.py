"""Logs on standard error: lines for people, or a JSON object for each. Nothing that logs ever waits for a reader."""

import logging
import os
import sys
import threading
import time
from collections import deque
from contextvars import ContextVar
from typing import Literal, Protocol

import msgspec

Format = Literal["human", "json"]

_MAX_WAITING = 10_000
_FLUSH_SECONDS = 1.0
_encode = msgspec.json.Encoder(enc_hook=str).encode


class RequestIds(Protocol):
    """What names the request that a task works on; "" for no trace."""

    @property
    def request_id(self) -> str: ...

    @property
    def trace_id(self) -> str: ...


CURRENT_REQUEST: ContextVar[RequestIds | None] = ContextVar("CURRENT_REQUEST", default=None)
"""The request of the running task; tasks that it starts inherit it."""


def configure_logging(kind: Format, level: str) -> None:
    """Have this process log what is at least as severe as `level`, in place of what was configured before."""
    formatter = JsonFormatter() if kind == "json" else HumanFormatter()
    handler = BackgroundHandler(sys.stderr.fileno())
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class HumanFormatter(logging.Formatter):
    """`LEVEL logger: message`, and the request at whose order it was logged."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        request = CURRENT_REQUEST.get()
        return super().formatMessage(record) + (f" [{request.request_id}]" if request is not None else "")


class JsonFormatter(logging.Formatter):
    """An object with time (RFC 3339), level, logger and message; `extra={"fields": {...}}` adds to it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := CURRENT_REQUEST.get()) is not None:
            line["request_id"] = request.request_id
            if request.trace_id:
                line["trace_id"] = request.trace_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line).decode()


def rfc3339(seconds: float) -> str:
    """A time in seconds since 1970 as UTC, with milliseconds."""
    milliseconds = int(seconds * 1000)
    date = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{date}.{milliseconds % 1000:03d}Z"


class BackgroundHandler(logging.Handler):
    """Formats a record at once and writes it in a thread, so that a full pipe stops no request.

    Lines beyond 10,000 that wait are dropped, and counted in the log itself.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._dropped = 0
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line."""
        if len(self._lines) >= _MAX_WAITING:
            self._dropped += 1
            return
        try:
            line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
        except Exception:  # noqa: BLE001  # logging's own way with arguments that do not fit the message
            self.handleError(record)
            return
        self._idle.clear()
        self._lines.append(line)
        self._wake.set()

    def flush(self) -> None:
        """Wait until all is written, for a second at most."""
        self._idle.wait(_FLUSH_SECONDS)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._lines:
                self._write(b"".join([self._lines.popleft() for _ in range(len(self._lines))]))
                if self._dropped:
                    dropped, self._dropped = self._dropped, 0
                    lost = logging.LogRecord(
                        __name__, logging.WARNING, "", 0, "%d lines of the log were dropped", (dropped,), None
                    )
                    self._write(self.format(lost).encode() + b"\n")
            if not self._wake.is_set():
                self._idle.set()

    def _write(self, text: bytes) -> None:
        while text:
            try:
                text = text[os.write(self._descriptor, text) :]
            except BlockingIOError:  # a descriptor that does not block, and is full
                time.sleep(0.01)
            except OSError:  # the terminal is closed: nobody is left to be told
                return
