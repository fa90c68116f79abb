"""An inference request, in any form that clients speak, parsed and checked.

A new field that the gateway must know is declared in `InferenceRequest` and read in `parse_request`. All other fields
are the upstream's: they are part of the key and pass unchanged in `body`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from multidict import CIMultiDictProxy

from cache.entries.entry import Family
from cache.entries.key import Key, canonical_body, canonical_key, priority_of
from cache.index.fingerprint import encode_fingerprint, fingerprint
from cache.semantic.messages import MAX_MODEL, MAX_TEXT
from cache.semantic.question import Question, question_of
from gateway.errors import InvalidRequest
from gateway.http.cache_control import CacheControl, parse_cache_control, tags_of
from gateway.http.fetched_urls import check_urls
from gateway.http.json_object import decode_object
from gateway.proxy.deadlines import timeout_of
from gateway.proxy.model_names import resolved
from gateway.routing.models import ModelTable
from gateway.routing.router import Router
from gateway.settings.settings import Settings
from gateway.surfaces.breakpoints import CACHE_CONTROL, without_breakpoints
from gateway.surfaces.ollama.models import known_as
from gateway.surfaces.openai import CHAT, COMPLETIONS
from gateway.surfaces.registry import BY_PATH
from gateway.surfaces.responses.requests import continued
from gateway.surfaces.surface import (
    AnswerForm,
    ChatRequest,
    Json,
    StreamedForm,
    Surface,
    TranslatedForm,
    without_empty_tools,
)
from gateway.surfaces.whole import WholeRequest
from gateway.tenants.caller import Caller
from gateway.tenants.credentials import OTHER_HEADERS, answer_headers, bearer
from gateway.tenants.policies import priority_for
from gateway.upstreams.identity import with_own_model
from gateway.upstreams.upstream import PRIORITY_HEADER, REUSE_HEADER, Attempt

MAX_RISK_HEADER = "x-keepgate-max-risk"
THRESHOLD_HEADER = "x-keepgate-threshold"
USAGE_OF_STREAMS = "stream_options"
"""What an upstream lacks that refuses to be asked for the usage of a stream."""

# Lower numbers come first, as with vLLM; what says nothing has 0.
_BATCH_PRIORITY = 100
# The next turn of a chat begins with the whole conversation so far; a completion has no next turn.
_REUSES: dict[Family, str] = {CHAT.family: "conversation", COMPLETIONS.family: "one-shot"}
_TARGETS = {path: form.family for form in (CHAT, COMPLETIONS) for path in form.paths}

_decode = msgspec.json.Decoder().decode
_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """What the pipeline needs to know of a request. `asked` is the same in the form of chat completions.

    `path` (with the query) and `body` are the client's own: an upstream with this form of API gets them unchanged.
    `headers` are the client's without a virtual key.
    """

    caller: Caller
    surface: AnswerForm
    asked: ChatRequest
    path: str
    body: bytes
    headers: CIMultiDictProxy[str]
    key: Key
    model: str
    sampled: bool
    choices: int
    priority: int
    cache_control: CacheControl
    question: Question | None
    max_risk: float
    reuse: str
    timeout: float | None = None
    """Seconds that the client gives for the whole answer, if it says so."""
    named: str = ""
    """The model that the client named, which stands for `model`."""
    fallbacks: tuple[str, ...] = ()
    """Models that answer when no upstream of `model` does, in this order."""
    conversation: Sequence[Json] = ()
    """What a client of the Responses API refers to by `previous_response_id`, if it is kept here."""
    fingerprint: bytes = b""
    """What an entry remembers of the request, encoded."""
    tags: tuple[str, ...] = ()
    """What the client calls the answer."""
    threshold: float = 0.0
    """The similarity from which on any answer may be served, whatever its risk; 0 leaves it to the policy."""

    @property
    def family(self) -> Family:
        return self.surface.family

    @property
    def stream(self) -> bool:
        return self.asked.stream

    @property
    def include_usage(self) -> bool:
        return self.asked.include_usage

    @property
    def needs_usage(self) -> bool:
        return self.stream and self.include_usage

    @property
    def form(self) -> str:
        """The form of a complete answer that this client gets. Equal forms of one entry are equal bytes."""
        if not self.stream:
            form = "json"
        elif self.surface in (CHAT, COMPLETIONS):
            form = "stream+usage" if self.include_usage else "stream"
        else:
            form = "stream"
        return f"{self.family} {form}{self.asked.echo_digest}"

    def for_model(self, model: str) -> "InferenceRequest":
        """The same request for another model."""
        asked = replace(self.asked, fields={**self.asked.fields, "model": model})
        return replace(self, model=model, asked=asked, body=with_own_model(self.body, {self.model: model}))

    def attempts(self, ask_usage: bool) -> list[Attempt]:
        """The forms in which the upstream may be asked, in the order of preference."""
        if not isinstance(self.surface, TranslatedForm):
            plain = Attempt(self.path, self.body, self.family)
            if not self.stream or self.include_usage or not ask_usage:
                return [*self._with_priority(plain), plain]
            return [_asking_for_usage(Attempt(self.path, _body_with_usage(self), self.family)), plain]
        attempts: list[Attempt] = []
        if self.asked.native and isinstance(self.surface, Surface):
            path = self.path.partition("?")[0]
            attempts.append(Attempt(self.path, self.body, self.family, needs=path, lacking=no_such_path))
        if self.asked.untranslatable is None:
            attempts += self._translated(ask_usage)
        return attempts

    def _with_priority(self, plain: Attempt) -> list[Attempt]:
        """The same with a low priority, for upstreams that have priorities, if the request may wait for others."""
        if not isinstance(self.surface, StreamedForm) or plain.body is None:  # the body may be no JSON object
            return []
        if self.headers.get(PRIORITY_HEADER) != "batch" or "priority" in self.asked.fields:
            return []
        body = with_field(plain.body, b'"priority":%d' % self.priority)
        return [replace(plain, body=body, needs="priority", lacking=lambda _, error: b"priority" in error)]

    def _translated(self, ask_usage: bool) -> list[Attempt]:
        fields = self.asked.chat_fields
        target, own = _TARGETS[self.asked.path], bearer(self.headers)

        def attempt(sent: Json, *marks: str) -> Attempt:
            body = _encode(sent)
            return Attempt(self.asked.path, body, target, own=own, dropped=OTHER_HEADERS, marks=marks)

        def attempts(sent: Json) -> list[Attempt]:
            """With the client's breakpoints for prompt caching, and without for upstreams that refuse them."""
            marked = attempt(sent, CACHE_CONTROL)
            if marked.body is None or b'"cache_control"' not in marked.body:
                return [replace(marked, marks=())]
            return [marked, attempt(without_breakpoints(sent))]

        if not self.stream:
            plain = attempts(fields)
            return [*self._with_priority(plain[0]), *plain]
        fields["stream"] = True
        plain = attempts(fields)
        if not ask_usage:
            return plain
        asking = attempts({**fields, "stream_options": {"include_usage": True}})
        return [*map(_asking_for_usage, asking), *plain]


def no_such_path(status: int, error: bytes) -> bool:
    """Whether an upstream's answer says that it does not have the endpoint, or a model of it."""
    return status in (404, 405, 501)


def _asking_for_usage(attempt: Attempt) -> Attempt:
    return replace(attempt, needs=USAGE_OF_STREAMS, lacking=lambda _, error: b"stream_options" in error)


def with_field(body: bytes, field: bytes) -> bytes:
    """The object `body`, which is not empty, with one more field before the others. All its bytes stay."""
    start = body.index(b"{") + 1
    return b"%s%s,%s" % (body[:start], field, body[start:])


def _body_with_usage(inference: InferenceRequest) -> bytes:
    """The body of a stream's request that asks for usage. All bytes of the client's stay, unless they have options."""
    if "stream_options" not in inference.asked.fields:
        return with_field(inference.body, b'"stream_options":{"include_usage":true}')
    fields = _decode(inference.body)
    fields["stream_options"] = {**(fields["stream_options"] or {}), "include_usage": True}
    return _encode(fields)


def parse_request(
    path: str,
    query: str,
    body: bytes,
    headers: CIMultiDictProxy[str],
    caller: Caller,
    settings: Settings,
    router: Router,
    models: ModelTable,
    conversation: Sequence[Json] | None = None,
) -> InferenceRequest:
    """Parse a request body. Raises InvalidRequest, naming the field, and ModelNotAllowed.

    Only the fields that the gateway uses are checked; the upstream checks the rest. The query string is passed on
    unchanged and is part of the key. `conversation` is what the request continues by an id that no upstream knows.
    """
    fields = decode_object(body)
    check_urls(fields, settings.security.urls)
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("'model' must be the name of a model, as listed by GET /v1/models.", param="model")
    surface = BY_PATH[path]
    if path.startswith("/api/"):
        fields["model"] = model = known_as(model, router.models)
    if conversation is not None:
        fields = continued(fields, conversation)
    try:
        if isinstance(surface, TranslatedForm):
            asked = surface.chat_request(path, fields)
            if asked.takes_variant and model in settings.variants:
                model = settings.variants[model]
                asked = replace(asked, fields={**asked.fields, "model": model})
            fields = asked.fields
        else:
            if fields.get("tools") == [] and surface is CHAT:
                fields = without_empty_tools(fields)
                body = _encode({name: value for name, value in _fields_of(body).items() if name in fields})
            asked = _chat_request(path, fields)
        named = model
        chosen = resolved(models, model, fields, headers, caller)
        if chosen.model != model:
            body = with_own_model(body, {model: chosen.model})
            model = chosen.model
            asked = replace(asked, fields={**fields, "model": model})
            fields = asked.fields
        target = _TARGETS[asked.path]
        scope = f"{target}?{query}" if query else target
        is_translated = isinstance(surface, TranslatedForm) and not (
            isinstance(surface, Surface) and router.may_have(path)
        )
        scope += answer_headers(headers, settings.cache.key_headers, is_translated)
        if not is_translated and asked.echo.get("store") is False:
            scope += "\nstore: false"  # an upstream does not keep this answer: the id in it leads nowhere
        canonical = canonical_body(fields)
        key = canonical_key(caller.namespace, scope, canonical)
        known = encode_fingerprint(fingerprint(canonical))
        asks_semantic = settings.semantic.mode != "off" and asked.is_cached and asked.is_optimized
        question = question_of(caller.namespace, scope, canonical) if asks_semantic else None
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error
    may_wait = headers.get(PRIORITY_HEADER) == "batch"
    asked_priority = _BATCH_PRIORITY if may_wait and priority_of(fields) is None else priority_of(fields) or 0
    return InferenceRequest(
        caller=caller,
        surface=surface,
        asked=asked,
        path=f"{path}?{query}" if query else path,
        body=body,
        headers=caller.forwarded(headers),
        key=key,
        model=model,
        sampled=fields.get("seed") is None and fields.get("temperature") != 0,
        choices=_choices(fields),
        priority=priority_for(caller, asked_priority),
        cache_control=_cache_control(headers, asked),
        question=question if question and len(question.text) <= MAX_TEXT and len(model) <= MAX_MODEL else None,
        max_risk=_max_risk(headers),
        threshold=_threshold(headers, settings.semantic.request_threshold),
        reuse=_reuse(headers, target),
        timeout=timeout_of(headers),
        named=named,
        fallbacks=chosen.fallbacks,
        conversation=conversation or (),
        fingerprint=known,
        tags=tags_of(headers),
    )


def _cache_control(headers: CIMultiDictProxy[str], asked: ChatRequest) -> CacheControl:
    given = parse_cache_control(", ".join(headers.getall("Cache-Control", ())))
    return given if asked.is_cached else replace(given, no_store=True)


def parse_whole(
    asked: WholeRequest,
    path: str,
    query: str,
    body: bytes,
    headers: CIMultiDictProxy[str],
    caller: Caller,
    settings: Settings,
    models: ModelTable,
) -> InferenceRequest:
    """A request that is answered whole, for the pipeline. Raises InvalidRequest and ModelNotAllowed."""
    check_urls(asked.fields, settings.security.urls)
    named = asked.model
    model = resolved(models, named, asked.fields, headers, caller).model
    if model != asked.model and "model" in asked.fields:
        body = with_own_model(body, {asked.model: model})
        asked = replace(asked, model=model, fields={**asked.fields, "model": model})
    scope = f"{asked.endpoint.family} {path}?{query}" + answer_headers(headers, settings.cache.key_headers)
    try:
        canonical = canonical_body(asked.fields)
        key = canonical_key(caller.namespace, scope, canonical)
        known = encode_fingerprint(fingerprint(canonical))
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error
    return InferenceRequest(
        caller=caller,
        surface=asked.endpoint,
        asked=ChatRequest(dict(asked.fields)),
        path=f"{path}?{query}" if query else path,
        body=body,
        headers=caller.forwarded(headers),
        key=key,
        model=asked.model,
        sampled=asked.sampled,
        choices=1,
        priority=priority_for(caller, 0),
        cache_control=parse_cache_control(", ".join(headers.getall("Cache-Control", ()))),
        question=None,
        max_risk=1.0,
        reuse=_reuse(headers, COMPLETIONS.family),
        named=named,
        timeout=timeout_of(headers),
        fingerprint=known,
        tags=tags_of(headers),
    )


def _chat_request(path: str, fields: dict[str, Any]) -> ChatRequest:
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise InvalidRequest(
            "'stream_options' must be an object such as {\"include_usage\": true}.", param="stream_options"
        )
    return ChatRequest(
        fields,
        _boolean(fields, "stream", "stream"),
        _boolean(options or {}, "include_usage", "stream_options.include_usage"),
        path,
    )


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


def _threshold(headers: CIMultiDictProxy[str], lowest: float | None) -> float:
    """The similarity that the client asks for, 0 if it asks for none. `lowest` is what the operator allows."""
    given = headers.get(THRESHOLD_HEADER)
    if given is None:
        return 0.0
    if lowest is None:
        raise InvalidRequest(
            f"'{THRESHOLD_HEADER}' is not allowed here: the operator has not set semantic.request_threshold, the lowest"
            " similarity that requests may ask for."
        )
    try:
        threshold = float(given)
    except ValueError:
        threshold = math.nan
    if not lowest <= threshold <= 1.0:
        raise InvalidRequest(f"'{THRESHOLD_HEADER}' must be a similarity from {lowest:g} to 1.")
    return threshold


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
