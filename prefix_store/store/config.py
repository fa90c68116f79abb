"""What a prefix store is made of."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from prefix_store.codecs.codec import Codec
from prefix_store.codecs.registry import PLAIN

_PEERS = b"keepgate prefix store: what engines show each other"


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Which places there are, and how much they hold; sizes in bytes.

    Raises:
        ValueError: a number is negative, the address is no URL of a server, or there are two lossy codecs, whose blocks
            one engine could not keep apart.
    """

    memory_bytes: int = 0
    """0: nothing is kept in host memory."""
    memory_codec: Codec = PLAIN
    disk: Path | None = None
    """Folder that the processes of a host share; None: nothing is kept on disk."""
    disk_bytes: int = 4 * 2**30
    disk_codec: Codec = PLAIN
    index: str = ""
    """URL of the Redis that knows what other engines have; empty: they are not asked."""
    name: str = ""
    """Of this engine, in the index."""
    address: str = ""
    """URL under which other engines reach this one; empty: they cannot."""
    secret: str = field(default="", repr=False)
    """Known to all engines that share blocks."""
    audit_every: int = 1000
    """One in so many restored prefixes is computed again and compared; 0: none is."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "disk_bytes", "audit_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 0")
        if self.address and not _is_url(self.address):
            raise ValueError(f"address is {self.address!r}, expected http://host:port or https://host:port")
        lossy = {codec.name for codec in self.codecs if not codec.is_exact}
        if len(lossy) > 1:
            memory, disk = self.memory_codec.name, self.disk_codec.name
            raise ValueError(f"disk_codec is {disk}, expected plain or {memory}: one engine has one codec beside plain")

    @property
    def peers_secret(self) -> str:
        """What engines show each other. From it nobody learns the secret, with which tenants' keys are made."""
        return hmac.digest(self.secret.encode(), _PEERS, "sha256").hex() if self.secret else ""

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Of the tiers that there are."""
        codecs = [self.memory_codec] if self.memory_bytes else []
        return (*codecs, self.disk_codec) if self.disk is not None else tuple(codecs)

    @property
    def lossy_codec(self) -> Codec | None:
        """The one that does not give back every bit; None: all do."""
        return next((codec for codec in self.codecs if not codec.is_exact), None)


def _is_url(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False
