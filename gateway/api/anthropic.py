"""Anthropic's API beside its Messages: the tokens of a request, and models in its form."""

from collections.abc import Sequence

import msgspec
from aiohttp import web

from gateway.api.app_keys import ADMISSIONS, ROUTER, ROUTING, SETTINGS
from gateway.errors import InvalidRequest, NotFound, UpstreamDisconnected, refusal
from gateway.http.body import read_body
from gateway.http.fetched_urls import check_urls
from gateway.http.json_object import decode_object
from gateway.proxy.inference_request import no_such_path
from gateway.proxy.model_names import resolved
from gateway.routing.call import RouteCall
from gateway.surfaces.messages.requests import chat_request
from gateway.surfaces.surface import Json
from gateway.surfaces.timestamps import rfc3339
from gateway.tenants.caller import CALLER
from gateway.tenants.credentials import OTHER_HEADERS, bearer
from gateway.upstreams.identity import with_own_model
from gateway.upstreams.upstream import Attempt

_encode = msgspec.json.Encoder().encode
_MAX_BYTES = 2**26
_OF_A_PROMPT = ("model", "messages", "tools")


class _Count(msgspec.Struct):
    """The answer to POST /tokenize, as vLLM and the in-repo engine have it."""

    count: int


def model_info(model: Json) -> Json:
    """One model as Anthropic shows it."""
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": rfc3339(model.get("created")),
    }


def models_page(models: Sequence[Json]) -> Json:
    """Models as Anthropic lists them, all on one page."""
    data = [model_info(model) for model in models]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"data": data, "has_more": False, **ends}


async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens, from an upstream that has it, else from its tokenizer (POST /tokenize)."""
    settings = request.app[SETTINGS]
    body = await read_body(request, settings.max_body, settings.timeouts.client)
    fields = decode_object(body)
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("'model' must be the name of a model, as listed by GET /v1/models.", param="model")
    check_urls(fields, settings.security.urls)
    named, caller = model, request[CALLER]
    model = resolved(request.app[ROUTING].models, named, fields, request.headers, caller).model
    if model != named:
        body, fields = with_own_model(body, {named: model}), {**fields, "model": model}
    chat = chat_request({"max_tokens": 1, **fields}).fields
    prompt = _encode({name: chat[name] for name in _OF_A_PROMPT if name in chat})
    native = Attempt(request.rel_url.raw_path_qs, body, needs=request.path, lacking=no_such_path)
    tokenizer = Attempt(
        "/tokenize",
        prompt,
        needs="/tokenize",
        lacking=no_such_path,
        own=bearer(request.headers),
        dropped=OTHER_HEADERS,
    )
    absent = NotFound(f"The upstream of {model!r} does not count tokens: it has no {request.path} and no /tokenize.")
    call = RouteCall(
        method="POST",
        headers=caller.forwarded(request.headers),
        attempts=[native, tokenizer],
        model=model,
        otherwise=absent,
        own=caller.own,
        namespace=caller.namespace,
    )
    async with request.app[ADMISSIONS].other(caller, body) as admission:
        admission.settle(0, 0)
        with await request.app[ROUTER].request(call) as reply:
            said = await reply.body(_MAX_BYTES)
    if reply.attempt is native:
        return web.Response(status=reply.status, body=said, headers=reply.headers)
    if reply.status != 200:
        raise refusal(reply.status, said)
    try:
        count = msgspec.json.decode(said, type=_Count).count
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UpstreamDisconnected("The upstream's tokenizer answers in a form that is not vLLM's.") from error
    return web.Response(body=_encode({"input_tokens": count}), content_type="application/json")
