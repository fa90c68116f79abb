"""A gateway whose answers are encrypted in Redis."""

import base64

import pytest
import redis.asyncio

from gateway.settings.operations import EncryptionSettings
from tests.cache.valkey import Valkey
from tests.gateway.client import chat
from tests.gateway.conftest import Stage


async def test_gateways_with_one_key_share_answers_that_nobody_else_can_read(
    stage: Stage, valkey: Valkey, raw: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway with the key has the answer; one without computes it; Redis has none of its text."""
    monkeypatch.setenv("REDIS_KEY", base64.b64encode(bytes(32)).decode())
    mock = await stage.mock()
    shared = {"redis": valkey.url}
    encrypted = {**shared, "encryption": EncryptionSettings(key="env:REDIS_KEY")}
    first, second = [await stage.gateway(mock, **encrypted) for _ in range(2)]
    assert (await first.post(chat("a phrase of its own"))).cache == "miss"
    store = first.gateway.cache.redis
    assert store is not None
    await store.flush()
    assert (await second.post(chat("a phrase of its own"))).cache == "hit"
    values = [await raw.get(name) async for name in raw.scan_iter(match="keepgate:entry:*")]
    assert [isinstance(value, bytes) and b"phrase" not in value for value in values] == [True]
    without = await stage.gateway(mock, **shared)
    assert (await without.post(chat("a phrase of its own"))).cache == "miss"


async def test_what_no_key_decrypts_is_shown_to_the_operator(
    stage: Stage, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers and conversations, in the metrics and in the statistics, each time that one is asked for."""
    for name in ("ONE", "OTHER"):
        monkeypatch.setenv(name, base64.b64encode(name.encode() * 16)[:43].decode() + "=")
    mock = await stage.mock()
    shared = {"redis": valkey.url}
    one, other = [
        await stage.gateway(mock, **shared, encryption=EncryptionSettings(key=f"env:{name}"))
        for name in ("ONE", "OTHER")
    ]
    records = {"record": "entry", "reason": "undecryptable"}, {"record": "conversation", "reason": "undecryptable"}
    before = [await other.figure("redis_unreadable_total", **labels) for labels in records]
    assert (await one.post(chat("a secret"))).cache == "miss"
    store = one.gateway.cache.redis
    assert store is not None
    await store.flush()
    response = (await one.post({"model": "mock", "input": "a secret"}, "/v1/responses")).json["id"]

    assert (await other.post(chat("a secret"))).cache == "miss"
    assert (await other.get(f"/v1/responses/{response}")).status == 404
    after = [await other.figure("redis_unreadable_total", **labels) for labels in records]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1]
    stats = (await other.get("/v1/cache/stats")).json
    redis_tier = stats["layers"]["exact"]["tiers"]["redis"]
    assert [redis_tier["undecryptable"], stats["conversations"]["undecryptable"]] == after
    assert redis_tier["writes_dropped"] == await other.figure("redis_writes_dropped_total")
