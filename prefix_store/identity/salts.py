"""Salts that separate blocks of equal tokens, by tenant and by adapter weights."""

import hashlib
import hmac
from typing import Literal

import msgspec

from prefix_store.identity.encoding import encoded

_SHORTEST_SECRET = 16


class Salt(msgspec.Struct, frozen=True):
    """Made by `tenant_salt` and `adapter_salt`. The kind counts, so a tenant's salt never equals an adapter's, and an
    empty value is not the same as no salt."""

    kind: Literal["tenant", "adapter"]
    value: bytes

    def __repr__(self) -> str:
        return f"Salt({self.kind})"  # a tenant's keys can be computed from its value


def tenant_salt(secret: bytes, tenant: str) -> Salt:
    """The salt of a tenant: HMAC-SHA-256 (RFC 2104) of its name under a secret of the server.

    Without the secret no client can compute another tenant's keys, under any name; all engines that share a store must
    have the same secret. Raises ValueError for a secret of fewer than 16 bytes.
    """
    if len(secret) < _SHORTEST_SECRET:
        raise ValueError(f"the secret has {len(secret)} bytes, expected 16 random ones at least")
    return Salt("tenant", hmac.digest(secret, encoded(["tenant", tenant]), "sha256"))


def adapter_salt(weights: bytes) -> Salt:
    """The salt of an adapter (LoRA, arXiv 2106.09685) by the digest of its weights.

    Not by its name: two adapters of one name, or one that was trained further, compute different blocks. Raises
    ValueError if it is too short to be a digest.
    """
    if len(weights) < _SHORTEST_SECRET:
        raise ValueError(f"weights has {len(weights)} bytes, expected a digest of 16 or more")
    return Salt("adapter", weights)


def salted(parent: bytes, salt: Salt) -> bytes:
    """The salted parent key, which replaces it for later blocks. 16 bytes.

    BLAKE2b with its own personalisation: block keys, which are XXH3, are not computed this way.
    """
    content = encoded([parent, salt.kind, salt.value])
    return hashlib.blake2b(content, digest_size=16, person=b"kg-salt").digest()
