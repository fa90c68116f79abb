"""One request for an answer, read and understood."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from multidict import CIMultiDictProxy

from cache.entries.entry import Family
from cache.entries.key import Key, namespace_for, priority_of, request_key
from cache.semantic.messages import MOST_MODEL, MOST_TEXT
from cache.semantic.question import Question, question_of
from gateway.errors import InvalidRequest
from gateway.http.cache_control import Directives, parse_cache_control
from gateway.upstreams.upstream import NAMESPACE_HEADER, REUSE_HEADER

FAMILIES: dict[str, Family] = {"/v1/chat/completions": "chat.completions", "/v1/completions": "completions"}

MOST_RISK_HEADER = "x-keepgate-max-risk"

# Of a chat the next turn is likely to come, which begins with all that was said before; of a completion nothing is.
_REUSES: dict[Family, str] = {"chat.completions": "conversation", "completions": "one-shot"}

_MOST_VALUES = 300_000
_OTHER_CREDENTIALS = ("x-api-key", "api-key")

_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Call:
    """What the pipeline needs to know; `body` is what the upstream gets, byte for byte."""

    family: Family
    path: str
    body: bytes
    headers: CIMultiDictProxy[str]
    key: Key
    model: str
    stream: bool
    include_usage: bool
    sampled: bool
    choices: int
    priority: int
    directives: Directives
    question: Question | None
    most_risk: float
    reuse: str

    @property
    def needs_usage(self) -> bool:
        return self.stream and self.include_usage

    @property
    def form(self) -> str:
        """The shape in which this client wants a complete answer."""
        if not self.stream:
            return "json"
        return "stream+usage" if self.include_usage else "stream"


def credential(headers: CIMultiDictProxy[str], namespace_setting: str) -> str:
    """What sets the caller apart from other tenants; "" where nothing does.

    With `authorization` that is the Authorization header, and those that take its place at some providers.
    """
    if namespace_setting == "shared":
        return ""
    if namespace_setting != "authorization":
        # All of them: the first may be the client's own, before that of a proxy which adds its own to it.
        return "\n".join(headers.getall(namespace_setting.removeprefix("header:"), ()))
    given = [f"{name}: {value}" for name in _OTHER_CREDENTIALS if name in headers for value in headers.getall(name)]
    # A line break, which no header can hold, keeps the two kinds apart.
    return "\n".join((*headers.getall("Authorization", ()), *(f"\n{line}" for line in given)))


def namespace_header(headers: CIMultiDictProxy[str], namespace_setting: str) -> dict[str, str]:
    """What tells an upstream whose request it is, where no credential that it gets does."""
    if not namespace_setting.startswith("header:"):
        return {}
    return {NAMESPACE_HEADER: namespace_for(credential(headers, namespace_setting))}


def read_call(
    path: str, query: str, body: bytes, headers: CIMultiDictProxy[str], namespace_setting: str, semantic: bool
) -> Call:
    """Understand a request body. Raises InvalidRequest, naming the field, where the gateway cannot.

    Only what the gateway itself must know is checked; the rest is the upstream's to judge. The query string is passed
    on as it is, and a request with another one is another request. With `semantic` the call knows its question, where
    its last turn is one.
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
    return Call(
        family=family,
        path=f"{path}?{query}" if query else path,
        body=body,
        headers=headers,
        key=key,
        model=model,
        stream=stream,
        include_usage=_boolean(options or {}, "include_usage", "stream_options.include_usage"),
        sampled=fields.get("seed") is None and fields.get("temperature") != 0,
        choices=_choices(fields),
        priority=priority_of(fields) or 0,
        directives=parse_cache_control(", ".join(headers.getall("Cache-Control", ()))),
        question=question if question and len(question.text) <= MOST_TEXT and len(model) <= MOST_MODEL else None,
        most_risk=_most_risk(headers),
        reuse=_reuse(headers, family),
    )


def decode_object(body: bytes) -> dict[str, Any]:
    """The fields of a request. Raises InvalidRequest for a body that is not one JSON object."""
    if len(body) > _MOST_VALUES and sum(map(body.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        # Decoding holds up everybody, in whatever thread it is done: that is for text, not for millions of brackets.
        raise InvalidRequest(f"The body has more than {_MOST_VALUES} values.", code="too_many_values")
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
        # Which of the two counts is every server's own choice, so the answer to one meaning could be served for the
        # other (RFC 8259, section 4).
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
    """How many choices a whole answer has: `n` of them, for each prompt of a batch. What makes no sense counts as 1."""
    n, prompts = fields.get("n"), fields.get("prompt")
    each = n if isinstance(n, int) and n > 0 else 1
    if isinstance(prompts, list) and all(isinstance(prompt, str | list) for prompt in prompts):
        return each * max(1, len(prompts))
    return each


def _most_risk(headers: CIMultiDictProxy[str]) -> float:
    """The probability of a wrong answer that the client takes at most; 1 where it says nothing."""
    said = headers.get(MOST_RISK_HEADER)
    if said is None:
        return 1.0
    try:
        risk = float(said)
    except ValueError:
        risk = math.nan
    if not 0.0 <= risk <= 1.0:
        raise InvalidRequest(f"'{MOST_RISK_HEADER}' must be a number from 0 to 1, such as 0.001.")
    return risk


def _reuse(headers: CIMultiDictProxy[str], family: Family) -> str:
    """Whether keys and values of the prompt are worth keeping at once (conversation), or once they come again."""
    said = headers.getall(REUSE_HEADER, [_REUSES[family]])
    if len(said) != 1 or said[0] not in _REUSES.values():
        raise InvalidRequest(f"'{REUSE_HEADER}' must be {' or '.join(_REUSES.values())}, and stand there once.")
    return said[0]


def _boolean(fields: Mapping[str, Any], field: str, name: str) -> bool:
    value = fields.get(field)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"'{name}' must be true or false.", param=name)
    return bool(value)
