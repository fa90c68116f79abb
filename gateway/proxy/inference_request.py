"""An inference request (chat completion or completion), parsed and checked.

A new field that the gateway must know is declared in `InferenceRequest` and read in `parse_request`. All other fields
are the upstream's: they are part of the key and pass unchanged in `body`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from multidict import CIMultiDictProxy

from cache.entries.entry import Family
from cache.entries.key import Key, namespace_for, priority_of, request_key
from cache.semantic.messages import MAX_MODEL, MAX_TEXT
from cache.semantic.question import Question, question_of
from gateway.errors import InvalidRequest
from gateway.http.cache_control import CacheControl, parse_cache_control
from gateway.upstreams.upstream import NAMESPACE_HEADER, REUSE_HEADER

FAMILIES: dict[str, Family] = {"/v1/chat/completions": "chat.completions", "/v1/completions": "completions"}

MAX_RISK_HEADER = "x-keepgate-max-risk"

# The next turn of a chat begins with the whole conversation so far; a completion has no next turn.
_REUSES: dict[Family, str] = {"chat.completions": "conversation", "completions": "one-shot"}

_MAX_VALUES = 300_000
_OTHER_CREDENTIALS = ("x-api-key", "api-key")

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """What the pipeline needs to know of a request. `body` is sent to the upstream unchanged."""

    family: Family
    path: str
    body: bytes
    headers: CIMultiDictProxy[str]
    key: Key
    model: str
    stream: bool
    include_usage: bool
    has_stream_options: bool
    sampled: bool
    choices: int
    priority: int
    cache_control: CacheControl
    question: Question | None
    max_risk: float
    reuse: str

    @property
    def needs_usage(self) -> bool:
        return self.stream and self.include_usage

    @property
    def form(self) -> str:
        """The form of a complete answer that this client gets: "json", "stream" or "stream+usage"."""
        if not self.stream:
            return "json"
        return "stream+usage" if self.include_usage else "stream"


def body_with_usage(inference: InferenceRequest) -> bytes:
    """The body of a stream's request that asks for usage. All bytes of the client's stay, unless they have options."""
    if not inference.has_stream_options:
        start = inference.body.index(b"{") + 1
        return b'%s"stream_options":{"include_usage":true},%s' % (inference.body[:start], inference.body[start:])
    fields = _decode(inference.body)
    fields["stream_options"] = {**(fields["stream_options"] or {}), "include_usage": True}
    return _encode(fields)


def credential(headers: CIMultiDictProxy[str], namespace_setting: str) -> str:
    """The text that identifies the caller's tenant; "" if none does.

    With `authorization` that is the Authorization header, and the headers that some providers use in its place.
    """
    if namespace_setting == "shared":
        return ""
    if namespace_setting != "authorization":
        # All values: the first may be the client's own, before one that a proxy added.
        return "\n".join(headers.getall(namespace_setting.removeprefix("header:"), ()))
    given = [f"{name}: {value}" for name in _OTHER_CREDENTIALS if name in headers for value in headers.getall(name)]
    # A line break, which no header can contain, separates the two kinds.
    return "\n".join((*headers.getall("Authorization", ()), *(f"\n{line}" for line in given)))


def namespace_header(headers: CIMultiDictProxy[str], namespace_setting: str) -> dict[str, str]:
    """The header that names the tenant to the upstream, where no credential that it receives does."""
    if not namespace_setting.startswith("header:"):
        return {}
    return {NAMESPACE_HEADER: namespace_for(credential(headers, namespace_setting))}


def parse_request(
    path: str, query: str, body: bytes, headers: CIMultiDictProxy[str], namespace_setting: str, semantic: bool
) -> InferenceRequest:
    """Parse a request body. Raises InvalidRequest, naming the field.

    Only the fields that the gateway uses are checked; the upstream checks the rest. The query string is passed on
    unchanged and is part of the key. With `semantic` the question is extracted, if the last turn is one.
    """
    fields = decode_object(body)
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("'model' must be the name of a model, as listed by GET /v1/models.", param="model")
    stream = _boolean(fields, "stream", "stream")
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise InvalidRequest(
            "'stream_options' must be an object such as {\"include_usage\": true}.", param="stream_options"
        )
    family = FAMILIES[path]
    namespace = namespace_for(credential(headers, namespace_setting))
    scope = f"{family}?{query}" if query else family
    try:
        key = request_key(namespace, scope, fields)
        question = question_of(namespace, scope, fields) if semantic else None
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error
    return InferenceRequest(
        family=family,
        path=f"{path}?{query}" if query else path,
        body=body,
        headers=headers,
        key=key,
        model=model,
        stream=stream,
        include_usage=_boolean(options or {}, "include_usage", "stream_options.include_usage"),
        has_stream_options="stream_options" in fields,
        sampled=fields.get("seed") is None and fields.get("temperature") != 0,
        choices=_choices(fields),
        priority=priority_of(fields) or 0,
        cache_control=parse_cache_control(", ".join(headers.getall("Cache-Control", ()))),
        question=question if question and len(question.text) <= MAX_TEXT and len(model) <= MAX_MODEL else None,
        max_risk=_max_risk(headers),
        reuse=_reuse(headers, family),
    )


def decode_object(body: bytes) -> dict[str, Any]:
    """The fields of a request. Raises InvalidRequest for a body that is not one JSON object."""
    if len(body) > _MAX_VALUES and sum(map(body.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        # Decoding holds the GIL: long text is cheap, millions of values are not.
        raise InvalidRequest(f"The body has more than {_MAX_VALUES} values.", code="too_many_values")
    try:
        text = body.decode()
        fields = _decode(body)
        _check_keys(text)
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not valid UTF-8: {error.reason} at byte {error.start}.") from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    except _RepeatedKey as error:
        # Servers differ in which of the two they use (RFC 8259, section 4): the answer to one reading could be served
        # for the other.
        raise InvalidRequest(
            f"The key {str(error)[:100]!r} is there twice in one object.", code="repeated_key"
        ) from error
    if not isinstance(fields, dict):
        raise InvalidRequest('The body must be a JSON object such as {"model": "...", "messages": [...]}.')
    return fields


class _RepeatedKey(ValueError):
    pass


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len({key for key, _ in pairs}) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKey(next(key for key in keys if keys.count(key) > 1))


_check_keys = json.JSONDecoder(object_pairs_hook=_refuse_repeated_keys).decode


def _choices(fields: Mapping[str, Any]) -> int:
    """The number of choices of a complete answer: `n` for each prompt of a batch. An invalid `n` counts as 1."""
    n, prompts = fields.get("n"), fields.get("prompt")
    each = n if isinstance(n, int) and n > 0 else 1
    if isinstance(prompts, list) and all(isinstance(prompt, str | list) for prompt in prompts):
        return each * max(1, len(prompts))
    return each


def _max_risk(headers: CIMultiDictProxy[str]) -> float:
    """The highest probability of a wrong answer that the client accepts; 1 if the header is absent."""
    given = headers.get(MAX_RISK_HEADER)
    if given is None:
        return 1.0
    try:
        risk = float(given)
    except ValueError:
        risk = math.nan
    if not 0.0 <= risk <= 1.0:
        raise InvalidRequest(f"'{MAX_RISK_HEADER}' must be a number from 0 to 1, such as 0.001.")
    return risk


def _reuse(headers: CIMultiDictProxy[str], family: Family) -> str:
    """Whether the prompt's KV blocks are stored at once (conversation) or when they are used again (one-shot)."""
    given = headers.getall(REUSE_HEADER, [_REUSES[family]])
    if len(given) != 1 or given[0] not in _REUSES.values():
        raise InvalidRequest(f"'{REUSE_HEADER}' must be {' or '.join(_REUSES.values())}, and stand there once.")
    return given[0]


def _boolean(fields: Mapping[str, Any], field: str, name: str) -> bool:
    value = fields.get(field)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"'{name}' must be true or false.", param=name)
    return bool(value)
