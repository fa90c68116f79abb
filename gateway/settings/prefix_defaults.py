"""The prefix store of the in-repo backend, where the settings leave it open: on disk and with a secret in the state
directory, indexed in the gateway's own Redis.
"""

import logging
import os
from pathlib import Path

from msgspec.structs import replace

from gateway.settings.backend import BackendSettings
from gateway.settings.fields import SettingsError
from gateway.settings.settings import Settings

log = logging.getLogger(__name__)

# Of the backend, which takes the options before them.
INDEX_VARIABLE = "KEEPGATE_PREFIX_INDEX"
SECRET_VARIABLE = "KEEPGATE_PREFIX_SECRET"  # noqa: S105  # the name of one
_FOLDER = "prefix"
_SECRET_FILE = "prefix-secret"  # noqa: S105  # the name of one


def with_prefix_store(settings: Settings, redis_url: str) -> BackendSettings:
    """`settings.backend` with its prefix store; what was said stays. `redis_url` is of its own store, "" for none.

    Raises SettingsError where a folder was asked for by its size, and the state directory cannot hold it. One that
    nobody asked for is done without.
    """
    given = settings.backend
    backend = replace(given, prefix_disk=None, prefix_disk_size=None) if given.prefix_disk_size == 0 else given
    if backend.prefix_disk is None and given.prefix_disk_size != 0 and given.prefix_sharing is not False:
        backend = replace(backend, prefix_disk=_folder(settings))
    if backend.prefix_disk is None and backend.prefix_memory is None and backend.prefix_mooncake is None:
        return backend
    if backend.prefix_index is None:
        backend = replace(backend, prefix_index=_index(settings, redis_url))
    if backend.prefix_secret_file is None and SECRET_VARIABLE not in os.environ:
        backend = replace(backend, prefix_secret_file=_secret_file(settings))
    return backend


def _index(settings: Settings, redis_url: str) -> str | None:
    # A database of its own where there is one for certain: the cache counts the keys of its own as its entries.
    return f"{redis_url}?db=1" if settings.redis == "embedded" else redis_url or None


def _folder(settings: Settings) -> str | None:
    folder = settings.state_path() / _FOLDER
    return str(folder) if _made(settings, folder) else None


def _secret_file(settings: Settings) -> str | None:
    """The backend writes the secret itself, unless there is one."""
    state = settings.state_path()
    return str(state / _SECRET_FILE) if _made(settings, state) else None


def _made(settings: Settings, folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        reason = f"nothing can be kept in {folder}: {error.strerror}"
        if settings.backend.prefix_disk_size is not None:
            raise SettingsError(f"state_dir: {reason}; or set backend.prefix_disk_size to 0") from error
        log.warning("no keys and values of prompts outlive the backend: %s", reason)
        return False
    return True
