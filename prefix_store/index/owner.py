"""Who holds blocks: an engine process with its memory, or a host's disk."""

from collections.abc import Mapping, Sequence
from enum import IntEnum

import msgspec

from prefix_store.index.layout import EPOCH_BYTES


class TierKind(IntEnum):
    """Where an owner keeps a block. Part of what lies in Redis: a number is never used again for something else."""

    MEMORY = 1
    DISK = 2


class Details(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an owner says of itself with every sign of life."""

    address: str = ""
    """URL under which other hosts can fetch its blocks; empty where they cannot."""
    instance: str = ""
    """As what the server at this address answers: one that has restarted there answers as another. Not the owner's
    epoch, which also changes when Redis has lost the owner and the server has not restarted."""
    blocks: int = 0
    size: int = 0
    """Bytes of these blocks."""


class Owner(msgspec.Struct, frozen=True):
    """An owner that is alive. One that restarts is another owner of the same name, with a higher epoch."""

    name: str
    epoch: int
    details: Details
    seconds_left: float
    """For so long it counts as alive without another sign of life, when it was asked for."""


_decode = msgspec.msgpack.Decoder(Details).decode
packed_details = msgspec.msgpack.Encoder().encode


def owners_of(reply: Sequence[bytes]) -> Mapping[int, Owner]:
    """Those of a reply of owners.lua, by epoch. One whose details this version cannot read is left out."""
    now = int(reply[0])
    found: dict[int, Owner] = {}
    for name, value in zip(reply[1::2], reply[2::2], strict=True):
        epoch, ends = (int.from_bytes(value[at : at + EPOCH_BYTES], "big") for at in (0, EPOCH_BYTES))
        try:
            details = _decode(value[2 * EPOCH_BYTES + 8 :])
        except msgspec.DecodeError:
            continue
        found[epoch] = Owner(name.decode(errors="replace"), epoch, details, (ends - now) / 1000)
    return found
