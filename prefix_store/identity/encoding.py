"""One byte string for one value, the same in every process: typed, sorted, length-delimited."""

import math
import struct
from collections.abc import Mapping, Sequence

Value = None | bool | int | float | str | bytes | Sequence["Value"] | Mapping[str, "Value"]


def encoded(value: Value) -> bytes:
    """Encodes `value`; two encodings are equal exactly if type and value are.

    A letter for the type, eight bytes for the length, then the content; nested values are encoded the same way, so
    boundaries are unambiguous. 1, 1.0, True and "1" are four values; a list and a tuple are one; the order of a
    mapping's keys does not count. Raises ValueError for NaN, TypeError for a type that is not in `Value`.
    """
    kind = type(value)
    if value is None:
        return _delimited(b"n", b"")
    if kind is bool:
        return _delimited(b"t", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _delimited(b"i", str(int(value)).encode())
    if isinstance(value, float):
        if math.isnan(value):
            raise ValueError("nan has no encoding: it does not equal itself; expected a number")
        return _delimited(b"f", struct.pack(">d", value))
    if isinstance(value, str):
        # A file name that is not UTF-8 has lone surrogates in Python.
        return _delimited(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes | bytearray | memoryview):
        return _delimited(b"b", bytes(value))
    if isinstance(value, Mapping):
        return _delimited(b"m", b"".join(sorted(_pair(key, item) for key, item in value.items())))
    if isinstance(value, Sequence):
        return _delimited(b"l", b"".join(map(encoded, value)))
    raise TypeError(f"{kind.__name__} has no encoding; expected None, bool, int, float, str, bytes, list or mapping")


def _pair(key: object, value: Value) -> bytes:
    if not isinstance(key, str):
        raise TypeError(f"{key!r} is a key of a mapping and must be a str, not {type(key).__name__}")
    return encoded(key) + encoded(value)


def _delimited(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack(">Q", len(content)) + content
