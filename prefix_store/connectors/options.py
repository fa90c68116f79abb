"""The options of a connector, from the JSON that an engine is started with."""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from prefix_store.codecs.registry import codec_named
from prefix_store.store.config import StoreConfig
from prefix_store.store.options import read_secret, read_size
from prefix_store.tiers.disk.folder import Folder
from prefix_store.tiers.mooncake.settings import read_settings

_OPTIONS = {"memory_bytes": "memory", "disk_bytes": "disk_size", "audit_every": "audit"}
"""The option that a field of `StoreConfig` comes from, where it has another name."""


class ConnectorOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """As people write them; the names are those of ``keepgate backend --prefix-…``, but for ``listen``.

    Sizes are bytes, or as "2GiB".
    """

    memory: int | str = 0
    """Host memory for blocks; of each worker."""
    memory_codec: str = "plain"
    disk: str | None = None
    """Folder for blocks, shared by the engines of a host and kept after their end."""
    disk_size: int | str = 4 * 2**30
    disk_codec: str = "plain"
    mooncake: str | None = None
    """Mooncake's configuration file."""
    mooncake_codec: str = "plain"
    index: str | None = None
    """URL of the Redis in which engines find each other's blocks; else $KEEPGATE_PREFIX_INDEX."""
    secret_file: str | None = None
    """Secret of all engines that share blocks; written if it is absent; else $KEEPGATE_PREFIX_SECRET."""
    name: str = ""
    """Of this engine in the index; by default its host and port, or process."""
    address: str = ""
    """URL at which other engines and the gateway reach the store of this engine's first worker; the next ones have the
    ports after it. Empty: they cannot."""
    listen: str = ""
    """Host that the address's port is opened at; by default the address's own."""
    audit: int = 1000
    """One in so many prefixes that could be restored is computed, and compared; 0: none."""
    public_prefix: tuple[str, ...] = ()
    """Files with beginnings of prompts that all tenants share."""

    def config(self, worker: int) -> StoreConfig:
        """The store of a worker, by its number from 0 on.

        Raises:
            ValueError: names the option, and what would be right.
        """
        address = _with_port(self.address, worker)
        if self.disk:
            try:
                Folder.open(Path(self.disk))
            except OSError as error:
                raise ValueError(f"disk {self.disk}: {error.strerror or error}") from error
        if self.mooncake:
            try:
                read_settings(Path(self.mooncake))
            except ValueError as error:
                raise ValueError(f"mooncake: {error}") from error
        name = self.name or urlsplit(address).netloc or f"{socket.gethostname()}:{os.getpid()}"
        sizes = _size("memory", self.memory), _size("disk_size", self.disk_size)
        try:
            config = StoreConfig(
                memory_bytes=sizes[0],
                memory_codec=_codec("memory_codec", self.memory_codec),
                disk=Path(self.disk) if self.disk else None,
                disk_bytes=sizes[1],
                disk_codec=_codec("disk_codec", self.disk_codec),
                mooncake=Path(self.mooncake) if self.mooncake else None,
                mooncake_codec=_codec("mooncake_codec", self.mooncake_codec),
                index=(os.environ.get("KEEPGATE_PREFIX_INDEX", "") if self.index is None else self.index),
                name=f"{name}-{worker}" if self.name and worker else name,
                address=address,
                secret=read_secret(Path(self.secret_file) if self.secret_file else None, "secret_file"),
                audit_every=self.audit,
            )
        except ValueError as error:
            field, _, rest = str(error).partition(" ")
            raise ValueError(f"{_OPTIONS.get(field, field)} {rest}") from error
        if not (config.memory_bytes or config.disk or config.mooncake or config.index):
            raise ValueError("there is no place for blocks; expected memory, disk, mooncake or index")
        return config


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a worker's store is reached."""

    host: str
    port: int


def listening(options: ConnectorOptions, worker: int) -> Listening | None:
    """The host and port that a worker opens; None: none. The address must be valid."""
    if not options.address:
        return None
    parts = urlsplit(_with_port(options.address, worker))
    return Listening(options.listen or parts.hostname or "", parts.port or 0)


def read_options(
    given: Mapping[str, Any], source: str = "kv_connector_extra_config", without: Collection[str] = ()
) -> ConnectorOptions:
    """The options in an engine's JSON.

    Args:
        source: the engine's option that has the JSON.
        without: options that this engine's connector has not.

    Raises:
        ValueError: names the option, and what would be right.
    """
    known = [name for name in ConnectorOptions.__struct_fields__ if name not in without]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f", expected one of {', '.join(known)}"
            raise ValueError(f"{name} is no option of this connector{hint}")
    try:
        return msgspec.convert(dict(given), ConnectorOptions)
    except msgspec.ValidationError as error:
        raise ValueError(f"{source}: {error}") from error


def _size(option: str, value: int | str) -> int:
    if isinstance(value, int):
        return value
    try:
        return 0 if value == "0" else read_size(value)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def _codec(option: str, name: str) -> Any:
    try:
        return codec_named(name)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def _with_port(address: str, worker: int) -> str:
    """The address of a worker: its port is that of the first one and its number."""
    if not address:
        return ""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"address is {address!r}: {error}") from error
    if not port or not parts.hostname:
        raise ValueError(f"address is {address!r}, expected a URL with a port, such as http://10.0.0.1:9700")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return parts._replace(netloc=f"{host}:{port + worker}").geturl()
