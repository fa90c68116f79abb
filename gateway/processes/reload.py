"""Settings of a running gateway, read again on SIGHUP and when their file changes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from gateway.settings.fields import SettingsError
from gateway.settings.reloading import Stamp, changed, stamp_of
from gateway.settings.settings import Settings
from gateway.telemetry.audit import AuditLog

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0


class Reloader:
    """Applies settings that have changed. Settings that cannot be read or applied change nothing."""

    def __init__(
        self,
        settings: Settings,
        read: Callable[[], Settings],
        file: Path | None,
        seen: Stamp,
        apply: Callable[[Settings], Awaitable[Sequence[str]]],
    ) -> None:
        """`seen` is the stamp of `file` from before it was read. `apply` returns the names of settings that wait for
        the next start.
        """
        self._settings = settings
        self._read = read
        self._file = file
        self._apply = apply
        self._asked = asyncio.Event()
        self._seen = self._last = seen

    def ask(self) -> None:
        """Read the settings again, whether or not their file has changed: other files that they name may have."""
        self._asked.set()

    async def run(self) -> None:
        """Watch for as long as the gateway runs."""
        while True:
            if await self._is_asked() or self._has_settled():
                self._asked.clear()
                self._seen = stamp_of(self._file)
                await self._reload()

    async def _is_asked(self) -> bool:
        try:
            async with asyncio.timeout(_POLL_SECONDS):
                await self._asked.wait()
        except TimeoutError:
            return False
        return True

    def _has_settled(self) -> bool:
        """Whether the file is another than the one that was read, and has not changed since it was last looked at.

        An editor may write it in several steps, and half of it may be valid.
        """
        stamp = stamp_of(self._file)
        is_still, self._last = stamp == self._last, stamp
        return is_still and stamp is not None and stamp != self._seen

    async def _reload(self) -> None:
        try:
            wanted = await asyncio.to_thread(self._read)
            audit_log = AuditLog(wanted)
            waiting = await self._apply(wanted)
        except SettingsError as error:
            log.error("the settings stay as they are: %s", error)
            return
        names = changed(self._settings, wanted)
        self._settings = wanted
        if names:
            audit_log.write(None, "settings.read", ", ".join(names), "host", {})
        log.log(
            logging.WARNING if names else logging.INFO,
            "settings read again; changed: %s",
            ", ".join(names) or "nothing",
        )
        for name in waiting:
            log.warning("%s has changed, which takes effect at the next start", name)
