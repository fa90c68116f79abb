"""Values of a store's options as people write them: sizes and secrets."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from pathlib import Path

_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
# Fits a signed 64-bit integer, as sizes of the system do, also after rounding to a float.
_MAX_SIZE = 2**62
_MAX_QUOTED = 40
_SECRET_BYTES = 32
_MIN_SECRET_BYTES = 16


def read_size(text: str) -> int:
    """Bytes, from a text such as 512MiB or 2GiB. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{_quoted(text)} is no size, expected for example 512MiB or 2GiB")
    size = float(match[1]) * unit
    if not 1 <= size <= _MAX_SIZE:
        raise ValueError(f"{_quoted(text)} is out of range, expected 1 byte to {_MAX_SIZE} bytes")
    return int(size)


def read_secret(path: Path | None, option: str) -> str:
    """The secret that engines share: from a file, which is written if it is absent, else from KEEPGATE_PREFIX_SECRET.

    Args:
        option: what the file's path comes from, for messages.

    Returns:
        An empty text if there is none.

    Raises:
        ValueError: it cannot be read or made, or is too short.
    """
    if path is None:
        given, where = os.environ.get("KEEPGATE_PREFIX_SECRET", ""), "KEEPGATE_PREFIX_SECRET"
        if not given:
            return ""
    else:
        where = f"{option} {path}"
        try:
            _make_secret(path)
            given = path.read_text("utf-8").strip()
        except OSError as error:
            raise ValueError(f"{where}: it cannot be read or made ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: expected UTF-8 text") from error
    if len(given.encode()) < _MIN_SECRET_BYTES:
        raise ValueError(f"{where}: the secret has {len(given.encode())} bytes, expected {_MIN_SECRET_BYTES} or more")
    return given


def _make_secret(path: Path) -> None:
    """Writes a new secret for the owner only, unless there is one; safe when several processes start at once."""
    if path.exists():
        return
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no directory {path.parent}")
    # Not by the process: those of two containers with one volume may have the same number.
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(_SECRET_BYTES) + "\n")
    try:
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink()


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "…")
