"""The identity of a request: two requests with one key may share one answer."""

import binascii
import contextlib
import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import xxhash

# They do not change the answer, so a stream and a plain request share an entry.
TRANSPORT_FIELDS = frozenset({"stream", "stream_options"})
# They say who asks, in which session, and what is to be remembered of the request. Agents send a new one each time.
LABELS = frozenset(
    {
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "store",
        "user",
    }
)
# Where a client wants its prompt cached: on the body, a message, a content part, a tool or a call of one.
_CACHE_MARKER = "cache_control"
_LEFT_OUT = TRANSPORT_FIELDS | LABELS | {_CACHE_MARKER}

# The content parts that carry a file: the field of each, and in its object the name of the URL or base64 text.
_FILES = {"image_url": "url", "video_url": "url", "audio_url": "url", "input_audio": "data", "file": "file_data"}
_MAX_MEDIA_TYPE = 1024
_BASE64_CHUNK = 2**16  # a multiple of 4
_FROM_URL_SAFE = bytes.maketrans(b"-_", b"+/")
# What parsers of URLs remove, cut off or replace: bytes that are not printable ASCII, and a fragment.
_NO_URL = re.compile(rb"[^!-~]|#")
_NO_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")

# MessagePack extension types; JSON text can never produce one. cache/semantic/question.py has 2.
_BIG_INTEGER = 1
_CONTENT = 3
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
    unknown, except TRANSPORT_FIELDS, LABELS, `priority` (see priority_of) and markers for prompt caching. Raises
    RecursionError for a body nested deeper than the interpreter can walk, ValueError for a namespace with a dot.
    """
    return canonical_key(namespace, family, canonical_body(body))


def canonical_key(namespace: str, family: str, body: Mapping[str, Any]) -> Key:
    """The key of a request whose body is canonical. Raises what `request_key` does."""
    if "." in namespace:
        raise ValueError(f"namespace {namespace!r}: a dot ends a namespace, so none can stand in it")
    canonical = _encoder.encode((family, body))
    digest = xxhash.xxh3_128_hexdigest(canonical)
    return Key(f"{namespace}.{digest}", hashlib.blake2b(canonical, digest_size=16).digest())


def canonical_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` with everything removed that cannot change the answer, and with digests in place of files.

    Null fields of the body and of a message count as absent. Deeper null values are kept, since in a JSON schema
    `{"const": null}` and `{}` differ. MessagePack types, sorts and length-delimits the rest.
    """
    left_out = _LEFT_OUT if priority_of(body) is None else _LEFT_OUT | {"priority"}
    if type(body.get("n")) is int and body["n"] == 1:
        left_out |= {"n"}  # one answer is what a request without it asks for
    return {
        field: [_ITEMS[field](item) for item in value] if field in _ITEMS and type(value) is list else _value(value)
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
        field: value if type(value) is str else _PARTS.get(field, _value)(value)
        for field, value in message.items()
        if value is not None and field != _CACHE_MARKER
    }


def _content(content: Any) -> Any:
    """The text of a single text part that says nothing else; other parts as they are but for markers and files."""
    if type(content) is not list:
        return _value(content)
    if len(content) == 1 and type(part := content[0]) is dict:
        text = part.get("text")
        is_alone = len(part) == 2 or (len(part) == 3 and _CACHE_MARKER in part)
        if is_alone and type(text) is str and part.get("type") == "text":
            return text
    return [_part(part) for part in content]


def _part(part: Any) -> Any:
    if type(part) is not dict:
        return _value(part)
    return {
        field: _file(value, _FILES[field]) if field in _FILES else value if type(value) is str else _value(value)
        for field, value in part.items()
        if field != _CACHE_MARKER
    }


def _tool(tool: Any) -> Any:
    if type(tool) is dict:
        function = tool.get("function")
        if type(function) is dict and _CACHE_MARKER in function:
            tool = {**tool, "function": _without_marker(function)}
        if _CACHE_MARKER in tool:
            tool = _without_marker(tool)
    return _value(tool)


def _tool_calls(calls: Any) -> Any:
    return [_tool(call) for call in calls] if type(calls) is list else _value(calls)


def _without_marker(fields: dict[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in fields.items() if field != _CACHE_MARKER}


_ITEMS = {"messages": _message, "tools": _tool}
_PARTS = {"content": _content, "tool_calls": _tool_calls}


def _file(value: Any, name: str) -> Any:
    """The object of a file, or its URL alone, with a digest in place of the bytes that its field `name` encodes."""
    if type(value) is str:
        return _bytes_in(value, is_url=True)
    if type(value) is not dict or type(value.get(name)) is not str:
        return _value(value)
    return {
        field: _bytes_in(item, is_url=name == "url") if field == name else _value(item) for field, item in value.items()
    }


def _bytes_in(text: str, is_url: bool) -> Any:
    """What `text` encodes as a data URL or, if it need not be a URL, as base64; any other text as it is."""
    with contextlib.suppress(ValueError):
        if text[:5].lower() == "data:":
            return _data_url(text)
        if not is_url:
            return msgspec.msgpack.Ext(_CONTENT, _base64_digest(text))
    return text


def _data_url(url: str) -> msgspec.msgpack.Ext:
    """The media type and the digest of a data URL (RFC 2397). Raises ValueError where readers could differ."""
    comma = url.index(",", 0, _MAX_MEDIA_TYPE)
    head = url[len("data:") : comma].encode("ascii").decode()
    essence, *parameters = (part.strip() for part in head.split(";"))
    is_base64 = bool(parameters) and parameters[-1].lower() == "base64"
    if is_base64:
        parameters.pop()
    if "base64" in map(str.lower, parameters):
        raise ValueError("base64 is not the last parameter")
    if is_base64:
        digest = _base64_digest(url, comma + 1)
    else:
        data = url[comma + 1 :].encode("ascii")
        if _NO_URL.search(data):
            raise ValueError("not a URL")
        digest = hashlib.blake2b(_unescaped(data), digest_size=32).digest()
    media_type = _media_type(essence.lower(), parameters)
    return msgspec.msgpack.Ext(_CONTENT, digest + b"data:" + media_type.encode())


def _media_type(essence: str, parameters: list[str]) -> str:
    """A media type without the parameters that cannot change what the bytes mean.

    `rate` of raw audio and the charset of a text can; none of an image or a video can.
    """
    kind = essence.partition("/")[0]
    if kind in ("image", "video"):
        return essence
    if kind == "text":
        counting = [parameter for parameter in parameters if parameter.lower() not in ("charset=utf-8", "charset=utf8")]
    else:
        counting = [parameter for parameter in parameters if not parameter.lower().startswith("charset=")]
    return ";".join((essence, *counting))


def _base64_digest(text: str, start: int = 0) -> bytes:
    """The digest of the bytes that `text` encodes from `start` on. Raises ValueError for what is not base64."""
    try:
        return _strict_base64_digest(text, start)
    except ValueError:
        data = text[start:].encode("ascii")
        return _strict_base64_digest(_standard_base64(_unescaped(data) if start else data), 0)


def _strict_base64_digest(text: str, start: int) -> bytes:
    if (len(text) - start) % 4 or text.find("=", start, len(text) - 2) >= 0:
        raise ValueError("wrong padding")
    digest = hashlib.blake2b(digest_size=32)
    # In pieces: a large file is never in memory a second time, and other threads run in between.
    for at in range(start, len(text), _BASE64_CHUNK):
        digest.update(binascii.a2b_base64(text[at : at + _BASE64_CHUNK], strict_mode=True))
    return digest.digest()


def _standard_base64(data: bytes) -> str:
    """Base64 without white space, in the standard alphabet, padded."""
    data = data.translate(None, b" \t\n\f\r")
    if b"+" not in data and b"/" not in data:
        data = data.translate(_FROM_URL_SAFE)
    if not data.endswith(b"="):
        data += b"=" * (-len(data) % 4)
    return data.decode("ascii")


def _unescaped(data: bytes) -> bytes:
    """`data` without percent-encoding. Raises ValueError for a percent sign without two hexadecimal digits."""
    if b"%" not in data:
        return data
    if _NO_ESCAPE.search(data):
        raise ValueError("not percent-encoded")
    # Quoted-printable has the same escapes with another sign, and is decoded in C; urllib makes objects of each escape.
    return binascii.a2b_qp(data.replace(b"=", b"=3D").replace(b"%", b"="))


def _value(value: Any) -> Any:
    kind = type(value)
    if kind is str or kind is bool:
        return value
    if kind is dict:
        # Most values are text, and a call costs more than the test.
        return {field: item if type(item) is str else _value(item) for field, item in value.items()}
    if kind is list:
        return [_value(item) for item in value]
    if kind is float:
        # 0 and 0.0 are one number; beyond 2**53 a float no longer represents one integer.
        return int(value) if value.is_integer() and abs(value) < _EXACT_FLOAT_LIMIT else value
    if kind is int and not -(2**63) <= value < 2**64:
        return msgspec.msgpack.Ext(_BIG_INTEGER, hex(value).encode())
    return value
