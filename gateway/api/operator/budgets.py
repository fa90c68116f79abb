"""Budgets of keys and teams with what is spent of them, for the operator."""

from typing import Literal

import msgspec
from aiohttp import web

from cache.errors import StoreUnavailable
from gateway.api.app_keys import CACHE
from gateway.api.operator.keys import registry_of
from gateway.errors import CacheUnavailable, InvalidRequest
from gateway.tenants.budgets import SpentBudget, read_budgets

_encode = msgspec.json.Encoder().encode


class BudgetList(msgspec.Struct, kw_only=True):
    """Keys first, then teams, each in the order of its own list."""

    object: Literal["list"] = "list"
    data: list[SpentBudget]


async def list_budgets(request: web.Request) -> web.Response:
    """GET /v1/budgets: what each key and team with a budget has spent of it, today and this month (UTC)."""
    registry = registry_of(request)
    for field in request.query:
        raise InvalidRequest(f"'{field}' is no parameter of this list, which has none.", param=field)
    redis = request.app[CACHE].redis
    assert redis is not None  # noqa: S101  # there is a registry
    try:
        found = await read_budgets(redis, await registry.keys(), await registry.teams())
    except StoreUnavailable as error:
        raise CacheUnavailable(f"The shared store, which has the budgets, does not answer: {error}.") from error
    return web.Response(body=_encode(BudgetList(data=found)), content_type="application/json")
