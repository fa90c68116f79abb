"""Mooncake's own configuration file, as vLLM, SGLang and LMCache read it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = "keepgate[mooncake]"
_MIN_MEMORY = 16 * 2**20
"""What Mooncake's allocator can divide."""


def read_settings(path: Path) -> Any:
    """The ``mooncake.mooncake_config.MooncakeConfig`` of a JSON file.

    Raises:
        ValueError: Mooncake is not installed, or the file is missing or invalid.
    """
    config = mooncake_module("mooncake_config").MooncakeConfig
    try:
        settings = config.from_file(str(path))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        # Invalid JSON; a list, which has no keys; 1e999 bytes; deep nesting.
        raise ValueError(f"{path}: this is no configuration of Mooncake: {error}") from error
    if not settings.local_buffer_size:
        raise ValueError(f"{path}: local_buffer_size is 0, expected at least some megabytes")
    # Mooncake does not check these two, and fails with a number, or none, when it joins.
    if not isinstance(settings.device_name or "", str):
        raise ValueError(f"{path}: device_name is {settings.device_name!r}, expected a name")
    if 0 < settings.global_segment_size < _MIN_MEMORY:
        raise ValueError(
            f"{path}: global_segment_size is {settings.global_segment_size}, expected 0 or at least {_MIN_MEMORY}"
        )
    return settings


def mooncake_module(name: str) -> ModuleType:
    """A module of the package. Raises ValueError, which says what to install."""
    # Else it logs several lines to stderr for each success.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        return importlib.import_module(f"mooncake.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(f"Mooncake is not installed; install the extra: pip install '{_PACKAGE}'") from error
    except ImportError as error:
        raise ValueError(
            f"Mooncake cannot be loaded ({error}); libibverbs is in the package libibverbs1 of Debian and Ubuntu, "
            "libibverbs of others"
        ) from error


def join(store: Any, settings: Any, memory_bytes: int) -> int:
    """Joins a ``MooncakeDistributedStore`` with so much shared memory; returns its status, 0 for success.

    Holds the GIL until then.
    """
    code: int = store.setup(
        settings.local_hostname,
        settings.metadata_server,
        memory_bytes,
        settings.local_buffer_size,
        settings.protocol,
        settings.device_name or "",
        settings.master_server_address,
        None,
        settings.enable_ssd_offload,
        settings.ssd_offload_path,
        settings.tenant_id,
    )
    return code
