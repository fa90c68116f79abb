"""Upstreams: what servers of all kinds are found to be."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from gateway.commands.doctor.finding import Finding
from gateway.commands.doctor.upstreams import check_upstreams
from gateway.settings.settings import Settings
from gateway.settings.upstreams import ModelSettings, RoutingSettings, UpstreamSettings
from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.processes.serving import free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def found(*servers: UpstreamSettings | str, paid_requests: bool = False, **settings: Any) -> list[Finding]:
    return await check_upstreams(Settings(upstreams=servers, **settings), paid_requests)


def problems(findings: list[Finding]) -> list[str]:
    return [each.summary for each in findings if each.status == "problem"]


@asynccontextmanager
async def listing(handler: Handler, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """The base URL of a server that answers GET /v1/models so."""
    application = web.Application()
    application.router.add_get("/v1/models", handler)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        port = runner.addresses[0][1]
        yield f"{'http' if tls is None else 'https'}://{host}:{port}/v1"
    finally:
        await runner.cleanup()


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "a"}]})


async def test_a_server_that_lists_models_is_ok() -> None:
    """Its models and the time of its answer are told, and its clock is compared."""
    async with MockUpstream(models=("a", "b")).serving() as mock:
        reached, clock = await found(mock.url)
    assert (reached.status, "lists a, b" in reached.summary) == ("ok", True)
    assert (clock.check, clock.status) == ("clock", "ok")
    assert mock.received == []


async def test_an_alias_of_a_model_that_nobody_lists_is_a_problem() -> None:
    """Names of the settings are compared with what upstreams list, under the names of their `models` too."""
    routing = RoutingSettings(aliases={"chat": "renamed", "other": "missing"})
    async with MockUpstream(models=("a",)).serving() as mock:
        server = UpstreamSettings(url=mock.url, models={"renamed": "a"})
        said = problems(await found(server, routing=routing))
        assert said == ["aliases, fallbacks or variants name missing, which no upstream lists"]
        fine = RoutingSettings(aliases={"chat": "renamed"})
        assert problems(await found(server, routing=fine)) == []


async def test_names_that_an_upstream_does_not_have_are_a_problem() -> None:
    """Its own names of models in `models`, and models that are restricted to it."""
    async with MockUpstream(models=("a",)).serving() as mock:
        server = UpstreamSettings(url=mock.url, name="gpu", models={"chat": "gone"})
        routing = RoutingSettings(models={"big": ModelSettings(upstreams=("gpu",))})
        said = problems(await found(server, routing=routing))
    assert "gpu: its `models` name gone, which it does not list" in said
    assert "routing.models.big.upstreams names gpu, which does not list big" in said


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [(None, "warning", "clients send their own"), ("file:key", "problem", "refuses the credential")],
)
async def test_a_refused_credential_is_a_problem_where_it_is_the_operators(
    given: str | None, status: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """401 to a credential of the settings is a problem; without one it is the clients' to send, and shows nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("sk-secret-word")

    async def refuse(request: web.Request) -> web.Response:
        message = f"Wrong key {request.headers.get('Authorization')}"
        return web.json_response({"error": {"message": "no such key" if given else message}}, status=401)

    async with listing(refuse) as url:
        findings = await found(UpstreamSettings(url=url, api_key=given))
    assert (findings[0].status, words in findings[0].summary) == (status, True)
    assert "sk-secret-word" not in repr(findings)


async def test_the_credential_of_the_settings_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes it is said to."""
    monkeypatch.setenv("KEY_OF_TEST", "sk-1")

    async def accept(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a"}]}, status=200 if request.headers["x-api-key"] == "sk-1" else 401)

    async with listing(accept) as url:
        server = UpstreamSettings(url=url, api_key="env:KEY_OF_TEST", api_key_header="x-api-key")
        findings = await found(server)
    assert "accepts the credential" in findings[0].summary


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (web.Response(text="<html>", content_type="text/html"), "problem", "answers with a web page"),
        (web.json_response({"data": "none"}), "problem", "not with a list of models"),
        (web.json_response([]), "problem", "not with a list of models"),
        (web.json_response({"data": []}), "warning", "lists no model"),
        (web.Response(status=404), "warning", "has no list of models at /v1/models"),
        (web.json_response({"error": {"message": "down\x1b[2J"}}, status=500), "problem", "status 500: down [2J"),
    ],
)
async def test_what_is_no_list_of_models_says_so(answer: web.Response, status: str, words: str) -> None:
    """A web page, another JSON, no list, an error: each with its own words, none with control characters."""

    async def answering(request: web.Request) -> web.Response:
        return answer

    async with listing(answering) as url:
        first, *_ = await found(url)
    assert (first.status, words in first.summary) == (status, True), first.summary


async def test_servers_that_are_away_or_silent_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens, or nothing answers: the others are asked all the same."""
    monkeypatch.setattr("gateway.commands.doctor.upstreams._SECONDS", 0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server, MockUpstream(models=("a",)).serving() as mock:
        port = server.sockets[0].getsockname()[1]
        findings = await found(f"http://127.0.0.1:{free_port()}/v1", f"http://127.0.0.1:{port}/v1", mock.url)
    said = problems(findings)
    assert "cannot be reached" in said[0]
    assert "no answer to GET /v1/models" in said[1]
    assert any(each.status == "ok" and "lists a" in each.summary for each in findings)


async def test_a_proxy_of_the_environment_is_named_where_it_misleads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway uses none, which a host that only a proxy reaches makes hard to see."""
    away = f"http://127.0.0.1:{free_port()}/v1"
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    (without,) = await found(away)
    assert "HTTPS_PROXY" not in without.advice
    monkeypatch.setenv("HTTPS_PROXY", "http://user:word@proxy:3128")
    (named,) = await found(away)
    assert "HTTPS_PROXY of the environment is not used" in named.advice
    assert "word" not in named.advice


@pytest.mark.parametrize(
    ("ahead", "age", "status"), [(0, 0, "ok"), (-90, 0, "warning"), (90, 0, "warning"), (-90, 90, "ok")]
)
async def test_a_clock_that_is_off_is_a_warning(ahead: float, age: int, status: str) -> None:
    """By the header Date, and by Age where a cache on the way has kept the answer."""

    async def dated(request: web.Request) -> web.Response:
        headers = {"Date": format_datetime(datetime.now(UTC) + timedelta(seconds=ahead), usegmt=True)}
        return web.json_response({"data": [{"id": "a"}]}, headers=headers | ({"Age": str(age)} if age else {}))

    async with listing(dated) as url:
        clock = next(each for each in await found(url) if each.check == "clock")
    assert clock.status == status
    if status == "warning":
        assert ("ahead of" if ahead > 0 else "behind") in clock.summary
        assert "chrony" in clock.advice


async def test_a_certificate_that_is_not_trusted_is_a_problem_with_the_way_out(tmp_path: Path) -> None:
    """A foreign authority is a problem; with its certificate in ca_file the end of the server's own is told."""
    authority = trustme.CA()
    soon = datetime.now(UTC) + timedelta(days=3)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", not_after=soon).configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    async with listing(models, context, "localhost") as url:
        (refused,) = await found(url)
        assert (refused.status, "ca_file" in refused.advice) == ("problem", True)
        findings = await found(UpstreamSettings(url=url, ca_file=str(tmp_path / "ca.pem")))
    ends = next(each for each in findings if "its certificate ends on" in each.summary)
    assert (ends.status, f"{soon:%Y-%m-%d}" in ends.summary) == ("warning", True)


async def test_one_token_is_asked_for_only_on_demand() -> None:
    """Without the option no upstream computes anything; with it a model that the settings name is asked."""
    routing = RoutingSettings(aliases={"chat": "b"})
    async with MockUpstream(models=("a", "b")).serving() as mock:
        await found(mock.url, routing=routing)
        assert mock.received == []
        findings = await found(mock.url, routing=routing, paid_requests=True)
    assert any(each.status == "ok" and "b answers a chat of one token" in each.summary for each in findings)
    (sent,) = mock.received
    assert (sent.fields["model"], sent.fields["max_tokens"]) == ("b", 1)


async def test_newer_models_are_asked_with_the_newer_field() -> None:
    """A server that refuses max_tokens and names max_completion_tokens is asked again with that."""
    message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."

    class Newer(MockUpstream):
        async def _reply(self, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
            if "max_tokens" in fields:
                return web.json_response({"error": {"message": message}}, status=400)
            return await super()._reply(request, fields)

    async with Newer().serving() as mock:
        findings = await found(mock.url, paid_requests=True)
    assert problems(findings) == []
    assert [("max_tokens" in each.fields) for each in mock.received] == [True, False]


async def test_a_model_that_does_not_answer_is_a_problem() -> None:
    """The message of the upstream is part of the finding."""
    busy = Reply(status=503, error={"message": "out of memory", "type": "server_error"})
    async with MockUpstream((busy,)).serving() as mock:
        said = problems(await found(mock.url, paid_requests=True))
    assert said == [
        f"{mock.url.removeprefix('http://').removesuffix('/v1')}: mock answers a chat of one token with status 503:"
        " out of memory"
    ]


async def test_a_health_path_that_fails_is_a_problem() -> None:
    """The path of the settings is asked, as the router does."""
    async with MockUpstream().serving() as mock:
        said = problems(await found(UpstreamSettings(url=mock.url, health_path="/healthz")))
    assert len(said) == 1
    assert "/healthz answers with status 40" in said[0]


async def test_a_script_of_a_mock_upstream_is_read(tmp_path: Path) -> None:
    """`mock:FILE` is checked as the gateway would."""
    script = tmp_path / "script.yaml"
    script.write_text("replies: [{txt: a}]")
    assert "txt" in problems(await found(f"mock:{script}"))[0]
    script.write_text("replies: [{text: a}]")
    (fine,) = await found(f"mock:{script}")
    assert (fine.status, "1 reply in" in fine.summary) == ("ok", True)
