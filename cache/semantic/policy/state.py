"""How the state of a policy, and a label, are written down: named, versioned, and checked when they are read."""

from typing import Any, TypeVar

import msgspec
import numpy as np

from cache.entries.checksum import checked_payload, with_checksum
from cache.errors import CacheError, CorruptEntry

VERSION = 4

_MAGIC = b"KGS"

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder(enc_hook=np.ndarray.tolist)


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """That of a later version may have more."""

    version: int
    kind: str
    content: msgspec.Raw


def freeze(kind: str, content: Any) -> bytes:
    """Version, kind and content in MessagePack, with a checksum."""
    return with_checksum(_MAGIC, _encoder.encode((VERSION, kind, content)))


def thaw(data: bytes, kind: str, of: type[T]) -> T:
    """The inverse of `freeze`. Raises UnusableState for anything that this version did not write as `kind`.

    A number within limits is finite: msgspec refuses NaN there. Arrays are of float64, and of any shape and numbers.
    """
    try:
        frame = msgspec.msgpack.decode(checked_payload(_MAGIC, data), type=_Frame)
        if frame.version != VERSION:
            raise OtherVersion(kind, frame.version)
        if frame.kind != kind:
            raise UnusableState(f"{kind}: this is the state of {frame.kind!r}.")
        return msgspec.msgpack.decode(frame.content, type=of, dec_hook=lambda _, value: np.array(value, np.float64))
    except (CorruptEntry, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnusableState(f"{kind}: {error}") from error


class UnusableState(CacheError):
    """Stored state or a label from elsewhere that is damaged, foreign, of another version, or not what can be.

    The message says which. A policy that raises it is as it was before; the answer to it is a cold start.
    """


class OtherVersion(UnusableState):
    """What another version of the program has written, as it does while processes are updated one by one."""

    def __init__(self, kind: str, version: int) -> None:
        super().__init__(f"{kind}: written in version {version}; this one reads version {VERSION}.")
        self.version = version
