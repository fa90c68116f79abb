"""How long an operator waits for figures, pages of entries and explanations when there are a million entries."""

import statistics
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec
import redis.asyncio

from benchmarks.harness.client import Client
from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, Server, cores, gateway, upstream
from benchmarks.harness.valkey import valkey_server
from cache.entries.entry import Entry, encode_entry
from cache.entries.key import request_key
from cache.index.fingerprint import encode_fingerprint, fingerprint
from cache.index.redis_index import RedisIndex
from cache.stores.redis_store import open_redis_store

_MODELS, _NAMESPACES = 10, 100
_AT_ONCE = 2_000
_BODY = msgspec.json.encode({"choices": [{"message": {"role": "assistant", "content": "word " * 60}}]})
_LIFETIME = 86_400
_SPREAD = 80_000
"""Seconds over which the entries were made."""
_HOT = 5_000
_TARGET = Target("most", 20.0)
_FIRST_NAMESPACE = "tenant0"
_METHOD = f"""\
The entries, of {_MODELS} models and {_NAMESPACES} tenants, {len(_BODY)} B each, are written to a Valkey, and to the
index as a gateway writes it; {_HOT:,} of them were served. Then one gateway, one worker on one core, with an empty
memory tier, is asked over HTTP by one client, one question after the other. An answer is compared with the same among
a thousand entries. The Valkey runs on the core of the load."""


async def measure(quick: bool) -> Figure:
    many = 20_000 if quick else 1_000_000
    rounds = 5 if quick else 40
    small, large = await _measured(1_000, rounds), await _measured(many, rounds)
    rows = []
    for what, durations in large.durations.items():
        beside = {
            "p99 ms": _p99(durations),
            "among 1,000 entries, p50 ms": statistics.median(small.durations[what]),
        }
        rows.append(
            Row(what=f"{what}, {many:,} entries", unit="ms", rounds=tuple(durations), target=_TARGET, beside=(beside,))
        )
    index = Row(what="index in Redis, of an entry", unit="B", rounds=(large.index_bytes / many,))
    return Figure(figure="inspection", title="Inspecting the cache", method=_METHOD, rows=(*rows, index))


class _Measured(msgspec.Struct):
    """Milliseconds of each answer, by question, and what the index takes in Redis."""

    durations: Mapping[str, list[float]]
    index_bytes: int


async def _measured(entries: int, rounds: int) -> _Measured:
    async with upstream() as origin, valkey_server() as valkey, _client_of(valkey) as raw:
        url = f"redis://127.0.0.1:{valkey.port}/0"
        await _fill(raw, entries)
        before = await _used(raw)
        await _index(url, entries)
        index_bytes = await _used(raw) - before
        async with (
            gateway(origin.url, on=cores().subject, redis=url, cache_redis_deadline="2") as subject,
            Client(subject) as client,
        ):
            durations = {what: await _ask(client, *asked, rounds) for what, asked in _questions().items()}
    return _Measured(durations, index_bytes)


def _questions() -> dict[str, tuple[str, str, bytes]]:
    body = {**_body(0, 0), "temperature": 0.7}
    entries, explain = "/v1/cache/entries", f"/v1/cache/explain?namespace={_FIRST_NAMESPACE}"
    return {
        "statistics": ("GET", "/v1/cache/stats", b""),
        "statistics by model": ("GET", "/v1/cache/stats?by=model", b""),
        "newest 50 entries": ("GET", entries, b""),
        "newest 50 of a model": ("GET", f"{entries}?model=model-1", b""),
        "newest 50 of a tenant": ("GET", f"{entries}?namespace={_FIRST_NAMESPACE}", b""),
        "hottest 50": ("GET", f"{entries}?order=hits", b""),
        "50 entries of a certain age": ("GET", f"{entries}?min_age=20000", b""),
        "explanation of a miss": ("POST", explain, msgspec.json.encode(body)),
    }


async def _ask(client: Client, method: str, path: str, body: bytes, rounds: int) -> list[float]:
    durations = []
    for turn in range(rounds + 2):
        answer = await client.post(body, path, method)
        if answer.status != 200:
            raise CannotMeasure(f"{method} {path} was answered with {answer.status}: {answer.body[:300]!r}")
        decoded = msgspec.json.decode(answer.body)
        if "explain" in path and not decoded["nearest"]:
            raise CannotMeasure("The explanation has no nearest entry.")
        if "entries" in path and not decoded["data"]:
            raise CannotMeasure(f"{path} has no entry.")
        if turn >= 2:  # the first answers open connections
            durations.append(answer.seconds * 1e3)
    return durations


def _body(number: int, namespace: int) -> dict[str, object]:
    question = f"question {_letters(number)} of tenant {_letters(namespace)}"
    return {
        "model": f"model-{number % _MODELS}",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}],
    }


def _letters(number: int) -> str:
    """A number as a word: digits do not tell questions apart."""
    return "".join(chr(97 + int(digit)) for digit in str(number))


def _entry(number: int, age: float, now: float) -> Entry:
    body = _body(number, number % _NAMESPACES)
    key = request_key(f"tenant{number % _NAMESPACES}", "chat.completions", body)
    return Entry(
        id=key.id,
        proof=key.proof,
        family="chat.completions",
        model=str(body["model"]),
        body=_BODY,
        created=now - age,
        fresh_for=_LIFETIME,
        generation="0.0.0",
        has_usage=True,
        prompt_tokens=20,
        completion_tokens=60,
        seconds=1.0,
        asked=encode_fingerprint(fingerprint(body)),
    )


async def _fill(raw: redis.asyncio.Redis, entries: int) -> None:
    now = time.time()
    for start in range(0, entries, _AT_ONCE):
        pipeline = raw.pipeline(transaction=False)
        for number in range(start, min(start + _AT_ONCE, entries)):
            entry = _entry(number, number * _SPREAD / entries, now)
            pipeline.set(f"keepgate:entry:{entry.id}", encode_entry(entry), ex=_LIFETIME)
        await pipeline.execute()


async def _index(url: str, entries: int) -> None:
    now = time.time()
    async with open_redis_store(url, 30.0) as store:
        index = RedisIndex(store)
        for start in range(0, entries, _AT_ONCE):
            for number in range(start, min(start + _AT_ONCE, entries)):
                entry = _entry(number, number * _SPREAD / entries, now)
                index.stored(entry)
                if number < _HOT:
                    index.hit(entry.id)
            await index.flush()


@asynccontextmanager
async def _client_of(valkey: Server) -> AsyncIterator[redis.asyncio.Redis]:
    client = redis.asyncio.Redis(port=valkey.port)
    try:
        yield client
    finally:
        await client.aclose()


async def _used(raw: redis.asyncio.Redis) -> int:
    info = await raw.info("memory")
    return int(info["used_memory"])


def _p99(durations: list[float]) -> float:
    return sorted(durations)[max(0, round(len(durations) * 0.99) - 1)]
