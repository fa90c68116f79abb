"""What others may have written to a shared Redis harms nobody."""

import pytest
import xxhash

from cache.entry import decode_entry, encode_entry
from cache.errors import CorruptEntry
from cache.generations import Purge
from cache.redis_store import open_redis_store
from tests.cache.entries import entry
from tests.cache.valkey import Valkey

STRANGE: list[dict[str, str | bytes]] = [
    {"kind": "new"},
    {"scope": "planet", "name": "x", "token": "y"},
    {"scope": b"\xff", "name": "", "token": ""},
]


@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens", "seconds"])
def test_an_entry_with_a_cost_that_cannot_be_is_corrupt(field: str) -> None:
    """Sums over all hits would be wrong for good."""
    data = encode_entry(entry(**{field: -1}))
    with pytest.raises(CorruptEntry):
        decode_entry(data)
    assert xxhash.xxh3_64_digest(data[12:]) == data[4:12], "it is not the checksum that gives it away"


async def test_events_of_another_version_are_passed_over(valkey: Valkey) -> None:
    """Purges before and after an unknown event are applied."""
    async with open_redis_store(valkey.url, deadline=1.0) as store:
        position, _ = await store.purges_since("")
        await store.purge(Purge("model", "a", "1"))
        for strange in STRANGE:
            await store._client.xadd("keepgate:purges", strange)
        await store.purge(Purge("model", "b", "2"))
        _, events = await store.purges_since(position)

    assert events == [Purge("model", "a", "1"), Purge("model", "b", "2")]
