"""Foreign values in Redis end no process, and stop no sharing."""

import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio
import xxhash

from cache.entries.key import namespace_for
from cache.semantic.embedding.encoder import Encoder
from cache.semantic.service.record_log import Event
from cache.semantic.service.records import Record
from gateway.upstreams.mock import MockUpstream
from tests.cache.valkey import Valkey
from tests.gateway.client import chat
from tests.gateway.conftest import Stage
from tests.gateway.semantic.stage import AGAIN, ASKED, SemanticStage, figure, until_figure, until_known
from tests.waiting import until

LOG = "keepgate:semantic:log"
HEADER_BYTES = 12


async def stored(client: redis.asyncio.Redis, count: int) -> list[bytes]:
    """The keys of the records, once there are `count`. Raises TimeoutError."""
    keys: list[bytes] = []

    async def are_there() -> bool:
        keys[:] = [key async for key in client.scan_iter("keepgate:semantic:record:*")]
        return len(keys) == count

    await until(are_there)
    return keys


async def test_invalid_events_are_skipped(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, raw: redis.asyncio.Redis, minilm: Encoder
) -> None:
    """Invalid events and labels are skipped, and later events are applied."""
    one = await semantic.gateway(mock, redis=valkey.url, semantic={"policy": "budget"})
    other = await semantic.gateway(mock, redis=valkey.url, semantic={"policy": "budget"})
    content = msgspec.msgpack.encode(
        (1, "label", ("e", 0.9, (1.0, 1e160, 1e160, 1e160, 1e160), True, "miss", 1.0, 1.0))
    )
    label = b"KGS" + xxhash.xxh3_64_digest(content) + content
    name = f"budget:{minilm.fingerprint}"
    for data in (msgspec.msgpack.encode((name, label)), b"\x92\xa1\xff\xc4\x00", b""):
        await raw.xadd(LOG, {"event": msgspec.msgpack.encode(Event("x", 1, "label", label=data))})
    for kind in ("put", "remove", "wrong", "confirm"):
        await raw.xadd(LOG, {"event": msgspec.msgpack.encode(("x", 1, kind, "\ufffd"))})
    await raw.xadd(LOG, {"event": b"\x94\xa1x\x01\xa3put\xa1\xff"})
    await raw.xadd(LOG, {"what": "?"})
    await one.post(chat(ASKED))
    await until_known(other, 1)

    assert [await figure(client, "available") for client in (one, other)] == [True, True]
    assert await figure(other, "policy.labels") == 0
    await one.post(chat(AGAIN))
    await until_figure(other, "policy.labels", 1)


async def test_a_later_host_knows_earlier_confirmations(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, raw: redis.asyncio.Redis
) -> None:
    """A host that starts after confirmations serves the published answer, and keeps no more than needed."""
    settings = {"published": (namespace_for("Bearer sk-docs"),), "confirmations": 2}
    one = await semantic.gateway(mock, redis=valkey.url, semantic=settings)
    await one.tenant("sk-docs").post(chat(ASKED))
    await until_known(one, 1)
    for known, tenant in enumerate(("sk-a", "sk-b"), start=2):
        assert (await one.tenant(tenant).post(chat(AGAIN))).cache == "miss"
        await until_known(one, known)
        await until_figure(one, "judged_same", known - 1)
    assert (await one.tenant("sk-c").post(chat(AGAIN), x_keepgate_max_risk="0")).cache == "miss"
    await until_known(one, 4)
    other = await semantic.gateway(mock, redis=valkey.url, semantic=settings)
    await until_known(other, 4)

    assert (await other.tenant("sk-d").post(chat(AGAIN))).cache == "hit"
    confirmed = []
    for key in await stored(raw, 4):
        data = await raw.get(key)
        assert isinstance(data, bytes)
        record = msgspec.convert(msgspec.msgpack.decode(data[HEADER_BYTES:])[0], Record)
        confirmed.append(len(record.confirmed))
    assert sorted(confirmed) == [0, 0, 0, 2]


async def test_a_confirmation_brings_no_removed_record_back(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, raw: redis.asyncio.Redis
) -> None:
    """A confirmation of a record that another host removed does not bring it back."""
    settings = {"published": (namespace_for("Bearer sk-docs"),), "confirmations": 1}
    one = await semantic.gateway(mock, redis=valkey.url, semantic=settings)
    await one.tenant("sk-docs").post(chat(ASKED))
    await until_known(one, 1)
    (removed,) = await stored(raw, 1)
    await raw.unlink(removed)
    assert (await one.tenant("sk-a").post(chat(AGAIN))).cache == "miss"
    await until_known(one, 2)
    (kept,) = await stored(raw, 1)

    assert kept != removed
    events: Any = await raw.xrange(LOG)
    changes = [msgspec.msgpack.decode(fields[b"event"], type=Event) for _, fields in events]
    put = [change.entry for change in changes if change.kind == "put"]
    assert put.count(removed.decode().removeprefix("keepgate:semantic:record:")) == 2, "stored, and confirmed"


async def test_an_invalid_policy_state_is_a_cold_start(
    stage: Stage,
    folder: Path,
    mock: MockUpstream,
    valkey: Valkey,
    raw: redis.asyncio.Redis,
    minilm: Encoder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A policy state of another type is logged once, stops no other sharing, and is replaced."""
    caplog.set_level(logging.WARNING)
    key = f"keepgate:semantic:policy:budget:{minilm.fingerprint}"
    await raw.set(key, b"x")
    async with AsyncExitStack() as stack:
        one = await SemanticStage(stage, stack, minilm, folder).gateway(
            mock, redis=valkey.url, semantic={"policy": "budget"}
        )
        await until_figure(one, "loaded", True)
        for known, question in enumerate((ASKED, AGAIN), start=1):
            await one.post(chat(question))
            await until_known(one, known)
        await until_figure(one, "policy.labels", 1)
    assert await raw.type(key) == b"hash"
    async with AsyncExitStack() as stack:
        other = await SemanticStage(stage, stack, minilm, folder).gateway(
            mock, redis=valkey.url, semantic={"policy": "budget"}
        )
        await until_known(other, 2)
        assert await figure(other, "policy.labels") == 1
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if key in line]) == 1
    assert not [line for line in said if "unavailable" in line]


async def test_keys_of_another_type_are_replaced_later_too(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, raw: redis.asyncio.Redis
) -> None:
    """A stream that becomes a string while it is read is replaced, and what comes then is shared."""
    one, other = [await semantic.gateway(mock, redis=valkey.url) for _ in range(2)]
    for client in (one, other):
        await until_figure(client, "loaded", True)
    await raw.set(LOG, b"x")

    async def is_replaced() -> bool:
        return await raw.type(LOG) != b"string"

    await until(is_replaced)
    await one.post(chat(ASKED))
    await until_known(other, 1)


async def test_keys_of_another_type_are_replaced_at_the_start(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, raw: redis.asyncio.Redis
) -> None:
    """Keys of a wrong type for events and ids are replaced, so that hosts share what they learn."""
    await raw.set(LOG, b"x")
    await raw.rpush("keepgate:semantic:records", b"x")
    one = await semantic.gateway(mock, redis=valkey.url)
    other = await semantic.gateway(mock, redis=valkey.url)
    for client in (one, other):
        await until_figure(client, "loaded", True)
    await one.post(chat(ASKED))
    await until_known(other, 1)
    assert await figure(one, "writes_dropped") == 0
