"""The keys with which values in Redis are encrypted, read from where the settings say they are."""

import os
from pathlib import Path

from cache.stores.encryption import Encryption, encryption_with
from gateway.settings.fields import SettingsError
from gateway.settings.operations import EncryptionSettings


def encryption_keys(settings: EncryptionSettings) -> tuple[str, ...]:
    """Keys as base64, the one for new values first; none where nothing is encrypted. Raises SettingsError."""
    if settings.key is None:
        if settings.old_keys:
            raise SettingsError("encryption.key: expected a key, for there are old ones; or leave old_keys out")
        return ()
    places = {"key": settings.key, **{f"old_keys[{n}]": place for n, place in enumerate(settings.old_keys)}}
    keys = []
    for name, place in places.items():
        key = _read(name, place)
        try:
            encryption_with([key])
        except ImportError as error:
            raise SettingsError(
                "encryption.key: encryption is not installed; install the extra: pip install 'keepgate[encryption]'"
            ) from error
        except ValueError as error:
            raise SettingsError(
                f"encryption.{name}: expected base64 of 32 bytes in {place}, as `openssl rand -base64 32` prints it"
            ) from error
        keys.append(key)
    return tuple(keys)


def encryption_of(settings: EncryptionSettings) -> Encryption:
    """Raises SettingsError."""
    return encryption_with(encryption_keys(settings))


def _read(name: str, place: str) -> str:
    """A key at `env:NAME` or `file:PATH`. Raises SettingsError."""
    kind, _, where = place.partition(":")
    if kind == "env":
        text = os.environ.get(where, "")
        if not text.strip():
            raise SettingsError(f"encryption.{name}: expected a key in the environment variable {where}")
        return text.strip()
    try:
        return Path(where).expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"encryption.{name}: cannot read the file {where}: {reason}") from error
