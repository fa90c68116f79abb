"""Encryption of what is in Redis: nothing readable, nothing exchangeable, keys that can be replaced."""

import base64
import logging
import os
import subprocess
import sys

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from cache.entries.entry import encode_entry
from cache.errors import CorruptEntry, StoreUnavailable, Undecryptable
from cache.stores.conversations import Conversations, Record, encode_record
from cache.stores.encryption import AesGcm, encryption_with
from cache.stores.redis_store import open_redis_store
from tests.cache.conftest import PATIENT
from tests.cache.entries.entry_examples import entry
from tests.cache.valkey import Valkey

OLD, NEW = (base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))
TEXT = b"the capital of France is Paris"


@given(st.binary(max_size=100), st.text(max_size=20))
async def test_what_was_sealed_is_opened(value: bytes, name: str) -> None:
    """A value is opened under its own name with the key that sealed it, and never stored in the clear."""
    name = name.encode(errors="replace").decode()
    encryption = AesGcm([OLD])
    sealed = await encryption.seal(name, value)
    assert await encryption.open(name, sealed) == value
    assert len(sealed) == len(value) + 36
    assert sealed != await encryption.seal(name, value)  # another nonce
    with pytest.raises(CorruptEntry):
        await encryption.open(name + "x", sealed)


async def test_every_damaged_byte_is_noticed() -> None:
    """No byte of a stored value can be changed, and none be missing."""
    encryption = AesGcm([OLD])
    sealed = await encryption.seal("name", TEXT)
    for place in range(len(sealed)):
        damaged = sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :]
        with pytest.raises((CorruptEntry, Undecryptable)):
            await encryption.open("name", damaged)
        with pytest.raises((CorruptEntry, Undecryptable)):
            await encryption.open("name", sealed[:place])


async def test_keys_can_be_replaced() -> None:
    """Values of an old key are read while it is listed, and new ones are written with the first key."""
    sealed = await AesGcm([OLD]).seal("name", TEXT)
    rotated = AesGcm([NEW, OLD])
    assert await rotated.open("name", sealed) == TEXT
    assert await AesGcm([NEW]).open("name", await rotated.seal("name", TEXT)) == TEXT
    with pytest.raises(Undecryptable, match="another key"):
        await AesGcm([NEW]).open("name", sealed)


@pytest.mark.parametrize("key", ["", "x", base64.b64encode(bytes(31)).decode(), base64.b64encode(bytes(33)).decode()])
def test_a_key_that_is_none_is_refused(key: str) -> None:
    """A key that is not base64 of 32 bytes is refused, and not shown."""
    with pytest.raises(ValueError, match="key 2 is no base64 of 32 bytes") as raised:
        encryption_with([OLD, key])
    assert not key or f"{key!r}" not in str(raised.value)


async def test_nothing_in_redis_is_readable(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """Entries and conversations are stored encrypted, and are read by those that have the key."""
    encryption = encryption_with([OLD])
    async with open_redis_store(valkey.url, PATIENT, encryption) as store:
        small, large = entry("public.1", body=TEXT), entry("public.2", body=TEXT * 20_000)
        for each in (small, large):
            await store.put(each, 60)
        await store.flush()
        record = encode_record(Record([{"content": TEXT.decode()}], {"output": []}))
        await Conversations(store, 60).save("public", "r1", record)
        assert await Conversations(store, 60).load("public", "r1") == record
        assert await store.get("public.1") == small
        assert await store.get("public.2") == large
    values = [await raw.get(key) for key in await raw.keys()]
    assert len(values) == 3
    assert not any(b"Paris" in value or b"public" in value for value in values if isinstance(value, bytes))


@pytest.mark.parametrize("keys", [[NEW], []])
async def test_without_its_key_an_entry_is_a_miss(
    valkey: Valkey, raw: redis.asyncio.Redis, keys: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """An entry and a conversation under another or a lost key are misses that are counted, and stay for others."""
    async with open_redis_store(valkey.url, PATIENT, encryption_with([OLD])) as store:
        await store.put(entry("public.1", body=TEXT), 60)
        await store.flush()
        await Conversations(store, 60).save("public", "r1", encode_record(Record([], {"output": []})))
    async with open_redis_store(valkey.url, PATIENT, encryption_with(keys)) as store:
        conversations = Conversations(store, 60)
        with caplog.at_level(logging.WARNING):
            assert [await store.get("public.1") for _ in range(3)] == [None] * 3
        assert await conversations.load("public", "r1") is None
        assert (store.undecryptable, conversations.undecryptable) == (3, 1)
        assert (store.corrupt_entries, store.breaker.times_opened) == (0, 0)
        assert len([record for record in caplog.records if "counts as a miss" in record.message]) == 1
    assert await raw.exists("keepgate:entry:public.1") == 1


async def test_a_plain_entry_is_a_miss_where_entries_are_encrypted(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """Whoever can write to Redis, and has no key, can put no answer there."""
    await raw.set("keepgate:entry:public.1", encode_entry(entry("public.1")))
    async with open_redis_store(valkey.url, PATIENT, encryption_with([OLD])) as store:
        assert await store.get("public.1") is None
        assert store.undecryptable == 1


async def test_an_encrypted_value_cannot_be_moved_to_another_key(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """The bytes of one entry are no other entry, also not of the same name in another namespace."""
    async with open_redis_store(valkey.url, PATIENT, encryption_with([OLD])) as store:
        await store.put(entry("a.1", body=TEXT), 60)
        await store.flush()
        await raw.copy("keepgate:entry:a.1", "keepgate:entry:b.1")
        with pytest.raises(StoreUnavailable, match="damaged, or of another name"):
            await store.get("b.1")
        assert await raw.exists("keepgate:entry:b.1") == 0


def test_the_library_is_loaded_only_where_it_is_used() -> None:
    """Without a key the package cryptography is not imported."""
    code = (
        "import sys; from cache.stores.encryption import encryption_with; e = encryption_with(sys.argv[1:]);"
        "print(any(name.startswith('cryptography') for name in sys.modules))"
    )
    said = [
        subprocess.run([sys.executable, "-c", code, *keys], capture_output=True, text=True, check=True, env=os.environ)
        for keys in ([], [OLD])
    ]
    assert [each.stdout.strip() for each in said] == ["False", "True"]
