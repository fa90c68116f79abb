"""The operator's API to the upstreams' prefix stores: each request goes to all of them.

A store of its own URL (`prefix_url`), as each worker of vLLM's connector has it, is asked with the tokens of a prompt,
which its upstream tells, and with the salt of the tenant.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.api.access import carries_admin_key, require_operator
from gateway.api.app_keys import ROUTER, SETTINGS
from gateway.api.identification import caller_of
from gateway.errors import (
    GatewayError,
    InvalidRequest,
    NoPrefixStore,
    UpstreamDisconnected,
    UpstreamError,
    UpstreamRefused,
    UpstreamTimeout,
)
from gateway.http.body import read_body
from gateway.http.json_object import decode_object
from gateway.http.sse import event_json
from gateway.routing.prefixes.asking import TOKENIZE_PATH, are_tokens, prompt_body
from gateway.telemetry.audit import audit
from gateway.upstreams.upstream import Upstream

_encode = msgspec.json.Encoder().encode
_REPORT_DEADLINE = 5.0
# A prompt may have to be made into tokens, and a disk's files be removed.
_OPERATION_DEADLINE = 60.0
_MAX_BYTES = 8 * 2**20
_LARGE_BODY = 2**18
_JSON = {"Content-Type": "application/json"}

# The reply of one upstream: the JSON text of an object, or the error.
Reply = bytes | GatewayError


async def describe(request: web.Request) -> web.Response:
    """GET /v1/cache/prefix: the state of each upstream's store, or its error."""
    require_operator(request)
    _refuse_parameters(request)
    return _gathered(await _ask_all(request, request.app[ROUTER].upstreams, "GET", "/v1/prefix", None))


async def operate(request: web.Request) -> web.Response:
    """POST /v1/cache/prefix/lookup, pin and unpin: of a prompt, at every upstream that has its model."""
    require_operator(request)
    _refuse_parameters(request)
    settings = request.app[SETTINGS]
    body = await read_body(request, settings.max_body, settings.timeouts.client)
    fields = await asyncio.to_thread(decode_object, body) if len(body) > _LARGE_BODY else decode_object(body)
    upstreams = request.app[ROUTER].having(_model(fields.get("model")))
    operation = request.match_info["operation"]
    done = _done(await _ask_all(request, upstreams, "POST", f"/v1/prefix/{operation}", body))
    if operation != "lookup":
        audit(request, f"prefix.{operation}", str(fields.get("model") or ""))
    return done


async def clear(request: web.Request) -> web.Response:
    """DELETE /v1/cache/prefix: the stores of all upstreams, or with `?model=` of those that have it."""
    require_operator(request)
    _refuse_parameters(request, "model")
    upstreams = request.app[ROUTER].having(_model(request.query.get("model")))
    done = _done(await _ask_all(request, upstreams, "DELETE", "/v1/prefix", None))
    audit(request, "prefix.clear", request.query.get("model", ""))
    return done


def _refuse_parameters(request: web.Request, known: str = "") -> None:
    """Raises InvalidRequest for a parameter that would have no effect."""
    for name in request.query:
        if name != known:
            hint = f"; use {known}, or none" if known else ""
            raise InvalidRequest(f"'{name}' is no parameter of this{hint}.", param=name)
    if len(request.query) > 1:
        raise InvalidRequest(f"'{known}' is there twice.", param=known)


def _model(name: Any) -> str | None:
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidRequest(
            "'model' must be the name of a model, as listed by GET /v1/models, or be left out for all upstreams.",
            param="model",
        )
    return name


async def _ask_all(
    request: web.Request, upstreams: Sequence[Upstream], method: str, path: str, body: bytes | None
) -> dict[str, Reply]:
    """The reply of each upstream, by URL; where one has several stores, of each store by its own.

    The operator acts as the tenant whose credentials the request carries.
    """
    settings = request.app[SETTINGS]
    headers = CIMultiDict(
        (name, value)
        for name, value in request.headers.items()
        if name.lower() != "authorization" or not carries_admin_key(value, settings)
    )
    caller = caller_of(request)
    own = {} if caller is None else caller.own
    sent = headers if caller is None else caller.forwarded(CIMultiDictProxy(headers))
    namespace = "" if caller is None or caller.is_operator else caller.namespace
    question = _Question(method, path, sent, body, own, namespace)
    given = await asyncio.gather(*(_ask(upstream, question) for upstream in upstreams))
    return {url: reply for replies in given for url, reply in replies.items()}


class _Question(NamedTuple):
    """A request to prefix stores; `headers` are the client's, `own` the gateway's."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | None
    own: Mapping[str, str]
    namespace: str


async def _ask(upstream: Upstream, question: _Question) -> dict[str, Reply]:
    deadline = _REPORT_DEADLINE if question.method == "GET" else _OPERATION_DEADLINE
    until = asyncio.get_running_loop().time() + deadline

    async def in_time(reply: Awaitable[bytes]) -> Reply:
        try:
            async with asyncio.timeout_at(until):
                return await reply
        except GatewayError as error:
            return error
        except TimeoutError:
            return UpstreamTimeout(f"{upstream.title} did not answer in {deadline:g} s.")

    stores = upstream.prefix_stores
    if not stores:
        return {upstream.url: await in_time(_answer(upstream, question))}
    asked = question._replace(headers=_JSON, own={})
    if question.body is not None:
        tokens = await in_time(_in_tokens(upstream, question, event_json(question.body)))
        if isinstance(tokens, GatewayError):
            return {upstream.url: tokens}
        asked = asked._replace(body=tokens)
    given = await asyncio.gather(*(in_time(_answer(store, asked)) for store in stores))
    urls = [store.url for store in stores] if len(stores) > 1 else [upstream.url]
    return dict(zip(urls, given, strict=True))


async def _answer(at: Upstream, question: _Question) -> bytes:
    """What an engine, or a store of its own URL, replies. Raises GatewayError."""
    with await at.request(question.method, question.path, question.headers, question.body, question.own) as answer:
        return _read(at, answer.status, await answer.body(_MAX_BYTES))


async def _in_tokens(upstream: Upstream, question: _Question, fields: Mapping[str, Any]) -> bytes:
    """What a store of its own URL is asked about a prompt. Raises GatewayError."""
    tokens = fields.get("prompt")
    if not are_tokens(tokens):
        body = prompt_body(fields)
        headers = CIMultiDict(question.headers)
        headers.update(_JSON)
        with await upstream.request("POST", TOKENIZE_PATH, headers, body, question.own) as answer:
            told = _object(await answer.body(_MAX_BYTES))
        if answer.status != 200 and (refusal := _refusal(told)):
            raise _refused(answer.status, refusal)
        tokens = told.get("tokens") if told and answer.status == 200 else None
    if not are_tokens(tokens):
        raise UpstreamDisconnected(f"{upstream.title} does not tell the tokens of the prompt ({TOKENIZE_PATH}).")
    salt = upstream.salt(question.namespace, fields.get("cache_salt"))
    return _encode({"tokens": tokens} if salt is None else {"tokens": tokens, "cache_salt": salt})


def _read(upstream: Upstream, status: int, body: bytes) -> bytes:
    """The body of an answer that is one. Raises GatewayError for any other."""
    given = _object(body)
    if status == 200 and given is not None:
        return body
    refusal = _refusal(given)
    if status in (404, 405, 501) and refusal.get("param") != "model":
        raise NoPrefixStore(f"{upstream.title} has no prefix store.")
    if status == 200 or not refusal:
        raise UpstreamDisconnected(f"{upstream.title} answered with status {status} and no reply of a prefix store.")
    raise _refused(status, refusal)


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        return event_json(body)
    except ValueError:
        return None


def _refusal(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The error that an upstream tells; {} for none."""
    error = given.get("error") if given else None
    return error if isinstance(error, dict) and isinstance(error.get("message"), str) else {}


def _refused(status: int, refusal: Mapping[str, Any]) -> GatewayError:
    """An upstream's error, passed on with its message."""
    param, code = (text if isinstance(text := refusal.get(name), str) else None for name in ("param", "code"))
    kind = InvalidRequest.kind if 400 <= status < 500 else UpstreamError.kind
    return UpstreamRefused(status, refusal["message"], kind, param, code)


def _done(given: Mapping[str, Reply]) -> web.Response:
    """The replies of those that succeeded and failed. Raises GatewayError if all failed."""
    errors = [error for error in given.values() if isinstance(error, GatewayError)]
    if len(errors) < len(given):
        return _gathered(given)
    if all(isinstance(error, NoPrefixStore) for error in errors):
        raise NoPrefixStore("No upstream has a prefix store.")
    if len({error.body() for error in errors}) == 1:
        raise errors[0]
    raise UpstreamError(" ".join(f"{url}: {error}" for url, error in zip(given, errors, strict=True)))


def _gathered(given: Mapping[str, Reply]) -> web.Response:
    upstreams = {url: msgspec.Raw(one if isinstance(one, bytes) else one.body()) for url, one in given.items()}
    return web.Response(body=_encode({"upstreams": upstreams}), content_type="application/json")
