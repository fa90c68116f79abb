"""Whose KV blocks are whose: how the keys of each tenant's blocks are made."""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict

from prefix_store.identity.keys import KeyChain, Published
from prefix_store.identity.salts import tenant_salt

_SECRET_BYTES = 32
_REMEMBERED = 10_000


class Tenants:
    """Tells tenants apart by what a request says of its caller.

    Args:
        block_size: tokens in a block.
        root: parent of first blocks, 16 bytes; what has the same one has the same model.
        secret: shared by all engines that share blocks; None: a random one of this process.
    """

    def __init__(self, block_size: int, root: bytes = bytes(16), secret: bytes | None = None) -> None:
        self.published = Published(root, block_size)
        """Prefixes that all tenants share."""
        self.is_lasting = secret is not None
        """Whether other processes, and this one after a restart, can make the same keys of tenants."""
        self._root = root
        self._block_size = block_size
        self._secret = secret or secrets.token_bytes(_SECRET_BYTES)
        self._chains: OrderedDict[str, KeyChain] = OrderedDict()

    def keys(self, credentials: list[str]) -> KeyChain:
        """Keys of those who give these credentials; who gives none shares with all who give none."""
        name = json.dumps(credentials)
        chain = self._chains.pop(name, None)
        if chain is None:
            salt = tenant_salt(self._secret, name) if credentials else None
            chain = KeyChain(self._root, self._block_size, salt, self.published)
        self._chains[name] = chain
        if len(self._chains) > _REMEMBERED:
            self._chains.popitem(last=False)
        return chain
