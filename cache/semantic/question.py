"""What of a request may be fuzzy: the text of its last turn. Everything else is its context, and that is exact."""

import hashlib
from typing import Any, NamedTuple

import msgspec

# MessagePack extension type that stands where the text was; JSON text can never produce one.
_BLANK = msgspec.msgpack.Ext(2, b"")
_encoder = msgspec.msgpack.Encoder(order="deterministic")


class Question(NamedTuple):
    """The last turn of a request, and what it was asked in.

    Only answers to questions of one partition are compared. `partition` is `<namespace>.<BLAKE2b-128, hex>` of the
    canonical request without the text: tenant, endpoint, query string, model, every parameter, system prompt, tools
    and all earlier turns.
    """

    partition: str
    text: str


def question_of(namespace: str, family: str, canonical: dict[str, Any]) -> Question | None:
    """The question of a request; None where its last turn is not the plain text of one user.

    Such are images and other parts, the result of a tool, a prefilled answer, and every prompt that is no chat.
    `family` is as in `request_key`, `canonical` the canonical body, from which the text is taken out. Raises
    RecursionError as `request_key` does.
    """
    if family.partition("?")[0] == "completions":
        return None  # its prompt is text to be continued, where every sign counts
    text = _take_last_message(canonical)
    if text is None:
        return None
    digest = hashlib.blake2b(_encoder.encode((family, canonical)), digest_size=16).hexdigest()
    return Question(f"{namespace}.{digest}", text)


def _take_last_message(body: dict[str, Any]) -> str | None:
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "user":
        return None
    text = last.get("content")
    if not isinstance(text, str) or not text.strip():
        return None
    last["content"] = _BLANK
    return text
