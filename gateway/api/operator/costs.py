"""What answers cost and what hits saved, for the operator."""

import csv
import io
import time
from datetime import UTC, datetime
from typing import Literal

import msgspec
from aiohttp import web

from cache.errors import StoreUnavailable
from gateway.api.access import require_operator
from gateway.costs.ledger import COUNTERS, Group, Ledger
from gateway.costs.price import published_prices
from gateway.costs.pricing import Pricing
from gateway.costs.report import DIMENSIONS, InvalidPeriod, Row, read_time, report
from gateway.errors import CacheUnavailable, InvalidRequest

LEDGER = web.AppKey("ledger", Ledger)
PRICING = web.AppKey("pricing", Pricing)

_PARAMETERS = ("by", "since", "until", "format", *Group._fields)
_DEFAULT_SINCE = "7d"
_encode = msgspec.json.Encoder().encode


class CostTotal(msgspec.Struct, kw_only=True):
    """Counts of requests and tokens, and US dollars. `unpriced` are requests whose cost or saving is not known, and
    `estimated` those whose tokens and cost are estimates, since the upstream has not said them.
    """

    requests: int
    hits: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost: float
    saving: float
    unpriced: int
    estimated: int


class CostRow(CostTotal, kw_only=True, omit_defaults=True):
    """The totals of one group; it has the names that were asked for."""

    key: str | msgspec.UnsetType = msgspec.UNSET
    team: str | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET
    upstream: str | msgspec.UnsetType = msgspec.UNSET
    layer: str | msgspec.UnsetType = msgspec.UNSET
    day: str | msgspec.UnsetType = msgspec.UNSET
    hour: str | msgspec.UnsetType = msgspec.UNSET


class MachineFigures(msgspec.Struct, kw_only=True):
    """A machine paid by the hour, as this process has seen it over ten minutes."""

    upstream: str
    tokens: int
    busy_seconds: float
    dollars_per_1k_tokens: float | None


class PriceListName(msgspec.Struct, kw_only=True):
    """Where the table of prices is from."""

    source: str
    date: str


class CostReport(msgspec.Struct, kw_only=True):
    object: Literal["costs"] = "costs"
    by: list[str]
    since: str
    until: str
    data: list[CostRow]
    total: CostTotal
    machines: list[MachineFigures]
    prices: PriceListName


async def get_costs(request: web.Request) -> web.Response:
    """GET /v1/costs?by=model,key&since=7d."""
    require_operator(request)
    query = _query(request)
    by = _by(query)
    since, until = _period(query)
    form = query.get("format", "json")
    if form not in ("json", "csv"):
        raise InvalidRequest("'format' must be json or csv.", param="format")
    filters = {name: query[name] for name in Group._fields if name in query}
    try:
        rows, total = await report(request.app[LEDGER], by, since, until, filters)
    except StoreUnavailable as error:
        raise CacheUnavailable(f"The shared store, which has the costs, does not answer: {error}.") from error
    if form == "csv":
        return web.Response(text=_csv(by, rows), content_type="text/csv", headers={"Cache-Control": "no-store"})
    prices = published_prices()
    answer = CostReport(
        by=by,
        since=_iso(since),
        until=_iso(until),
        data=[CostRow(**row) for row in rows],
        total=CostTotal(**total),
        machines=_machines(request.app[PRICING]),
        prices=PriceListName(source=prices.source, date=prices.date),
    )
    return web.Response(body=_encode(answer), content_type="application/json", headers={"Cache-Control": "no-store"})


def _query(request: web.Request) -> dict[str, str]:
    for name in request.query:
        if name not in _PARAMETERS:
            raise InvalidRequest(f"'{name}' is no parameter of costs; use {', '.join(_PARAMETERS)}.", param=name)
        if len(request.query.getall(name)) > 1:
            raise InvalidRequest(f"'{name}' is given twice.", param=name)
    return dict(request.query)


def _by(query: dict[str, str]) -> list[str]:
    by = query.get("by", "model").split(",")
    if len(set(by)) < len(by) or not set(by) <= set(DIMENSIONS):
        raise InvalidRequest(f"'by' must be some of {', '.join(DIMENSIONS)}, with commas between them.", param="by")
    return by


def _period(query: dict[str, str]) -> tuple[float, float]:
    now = time.time()
    since, until = _time(query, "since", _DEFAULT_SINCE, now), _time(query, "until", "0h", now)
    if since >= until:
        raise InvalidRequest("'since' must be before 'until'.", param="since")
    return since, until


def _time(query: dict[str, str], name: str, default: str, now: float) -> float:
    try:
        return read_time(query.get(name, default), now)
    except InvalidPeriod as error:
        raise InvalidRequest(
            f"'{name}' must be a number of hours, days or weeks ago, such as 24h, 7d and 4w, or a date such as"
            " 2026-11-01 or 2026-11-01T12:00Z.",
            param=name,
        ) from error


def _machines(pricing: Pricing) -> list[MachineFigures]:
    figures = []
    for upstream, machine in pricing.machines.items():
        tokens, busy = machine.throughput()
        cost = machine.cost_per_1k_tokens()
        figures.append(MachineFigures(upstream=upstream, tokens=tokens, busy_seconds=busy, dollars_per_1k_tokens=cost))
    return figures


def _csv(by: list[str], rows: list[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, (*by, *COUNTERS))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
