"""Owners of blocks: an engine process with its memory, or a host's disk."""

from collections.abc import Mapping, Sequence
from enum import IntEnum

import msgspec

from prefix_store.index.layout import EPOCH_BYTES


class TierKind(IntEnum):
    """Where an owner keeps a block. The numbers are stored in Redis: none is ever reused."""

    MEMORY = 1
    DISK = 2


class Details(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an owner reports with each announcement."""

    address: str = ""
    """URL under which other hosts can fetch its blocks; empty if they cannot."""
    instance: str = ""
    """Identifies the server process at this address; a restarted one has another. Not the owner's epoch, which also
    changes when Redis has lost the owner and the server has not restarted."""
    blocks: int = 0
    size: int = 0
    """Bytes of these blocks."""


class Owner(msgspec.Struct, frozen=True):
    """A live owner. After a restart it is another owner of the same name, with a higher epoch."""

    name: str
    epoch: int
    details: Details


_decode = msgspec.msgpack.Decoder(Details).decode
packed_details = msgspec.msgpack.Encoder().encode


def owners_of(reply: Sequence[bytes]) -> Mapping[int, Owner]:
    """The owners in a reply of owners.lua, by epoch, except those with unreadable details."""
    found: dict[int, Owner] = {}
    for name, value in zip(reply[::2], reply[1::2], strict=True):
        epoch = int.from_bytes(value[:EPOCH_BYTES], "big")
        try:
            details = _decode(value[2 * EPOCH_BYTES + 8 :])
        except msgspec.DecodeError:
            continue
        found[epoch] = Owner(name.decode(errors="replace"), epoch, details)
    return found
