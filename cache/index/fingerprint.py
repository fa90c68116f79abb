"""What an entry remembers of its request: enough to say in which fields another request differs, but no text of it.

Numbers, truth values and the names of well-known options stand there as they are. Everything else is a 64-bit digest
(xxh3): equal digests are equal values, and the values cannot be read from them.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import xxhash

# What names an option, not a person or a matter: texts of these fields are kept as they are.
_NAMED = frozenset(
    {
        "encoding_format",
        "modalities",
        "model",
        "quality",
        "reasoning_effort",
        "response_format",
        "service_tier",
        "size",
        "tool_choice",
        "truncation",
        "verbosity",
        "voice",
    }
)
_MAX_NAME = 64
_MAX_FIELDS = 64
_MAX_MESSAGES = 256
_REST = "…"
# What changes between two askings of one question: times, counters, punctuation, white space, case.
_VARYING = re.compile(r"[\W\d_]+")
_encoder = msgspec.msgpack.Encoder(order="deterministic")

Scalar = int | float | bool | str
Change = Literal["added", "removed", "changed"]


class Fingerprint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of the fields by name the `values` as they are, or their `digests`. `messages` are the role and the digest of
    each, in order. `question` is the digest of the last text of the user, without what varies between two askings; b""
    if the request has none.
    """

    values: dict[str, Scalar]
    digests: dict[str, bytes]
    messages: list[tuple[str, bytes]]
    question: bytes = b""


class Difference(msgspec.Struct, frozen=True, omit_defaults=True):
    """A field of a request that is not as in the entry. `here` and `there` are None where only a digest is known, or
    the field is missing.
    """

    field: str
    change: Change
    here: Scalar | None = None
    there: Scalar | None = None


def fingerprint(canonical: Mapping[str, Any]) -> Fingerprint:
    """Of a request with this canonical body. Raises RecursionError as `request_key` does."""
    fields, messages = dict(canonical), canonical.get("messages")
    if isinstance(messages, list) and messages:
        del fields["messages"]
    else:
        messages = []
    question = _last_text(messages) or _plain_text(fields)
    values: dict[str, Scalar] = {}
    digests: dict[str, bytes] = {}
    names = sorted(name for name in fields if len(name) <= _MAX_NAME)[:_MAX_FIELDS]
    if len(names) < len(fields):
        fields[_REST] = {name: value for name, value in fields.items() if name not in names}
        names.append(_REST)
    if len(messages) > _MAX_MESSAGES:
        messages = [*messages[:_MAX_MESSAGES], messages[_MAX_MESSAGES:]]
    for name in names:
        if (scalar := _scalar(name, fields[name])) is not None:
            values[name] = scalar
        else:
            digests[name] = _digest(fields[name])
    return Fingerprint(
        values,
        digests,
        [(_role(message), _digest(message)) for message in messages],
        _digest(_normalized(question)) if question else b"",
    )


def encode_fingerprint(known: Fingerprint) -> bytes:
    return _encoder.encode(known)


_decoder = msgspec.msgpack.Decoder(Fingerprint)


def decode_fingerprint(data: bytes) -> Fingerprint | None:
    """The inverse of `encode_fingerprint`; None for anything else, such as an entry that has none."""
    try:
        return _decoder.decode(data) if data else None
    except msgspec.DecodeError:
        return None


def differences(here: Fingerprint, there: Fingerprint) -> list[Difference]:
    """In what the request `here` differs from the one of an entry `there`: its fields in order, then its messages."""
    found = []
    ours, theirs = ({**each.values, **each.digests} for each in (here, there))
    for name in sorted(ours.keys() | theirs.keys()):
        mine, other = here.values.get(name), there.values.get(name)
        if name not in theirs:
            found.append(Difference(name, "added", here=mine))
        elif name not in ours:
            found.append(Difference(name, "removed", there=other))
        elif (type(ours[name]) is bool, ours[name]) != (type(theirs[name]) is bool, theirs[name]):
            found.append(Difference(name, "changed", mine, other))
    return found + _message_differences(here.messages, there.messages)


def _message_differences(here: Sequence[tuple[str, bytes]], there: Sequence[tuple[str, bytes]]) -> list[Difference]:
    """Messages at the same place from the start or, after one that only one of them has, from the end."""
    if len(here) == len(there):
        pairs = zip(range(len(here)), here, there, strict=True)
        return [
            Difference(f"messages[{place}]", "changed", mine[0], theirs[0])
            for place, mine, theirs in pairs
            if mine != theirs
        ]
    start = next((place for place, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None)
    start = min(len(here), len(there)) if start is None else start
    end = 0
    while end < min(len(here), len(there)) - start and here[-1 - end] == there[-1 - end]:
        end += 1
    more = [Difference(f"messages[{place}]", "added", here=here[place][0]) for place in range(start, len(here) - end)]
    less = [
        Difference(f"messages[{place}]", "removed", there=there[place][0]) for place in range(start, len(there) - end)
    ]
    return more + less


def _scalar(name: str, value: Any) -> Scalar | None:
    """The value, if it says nothing of a person or a matter."""
    if isinstance(value, bool | int | float):
        return value
    if name == "response_format" and isinstance(value, dict) and value.keys() == {"type"}:
        value = value["type"]
    return value if name in _NAMED and isinstance(value, str) and len(value) <= _MAX_NAME else None


def _digest(value: Any) -> bytes:
    return xxhash.xxh3_64_digest(_encoder.encode(value))


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    return role[:16] if isinstance(role, str) else ""


def _last_text(messages: Sequence[Any]) -> str:
    """Of the last message of a user."""
    for message in reversed(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, list):
                texts = (part.get("text") for part in content if isinstance(part, dict))
                content = "\n".join(text for text in texts if isinstance(text, str))
            return content if isinstance(content, str) else ""
    return ""


def _plain_text(fields: Mapping[str, Any]) -> str:
    for name in ("prompt", "input", "query"):
        if isinstance(text := fields.get(name), str):
            return text
    return ""


def _normalized(text: str) -> str:
    """Only letters, without case and marks; the text itself where it has no letters."""
    letters = _VARYING.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip()
    return letters or text
