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
    match canonical:
        case {"messages": [*_, {"role": "user", "content": str(text)} as last]} if text.strip():
            last["content"] = _BLANK
        case _:
            return None
    digest = hashlib.blake2b(_encoder.encode((family, canonical)), digest_size=16).hexdigest()
    return Question(f"{namespace}.{digest}", text)
