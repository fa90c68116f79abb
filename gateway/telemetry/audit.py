"""The audit log: a JSON object for each action of an operator, in a file or in the log."""

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from gateway.settings.fields import SettingsError
from gateway.settings.settings import Settings
from gateway.telemetry.record import RECORD
from telemetry.logs import rfc3339

log = logging.getLogger("keepgate.audit")

_FILE_MODE = 0o600


class AuditLog:
    """Where actions are written. The file is opened for each line: it may be rotated, and workers share it."""

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError if the file cannot be written."""
        file = settings.log.audit_file
        self._file = None if file is None else Path(file).expanduser()
        self._operator = "loopback" if settings.admin_key is None else "admin key"
        if self._file is not None:
            try:
                self._append(self._file, b"")
            except OSError as error:
                raise SettingsError(f"log.audit_file: {self._file} cannot be written: {error.strerror}") from error

    def write(
        self, request: web.BaseRequest | None, action: str, subject: str, who: str, details: dict[str, Any]
    ) -> None:
        """Write one line. What the file does not take goes to the log. None for what no request asked for."""
        record = None if request is None else request.get(RECORD)
        entry = {
            "time": rfc3339(time.time()),
            "action": action,
            "subject": subject,
            "who": who or self._operator,
            "remote": "" if request is None else request.remote or "",
            "request_id": "" if record is None else record.request_id,
            **details,
        }
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._append(self._file, msgspec.json.encode(entry, enc_hook=str) + b"\n")
                return
            log.error("the audit file cannot be written; the action is in this line", extra={"fields": entry})
        log.info("%s", msgspec.json.encode(entry, enc_hook=str).decode(), extra={"fields": entry})

    @staticmethod
    def _append(file: Path, line: bytes) -> None:
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


AUDIT = web.AppKey("AUDIT", AuditLog)


def audit(request: web.Request, action: str, subject: str, who: str = "", **details: Any) -> None:
    """Note an action that has been done, such as `key.revoke` of the key `subject`; never with a secret in `details`.

    `who` did it: by default whoever holds the admin key or, without one, a user of the loopback.
    """
    request.app[AUDIT].write(request, action, subject, who, details)
