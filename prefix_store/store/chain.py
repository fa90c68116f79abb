"""The blocks of one sequence, from its first one on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from prefix_store.frames.block_id import BlockId
from prefix_store.identity.keys import TokenIds


class Chain:
    """Identities of a sequence's full blocks; it grows with the sequence.

    Args:
        namespace: digest of the model's fingerprint, 16 bytes.
        root: parent key of first blocks, 16 bytes.
        block_size: tokens in a block.
    """

    def __init__(self, namespace: bytes, root: bytes, block_size: int) -> None:
        self.blocks: list[BlockId] = []
        self._namespace = namespace
        self._root = root
        self._block_size = block_size

    def copy(self) -> Chain:
        """For one with the same prefix."""
        copied = Chain(self._namespace, self._root, self._block_size)
        copied.blocks = list(self.blocks)
        return copied

    def extend(self, keys: Sequence[bytes], token_ids: TokenIds) -> None:
        """Adds blocks by their keys (16 bytes each), with the tokens in them.

        Raises:
            ValueError: there are not ``block_size`` tokens for each key.
        """
        if len(token_ids) != len(keys) * self._block_size:
            raise ValueError(f"{len(keys)} blocks have {len(token_ids)} tokens, expected {self._block_size} in each")
        tokens = np.asarray(token_ids, dtype="<i4").tobytes()
        width = 4 * self._block_size
        parent = self.blocks[-1].key if self.blocks else self._root
        for place, key in enumerate(keys):
            digest = xxhash.xxh3_128_digest(tokens[place * width : (place + 1) * width])
            self.blocks.append(BlockId(self._namespace, key, parent, digest))
            parent = key
