"""Secrets that are in files, as container platforms hand them out: `KEEPGATE_ADMIN_KEY_FILE` has the path of a file
with what `KEEPGATE_ADMIN_KEY` would say.
"""

from collections.abc import Mapping
from pathlib import Path

from gateway.settings.fields import InvalidValue, SettingsError

SUFFIX = "_FILE"


def secrets_in_files(environment: Mapping[str, str], variables: frozenset[str]) -> dict[str, str]:
    """What the files say, by the variables whose place they take; `variables` are those that may be in files.

    Raises SettingsError for a file that cannot be read or is empty, and for a secret that is given in both ways.
    """
    found: dict[str, str] = {}
    for name in variables & {name.removesuffix(SUFFIX) for name in environment if name.endswith(SUFFIX)}:
        if name in environment:
            raise SettingsError(f"environment: {name}: expected either this or {name}{SUFFIX}; unset one of them")
        try:
            found[name] = read_secret(environment[name + SUFFIX])
        except InvalidValue as error:
            raise SettingsError(f"environment: {name}{SUFFIX}: {error}") from error
    return found


def read_secret(place: str) -> str:
    """The content of a file without white space around it. Raises InvalidValue, which names the file."""
    if not place:
        raise InvalidValue("expected the path of a file, got nothing; unset it for the default")
    try:
        secret = Path(place).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidValue(f"cannot read the file {place}: {reason}") from error
    if not secret:
        raise InvalidValue(f"expected a secret in the file {place}, which is empty")
    return secret
