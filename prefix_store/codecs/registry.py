"""All codecs, by name."""

from __future__ import annotations

from prefix_store.codecs.codec import Codec
from prefix_store.codecs.plain import Plain
from prefix_store.codecs.scaled import FP8, INT8

PLAIN = Plain()
CODECS: dict[str, Codec] = {codec.name: codec for codec in (PLAIN, INT8, FP8)}


def codec_named(name: str) -> Codec:
    """Raises ValueError for an unknown name."""
    if name not in CODECS:
        raise ValueError(f"codec is {name!r}, expected one of {', '.join(CODECS)}")
    return CODECS[name]
