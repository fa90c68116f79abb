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
    shared = {"redis": valkey.url, "cache": {"redis_deadline": 2.0}}
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
