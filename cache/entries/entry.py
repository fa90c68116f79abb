"""What the cache keeps for a request: one whole answer and what it cost to compute."""

from typing import Annotated, Literal, NamedTuple

import msgspec

from cache.entries.checksum import checked_payload, with_checksum
from cache.errors import CorruptEntry

_MAGIC = b"KGE1"


# Limits of values that another writer may have put into a shared Redis.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Dollars = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Family = Literal[
    "chat.completions",
    "completions",
    "embeddings",
    "messages",
    "responses",
    "ollama.chat",
    "ollama.generate",
    "generate",
    "moderations",
    "rerank",
    "score",
    "audio.transcriptions",
    "audio.translations",
    "audio.speech",
    "images",
]


class Tag(NamedTuple):
    """A name that a client gave a request, and the purge state of all answers of this name when the request began."""

    name: str
    generation: str


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):  # gc: nothing of it refers to it
    """A complete answer in the form of a response that is not streamed.

    `body` is the JSON text of the response object: the upstream's own bytes if it did not stream, else assembled from
    the chunks with nothing left out. With a `content_type` it is what that says, as the upstream sent it. `created` is
    Unix time in seconds, `fresh_for` a lifetime in seconds. `generation` is the purge state under which the request
    began: an entry from before a purge never counts. `cost` is what it cost in US dollars, `repeat_cost` what the same
    request would have cost again; None where that is not known. `asked` is an encoded Fingerprint of the request, and
    `tags` are what its client called it.
    """

    id: str
    proof: bytes
    family: Family
    model: str
    body: bytes
    created: Seconds
    fresh_for: Seconds
    generation: str
    has_usage: bool
    prompt_tokens: Count
    completion_tokens: Count
    seconds: Seconds
    content_type: str = ""
    cost: Dollars | None = None
    repeat_cost: Dollars | None = None
    cached_tokens: Count = 0
    written_tokens: Count = 0
    upstream: str = ""
    asked: bytes = b""
    tags: tuple[Tag, ...] = ()

    def age(self, now: float) -> float:
        """Seconds since the answer was computed; a clock that went back counts as zero."""
        return max(0.0, now - self.created)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


def encode_entry(entry: Entry) -> bytes:
    """MessagePack, with a checksum."""
    return with_checksum(_MAGIC, _encoder.encode(entry))


def decode_entry(data: bytes) -> Entry:
    """The inverse of `encode_entry`. Raises CorruptEntry for anything else."""
    try:
        return _decoder.decode(checked_payload(_MAGIC, data))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptEntry(f"stored bytes do not decode: {error}") from error
