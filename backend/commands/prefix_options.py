"""Options of the command line about where KV blocks are kept beyond the engine's memory."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from backend.commands.argument_types import memory_size, non_negative

if TYPE_CHECKING:
    from prefix_store.store.config import StoreConfig

_CODECS = ("plain", "int8", "fp8")
_SECRET_BYTES = 32
_SHORTEST_SECRET = 16
_DISK_BYTES = 4 * 2**30
_PLACES = ("memory", "disk", "mooncake")
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
"""Where the fields of the configuration come from."""


def add_prefix_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options to a parser."""
    options = parser.add_argument_group(
        "prefix store",
        "Keeps keys and values of prompts, so that who begins like one before need not compute it again.",
    )
    options.add_argument(
        "--prefix-memory", type=memory_size, metavar="SIZE", help="host memory for them, such as 2GiB (default: none)"
    )
    options.add_argument(
        "--prefix-disk",
        type=Path,
        metavar="DIR",
        help="folder for them, which the engines of a host share and which outlives them (default: none)",
    )
    options.add_argument(
        "--prefix-disk-size",
        type=memory_size,
        metavar="SIZE",
        help="what the folder may hold (default: 4GiB)",
    )
    options.add_argument(
        "--prefix-mooncake",
        type=Path,
        metavar="FILE",
        help="Mooncake's configuration file, in JSON, for what a Mooncake store is to keep of them; needs the package: "
        "pip install 'keepgate[mooncake]' (default: none)",
    )
    for place in _PLACES:
        options.add_argument(
            f"--prefix-{place}-codec",
            choices=_CODECS,
            help="how they are written there: as they are, or in half the room with a loss that docs/benchmarks/ "
            "states (default: plain)",
        )
    options.add_argument(
        "--prefix-index",
        metavar="URL",
        default=os.environ.get("KEEPGATE_PREFIX_INDEX", ""),
        help="Redis through which engines find each other's, such as redis://host:6379 (default: "
        "$KEEPGATE_PREFIX_INDEX, where nobody sees its password, or none)",
    )
    options.add_argument(
        "--prefix-secret-file",
        type=Path,
        metavar="FILE",
        help="a secret that all engines have which share them; made if it is not there. Without one, those of tenants "
        "are of no use to other engines or after a restart (default: $KEEPGATE_PREFIX_SECRET, or none)",
    )
    options.add_argument(
        "--prefix-name", metavar="NAME", default="", help="of this engine, in the index (default: host:port)"
    )
    options.add_argument(
        "--prefix-address",
        metavar="URL",
        default="",
        help="where other engines reach this one (default: the address it listens on, unless only this host reaches it "
        "and the index is on another)",
    )
    options.add_argument(
        "--prefix-audit",
        type=non_negative,
        metavar="N",
        default=1000,
        help="compute one in N restored prompts again and compare; 0: none (default: %(default)s)",
    )
    options.add_argument(
        "--public-prefix",
        type=Path,
        action="append",
        metavar="FILE",
        default=[],
        help="a prompt's beginning that all tenants share: text, or JSON with messages and tools; may be repeated",
    )


def read_prefix_arguments(arguments: argparse.Namespace) -> StoreConfig | None:
    """The configuration that the options are; None: nothing is kept.

    Raises:
        ValueError: they do not go together, or the secret or the folder cannot be had.
    """
    from prefix_store.codecs.registry import codec_named
    from prefix_store.store.config import StoreConfig
    from prefix_store.tiers.disk.folder import Folder
    from prefix_store.tiers.mooncake.settings import read_settings

    for place in _PLACES:
        for what in ("size", "codec"):
            if getattr(arguments, f"prefix_{place}_{what}", None) and not getattr(arguments, f"prefix_{place}"):
                raise ValueError(f"--prefix-{place}-{what}: nothing is kept there, expected it with --prefix-{place}")
    if not (any(getattr(arguments, f"prefix_{place}") for place in _PLACES) or arguments.prefix_index):
        for what in ("secret_file", "name", "address"):
            if getattr(arguments, f"prefix_{what}"):
                raise ValueError(
                    f"--prefix-{what.replace('_', '-')}: nothing is kept, expected it with --prefix-memory, "
                    "--prefix-disk, --prefix-mooncake or --prefix-index"
                )
        return None
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (arguments.prefix_memory or 0) > there:
        raise ValueError(
            f"--prefix-memory: {arguments.prefix_memory:,} bytes are more than the {there:,} that this machine has"
        )
    if arguments.prefix_disk:
        # Found out before a model is loaded for minutes.
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
            secret=_secret(arguments.prefix_secret_file),
            audit_every=arguments.prefix_audit,
        )
    except ValueError as error:
        raise ValueError(by_option(str(error))) from error


def by_option(message: str) -> str:
    """What is said of a field of the configuration, said of the option that it comes from."""
    field = message.replace(":", " ").split(maxsplit=1)[0]
    return f"{_OPTIONS[field]}{message.removeprefix(field)}" if field in _OPTIONS else message


def _secret(path: Path | None) -> str:
    """The secret of the fleet; empty where there is none."""
    if path is None:
        given, where = os.environ.get("KEEPGATE_PREFIX_SECRET", ""), "KEEPGATE_PREFIX_SECRET"
        if not given:
            return ""
    else:
        where = f"--prefix-secret-file {path}"
        try:
            _make_secret(path)
            given = path.read_text("utf-8").strip()
        except OSError as error:
            raise ValueError(f"{where}: it cannot be read or made ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: this is no text") from error
    if len(given.encode()) < _SHORTEST_SECRET:
        raise ValueError(f"{where}: the secret has {len(given.encode())} bytes, expected {_SHORTEST_SECRET} or more")
    return given


def _make_secret(path: Path) -> None:
    """Writes a new secret for the owner's eyes, unless there is one; of processes that begin together one does."""
    if path.exists():
        return
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {path.parent}")
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(_SECRET_BYTES) + "\n")
    try:
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink()
