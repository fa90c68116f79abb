"""Salts that separate tenants' blocks of equal tokens."""

import hashlib
import hmac

import msgspec

from prefix_store.identity.encoding import encoded

_SHORTEST_SECRET = 16


class Salt(msgspec.Struct, frozen=True):
    """Made by `tenant_salt`. An empty value is not the same as no salt."""

    value: bytes

    def __repr__(self) -> str:
        return "Salt(…)"  # a tenant's keys can be computed from its value


def tenant_salt(secret: bytes, tenant: str) -> Salt:
    """The salt of a tenant: HMAC-SHA-256 (RFC 2104) of its name under a secret of the server.

    Without the secret no client can compute another tenant's keys, under any name; all engines that share a store must
    have the same secret. Raises ValueError for a secret of fewer than 16 bytes.
    """
    if len(secret) < _SHORTEST_SECRET:
        raise ValueError(f"the secret has {len(secret)} bytes, expected 16 random ones at least")
    return Salt(hmac.digest(secret, encoded(["tenant", tenant]), "sha256"))


def salted(parent: bytes, salt: Salt) -> bytes:
    """The salted parent key, which replaces it for later blocks. 16 bytes.

    BLAKE2b with its own personalisation: block keys, which are XXH3, are not computed this way. The kind of the salt is
    hashed with it, so a salt of another kind would have other keys.
    """
    content = encoded([parent, "tenant", salt.value])
    return hashlib.blake2b(content, digest_size=16, person=b"kg-salt").digest()
