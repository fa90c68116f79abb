"""What the semantic cache of this host decides, and what it would with other deltas, for the operator."""

from typing import Literal, TypeVar, get_args

import msgspec
from aiohttp import web
from multidict import MultiMapping

from cache.errors import StoreUnavailable
from cache.semantic.messages import (
    DecisionsRequest,
    Outcome,
    SemanticDecision,
    Step,
    Verdict,
    WhatIfAccount,
    WhatIfRequest,
)
from gateway.api.access import require_operator
from gateway.api.app_keys import SEMANTIC
from gateway.api.operator.entries import namespace_asked, number_of
from gateway.errors import CacheUnavailable, InvalidRequest

MAX_DECISIONS = 100
"""Of a page: with the texts of both questions it is one message of the semantic cache's process."""
MAX_DELTAS = 8
MAX_STEPS = 744
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
STEPS: dict[str, Step] = {"1m": 60, "1h": 3600}

_DEFAULT_DECISIONS, _DEFAULT_STEPS = 50, 24
_LIST = ("outcome", "verdict", "namespace", "key", "model", "limit", "cursor")
_WHAT_IF = ("delta", "step", "steps")
_encode = msgspec.json.Encoder().encode


class DecisionPage(msgspec.Struct, kw_only=True):
    """The newest first; `next` is the cursor of the next page, null after the last one."""

    object: Literal["list"] = "list"
    data: list[SemanticDecision]
    next: str | None


class WhatIfFigures(msgspec.Struct, kw_only=True):
    """`delta` is the setting, null where the policy keeps no budget; `step` is in seconds."""

    object: Literal["list"] = "list"
    delta: float | None
    step: int
    data: list[WhatIfAccount]


async def list_decisions(request: web.Request) -> web.Response:
    """GET /v1/cache/semantic/decisions: the last ones near a stored question, the newest first."""
    require_operator(request)
    query = request.query
    _check_names(query, _LIST)
    if "key" in query and "namespace" in query:
        raise InvalidRequest("A listing takes one of namespace and key.", param="key")
    limit = round(number_of(query, "limit", _DEFAULT_DECISIONS))
    if not 1 <= limit <= MAX_DECISIONS:
        raise InvalidRequest(f"'limit' must be a number from 1 to {MAX_DECISIONS}.", param="limit")
    if not (cursor := query.get("cursor", "0")).isdecimal():
        raise InvalidRequest("'cursor' must be the 'next' of an earlier page.", param="cursor")
    wanted = DecisionsRequest(
        limit,
        before=int(cursor[:18]),
        outcome=_one_of(query, "outcome", OUTCOMES),
        verdict=_one_of(query, "verdict", VERDICTS),
        namespace=await namespace_asked(request),
        model=query.get("model", ""),
    )
    try:
        reply = await request.app[SEMANTIC].decisions(wanted)
    except StoreUnavailable as error:
        raise CacheUnavailable(f"The semantic cache does not answer: {error}.") from error
    page = DecisionPage(data=list(reply.decisions), next=str(reply.next) if reply.next else None)
    return web.Response(body=_encode(page), content_type="application/json")


async def what_if(request: web.Request) -> web.Response:
    """GET /v1/cache/semantic/what-if?delta=.005,.02: hits and wrong answers of the same requests with other deltas."""
    require_operator(request)
    query = request.query
    _check_names(query, _WHAT_IF)
    step = STEPS[_one_of(query, "step", tuple(STEPS)) or "1h"]
    steps = round(number_of(query, "steps", _DEFAULT_STEPS))
    if not 1 <= steps <= MAX_STEPS:
        raise InvalidRequest(f"'steps' must be a number from 1 to {MAX_STEPS}.", param="steps")
    wanted = WhatIfRequest(_deltas(query.get("delta", "")), step, steps)
    try:
        reply = await request.app[SEMANTIC].what_if(wanted)
    except StoreUnavailable as error:
        raise CacheUnavailable(f"The semantic cache does not answer: {error}.") from error
    figures = WhatIfFigures(delta=reply.delta, step=step, data=list(reply.accounts))
    return web.Response(body=_encode(figures), content_type="application/json")


def _check_names(query: MultiMapping[str], known: tuple[str, ...]) -> None:
    for field in query:
        if field not in known:
            raise InvalidRequest(f"'{field}' is no parameter here; use {', '.join(known)}.", param=field)


T = TypeVar("T", bound=str)


def _one_of(query: MultiMapping[str], field: str, allowed: tuple[T, ...]) -> T | Literal[""]:
    """The value of a parameter; "" if it is not there. Raises InvalidRequest."""
    for value in allowed:
        if query.get(field) == value:
            return value
    if field in query:
        raise InvalidRequest(f"'{field}' must be one of {', '.join(allowed)}.", param=field)
    return ""


def _deltas(text: str) -> tuple[float, ...]:
    """Each delta once, the lowest first; none for an empty text."""
    parts = [part for part in text.split(",") if part.strip()]
    try:
        deltas = sorted({float(part) for part in parts})
    except ValueError:
        deltas = [0.0]
    if len(deltas) > MAX_DELTAS or not all(0.0 < delta <= 0.5 for delta in deltas):
        raise InvalidRequest(
            f"'delta' must be at most {MAX_DELTAS} shares with commas between, each more than 0 and at most 0.5,"
            " such as 0.005,0.02.",
            param="delta",
        )
    return tuple(deltas)
