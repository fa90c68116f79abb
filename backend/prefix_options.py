"""Options of the command line about where KV blocks are kept beyond the engine's memory."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from backend.options import memory_size, non_negative

if TYPE_CHECKING:
    from prefix_store.store.config import StoreConfig

_CODECS = ("plain", "int8", "fp8")
_SECRET_BYTES = 32
_SHORTEST_SECRET = 16


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
        default=4 * 2**30,
        help="what the folder may hold (default: 4GiB)",
    )
    for place in ("memory", "disk"):
        options.add_argument(
            f"--prefix-{place}-codec",
            choices=_CODECS,
            default="plain",
            help="how they are written there: as they are, or in half the room with a loss that docs/benchmarks.md "
            "states (default: %(default)s)",
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
        ValueError: they do not go together.
        OSError: a file cannot be read or made.
    """
    from prefix_store.codecs.registry import codec_named
    from prefix_store.store.config import StoreConfig

    if not (arguments.prefix_memory or arguments.prefix_disk or arguments.prefix_index):
        return None
    return StoreConfig(
        memory_bytes=arguments.prefix_memory or 0,
        memory_codec=codec_named(arguments.prefix_memory_codec),
        disk=arguments.prefix_disk,
        disk_bytes=arguments.prefix_disk_size,
        disk_codec=codec_named(arguments.prefix_disk_codec),
        index=arguments.prefix_index,
        name=arguments.prefix_name,
        address=arguments.prefix_address,
        secret=_secret(arguments.prefix_secret_file),
        audit_every=arguments.prefix_audit,
    )


def _secret(path: Path | None) -> str:
    """The secret of the fleet; empty where there is none."""
    if path is None:
        given, where = os.environ.get("KEEPGATE_PREFIX_SECRET", ""), "KEEPGATE_PREFIX_SECRET"
        if not given:
            return ""
    else:
        _make_secret(path)
        given, where = path.read_text("utf-8").strip(), str(path)
    if len(given.encode()) < _SHORTEST_SECRET:
        raise ValueError(f"{where}: the secret has {len(given.encode())} bytes, expected {_SHORTEST_SECRET} or more")
    return given


def _make_secret(path: Path) -> None:
    """Writes a new secret for the owner's eyes, unless there is one; of processes that begin together one does."""
    if path.exists():
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(_SECRET_BYTES) + "\n")
    try:
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink()
