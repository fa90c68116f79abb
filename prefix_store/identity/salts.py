"""What keeps apart blocks of equal tokens: a tenant's secret, an adapter's weights."""

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
        return f"Salt({self.kind})"  # who knows a tenant's value can compute the tenant's keys


def tenant_salt(secret: bytes, tenant: str) -> Salt:
    """The salt of a tenant: HMAC-SHA-256 (RFC 2104) of its name under a secret of the server.

    Nobody without the secret can compute a key of another tenant, whatever name a client gives itself; all engines
    that share a store must have one secret. Raises ValueError for a secret of fewer than 16 bytes.
    """
    if len(secret) < _SHORTEST_SECRET:
        raise ValueError(f"the secret has {len(secret)} bytes, expected 16 random ones at least")
    return Salt("tenant", hmac.digest(secret, encoded(["tenant", tenant]), "sha256"))


def adapter_salt(weights: bytes) -> Salt:
    """The salt of an adapter (LoRA, arXiv 2106.09685) by the digest of its weights.

    Not by its name: two adapters of one name, or one that was trained further, compute different blocks. Raises
    ValueError for what is too short to be a digest.
    """
    if len(weights) < _SHORTEST_SECRET:
        raise ValueError(f"weights has {len(weights)} bytes, expected a digest of 16 or more")
    return Salt("adapter", weights)


def salted(parent: bytes, salt: Salt) -> bytes:
    """What takes the place of a parent key from which on `salt` counts. 16 bytes.

    BLAKE2b with a personalisation of its own: no block's key, which is an XXH3, is computed this way.
    """
    content = encoded([parent, salt.kind, salt.value])
    return hashlib.blake2b(content, digest_size=16, person=b"kg-salt").digest()
