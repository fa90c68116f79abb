"""A stored answer in the form that a client wants."""

import asyncio
from typing import NamedTuple

import msgspec

from cache.entries.entry import Family
from cache.errors import UnstorableAnswer
from gateway.errors import refusal
from gateway.http.sse import event_json
from gateway.proxy.inference_request import InferenceRequest
from gateway.surfaces.registry import BY_FAMILY
from gateway.surfaces.surface import Json, StreamedForm, Surface, TranslatedForm

_encode = msgspec.json.Encoder().encode
_LARGE_BODY = 2**18


class Rendered(NamedTuple):
    """The body of a response, and the answer in it if it was translated."""

    body: bytes
    answer: Json | None = None


async def render(body: bytes, family: Family, inference: InferenceRequest) -> Rendered:
    """An answer of `family` (JSON text) as `inference` asks for it.

    Raises UnstorableAnswer if it is no such answer, and UpstreamRefused if it is an error.
    """
    if family == inference.family and not inference.stream:
        return Rendered(body)
    if len(body) > _LARGE_BODY:  # takes milliseconds: it leaves the event loop
        return await asyncio.to_thread(_render, body, family, inference)
    return _render(body, family, inference)


def _render(body: bytes, family: Family, inference: InferenceRequest) -> Rendered:
    answer = _answer_in(body)
    own, recorded = inference.surface, BY_FAMILY[family]
    assert isinstance(own, StreamedForm)  # noqa: S101  # what cannot be streamed is never translated
    if family == inference.family:
        return Rendered(own.own_stream(answer, inference.asked))
    if isinstance(recorded, Surface):
        answer = recorded.chat_answer(answer)
    elif not isinstance(choices := answer.get("choices"), list) or not choices:
        raise UnstorableAnswer("it has no choice") if answer.get("error") is None else refusal(502, body)
    if isinstance(own, TranslatedForm):
        answer = own.own_answer(answer, inference.asked, inference.key.id)
    rendered = own.own_stream(answer, inference.asked) if inference.stream else _encode(answer)
    return Rendered(rendered, answer)


def _answer_in(body: bytes) -> Json:
    try:
        answer = event_json(body)
    except ValueError as error:
        raise UnstorableAnswer("it is not a JSON object") from error
    return answer
