"""Text files that models are evaluated and calibrated on."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from backend.errors import ModelError

_GZIP = b"\x1f\x8b"
"""How a file begins that gzip has made; no UTF-8 text does."""


def read_text(path: Path) -> str:
    """Contents of a UTF-8 file, unpacked where it is one of gzip.

    Raises:
        ModelError: the file is not there, cannot be read, is not UTF-8 or has nothing but space in it.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    if content.startswith(_GZIP):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ModelError(f"{path}: not a whole gzip file ({error})") from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 text (byte {error.start} is {content[error.start]:#04x})") from error
    if not text.strip():
        raise ModelError(f"{path}: empty; expected text")
    return text
