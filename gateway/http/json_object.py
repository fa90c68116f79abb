"""Decoding a body that is one JSON object, so that every server reads the same in it."""

import json
from typing import Any

import msgspec

from gateway.errors import InvalidRequest

_MAX_VALUES = 300_000
_decode = msgspec.json.Decoder().decode


def decode_object(body: bytes) -> dict[str, Any]:
    """The fields of a request. Raises InvalidRequest for a body that is not one JSON object."""
    if len(body) > _MAX_VALUES and sum(map(body.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        # Decoding holds the GIL: long text is cheap, millions of values are not.
        raise InvalidRequest(f"The body has more than {_MAX_VALUES} values.", code="too_many_values")
    try:
        text = body.decode()
        fields = _decode(body)
        _check_keys(text)
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not valid UTF-8: {error.reason} at byte {error.start}.") from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    except _RepeatedKey as error:
        # Servers differ in which of the two they use (RFC 8259, section 4): the answer to one reading could be served
        # for the other.
        raise InvalidRequest(
            f"The key {str(error)[:100]!r} is there twice in one object.", code="repeated_key"
        ) from error
    if not isinstance(fields, dict):
        raise InvalidRequest('The body must be a JSON object such as {"model": "...", "messages": [...]}.')
    return fields


def relayed_fields(body: bytes) -> dict[str, Any]:
    """The fields of a body that is relayed as it is; none of one that is no JSON object.

    It is read as Python's json reads it, which many engines use: in UTF-16, with NaN and with halves of surrogates too.
    Raises InvalidRequest for one that is nested too deeply to be read.
    """
    try:
        fields = _decode(body)
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            fields = json.loads(body)
        except RecursionError as error:
            raise InvalidRequest("The body is nested too deeply.") from error
        except ValueError:
            return {}
    return fields if isinstance(fields, dict) else {}


class _RepeatedKey(ValueError):
    pass


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len({key for key, _ in pairs}) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKey(next(key for key in keys if keys.count(key) > 1))


_check_keys = json.JSONDecoder(object_pairs_hook=_refuse_repeated_keys).decode
