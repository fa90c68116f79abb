"""Where an upstream publishes KV cache events: as its settings say, or as vLLM lists it (`GET /kv_event_sources`).

vLLM lists a publisher for each data-parallel rank: {"0": {"endpoint": "tcp://*:5557", "replay_endpoint": …, …}, …}.
"""

import asyncio
import logging
import re
from typing import Any, NamedTuple

from yarl import URL

from gateway.errors import GatewayError
from gateway.http.sse import event_json
from gateway.upstreams.upstream import Upstream

log = logging.getLogger(__name__)

_PATH = "/kv_event_sources"
_DEADLINE = 5.0
_MAX_BYTES = 2**20
_MAX_RANKS = 256
_ADDRESS = re.compile(r"tcp://(\[[^\]]+\]|[^:/\s]+):(\d+)")
_ANY_HOST = ("*", "0.0.0.0", "[::]")  # noqa: S104  # what a publisher is bound to


class EventSource(NamedTuple):
    """The address of a publisher, and that of its replay."""

    address: str
    replay: str | None


def configured_source(address: str) -> EventSource:
    """A publisher whose replay is at the next port, where vLLM's and SGLang's examples have it."""
    host, _, port = address.rpartition(":")
    return EventSource(address, f"{host}:{int(port) + 1}")


async def listed_sources(upstream: Upstream) -> frozenset[EventSource] | None:
    """All publishers of an upstream; None if it does not answer, or has no list."""
    try:
        async with asyncio.timeout(_DEADLINE):
            with await upstream.request("GET", _PATH, {}, None) as answer:
                body = await answer.body(_MAX_BYTES)
        if answer.status != 200:
            log.debug("%s: %s: status %d", upstream.title, _PATH, answer.status)
            return None
        listed = list(event_json(body).values())[:_MAX_RANKS]
    except (GatewayError, TimeoutError, ValueError) as error:
        log.debug("%s: %s: %s", upstream.title, _PATH, error or "no answer in time")
        return None
    return frozenset(source for each in listed if (source := _source(each, upstream.url)) is not None)


def _source(listed: Any, url: str) -> EventSource | None:
    if not isinstance(listed, dict) or listed.get("publisher") != "zmq":
        return None
    address = _reachable(listed.get("endpoint"), url)
    return None if address is None else EventSource(address, _reachable(listed.get("replay_endpoint"), url))


def _reachable(endpoint: Any, url: str) -> str | None:
    """An endpoint as it is connected to; None if it is no address of TCP."""
    found = _ADDRESS.fullmatch(endpoint) if isinstance(endpoint, str) else None
    if found is None:
        return None
    host = URL(url).host or ""
    own = f"[{host}]" if ":" in host else host
    return f"tcp://{own if found[1] in _ANY_HOST else found[1]}:{found[2]}"
