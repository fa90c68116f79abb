"""Options of the prefix store, which keeps KV blocks outside the engine's memory."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from backend.commands.argument_types import memory_size, non_negative

if TYPE_CHECKING:
    from prefix_store.store.config import StoreConfig

_CODECS = ("plain", "int8", "fp8")
_DISK_BYTES = 4 * 2**30
_TIERS = ("memory", "disk", "mooncake")
_OPTIONS = {
    "memory_bytes": "--prefix-memory",
    "memory_codec": "--prefix-memory-codec",
    "disk_bytes": "--prefix-disk-size",
    "disk_codec": "--prefix-disk-codec",
    "mooncake": "--prefix-mooncake",
    "mooncake_codec": "--prefix-mooncake-codec",
    "index": "--prefix-index",
    "name": "--prefix-name",
    "address": "--prefix-address",
}
"""The option that each field of `StoreConfig` comes from."""


def add_prefix_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options to a parser."""
    options = parser.add_argument_group(
        "prefix store",
        "Stores keys and values of prompts, so that a prompt with the same beginning is not computed again.",
    )
    options.add_argument(
        "--prefix-memory", type=memory_size, metavar="SIZE", help="host memory for them, such as 2GiB (default: none)"
    )
    options.add_argument(
        "--prefix-disk",
        type=Path,
        metavar="DIR",
        help="directory for them, shared by the engines of a host and kept after their end (default: none)",
    )
    options.add_argument(
        "--prefix-disk-size",
        type=memory_size,
        metavar="SIZE",
        help="limit of the directory's size (default: 4GiB)",
    )
    options.add_argument(
        "--prefix-mooncake",
        type=Path,
        metavar="FILE",
        help="configuration file, in JSON, of a Mooncake store for them; needs the package: "
        "pip install 'keepgate[mooncake]' (default: none)",
    )
    for tier in _TIERS:
        options.add_argument(
            f"--prefix-{tier}-codec",
            choices=_CODECS,
            help="how they are stored there: plain, or in half the space with a loss (see docs/benchmarks/) "
            "(default: plain)",
        )
    options.add_argument(
        "--prefix-index",
        metavar="URL",
        default=os.environ.get("KEEPGATE_PREFIX_INDEX", ""),
        help="Redis in which engines find each other's blocks, such as redis://host:6379 (default: "
        "$KEEPGATE_PREFIX_INDEX, which hides its password from process lists, or none)",
    )
    options.add_argument(
        "--prefix-secret-file",
        type=Path,
        metavar="FILE",
        help="secret of all engines that share them; written if the file is absent. Without one, other engines cannot "
        "use the blocks of tenants, nor can this one after a restart (default: $KEEPGATE_PREFIX_SECRET, or none)",
    )
    options.add_argument(
        "--prefix-name", metavar="NAME", default="", help="name of this engine in the index (default: host:port)"
    )
    options.add_argument(
        "--prefix-address",
        metavar="URL",
        default="",
        help="where other engines reach this one (default: the address it listens on, unless that is a loopback "
        "address and the index is on another host)",
    )
    options.add_argument(
        "--prefix-audit",
        type=non_negative,
        metavar="N",
        default=1000,
        help="compute one in N restored prompts again and compare; 0: never (default: %(default)s)",
    )
    options.add_argument(
        "--public-prefix",
        type=Path,
        action="append",
        metavar="FILE",
        default=[],
        help="beginning of prompts that all tenants share: text, or JSON with messages and tools; may be repeated",
    )


def read_prefix_arguments(arguments: argparse.Namespace) -> StoreConfig | None:
    """The configuration of the prefix store; None: there is none.

    Raises:
        ValueError: options contradict each other, or the secret or the directory cannot be used.
    """
    from prefix_store.codecs.registry import codec_named
    from prefix_store.store.config import StoreConfig
    from prefix_store.store.options import read_secret
    from prefix_store.tiers.disk.folder import Folder
    from prefix_store.tiers.mooncake.settings import read_settings

    for tier in _TIERS:
        for what in ("size", "codec"):
            if getattr(arguments, f"prefix_{tier}_{what}", None) and not getattr(arguments, f"prefix_{tier}"):
                raise ValueError(f"--prefix-{tier}-{what}: there is no such tier; expected it with --prefix-{tier}")
    if not (any(getattr(arguments, f"prefix_{tier}") for tier in _TIERS) or arguments.prefix_index):
        for what in ("secret_file", "name", "address"):
            if getattr(arguments, f"prefix_{what}"):
                raise ValueError(
                    f"--prefix-{what.replace('_', '-')}: there is no prefix store; expected it with --prefix-memory, "
                    "--prefix-disk, --prefix-mooncake or --prefix-index"
                )
        return None
    if arguments.prefix_disk:
        # Checked here, because loading a model takes minutes.
        try:
            Folder.open(arguments.prefix_disk)
        except OSError as error:
            raise ValueError(f"--prefix-disk {arguments.prefix_disk}: {error.strerror or error}") from error
    if arguments.prefix_mooncake:
        try:
            read_settings(arguments.prefix_mooncake)
        except ValueError as error:
            raise ValueError(f"--prefix-mooncake: {error}") from error
    try:
        return StoreConfig(
            memory_bytes=arguments.prefix_memory or 0,
            memory_codec=codec_named(arguments.prefix_memory_codec or "plain"),
            disk=arguments.prefix_disk,
            disk_bytes=arguments.prefix_disk_size or _DISK_BYTES,
            disk_codec=codec_named(arguments.prefix_disk_codec or "plain"),
            mooncake=arguments.prefix_mooncake,
            mooncake_codec=codec_named(arguments.prefix_mooncake_codec or "plain"),
            index=arguments.prefix_index,
            name=arguments.prefix_name,
            address=arguments.prefix_address,
            secret=read_secret(arguments.prefix_secret_file, "--prefix-secret-file"),
            audit_every=arguments.prefix_audit,
        )
    except ValueError as error:
        raise ValueError(name_option(str(error))) from error


def name_option(message: str) -> str:
    """Replaces the field of `StoreConfig` that begins a message by its option."""
    field = message.replace(":", " ").split(maxsplit=1)[0]
    return f"{_OPTIONS[field]}{message.removeprefix(field)}" if field in _OPTIONS else message
