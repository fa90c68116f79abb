"""Virtual keys and teams, for the operator."""

from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from cache.entries.key import namespace_for
from gateway.api.access import require_operator
from gateway.api.app_keys import SETTINGS
from gateway.errors import CacheUnavailable
from gateway.http.body import read_body
from gateway.http.json_object import decode_object
from gateway.telemetry.audit import audit
from gateway.tenants.key_changes import KeyChanges, NewKey, Rotation, TeamLimits, checked, checked_name
from gateway.tenants.key_registry import KeyRegistry, Team
from gateway.tenants.virtual_key import CachePolicy, Limits, VirtualKey

REGISTRY = web.AppKey("registry", KeyRegistry)
"""Left out of an application without Redis."""

T = TypeVar("T", bound=msgspec.Struct)

_MAX_BODY = 2**16
_encode = msgspec.json.Encoder().encode


class Key(msgspec.Struct, kw_only=True):
    """A key without its secret. Times are Unix seconds; `cache_namespace` is what DELETE /v1/cache takes."""

    id: str
    object: Literal["key"] = "key"
    name: str
    team: str
    created: float
    expires: float | None
    revoked: bool
    models: tuple[str, ...]
    limits: Limits
    team_limits: Limits
    namespace: str
    cache_namespace: str
    cache: CachePolicy
    priority: int


class KeyWithSecret(Key, kw_only=True):
    """`secret` is what the client sends; it cannot be read again. Where keys are not `required`, none is recognised."""

    secret: str
    required: bool


class KeyList(msgspec.Struct, kw_only=True):
    """`required` is the setting keys.required, without which no request has a key and no limit of a key holds."""

    object: Literal["list"] = "list"
    data: list[Key]
    required: bool


class TeamObject(msgspec.Struct, kw_only=True):
    """Limits for all keys of a team together."""

    name: str
    object: Literal["team"] = "team"
    limits: Limits


class TeamList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[TeamObject]


async def create_key(request: web.Request) -> web.Response:
    """POST /v1/keys."""
    registry = registry_of(request)
    key, secret = await registry.create(await _read(request, NewKey))
    audit(request, "key.create", key.id, name=key.name, team=key.team, models=key.models, limits=key.limits)
    return _json(KeyWithSecret(**_fields(key), secret=secret, required=_required(request)))


async def list_keys(request: web.Request) -> web.Response:
    """GET /v1/keys."""
    keys = [Key(**_fields(key)) for key in await registry_of(request).keys()]
    return _json(KeyList(data=keys, required=_required(request)))


async def get_key(request: web.Request) -> web.Response:
    """GET /v1/keys/{id}."""
    return _json(Key(**_fields(await registry_of(request).get(request.match_info["id"]))))


async def change_key(request: web.Request) -> web.Response:
    """PATCH /v1/keys/{id}."""
    registry = registry_of(request)
    changes = await _read(request, KeyChanges)
    key = await registry.change(request.match_info["id"], changes)
    audit(request, "key.change", key.id, changes=changes)
    return _json(Key(**_fields(key)))


async def revoke_key(request: web.Request) -> web.Response:
    """DELETE /v1/keys/{id}."""
    key = await registry_of(request).revoke(request.match_info["id"])
    audit(request, "key.revoke", key.id)
    return _json(Key(**_fields(key)))


async def rotate_key(request: web.Request) -> web.Response:
    """POST /v1/keys/{id}/rotate."""
    registry = registry_of(request)
    rotation = await _read(request, Rotation) if request.can_read_body else Rotation()
    key, secret = await registry.rotate(request.match_info["id"], rotation)
    audit(request, "key.rotate", key.id)
    return _json(KeyWithSecret(**_fields(key), secret=secret, required=_required(request)))


async def list_teams(request: web.Request) -> web.Response:
    """GET /v1/teams."""
    return _json(TeamList(data=[_team(team) for team in await registry_of(request).teams()]))


async def get_team(request: web.Request) -> web.Response:
    """GET /v1/teams/{name}."""
    return _json(_team(await registry_of(request).team(request.match_info["name"])))


async def set_team(request: web.Request) -> web.Response:
    """PUT /v1/teams/{name}: makes the team, or replaces its limits."""
    registry = registry_of(request)
    name = checked_name(request.match_info["name"])
    team = Team(name=name, limits=(await _read(request, TeamLimits)).limits)
    await registry.set_team(team)
    audit(request, "team.set", name, limits=team.limits)
    return _json(_team(team))


ROUTES = (
    web.post("/v1/keys", create_key),
    web.get("/v1/keys", list_keys),
    web.get("/v1/keys/{id}", get_key),
    web.patch("/v1/keys/{id}", change_key),
    web.delete("/v1/keys/{id}", revoke_key),
    web.post("/v1/keys/{id}/rotate", rotate_key),
    web.get("/v1/teams", list_teams),
    web.get("/v1/teams/{name}", get_team),
    web.put("/v1/teams/{name}", set_team),
)


def registry_of(request: web.Request) -> KeyRegistry:
    """The keys, for an operator alone. Raises AdminKeyRequired, AdminForbidden and CacheUnavailable."""
    require_operator(request)
    registry = request.app.get(REGISTRY)
    if registry is None:
        raise CacheUnavailable("Virtual keys are kept in Redis, and this gateway has none. Set redis (KEEPGATE_REDIS).")
    return registry


async def _read(request: web.Request, kind: type[T]) -> T:
    body = await read_body(request, _MAX_BODY, request.app[SETTINGS].timeouts.client)
    return checked(decode_object(body), kind)


def _fields(key: VirtualKey) -> dict[str, Any]:
    return {**msgspec.structs.asdict(key), "cache_namespace": namespace_for(key.tenant)}


def _required(request: web.Request) -> bool:
    return request.app[SETTINGS].keys.required


def _team(team: Team) -> TeamObject:
    return TeamObject(name=team.name, limits=team.limits)


def _json(value: msgspec.Struct) -> web.Response:
    # A secret is for nobody's cache.
    return web.Response(body=_encode(value), content_type="application/json", headers={"Cache-Control": "no-store"})
