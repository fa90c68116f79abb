"""What an upstream is told in place of what the client said: the operator's credential, and its own names of models."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gateway.settings.fields import Secret, SettingsError
from gateway.settings.upstreams import UpstreamSettings

# A string, or the beginning or end of an object or array.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
_VALUE = re.compile(rb'\s*:\s*("[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)
_encode = msgspec.json.Encoder().encode


class _Model(msgspec.Struct):
    model: str | None = None


_model_of = msgspec.json.Decoder(_Model).decode
_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def api_key(settings: UpstreamSettings) -> Secret | None:
    """The operator's credential. Raises SettingsError where it is not there."""
    if settings.api_key is None:
        return None
    kind, _, place = settings.api_key.partition(":")
    name = f"upstreams: {settings.name or settings.url}: api_key"
    if kind == "env":
        key = os.environ.get(place, "").strip()
        if not key:
            raise SettingsError(f"{name}: expected a key in the environment variable {place}, which is not set")
    else:
        try:
            key = Path(place).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise SettingsError(f"{name}: cannot read the file {place}: {reason}") from error
        if not key:
            raise SettingsError(f"{name}: expected a key in the file {place}, which is empty")
    if not key.isascii() or not key.isprintable():
        raise SettingsError(f"{name}: expected a key of printable ASCII characters in one line")
    return Secret(key)


def with_own_model(body: bytes, names: Mapping[str, str]) -> bytes:
    """A JSON body with the upstream's own name of its model; all other bytes stay, and a body without one as it is."""
    try:
        model = _model_of(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    own = names.get(model) if model is not None else None
    if own is None:
        return body
    place = _place_of_model(body)
    if place is not None:
        changed = body[: place[0]] + _encode(own) + body[place[1] :]
        if _model_of(changed).model == own:
            return changed
    # A name with escape sequences, or twice in the body: white space between fields is lost.
    return _encode({**_fields_of(body), "model": msgspec.Raw(_encode(own))})


def _place_of_model(body: bytes) -> tuple[int, int] | None:
    """Where the value of the field `model` begins and ends."""
    depth = 0
    for token in _TOKEN.finditer(body):
        text = token[0]
        if text in (b"{", b"["):
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and text == b'"model"' and (value := _VALUE.match(body, token.end())):
            return value.span(1)
    return None
