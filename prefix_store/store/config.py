"""Prefix store configuration."""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from prefix_store.codecs.codec import Codec
from prefix_store.codecs.registry import PLAIN

_PEERS = b"keepgate prefix store: what engines show each other"


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The tiers, the index and the peers of a store; sizes in bytes.

    Raises:
        ValueError: a number is negative, the machine has not so much memory, the address is no URL of a server, or
            there are two lossy codecs, which one engine could not distinguish.
    """

    memory_bytes: int = 0
    """0: nothing is kept in host memory."""
    memory_codec: Codec = PLAIN
    disk: Path | None = None
    """Folder that the processes of a host share; None: nothing is kept on disk."""
    disk_bytes: int = 4 * 2**30
    disk_codec: Codec = PLAIN
    mooncake: Path | None = None
    """Mooncake's configuration file; None: nothing is kept there."""
    mooncake_codec: Codec = PLAIN
    index: str = ""
    """URL of the Redis that has the engines' index; empty: no blocks of peers."""
    name: str = ""
    """Of this engine, in the index."""
    address: str = ""
    """URL under which other engines reach this one; empty: they cannot."""
    secret: str = field(default="", repr=False)
    """One for all engines that share blocks."""
    audit_every: int = 1000
    """One in so many restored prefixes is computed again and compared; 0: none is."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "disk_bytes", "audit_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 0")
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self.memory_bytes > there > 0:
            raise ValueError(
                f"memory_bytes is {self.memory_bytes:,}, expected at most the {there:,} bytes of memory of this machine"
            )
        if self.address and not _is_url(self.address):
            raise ValueError(f"address is {self.address!r}, expected http://host:port or https://host:port")
        for field_name, codec in self.codecs.items():
            if not codec.is_exact and self.lossy_codec != codec:
                expected = f"plain or {self.lossy_codec.name}" if self.lossy_codec else "plain"
                raise ValueError(
                    f"{field_name} is {codec.name}, expected {expected}: one engine has one codec beside plain"
                )

    @property
    def peers_secret(self) -> str:
        """The token between engines. It does not reveal the secret, from which tenants' keys are derived."""
        return hmac.digest(self.secret.encode(), _PEERS, "sha256").hex() if self.secret else ""

    @property
    def codecs(self) -> dict[str, Codec]:
        """Of the configured tiers, by the name of the field."""
        is_there = {
            "memory": self.memory_bytes > 0,
            "disk": self.disk is not None,
            "mooncake": self.mooncake is not None,
        }
        return {name: getattr(self, name) for tier, is_so in is_there.items() if is_so and (name := f"{tier}_codec")}

    @property
    def lossy_codec(self) -> Codec | None:
        """The one that is not exact; None: all are."""
        return next((codec for codec in self.codecs.values() if not codec.is_exact), None)


def _is_url(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False
