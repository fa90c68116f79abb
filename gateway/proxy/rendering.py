"""A stored answer in the form that a client wants."""

import asyncio
from typing import NamedTuple

import msgspec

from cache.entries.entry import Family
from gateway.proxy.inference_request import InferenceRequest
from gateway.surfaces.registry import BY_FAMILY
from gateway.surfaces.surface import Json, StreamedForm, Surface, TranslatedForm

_decode = msgspec.json.Decoder(dict).decode
_encode = msgspec.json.Encoder().encode
_LARGE_BODY = 2**18


class Rendered(NamedTuple):
    """The body of a response, and the answer in it if it was translated."""

    body: bytes
    answer: Json | None = None


async def render(body: bytes, family: Family, inference: InferenceRequest) -> Rendered:
    """An answer of `family` (JSON text) as `inference` asks for it. Raises UnstorableAnswer if it is no such answer."""
    if family == inference.family and not inference.stream:
        return Rendered(body)
    if len(body) > _LARGE_BODY:  # takes milliseconds: it leaves the event loop
        return await asyncio.to_thread(_render, body, family, inference)
    return _render(body, family, inference)


def _render(body: bytes, family: Family, inference: InferenceRequest) -> Rendered:
    answer = _decode(body)
    own, recorded = inference.surface, BY_FAMILY[family]
    assert isinstance(own, StreamedForm)  # noqa: S101  # what cannot be streamed is never translated
    if family == inference.family:
        return Rendered(own.own_stream(answer, inference.asked))
    if isinstance(recorded, Surface):
        answer = recorded.chat_answer(answer)
    if isinstance(own, TranslatedForm):
        answer = own.own_answer(answer, inference.asked, inference.key.id)
    rendered = own.own_stream(answer, inference.asked) if inference.stream else _encode(answer)
    return Rendered(rendered, answer)
