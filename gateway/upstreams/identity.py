"""What an upstream is told in place of what the client said: the operator's credential, its own names of models, and
the salt of the tenant's KV blocks.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cache.entries.key import namespace_for
from gateway.http.json_object import relayed_fields
from gateway.settings.fields import InvalidValue, Secret, SettingsConflict, SettingsError
from gateway.settings.upstreams import UpstreamSettings

# A string, or the beginning or end of an object or array.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
_VALUE = re.compile(rb'\s*:\s*("[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)
_SALT = "cache_salt"
_PUBLIC = namespace_for("")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class _Model(msgspec.Struct):
    model: str | None = None


_model_of = msgspec.json.Decoder(_Model).decode
_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def api_key(settings: UpstreamSettings) -> Secret | None:
    """The operator's credential. Raises SettingsError where it is not there."""
    if settings.api_key is None:
        return None
    try:
        return Secret(_read_key(settings.api_key))
    except InvalidValue as error:
        raise SettingsError(f"upstreams: {settings.name or settings.url}: api_key: {error}") from error


def check_api_keys(servers: Sequence[UpstreamSettings]) -> None:
    """Raises SettingsConflict for a credential that is not there."""
    for number, settings in enumerate(servers):
        try:
            if settings.api_key is not None:
                _read_key(settings.api_key)
        except InvalidValue as error:
            raise SettingsConflict(("upstreams", str(number), "api_key"), f": {error}") from error


def _read_key(source: str) -> str:
    kind, _, place = source.partition(":")
    if kind == "env":
        key = os.environ.get(place, "").strip()
        if not key:
            raise InvalidValue(f"expected a key in the environment variable {place}, which is not set")
    else:
        try:
            key = Path(place).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise InvalidValue(f"cannot read the file {place}: {reason}") from error
        if not key:
            raise InvalidValue(f"expected a key in the file {place}, which is empty")
    if not key.isascii() or not key.isprintable():
        raise InvalidValue("expected a key of printable ASCII characters in one line")
    return key


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


def cache_salt(namespace: str, own: object = None) -> str | None:
    """The salt of a tenant's KV blocks in vLLM, where `own` is the one that its client sends; None for blocks that all
    callers without a tenant share.

    The same in every process. Another namespace never has the same one, whatever salt its client sends.
    """
    if not own and namespace in ("", _PUBLIC):
        return None
    text = f"{namespace}\n{own or ''}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16, person=b"KV blocks").hexdigest()


def with_cache_salt(body: bytes, namespace: str) -> bytes:
    """A JSON body with the salt of its tenant in place of the client's; a body that is no object as it is.

    A salt that is no text stays: vLLM refuses it.
    """
    encode = _encode
    try:
        fields: dict[str, Any] = dict(_fields_of(body))
        own = _decode(fields[_SALT]) if _SALT in fields else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # What engines read all the same. The salt of such a body counts as well: it could be another tenant's.
        fields = relayed_fields(body)
        own, encode = fields.get(_SALT), _as_python
    salt = cache_salt(namespace, own)
    if not fields or salt is None or not isinstance(own, str | None):
        return body
    return encode({**fields, _SALT: salt})


def _as_python(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode()


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
