"""Frames: a block's payload after a header of 128 bytes that identifies and verifies it.

offset  bytes  little endian
0       4      magic "KGKV"
4       2      version of this format
6       2      bytes of the header, 128
8       64     namespace, key, parent, tokens: 16 each
72      1      codec
73      1      dtype
74      1      number of axes
75      1      flags: 1 = keys are transposed
76      20     sizes of up to five axes, 0 where there is none
96      5      letters of the axes, NUL if they are unknown
101     3      NUL
104     8      bytes of the payload, which follows the header
112     8      xxh3-64 of the payload
120     8      xxh3-64 of the 120 bytes before
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields

import xxhash

from prefix_store.frames.block_id import BlockId
from prefix_store.frames.layout import DTYPES, MAX_AXES, BlockLayout

MAGIC = b"KGKV"
VERSION = 1
HEADER_BYTES = 128
_FIELDS = struct.Struct("<4sHH16s16s16s16sBBBB5I5s3sQQ")
_CHECKSUM = struct.Struct("<Q")
_NOTHING = b"\0\0\0"
_NAMES = slice(8, 72)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The header of a frame. ``checksum`` is the xxh3-64 of its payload, ``payload_bytes`` its size."""

    namespace: bytes
    key: bytes
    parent: bytes
    tokens: bytes
    codec: int
    dtype: int
    shape: tuple[int, ...]
    axes: bytes
    flags: int
    payload_bytes: int
    checksum: int

    @classmethod
    def of(cls, block: BlockId, codec: int, layout: BlockLayout, payload_bytes: int, checksum: int) -> FrameHeader:
        """The header of a block's frame; ``codec`` is the codec's number."""
        return cls(
            block.namespace,
            block.key,
            block.parent,
            block.tokens,
            codec,
            DTYPES.index(layout.dtype),
            layout.shape,
            layout.axes.encode("ascii"),
            int(layout.keys_transposed),
            payload_bytes,
            checksum,
        )

    def pack(self) -> bytes:
        """128 bytes."""
        sizes = self.shape + (0,) * (MAX_AXES - len(self.shape))
        said = _FIELDS.pack(
            *(MAGIC, VERSION, HEADER_BYTES, self.namespace, self.key, self.parent, self.tokens),
            *(self.codec, self.dtype, len(self.shape), self.flags, *sizes, self.axes, _NOTHING),
            *(self.payload_bytes, self.checksum),
        )
        return said + _CHECKSUM.pack(checksum_of(said))

    @classmethod
    def unpack(cls, header: bytes | memoryview) -> FrameHeader:
        """Parses the first 128 bytes of a frame. Raises BadFrame if they are not a header of this version."""
        if len(header) != HEADER_BYTES:
            raise BadFrame("header size", HEADER_BYTES, len(header))
        said = header[: _FIELDS.size]
        magic, version, size, namespace, key, parent, tokens, codec, dtype, axes_count, flags, *rest = _FIELDS.unpack(
            said
        )
        *sizes, axes, nothing, payload_bytes, checksum = rest
        _agree("magic", MAGIC, magic)
        _agree("version", VERSION, version)
        _agree("header checksum", checksum_of(said), _CHECKSUM.unpack(header[_FIELDS.size :])[0])
        _agree("header size", HEADER_BYTES, size)
        _agree("reserved bytes", _NOTHING, nothing)
        shape = tuple(sizes[: min(axes_count, MAX_AXES)])
        _agree("shape", shape + (0,) * (MAX_AXES - len(shape)), tuple(sizes))
        return cls(
            *(namespace, key, parent, tokens, codec, dtype, shape, axes.rstrip(b"\0"), flags, payload_bytes, checksum)
        )

    def check(self, expected: FrameHeader) -> None:
        """Raises BadFrame, which names the field, if a field except the payload's checksum differs."""
        for field in fields(self):
            if field.name != "checksum":
                name = field.name.replace("_", " ")
                _agree(name, getattr(expected, field.name), getattr(self, field.name))

    def check_payload(self, payload: memoryview) -> None:
        """Raises BadFrame if these are not the bytes that the frame was written with."""
        _agree("payload bytes", self.payload_bytes, len(payload))
        _agree("checksum", self.checksum, checksum_of(payload))


class HeaderTemplate:
    """Headers that differ only in their block and their checksum, packed faster than one by one."""

    def __init__(self, header: FrameHeader) -> None:
        packed = header.pack()
        self._before, self._after = packed[: _NAMES.start], packed[_NAMES.stop : _FIELDS.size - _CHECKSUM.size]

    def pack(self, names: Iterable[bytes], checksum: int) -> bytes:
        """The 128 bytes for a block by its stored namespace, key, parent and tokens."""
        said = b"".join((self._before, *names, self._after, _CHECKSUM.pack(checksum)))
        return said + _CHECKSUM.pack(checksum_of(said))


def check_frame(frame: memoryview, key: bytes, parent: bytes) -> None:
    """Raises BadFrame unless this is a complete, undamaged frame with these keys, of any format."""
    header = FrameHeader.unpack(frame[:HEADER_BYTES])
    _agree("key", key, header.key)
    _agree("parent", parent, header.parent)
    header.check_payload(frame[HEADER_BYTES:])


def checksum_of(data: bytes | memoryview) -> int:
    """xxh3-64 of contiguous bytes; releases the GIL above about 100 KB."""
    return xxhash.xxh3_64_intdigest(data)


def _agree(field: str, expected: object, found: object) -> None:
    if expected != found:
        raise BadFrame(field, expected, found)


class BadFrame(Exception):
    """Bytes that are not the expected frame. ``field`` is the first that differs.

    The message is logged, so it has no hashes: from a digest of a few tokens the tokens can be guessed.
    """

    def __init__(self, field: str, expected: object, found: object) -> None:
        self.field = field
        is_hash = isinstance(expected, bytes) and isinstance(found, bytes)
        super().__init__(f"{field} is another one" if is_hash else f"{field} is {found}, expected {expected}")
