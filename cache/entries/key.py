"""The identity of a request: two requests with one key may share one answer."""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import xxhash

# They do not change the answer, so a stream and a plain request share an entry.
TRANSPORT_FIELDS = frozenset({"stream", "stream_options"})

_BIG_INTEGER = 1  # MessagePack extension type; JSON text can never produce one
_EXACT_FLOAT_LIMIT = 2.0**53
_encoder = msgspec.msgpack.Encoder(order="deterministic")


class Key(NamedTuple):
    """The key of a stored answer.

    `id` is `<namespace>.<xxh3-128 of the canonical request, hex>`. The namespace is not in the hash, so no collision,
    found or forged, leads from one tenant to another. xxh3 is not a cryptographic hash; `proof` (BLAKE2b-128 of the
    same bytes) is compared on every hit, so a forged collision inside a tenant is a miss.
    """

    id: str
    proof: bytes

    @property
    def namespace(self) -> str:
        return namespace_of(self.id)

    def variant(self, number: int) -> "Key":
        """The key of the answer `number` (0, 1, …) of a request that keeps several."""
        return self if number == 0 else Key(f"{self.id}.{number}", self.proof)


def namespace_of(entry_id: str) -> str:
    return entry_id.partition(".")[0]


def namespace_for(credential: str) -> str:
    """The namespace of a caller: a digest of its credential, so that the credential is not stored."""
    if not credential:
        return "public"
    return hashlib.blake2b(credential.encode("utf-8", "surrogateescape"), digest_size=10).hexdigest()


def request_key(namespace: str, family: str, body: Mapping[str, Any]) -> Key:
    """The key of a decoded JSON request.

    `family` is the endpoint family ("chat.completions", "completions"). Every field of `body` counts, known or
    unknown, except TRANSPORT_FIELDS and `priority` (see priority_of). Raises RecursionError for a body nested deeper
    than the interpreter can walk, ValueError for a namespace with a dot.
    """
    if "." in namespace:
        raise ValueError(f"namespace {namespace!r}: a dot ends a namespace, so none can stand in it")
    canonical = _encoder.encode((family, canonical_body(body)))
    digest = xxhash.xxh3_128_hexdigest(canonical)
    return Key(f"{namespace}.{digest}", hashlib.blake2b(canonical, digest_size=16).digest())


def canonical_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` with everything removed that cannot change the answer.

    Null fields of the body and of a message count as absent. Deeper null values are kept, since in a JSON schema
    `{"const": null}` and `{}` differ. MessagePack types, sorts and length-delimits the rest.
    """
    left_out = TRANSPORT_FIELDS if priority_of(body) is None else TRANSPORT_FIELDS | {"priority"}
    return {
        field: [_message(item) for item in value] if field == "messages" and type(value) is list else _value(value)
        for field, value in body.items()
        if value is not None and field not in left_out
    }


def priority_of(body: Mapping[str, Any]) -> int | None:
    """The `priority` of a request, as vLLM, SGLang and the in-repo engine have it.

    It orders requests and does not change the answer. Any other value than a 64-bit integer counts as every field does.
    """
    value = body.get("priority")
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def _message(message: Any) -> Any:
    if type(message) is not dict:
        return _value(message)
    return {
        field: _text_of_single_part(value) if field == "content" else _value(value)
        for field, value in message.items()
        if value is not None
    }


def _text_of_single_part(content: Any) -> Any:
    if type(content) is list and len(content) == 1:
        part = content[0]
        if type(part) is dict and len(part) == 2 and part.get("type") == "text" and type(part.get("text")) is str:
            return part["text"]
    return _value(content)


def _value(value: Any) -> Any:
    kind = type(value)
    if kind is str or kind is bool:
        return value
    if kind is dict:
        return {field: _value(item) for field, item in value.items()}
    if kind is list:
        return [_value(item) for item in value]
    if kind is float:
        # 0 and 0.0 are one number; beyond 2**53 a float no longer represents one integer.
        return int(value) if value.is_integer() and abs(value) < _EXACT_FLOAT_LIMIT else value
    if kind is int and not -(2**63) <= value < 2**64:
        return msgspec.msgpack.Ext(_BIG_INTEGER, hex(value).encode())
    return value
