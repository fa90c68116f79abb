"""The admin API of keys and teams."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import jsonschema_rs
import msgspec
import pytest
from aiohttp import web

from cache.stores.redis_store import open_redis_store
from gateway.api.app_keys import SETTINGS
from gateway.api.openapi.key_operations import KEY_OPERATIONS
from gateway.api.operator.keys import REGISTRY, ROUTES
from gateway.http.middleware import answering_errors
from gateway.settings.fields import Secret
from gateway.settings.settings import Settings
from gateway.telemetry.audit import AUDIT, AuditLog
from gateway.tenants.key_registry import KeyRegistry
from tests.cache.valkey import Valkey

ADMIN = "the-admin-key"

Ask = Callable[..., Awaitable[tuple[int, Any]]]


class Server:
    """The routes of keys on a server of their own."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def ask(self, method: str, path: str, body: Any = None, key: str = ADMIN) -> tuple[int, Any]:
        """Status and decoded body; an answer of status 200 is as documented."""
        data = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
        headers = {"x-keepgate-admin-key": key} if key else {}
        async with self._session.request(method, self.url + path, data=data, headers=headers) as response:
            decoded = msgspec.json.decode(await response.read())
        if response.status == 200:
            parts = path.split("/")
            parts[3:4] = [{"keys": "{id}", "teams": "{name}"}[parts[2]] for _ in parts[3:4]]
            described = "/".join(parts)
            kind = KEY_OPERATIONS[method, described].answer["application/json"]
            jsonschema_rs.validator_for(msgspec.json.schema(kind)).validate(decoded)
            assert response.headers["Cache-Control"] == "no-store"
        return response.status, decoded

    async def refusal(self, method: str, path: str, body: Any = None, key: str = ADMIN) -> tuple[int, str, str, Any]:
        """Status, code, message and field of an error."""
        status, answer = await self.ask(method, path, body, key)
        error = answer["error"]
        return status, error["code"], error["message"], error["param"]


async def serve(stack: AsyncExitStack, valkey: Valkey | None) -> Server:
    application = web.Application(middlewares=[answering_errors(lambda _, error: error.response())])
    application[SETTINGS] = settings = Settings(admin_key=Secret(ADMIN))
    application[AUDIT] = AuditLog(settings)
    if valkey is not None:
        application[REGISTRY] = KeyRegistry(await stack.enter_async_context(open_redis_store(valkey.url, 0.5)))
    application.add_routes(ROUTES)
    runner = web.AppRunner(application)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    session = await stack.enter_async_context(aiohttp.ClientSession())
    return Server(f"http://127.0.0.1:{runner.addresses[0][1]}", session)


@pytest.fixture
async def server(valkey: Valkey) -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        yield await serve(stack, valkey)


async def test_a_key_is_made_shown_and_revoked(server: Server) -> None:
    """Its secret is in the answer that made it and in no other."""
    status, made = await server.ask("POST", "/v1/keys", {"name": "alice", "limits": {"requests_per_minute": 60}})
    assert status == 200
    secret = made.pop("secret")
    assert made.pop("required") is False
    assert secret.startswith("sk-kg-")
    assert len(secret) == 49
    for path in (f"/v1/keys/{made['id']}", "/v1/keys/alice"):
        assert await server.ask("GET", path) == (200, made)
    assert await server.ask("GET", "/v1/keys") == (200, {"object": "list", "data": [made], "required": False})
    assert await server.ask("DELETE", "/v1/keys/alice") == (200, {**made, "revoked": True})

    assert (await server.refusal("GET", "/v1/keys/alice"))[:2] == (404, "not_found")
    assert (await server.ask("GET", f"/v1/keys/{made['id']}"))[1]["revoked"] is True
    assert (await server.refusal("DELETE", f"/v1/keys/{made['id']}"))[:2] == (400, "key_revoked")
    assert (await server.ask("POST", "/v1/keys", {"name": "alice"}))[0] == 200


async def test_the_secret_is_not_stored(server: Server, raw: Any) -> None:
    """Nothing in Redis has the secret, or a part of it."""
    _, made = await server.ask("POST", "/v1/keys", {"name": "alice"})
    _, rotated = await server.ask("POST", "/v1/keys/alice/rotate", {"grace": 60})
    stored = [key async for key in raw.scan_iter()]
    stored += [await raw.dump(key) for key in stored]
    for secret in (made["secret"], rotated["secret"]):
        assert not [value for value in stored if secret.removeprefix("sk-kg-")[:12].encode() in value]
    assert made["secret"] != rotated["secret"]


async def test_a_change_changes_only_what_it_names(server: Server) -> None:
    """Limits that are left out stay; null lifts one."""
    limits = {"requests_per_minute": 60, "tokens_per_minute": 1000, "budget_per_month": 12.5}
    _, made = await server.ask("POST", "/v1/keys", {"name": "alice", "limits": limits, "priority": 3})
    del made["secret"], made["required"]
    change = {"limits": {"requests_per_minute": 5, "tokens_per_minute": None}, "models": ["m"], "cache": "bypass"}
    _, changed = await server.ask("PATCH", "/v1/keys/alice", change)

    expected = {**made["limits"], "requests_per_minute": 5, "tokens_per_minute": None}
    assert changed == {**made, "limits": expected, "models": ["m"], "cache": "bypass"}
    assert await server.ask("GET", "/v1/keys/alice") == (200, changed)


async def test_teams_have_limits_of_their_own(server: Server) -> None:
    """A team is made by its limits; a key names a team that there is."""
    refused = await server.refusal("POST", "/v1/keys", {"name": "alice", "team": "web"})
    assert refused[::3] == (400, "team")
    limits = {"budget_per_month": 50.0}
    status, team = await server.ask("PUT", "/v1/teams/web", {"limits": limits})
    assert status == 200
    assert (team["name"], team["limits"]["budget_per_month"]) == ("web", 50.0)
    assert await server.ask("GET", "/v1/teams/web") == (200, team)
    assert await server.ask("GET", "/v1/teams") == (200, {"object": "list", "data": [team]})
    _, made = await server.ask("POST", "/v1/keys", {"name": "alice", "team": "web"})
    assert made["team_limits"] == team["limits"]
    assert (await server.refusal("GET", "/v1/teams/none"))[::3] == (404, "name")


BAD = [
    ({}, "name", "'name' is missing."),
    ({"name": "a", "colour": 1}, "colour", "'colour' is no field here."),
    ({"name": "a", "limits": {"rpm": 1}}, "limits.rpm", "'limits.rpm' is no field here."),
    ({"name": "a", "limits": {"requests_per_minute": 0}}, "limits.requests_per_minute", None),
    ({"name": "a", "limits": {"requests_per_minute": "9"}}, "limits.requests_per_minute", None),
    ({"name": "a", "limits": {"requests_per_minute": 1.5}}, "limits.requests_per_minute", None),
    ({"name": "a", "limits": {"budget_per_day": -1}}, "limits.budget_per_day", None),
    ({"name": "a", "limits": {"budget_per_day": 1e7}}, "limits.budget_per_day", None),
    ({"name": "a b"}, "name", None),
    ({"name": "{a}"}, "name", None),
    ({"name": ""}, "name", None),
    ({"name": "a", "models": "m"}, "models", None),
    ({"name": "a", "cache": "no"}, "cache", None),
    ({"name": "a", "expires": 1.0}, "expires", None),
    ({"name": "a", "secret": "mine"}, "secret", None),
    ({"name": "a", "priority": True}, "priority", None),
]


@pytest.mark.parametrize(("body", "field", "message"), BAD)
async def test_a_bad_field_is_named(server: Server, body: Any, field: str, message: str | None) -> None:
    """One message says which field is wrong, and nothing is made."""
    status, _, said, param = await server.refusal("POST", "/v1/keys", body)
    assert (status, param) == (400, field)
    assert said.startswith(f"'{field}'")
    assert message in (None, said)
    assert (await server.ask("GET", "/v1/keys"))[1]["data"] == []


async def test_names_are_unique(server: Server) -> None:
    """Of keys that hold, no two have one name."""
    await server.ask("POST", "/v1/keys", {"name": "alice"})
    assert (await server.refusal("POST", "/v1/keys", {"name": "alice"}))[::3] == (400, "name")
    assert len((await server.ask("GET", "/v1/keys"))[1]["data"]) == 1


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_only_an_operator_may(server: Server, route: web.RouteDef) -> None:
    """Each route asks for the admin key before anything else."""
    path = route.path.replace("{id}", "alice").replace("{name}", "web")
    for key in ("", "wrong"):
        assert (await server.refusal(route.method, path, b"no JSON", key))[:2] == (401, "admin_key_required")


async def test_an_expiring_key_may_be_prolonged(server: Server) -> None:
    """`expires` is in Unix seconds; null is never."""
    later = time.time() + 100
    _, made = await server.ask("POST", "/v1/keys", {"name": "alice", "expires": later})
    assert made["expires"] == later
    assert (await server.ask("PATCH", "/v1/keys/alice", {"expires": None}))[1]["expires"] is None


async def test_without_redis_there_are_no_keys(own_valkey: Valkey) -> None:
    """A gateway without Redis, and one whose Redis is away, say so."""
    async with AsyncExitStack() as stack:
        server = await serve(stack, own_valkey)
        await own_valkey.kill()
        assert (await server.refusal("GET", "/v1/keys"))[:2] == (503, "store_unavailable")
        assert (await server.refusal("POST", "/v1/keys", {"name": "a"}))[:2] == (503, "store_unavailable")
        assert (await (await serve(stack, None)).refusal("GET", "/v1/keys"))[:2] == (503, "store_unavailable")


async def test_the_audit_has_what_was_allowed(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Limits of keys and teams, as they were set and changed; no secret."""
    caplog.set_level(logging.INFO)
    _, made = await server.ask("POST", "/v1/keys", {"name": "alice", "limits": {"budget_per_day": 5}, "models": ["m"]})
    await server.ask("PATCH", "/v1/keys/alice", {"limits": {"budget_per_day": None, "concurrent_requests": 2}})
    await server.ask("PUT", "/v1/teams/web", {"limits": {"tokens_per_minute": 9}})
    lines = [record.getMessage() for record in caplog.records if record.name == "keepgate.audit"]
    created, changed, team = map(msgspec.json.decode, lines)
    assert (created["models"], created["limits"]["budget_per_day"]) == (["m"], 5)
    assert changed["changes"] == {"limits": {"budget_per_day": None, "concurrent_requests": 2}}
    assert team["limits"]["tokens_per_minute"] == 9
    assert made["secret"] not in "".join(lines)
