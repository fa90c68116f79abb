"""Keys of KV blocks: each is a hash of the previous key and of its block's tokens.

namespace ─► block 0 ─► block 1 ─►│─► block 2 ─► block 3
             └ in a published prefix ┘  └ the tenant's salt, mixed in once ┘
"""

from array import array
from collections.abc import Sequence
from sys import byteorder

import numpy as np
import numpy.typing as npt
import xxhash

from prefix_store.identity.fingerprint import DIGEST_BYTES
from prefix_store.identity.salts import Salt, salted

KEY_BYTES = 16

TokenIds = Sequence[int] | npt.NDArray[np.int32]


def root_key(namespace: bytes) -> bytes:
    """The parent of first blocks, 16 bytes: the namespace, which is a `Fingerprint.digest`."""
    if len(namespace) != DIGEST_BYTES:
        raise ValueError(f"the namespace has {len(namespace)} bytes, expected the 16 of a fingerprint")
    return namespace


class Published:
    """Blocks of prefixes that an operator has published: the same for all tenants.

    Of a published prefix only full blocks count.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        self.block_size = block_size
        self._chain = KeyChain(root, block_size)
        self.keys: frozenset[bytes] = frozenset()

    def publish(self, token_ids: TokenIds) -> int:
        """Add a prefix; returns how many blocks of it are shared."""
        keys = self._chain.keys_of(token_ids)
        self.keys |= frozenset(keys)
        return len(keys)


class KeyChain:
    """The keys of all sequences of one tenant, or of all tenants where `tenant` is None.

    A key is the XXH3-128 of the parent's key (16 bytes) and the block's token ids (int32, little endian): fixed widths,
    so boundaries are unambiguous, and blocks of other sizes have other keys. XXH3 is not a cryptographic hash. The
    tenant's salt makes forged collisions useless to other tenants, and frames have a digest of their tokens.

    A tenant's blocks have public keys within a published prefix, then keys of this tenant only. A parent's key shows
    whether it is public, so the next key needs no history.
    """

    def __init__(
        self, root: bytes, block_size: int, tenant: Salt | None = None, published: Published | None = None
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, expected at least 1")
        self.root = root
        self.block_size = block_size
        self._tenant = tenant
        self._published = published

    def next_key(self, parent: bytes, token_ids: TokenIds) -> bytes:
        """The key of a full block after the one with key `parent` (the root, for a first block)."""
        self._check_size(token_ids)
        return self._next_key(parent, _int32_bytes(token_ids))

    def keys_of(self, token_ids: TokenIds) -> list[bytes]:
        """The keys of all full blocks of a prompt; a partial last block has none.

        `token_ids` is best an int32 array. Raises ValueError for ids that are not int32.
        """
        data = memoryview(_int32_bytes(token_ids))
        width = self.block_size * 4
        keys: list[bytes] = []
        parent, start = self.root, 0
        end = len(data) // width * width
        while start < end and self._may_leave(parent):
            parent = self._next_key(parent, bytes(data[start : start + width]))
            keys.append(parent)
            start += width
        hashed = xxhash.xxh3_128_digest
        for begin in range(start, end, width):
            parent = hashed(parent + data[begin : begin + width])
            keys.append(parent)
        return keys

    def _may_leave(self, parent: bytes) -> bool:
        """Whether `parent` is public and its children may not be."""
        return self._tenant is not None and (parent == self.root or self._is_published(parent))

    def _next_key(self, parent: bytes, tokens: bytes) -> bytes:
        key: bytes = xxhash.xxh3_128_digest(parent + tokens)
        if self._tenant is None or not self._may_leave(parent) or self._is_published(key):
            return key
        return xxhash.xxh3_128_digest(salted(parent, self._tenant) + tokens)

    def _is_published(self, key: bytes) -> bool:
        return self._published is not None and key in self._published.keys

    def _check_size(self, token_ids: TokenIds) -> None:
        if len(token_ids) != self.block_size:
            raise ValueError(f"a block has {self.block_size} tokens, not {len(token_ids)}")


def _int32_bytes(token_ids: TokenIds) -> bytes:
    if isinstance(token_ids, np.ndarray):
        if token_ids.dtype != np.int32:
            raise ValueError(f"token_ids are {token_ids.dtype}, expected int32")
        return token_ids.astype("<i4", copy=False).tobytes()
    try:
        ids = array("i", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token_ids: {error}; expected whole numbers that fit in 32 bits") from error
    if byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
