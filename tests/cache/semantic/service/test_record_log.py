"""The log of shared records, on a real Valkey."""

import logging

import msgspec
import pytest
import redis.asyncio

from cache.errors import StoreUnavailable
from cache.semantic.service.record_log import Event, RecordLog
from cache.stores.encryption import encryption_with
from cache.stores.redis_store import open_topology
from tests.cache.valkey import Valkey

LOG = "keepgate:semantic:log"


async def test_events_of_other_versions_are_passed_over(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """Whatever stands in the stream is an event or None, with its position; more parts than known are skipped."""
    event = Event("x", 1, "put", "a.1")
    known = msgspec.msgpack.encode(event)
    deep = b"\x91" * 100_000 + b"\xc0"
    for data in (known, b"\x96" + known[1:] + b"\xc0", b"\x96" + known[1:] + deep, deep, b"", b"\x95\xa1\xff"):
        await raw.xadd(LOG, {"event": data})
    await raw.xadd(LOG, {"what": "?"})
    async with open_topology(valkey.url) as topology:
        read = await RecordLog(topology, "encoder", 4, encryption_with(())).since("0-0")
    assert [found for _, found in read] == [event, event, None, None, None, None, None]
    assert sorted(position for position, _ in read) == [position for position, _ in read]


async def test_a_refused_read_is_said(own_valkey: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    """A Redis that answers and refuses what is read is reported as one that is unavailable, with its reason."""
    caplog.set_level(logging.WARNING)
    client = redis.asyncio.Redis.from_url(own_valkey.url)
    await client.execute_command("ACL", "SETUSER", "default", "-zscan")  # type: ignore[no-untyped-call]
    await client.aclose()
    async with open_topology(own_valkey.url) as topology:
        with pytest.raises(StoreUnavailable, match="zscan"):
            _ = [page async for page in RecordLog(topology, "encoder", 4, encryption_with(())).load()]
    assert "redis (semantic) is unavailable" in caplog.text
    assert "zscan" in caplog.text
