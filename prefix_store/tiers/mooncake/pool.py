"""One client of a Mooncake store, with frames and OSErrors."""

from __future__ import annotations

import ctypes
import errno
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from prefix_store.frames.segments import Bytes, buffer
from prefix_store.tiers.mooncake.settings import join, mooncake_module, read_settings

_NO_ROOM = -200
_TOO_SMALL = -600
_IS_THERE = -705
_GONE = frozenset((-703, -704, -707, -710, -712))
"""An object that is being written, does not exist, or was removed during the read."""
MASTER_ERRORS = (errno.ECONNREFUSED, errno.ETIMEDOUT)
"""Those of a master that does not answer."""
_ERRORS = {
    -900: OSError(errno.ECONNREFUSED, "the master does not answer"),
    -901: OSError(errno.ETIMEDOUT, "the master does not answer in time"),
    -800: OSError(errno.EHOSTUNREACH, "the host that has the block cannot be reached"),
    -500: OSError(errno.EIO, "the host that is to have the block has not taken it"),
}
"""Mooncake's numbers (ErrorCode in mooncake-store/include/types.h) as system errors."""


class Pool:
    """Frames by their stored keys. Calls block for up to 30 s where the master hangs; any thread may call.

    Calls to the master or another host raise OSError if they fail.

    Args:
        path: Mooncake's configuration file.
        namespace: prefix of all objects' names, so that it alone is cleared.

    Raises:
        ValueError: see `read_settings`.
    """

    def __init__(self, path: Path, namespace: bytes) -> None:
        self._path = path
        self._settings = read_settings(path)
        self._store = mooncake_module("store").MooncakeDistributedStore()
        self._prefix = f"keepgate-{namespace.hex()}-"
        self._lanes: list[Bytes] = []
        self._probe: subprocess.Popen[str] | None = None
        self._is_given_up = False
        self._is_abandoned = False
        self._has_joined = False

    @property
    def has_joined(self) -> bool:
        """Whether this client has joined the store, and not left it since."""
        return self._has_joined

    def connect(self) -> bool:
        """Joins the store with the memory of the settings. Takes up to 10 s if no master answers.

        Returns False if it was given up before.
        """
        command = [sys.executable, "-P", "-m", "prefix_store.tiers.mooncake.probe", str(self._path)]
        self._probe = subprocess.Popen(  # noqa: S603 (a module of this package)
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if self._is_given_up:
            self._probe.kill()
        said = self._probe.communicate()[0].strip()
        if self._is_given_up:
            return False
        status = self._probe.returncode
        reason = said or ("it does not answer" if status == -signal.SIGALRM else f"joining it ended with {status}")
        if status == 0 and (code := join(self._store, self._settings, self._settings.global_segment_size)):
            status, reason = code, f"Mooncake says {code}"
        if status:
            where = self._settings
            raise OSError(
                errno.ECONNREFUSED,
                f"no connection by {where.protocol} to the master at {where.master_server_address}, with metadata at "
                f"{where.metadata_server}: {reason}",
            )
        self._has_joined = True
        self._lanes.clear()  # of an earlier, incomplete attempt
        return True

    def give_up(self) -> None:
        """Ends `connect` soon, in any thread."""
        self._is_given_up = True
        if self._probe is not None:
            self._probe.kill()

    def lane(self, frames: int, frame_bytes: int) -> list[Bytes]:
        """Registered memory for frames, which other hosts read and write; for one thread. After `connect`."""
        width = -(-frame_bytes // 64) * 64
        memory = buffer(frames * width)
        if code := self._store.register_buffer(memory.ctypes.data, memory.nbytes):
            raise failure(code)
        self._lanes.append(memory)
        return [memory[start : start + frame_bytes] for start in range(0, memory.nbytes, width)]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of them are stored; those are not evicted for some seconds."""
        found = self._store.batch_is_exist(self._names(keys))
        if any(code < 0 for code in found):
            raise failure(min(found))
        return [code == 1 for code in found]

    def load(self, keys: Sequence[bytes], frames: Sequence[Bytes]) -> list[int]:
        """Fills frames of a lane; returns the size of each in the store, 0 if it is missing.

        One that is larger than its frame in the lane is not copied. A negative size is a `failure` of one host; the
        rest of the batch may be valid.
        """
        names = self._names(keys)
        sizes: list[int] = self._store.batch_get_into(names, *_places(frames))
        for number, size in enumerate(sizes):
            if size == _TOO_SMALL:
                sizes[number] = max(0, self._store.get_size(names[number]))
            elif size in _GONE:
                sizes[number] = 0
        return sizes

    def save(self, keys: Sequence[bytes], frames: Sequence[Bytes]) -> list[bool]:
        """Writes frames of a lane; returns which are stored now; for the others there is no space."""
        codes = self._store.batch_put_from(self._names(keys), *_places(frames))
        for code in codes:
            if code not in (0, _IS_THERE, _NO_ROOM):
                raise failure(code)
        return [code != _NO_ROOM for code in codes]

    def remove(self, keys: Sequence[bytes]) -> None:
        """Removes those that exist."""
        for code in self._store.batch_remove(self._names(keys), True):
            if code < 0 and code not in _GONE:
                raise failure(code)

    def clear(self) -> int:
        """Removes every frame of the namespace, of all engines; returns the number of frames."""
        code: int = self._store.remove_by_regex(f"^{re.escape(self._prefix)}", True)
        if code < 0:
            raise failure(code)
        return code

    def leave(self) -> None:
        """Leaves the store; blocks in this client's memory are lost. No other call may be running.

        Raises OSError if no master answers.
        """
        if not self._has_joined:
            return
        self.has([bytes(16)])
        if self._is_abandoned:
            return
        # close() holds the GIL for a minute if the master hangs: `has` raises before that.
        self._store.close()
        self._has_joined = False

    def abandon(self) -> None:
        """Instead of `leave`: the master notices it some seconds after the end of the process."""
        self._is_abandoned = True
        # At exit Python and then C++ would leave, and wait for the master, or abort the process if a thread still
        # waits. So the object is never destroyed, nor are the lanes, into which a hanging host may still copy; and the
        # process ends without further exit handlers.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        libc = ctypes.CDLL(None)
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]


def _places(frames: Sequence[Bytes]) -> tuple[list[int], list[int]]:
    return [frame.ctypes.data for frame in frames], [frame.nbytes for frame in frames]


def failure(code: int) -> OSError:
    """One of Mooncake's numbers as an OSError."""
    error = _ERRORS.get(code)
    return OSError(error.errno, error.strerror) if error else OSError(errno.EIO, f"Mooncake says {code}")
