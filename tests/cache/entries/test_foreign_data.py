"""Data that other programs have written to a shared Redis does no harm."""

import time
from typing import Any

import pytest
import redis.asyncio
import xxhash

from cache.entries.answer import StreamAssembler, check_complete
from cache.entries.entry import decode_entry, encode_entry
from cache.entries.generations import Purge
from cache.errors import CorruptEntry, UnstorableAnswer
from cache.stores.redis_store import open_redis_store
from tests.cache.entries.entry_examples import entry
from tests.cache.valkey import Valkey

STRANGE: list[dict[Any, Any]] = [
    {"kind": "new"},
    {"scope": "planet", "name": "x", "token": "y"},
    {"scope": b"\xff", "name": "", "token": ""},
]


@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens", "seconds"])
def test_an_entry_with_a_negative_cost_is_corrupt(field: str) -> None:
    """An entry with a negative cost raises CorruptEntry although its checksum is right."""
    cost: dict[str, Any] = {field: -1}
    data = encode_entry(entry(**cost))
    with pytest.raises(CorruptEntry):
        decode_entry(data)
    assert xxhash.xxh3_64_digest(data[12:]) == data[4:12], "it is not the checksum that gives it away"


async def test_unknown_events_are_skipped(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """Unknown events are skipped, and the purges before and after them are read."""
    async with open_redis_store(valkey.url, deadline=1.0) as store:
        position, _ = await store.purges_since("")
        await store.purge(Purge("model", "a", "1"))
        for strange in STRANGE:
            await raw.xadd("keepgate:purges", strange)
        await store.purge(Purge("model", "b", "2"))
        _, events = await store.purges_since(position)

    assert events == [Purge("model", "a", "1"), Purge("model", "b", "2")]


@pytest.mark.parametrize("change", [{"fresh_for": float("inf")}, {"created": float("nan")}, {"family": "poems"}])
def test_an_entry_with_an_impossible_value_is_corrupt(change: dict[str, Any]) -> None:
    """An entry with a value that is never written raises CorruptEntry."""
    with pytest.raises(CorruptEntry):
        decode_entry(encode_entry(entry(**change)))


async def test_generations_that_are_not_text_are_skipped(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """Generations that are not text are skipped, and the others are read."""
    async with open_redis_store(valkey.url, deadline=1.0) as store:
        await raw.hset("keepgate:generations", b"\xff", b"\xfe")
        await store.purge(Purge("model", "a", "1"))
        assert await store.generations() == {"model:a": "1"}


@pytest.mark.parametrize("message", ["hi", [1], 5])
def test_a_message_that_cannot_be_streamed_is_not_kept(message: Any) -> None:
    """An answer whose message cannot be replayed as a stream raises UnstorableAnswer."""
    with pytest.raises(UnstorableAnswer):
        check_complete({"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}})


def seconds_to_assemble(calls: int) -> float:
    chunk = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": n, "id": "x"} for n in range(calls)]}}]}
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        StreamAssembler().add(chunk)
        best = min(best, time.process_time() - began)
    return best


def test_many_tool_calls_cost_linear_time() -> None:
    """Assembling many tool calls takes linear time."""
    assert seconds_to_assemble(20_000) < 12 * seconds_to_assemble(5_000)
