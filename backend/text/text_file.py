"""Text files that models are evaluated and calibrated on."""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from pathlib import Path

from backend.errors import ModelError

_GZIP = b"\x1f\x8b"
"""How a file begins that gzip has made; no UTF-8 text does."""

MAX_BYTES = 256 * 2**20
"""Of a text, unpacked. It is held whole, and its tokens take many times its size; texts of evaluation have a few MB."""


def read_text(path: Path) -> str:
    """Contents of a UTF-8 file, unpacked where it is one of gzip.

    Raises:
        ModelError: the file is not there, cannot be read, is too large, is not UTF-8 or has nothing but space in it.
    """
    try:
        content = _content(path)
        if content.startswith(_GZIP):
            content = _unpacked(content, path)
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise ModelError(f"{path}: not UTF-8 text (byte {error.start} is {wrong:#04x})") from error
    except MemoryError as error:
        raise ModelError(f"{path}: there is not enough memory to read it") from error
    if not text.strip():
        raise ModelError(f"{path}: empty; expected text")
    return text


def _content(path: Path) -> bytes:
    try:
        # Opening a pipe without a writer would block.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ModelError(f"{path}: cannot be read: not a regular file")
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    return _bounded(content, path)


def _unpacked(content: bytes, path: Path) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
            return _bounded(packed.read(MAX_BYTES + 1), path)
    except (OSError, EOFError, zlib.error) as error:
        raise ModelError(f"{path}: not a whole gzip file ({error})") from error


def _bounded(content: bytes, path: Path) -> bytes:
    if len(content) > MAX_BYTES:
        raise ModelError(f"{path}: too large; expected a text of at most {MAX_BYTES // 2**20} MiB, unpacked")
    return content
