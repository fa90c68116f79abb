"""The protocol of engines.

A request is POST /v1/prefix/blocks with a bearer token and a `BlocksRequest` in MessagePack. The answer is the frames
of the first of these blocks, one after the other, up to the first that is not there. Both carry the epoch of the
answering engine, so that an engine that has restarted is not taken for the one in the index.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

PATH = "/v1/prefix/blocks"
EPOCH_HEADER = "x-keepgate-epoch"
REQUEST_TYPE = "application/msgpack"
FRAMES_TYPE = "application/vnd.keepgate.kv-frames"
MAX_BLOCKS = 2_048
MAX_REQUEST_BYTES = 64 * MAX_BLOCKS

_Key = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class BlocksRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Blocks of a chain by stored key and stored parent: hashes, which reveal nothing without the blocks."""

    epoch: Annotated[str, msgspec.Meta(max_length=128)]
    blocks: Annotated[list[tuple[_Key, _Key]], msgspec.Meta(min_length=1, max_length=MAX_BLOCKS)]
