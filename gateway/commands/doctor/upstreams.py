"""Upstreams: reachable, trusted, the credential accepted, the models that the settings name among those listed."""

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from yarl import URL

from gateway.commands.doctor import clock
from gateway.commands.doctor.configuration import expiry
from gateway.commands.doctor.finding import Finding, ok, problem, warning
from gateway.errors import UpstreamError
from gateway.http.tls import upstream_context
from gateway.routing.models import ModelTable, upstream_name
from gateway.settings.fields import SettingsError
from gateway.settings.settings import Settings
from gateway.settings.upstreams import UpstreamSettings
from gateway.upstreams.connection import ConnectionPool, open_connections
from gateway.upstreams.mock import MODEL as MOCK_MODEL
from gateway.upstreams.mock import load_script
from gateway.upstreams.upstream import Upstream, UpstreamResponse

_SECONDS = 10.0
_PAID_SECONDS = 60.0
DEADLINE = _SECONDS + _PAID_SECONDS + 5.0
"""Seconds for all upstreams, which are asked at the same time."""
_MAX_BODY = 8 * 2**20
_MAX_SHOWN = 120
_SHOWN_MODELS = 3
_NO_LIST = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
_PROXIES = {"http_proxy", "https_proxy", "all_proxy"}
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


@dataclass(slots=True)
class _Looked:
    """What one upstream has shown. `models` are its own names, None where it does not list them."""

    server: UpstreamSettings
    findings: list[Finding] = field(default_factory=list)
    models: frozenset[str] | None = None

    @property
    def name(self) -> str:
        return upstream_name(self.server) if not self.server.url.startswith("mock:") else self.server.url

    @property
    def served(self) -> frozenset[str]:
        """The names under which clients can ask for its models."""
        return (self.models or frozenset()) | self.server.models.keys()


async def check_upstreams(settings: Settings, paid_requests: bool) -> list[Finding]:
    """Asks all upstreams for their models at the same time; with `paid_requests` also for one token of an answer."""
    if not settings.servers:
        return []
    limit = min(_SECONDS, settings.timeouts.connect)
    async with open_connections(limit) as connections, asyncio.TaskGroup() as tasks:
        looking = [
            tasks.create_task(_look(settings, server, connections, paid_requests)) for server in settings.servers
        ]
    looked = [task.result() for task in looking]
    found = [finding for each in looked for finding in each.findings]
    return [*found, *_names(settings, looked)]


async def _look(
    settings: Settings, server: UpstreamSettings, connections: ConnectionPool, paid_requests: bool
) -> _Looked:
    looked = _Looked(server)
    if server.url.startswith("mock:"):
        looked.findings.append(_script(looked))
        looked.models = frozenset({MOCK_MODEL})
        return looked
    timeouts = replace(settings.timeouts, first_byte=min(_SECONDS, settings.timeouts.first_byte), idle=_SECONDS)
    try:
        upstream = Upstream(server.url, connections, timeouts, settings=server)
    except SettingsError as error:
        looked.findings.append(problem("upstream", str(error), "correct the setting that is named"))
        return looked
    try:
        async with asyncio.timeout(_SECONDS):
            await _list_models(looked, upstream)
    except TimeoutError:
        looked.findings.append(_silent(looked.name))
        return looked
    except UpstreamError as error:
        looked.findings.append(_unreachable(error))
        return looked
    if server.health_path is not None:
        looked.findings.append(await _health(looked.name, upstream, server.health_path))
    if URL(server.url).scheme == "https" and server.verify_tls:
        looked.findings += await _certificate(looked.name, server)
    if paid_requests:
        looked.findings.append(await _paid_request(settings, looked, connections))
    return looked


def _script(looked: _Looked) -> Finding:
    file = looked.server.url.removeprefix("mock:")
    try:
        replies = load_script(Path(file)) if file else ()
    except SettingsError as error:
        return problem("upstream", str(error), "correct the script: gateway/upstreams/mock.py shows what it may hold")
    said = (
        f"a script with {len(replies)} {'reply' if len(replies) == 1 else 'replies'} in {file}"
        if file
        else "it repeats the last message"
    )
    return ok("upstream", f"a scripted upstream: {said}")


def _silent(name: str) -> Finding:
    return problem(
        "upstream",
        f"{name}: no answer to GET /v1/models in {_SECONDS:g} s",
        "see whether it is overloaded, still loading its model, or behind a firewall that drops packets",
    )


def _unreachable(error: UpstreamError) -> Finding:
    text = error.message
    if "certificate" in text:
        advice = "name the authority of its certificate in ca_file; check the host name, and the clock of this machine"
    elif "refused" in text or "connect call failed" in text:
        advice = "start it, or correct the host and port of its url"
    elif "name" in text or "resolve" in text or "address" in text:
        advice = "correct the host of its url, or the DNS of this machine"
    else:
        advice = "try its url with curl from this machine; look at firewalls, and whether it speaks http or https"
    if proxies := sorted(name for name in os.environ if name.lower() in _PROXIES and os.environ[name]):
        advice += f"; {' and '.join(proxies)} of the environment is not used: the gateway asks its upstreams directly"
    return problem("upstream", text, advice)


async def _list_models(looked: _Looked, upstream: Upstream) -> None:
    """Raises UpstreamError."""
    began, started = clock.now(), time.perf_counter()
    with await upstream.request("GET", "/v1/models", {}, None) as answer:
        ended, seconds = clock.now(), time.perf_counter() - started
        body = await answer.body(_MAX_BODY)
    looked.models = _listed(body) if answer.status == HTTPStatus.OK else None
    looked.findings.append(_of_answer(looked, answer, body, seconds))
    skew = clock.of_answer(looked.name, answer.date, answer.headers.get("Age", ""), began, ended)
    if skew is not None:
        looked.findings.append(skew)


def _of_answer(looked: _Looked, answer: UpstreamResponse, body: bytes, seconds: float) -> Finding:
    name, status = looked.name, answer.status
    has_key = looked.server.api_key is not None
    if looked.models is not None:
        credential = ", accepts the credential" if has_key else ""
        if not looked.models:
            return warning(
                "upstream",
                f"{name}: lists no model ({seconds * 1000:.0f} ms)",
                "load a model there; an Ollama needs `ollama pull MODEL` first",
            )
        return ok("upstream", f"{name}: answers in {seconds * 1000:.0f} ms{credential}, lists {_some(looked.models)}")
    if status in _REFUSED:
        if has_key:
            return problem(
                "upstream",
                f"{name}: refuses the credential of api_key (status {status}{_said(body)})",
                f"renew what {looked.server.api_key} holds, and see api_key_header: it is sent in"
                f" {looked.server.api_key_header}",
            )
        return warning(
            "upstream",
            f"{name}: asks for a credential (status {status}): clients send their own, and its models are not known",
            "set api_key to env:NAME or file:PATH where the gateway is to use a credential of its own",
        )
    if status in _NO_LIST:
        return warning(
            "upstream",
            f"{name}: has no list of models at {upstream_path(looked.server)} (status {status})",
            "check the path of its url; if it has no list, models it answers are to be named in its `models`",
        )
    if status == HTTPStatus.OK:
        page = " with a web page" if answer.content_type == "text/html" else ""
        return problem(
            "upstream",
            f"{name}: answers{page}, but not with a list of models",
            "check the url: expected the base URL of an OpenAI-compatible API, such as http://host:8000/v1",
        )
    return problem(
        "upstream", f"{name}: answers GET /v1/models with status {status}{_said(body)}", "look at its own log"
    )


def upstream_path(server: UpstreamSettings) -> str:
    """Where an upstream's models are listed."""
    path = URL(server.url).path
    return f"{'/v1' if path in ('', '/') else path.rstrip('/')}/models"


async def _health(name: str, upstream: Upstream, path: str) -> Finding:
    try:
        async with asyncio.timeout(_SECONDS):
            with await upstream.request("GET", path, {}, None) as answer:
                status = answer.status
    except (UpstreamError, TimeoutError) as error:
        return problem("upstream", f"{name}: {path} gives no answer: {error}", "correct its health_path")
    if HTTPStatus(200) <= status < HTTPStatus(300):
        return ok("upstream", f"{name}: {path} answers with status {status}")
    return problem(
        "upstream",
        f"{name}: {path} answers with status {status}, so it counts as unhealthy",
        "correct its health_path, or leave it out",
    )


async def _certificate(name: str, server: UpstreamSettings) -> list[Finding]:
    """Until when its certificate is valid; nothing where that cannot be learned."""
    url = URL(server.url)
    context = upstream_context(server) or ssl.create_default_context()
    writer: asyncio.StreamWriter | None = None
    with contextlib.suppress(OSError, TimeoutError):
        try:
            async with asyncio.timeout(_SECONDS):
                _, writer = await asyncio.open_connection(url.host, url.port, ssl=context, server_hostname=url.host)
            certificate = writer.get_extra_info("peercert")
            if certificate:
                return list(expiry("upstream", f"{name}: its certificate", certificate))
        finally:
            if writer is not None:
                writer.close()
    return []


async def _paid_request(settings: Settings, looked: _Looked, connections: ConnectionPool) -> Finding:
    """Ask for one token, under the name that clients use."""
    name = looked.name
    model = _model_to_ask(settings, looked)
    if model is None:
        return warning(
            "upstream",
            f"{name}: no token was asked for: it lists no model, and none is named",
            "name a model in routing.aliases, or in its `models`",
        )
    timeouts = replace(settings.timeouts, first_byte=_PAID_SECONDS, idle=_PAID_SECONDS)
    upstream = Upstream(looked.server.url, connections, timeouts, settings=looked.server)
    messages = [{"role": "user", "content": "Say ok."}]
    began = time.perf_counter()
    try:
        async with asyncio.timeout(_PAID_SECONDS):
            status, body = await _chat(upstream, {"model": model, "messages": messages, "max_tokens": 1})
            if status == HTTPStatus.BAD_REQUEST and b"max_completion_tokens" in body:  # newer models of OpenAI's
                status, body = await _chat(upstream, {"model": model, "messages": messages, "max_completion_tokens": 1})
    except (UpstreamError, TimeoutError) as error:
        reason = str(error) or f"nothing in {_PAID_SECONDS:g} s"
        return problem("upstream", f"{name}: {model} gives no answer: {reason}", "look at its own log")
    seconds = time.perf_counter() - began
    if status == HTTPStatus.OK and b'"choices"' in body:
        return ok("upstream", f"{name}: {model} answers a chat of one token in {seconds:.2f} s")
    return problem(
        "upstream",
        f"{name}: {model} answers a chat of one token with status {status}{_said(body)}",
        "do what the message says; a model of another kind than chats is no fault",
    )


async def _chat(upstream: Upstream, fields: Mapping[str, Any]) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}
    body = msgspec.json.encode(fields)
    with await upstream.request("POST", "/v1/chat/completions", headers, body) as answer:
        return answer.status, await answer.body(_MAX_BODY)


def _model_to_ask(settings: Settings, looked: _Looked) -> str | None:
    """One that the settings name, or else the first that it lists."""
    table = ModelTable(settings.routing, settings.servers)
    named = sorted({table.unaliased(name) for name in table.names} & looked.served)
    return next(iter([*looked.server.models, *named, *sorted(looked.served)]), None)


def _names(settings: Settings, looked: Sequence[_Looked]) -> Iterator[Finding]:
    """Models that the settings name and that no upstream lists."""
    for each in looked:
        if each.models is None:
            continue
        wrong = sorted(own for own in each.server.models.values() if own not in each.models)
        if wrong:
            yield problem(
                "models",
                f"{each.name}: its `models` name {_some(wrong)}, which it does not list",
                f"correct them; it lists {_some(each.models)}",
            )
    if any(each.models is None for each in looked):
        return
    table = ModelTable(settings.routing, settings.servers)
    listed = frozenset().union(*(each.served for each in looked))
    unlisted = sorted({*table.unlisted(listed), *({*settings.variants.values()} - listed)})
    if unlisted:
        yield problem(
            "models",
            f"aliases, fallbacks or variants name {_some(unlisted)}, which no upstream lists",
            f"correct routing.aliases, routing.models or quantized_variants; listed are {_some(listed)}",
        )
    for model, of_model in settings.routing.models.items():
        for each in looked:
            if each.name in of_model.upstreams and not of_model.variants and model not in each.served:
                yield problem(
                    "models",
                    f"routing.models.{model}.upstreams names {each.name}, which does not list {model}",
                    f"load the model there, or take the upstream out; it lists {_some(each.served)}",
                )
    if not unlisted and table.names:
        yield ok("models", f"upstreams list every model that the settings name ({_some(table.names)})")


def _listed(body: bytes) -> frozenset[str] | None:
    try:
        data = msgspec.json.decode(body).get("data")
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
        return None
    if not isinstance(data, list):
        return None
    names = (item.get("id") for item in data if isinstance(item, dict))
    return frozenset(name for name in names if isinstance(name, str))


def _said(body: bytes) -> str:
    """The message of an error in OpenAI's form, to go on from the status."""
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return ""
    return f": {message[:_MAX_SHOWN]}" if isinstance(message, str) else ""


def _some(names: Sequence[str] | frozenset[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN_MODELS} more" if len(ordered) > _SHOWN_MODELS else ""
    return ", ".join(ordered[:_SHOWN_MODELS]) + more if ordered else "nothing"
