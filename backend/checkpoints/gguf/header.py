"""Reads a GGUF file's metadata and the places of its tensors, and checks all numbers in it.

All is little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); a string is its length and UTF-8:

    "GGUF" | version u32 | count of tensors u64 | count of keys u64
    each key:     name | type u32 | value
    each tensor:  name | count of sizes u32 | sizes u64, the fastest first | type u32 | offset u64
    padding to general.alignment | data

Files are untrusted: a count is compared with the remaining bytes before memory is allocated for it, so that the cost of
reading is bounded by the size of the file. Tensors must not overlap.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from backend.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER = 2**26
"""Bytes; the largest vocabularies with their merges need a third of it."""
_MAX_SIZES = 4
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's types of one number, as the letters of `struct`."""
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_MAX_SHOWN = 100
_MAX_SHOWN_ITEMS = 20
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """Of elements, the slowest first, as in Hugging Face's files."""
    data: Bytes
    """uint8 [all sizes but the last, bytes of a row]; memory-mapped."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata by key, and tensors in the order of the file; their names differ."""

    fields: dict[str, Any]
    tensors: list[GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Reads a file's header and maps its tensors.

    Raises:
        ModelError: it is not GGUF, or is invalid; names the key or the tensor.
    """
    try:
        data: Bytes = np.memmap(path, dtype=np.uint8, mode="r")
        header = _Header(data.data[:_MAX_HEADER])
        if bytes(header.take(4)) != _MAGIC:
            raise ValueError("it does not begin with 'GGUF'")
        version = header.number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, expected one of {_VERSIONS}, little-endian")
        tensor_count, key_count = header.number("Q"), header.number("Q")
        fields = header.fields(key_count)
        return GgufFile(fields, _tensors(header, tensor_count, _alignment(fields), data))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"{path}: not a readable GGUF file ({error})") from error


def shown(value: object) -> str:
    """A value of a file for an error message: control characters escaped, and cut if it is long."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]!r}…"
    text = repr(value[:_MAX_SHOWN_ITEMS] if isinstance(value, list) else value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


class _Header:
    """Reads the bytes of a header in order. Each method raises ValueError if they are invalid."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def take(self, size: int) -> memoryview:
        """The next bytes."""
        self._check(size)
        self.at += size
        return self._data[self.at - size : self.at]

    def number(self, form: str) -> Any:
        return self.numbers(form, 1)[0]

    def numbers(self, form: str, count: int) -> list[Any]:
        self._check(count * struct.calcsize(f"<{form}"))
        form = f"<{count}{form}"
        return list(struct.unpack(form, self.take(struct.calcsize(form))))

    def text(self) -> str:
        """Raises UnicodeDecodeError, a ValueError, if it is not UTF-8."""
        return str(self.take(self.number("Q")), "utf-8")

    def fields(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):  # a count that is too high ends with the bytes
            key = self.text()
            if key in found:
                raise ValueError(f"metadata {shown(key)} is there twice")
            try:
                found[key] = self._value(self.number("I"))
            except ValueError as error:
                raise ValueError(f"metadata {shown(key)}: {error}") from error
        return found

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"type {kind}, which GGUF does not have")
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind], count)
        if kind != _STRING:
            raise ValueError("an array of something else than numbers or strings")
        self._check(8 * count)
        return [self.text() for _ in range(count)]

    def _check(self, size: int) -> None:
        if size > (left := len(self._data) - self.at):
            most = "a header may have" if len(self._data) == _MAX_HEADER else "the file has"
            raise ValueError(f"{size} bytes at byte {self.at}, expected at most the {left} left of what {most}")


def _alignment(fields: dict[str, Any]) -> int:
    value = fields.get("general.alignment", _ALIGNMENT)
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise ValueError(f"metadata general.alignment is {shown(value)}, expected a power of two")
    return value


def _tensors(header: _Header, count: int, alignment: int, data: Bytes) -> list[GgufTensor]:
    infos: dict[str, tuple[GGMLQuantizationType, tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = header.text()
        if name in infos:
            raise ValueError(f"tensor {shown(name)} is there twice")
        try:
            infos[name] = _tensor_info(header, alignment)
        except ValueError as error:
            raise ValueError(f"tensor {shown(name)}: {error}") from error
    start = -(-header.at // alignment) * alignment
    free = start
    for name, (_, _, offset, size) in sorted(infos.items(), key=lambda item: item[1][2]):
        if start + offset < free:
            raise ValueError(f"tensor {shown(name)} begins within another one")
        free = start + offset + size
        if free > len(data):
            raise ValueError(f"tensor {shown(name)} ends at byte {free}, the file at byte {len(data)}")
    return [
        GgufTensor(name, kind, shape, data[start + offset : start + offset + size].reshape(*shape[:-1], -1))
        for name, (kind, shape, offset, size) in infos.items()
    ]


def _tensor_info(header: _Header, alignment: int) -> tuple[GGMLQuantizationType, tuple[int, ...], int, int]:
    """Type, shape, offset in the data, bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    rank = header.number("I")
    if not 1 <= rank <= _MAX_SIZES:
        raise ValueError(f"{rank} sizes, expected 1 to {_MAX_SIZES}")
    shape = tuple(reversed(header.numbers("Q", rank)))
    number, offset = header.number("I"), header.number("Q")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise ValueError(f"type {number}, which is not known") from error
    elements, block_bytes = GGML_QUANT_SIZES[kind]
    if not all(shape) or shape[-1] % elements:
        raise ValueError(f"shape {list(shape)}, expected positive sizes and rows of whole {kind.name} blocks")
    if offset % alignment:
        raise ValueError(f"offset {offset}, expected a multiple of {alignment}")
    size = block_bytes
    for one in (*shape[:-1], shape[-1] // elements):
        size *= one
    return kind, shape, offset, size
