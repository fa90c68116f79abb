"""Endpoints whose answers are functions of their requests, stored as the bytes they are with their content type.

Moderations, reranking, scores, transcriptions, translations and speech always; images if the request has a seed. An
answer is served to equal requests alone: it is never brought into another form, cut or streamed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from cache.entries.entry import Family
from gateway.http.json_object import decode_object
from gateway.http.multipart import Part, multipart_fields, text_of
from gateway.surfaces.surface import AnswerForm

_FORM = "multipart/form-data"
_STREAMS = ("text/event-stream", "application/x-ndjson")
_decode = msgspec.json.Decoder(dict[str, Any] | list[Any]).decode
# As JSON says it, and as fields of a form do.
_ABSENT = (None, "")
_NOT_STREAMED = (*_ABSENT, False, "false", "False", "0")


class WholeEndpoint(AnswerForm, ABC):
    """One kind of endpoint. Stateless: one object serves all requests."""

    takes_forms = False
    """Whether requests come as multipart/form-data too."""
    needs_seed = False
    """Whether only the answer to a request with a seed is a function of it."""

    def __init__(self, family: Family, *paths: str) -> None:
        self.family = family
        self.paths = paths

    def storable(self, status: int, content_type: str, body: bytes) -> str | None:
        """None for an answer that may be stored; else why not, in one of few texts (for a label of metrics)."""
        kind = _media_type(content_type)
        if status != 200:
            return "not status 200"
        if not body or body.isspace():
            return "empty"
        if kind in _STREAMS:
            return "a stream"
        return self._fault(kind, body)

    @abstractmethod
    def _fault(self, kind: str, body: bytes) -> str | None:
        """Why an answer of status 200 must not be stored; `kind` is its media type."""


@dataclass(frozen=True, slots=True)
class WholeRequest:
    """A request to such an endpoint.

    `fields` identify it among all requests with its path and query: the fields of its JSON, or of a form the digests of
    its parts. `sampled` requests follow the same rule as chats that are.
    """

    endpoint: WholeEndpoint
    fields: Mapping[str, Any]
    model: str
    sampled: bool


def whole_request(path: str, content_type: str, body: bytes) -> WholeRequest | None:
    """The request with this body; None for one that is passed on and not cached.

    Those are requests for a stream or for images without a seed, and what has another content type than the endpoint's
    own. A model that is not named is "": some upstreams have one by default. `path` is without the query. Hashes the
    files of a form: about a millisecond for each megabyte. Raises InvalidRequest for a body that is not what its
    content type says, and for a form that says a field twice.
    """
    endpoint = _BY_PATH.get(path)
    if endpoint is None:
        return None
    kind = _media_type(content_type)
    if kind == _FORM and endpoint.takes_forms:
        parts = multipart_fields(content_type, body)
        return _request(endpoint, _form_fields(parts), partial(text_of, parts))
    if _is_json(kind):
        fields = decode_object(body)
        return _request(endpoint, fields, fields.get)
    return None


def _request(endpoint: WholeEndpoint, fields: Mapping[str, Any], read: Callable[[str], Any]) -> WholeRequest | None:
    model, seed = read("model"), read("seed")
    model = "" if model is None else model
    if not isinstance(model, str):
        return None
    if read("stream") not in _NOT_STREAMED or read("stream_format") == "sse":
        return None
    has_seed = seed not in _ABSENT
    if endpoint.needs_seed and not has_seed:
        return None
    return WholeRequest(endpoint, fields, model, sampled=not has_seed and _is_warm(read("temperature")))


def _is_warm(temperature: Any) -> bool:
    """Whether tokens are sampled: without a temperature, these endpoints take 0."""
    if temperature in _ABSENT:
        return False
    try:
        return float(temperature) != 0
    except (TypeError, ValueError, OverflowError):
        return True  # for the upstream to judge


def _form_fields(parts: Sequence[Part]) -> dict[str, Any]:
    """The parts of a form in MessagePack's types, with bytes where JSON has none: no JSON body has these fields."""
    return {
        "form": [
            [
                *(_encoded(text) for text in (part.name, part.filename, part.content_type)),
                [[_encoded(name), _encoded(value)] for name, value in part.others],
                part.digest,
            ]
            for part in parts
            if part.name != "stream"  # it says false
        ]
    }


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogateescape")


class ResultsEndpoint(WholeEndpoint):
    """Answers with a list of results: moderations, and reranking and scores as Jina, Cohere, vLLM and TEI have them."""

    def _fault(self, kind: str, body: bytes) -> str | None:
        answer = _json_in(body) if _is_json(kind) else None
        if answer is None:
            return "not JSON"
        if _is_error(answer):
            return "an error"
        lists = [answer] if isinstance(answer, list) else [answer.get("results"), answer.get("data")]
        return None if any(isinstance(results, list) and results for results in lists) else "no results"


class TranscriptEndpoint(WholeEndpoint):
    """Answers a recording with its text: as JSON, as plain text, or as subtitles."""

    takes_forms = True

    def _fault(self, kind: str, body: bytes) -> str | None:
        answer = _json_in(body)
        if _is_error(answer):
            return "an error"
        if _is_json(kind):
            return None if isinstance(answer, dict) and isinstance(answer.get("text"), str) else "no text"
        is_text = kind.startswith("text/") and kind != "text/html"
        return None if is_text or kind == "application/x-subrip" else "no text"


class SpeechEndpoint(WholeEndpoint):
    """Answers a text with a recording of it."""

    def _fault(self, kind: str, body: bytes) -> str | None:
        return None if kind.startswith("audio/") or kind == "application/octet-stream" else "no audio"


class ImagesEndpoint(WholeEndpoint):
    """Answers with images. Links to them are not stored, since they expire."""

    takes_forms = True
    needs_seed = True

    def _fault(self, kind: str, body: bytes) -> str | None:
        answer = _json_in(body) if _is_json(kind) else None
        if answer is None:
            return "not JSON"
        if _is_error(answer):
            return "an error"
        images = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(images, list) or not images or not all(isinstance(image, dict) for image in images):
            return "no images"
        if any(image.get("url") for image in images):
            return "links to images"
        contents = [image.get("b64_json") for image in images]
        return None if all(isinstance(content, str) and content for content in contents) else "no images"


ENDPOINTS: tuple[WholeEndpoint, ...] = (
    ResultsEndpoint("moderations", "/v1/moderations"),
    ResultsEndpoint("rerank", "/v1/rerank", "/v2/rerank", "/rerank"),
    ResultsEndpoint("score", "/v1/score"),
    TranscriptEndpoint("audio.transcriptions", "/v1/audio/transcriptions"),
    TranscriptEndpoint("audio.translations", "/v1/audio/translations"),
    SpeechEndpoint("audio.speech", "/v1/audio/speech"),
    ImagesEndpoint("images", "/v1/images/generations", "/v1/images/edits", "/v1/images/variations"),
)
_BY_PATH = {path: endpoint for endpoint in ENDPOINTS for path in endpoint.paths}


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _is_json(kind: str) -> bool:
    return kind == "application/json" or kind.endswith("+json")


def _json_in(body: bytes) -> dict[str, Any] | list[Any] | None:
    """The object or list that `body` is as JSON; None for any other."""
    if body.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        answer: dict[str, Any] | list[Any] = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return answer


def _is_error(answer: Any) -> bool:
    return isinstance(answer, dict) and answer.get("error") is not None
