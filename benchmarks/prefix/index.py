"""The index of KV blocks in Redis: a longest-prefix match beside other ways to ask, and what a block costs there.

As a program it is the client of a server that is there already: `python -m benchmarks.prefix.index --port 6379`, or
with `--fill BLOCKS` it measures the server's memory.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import redis.asyncio
import uvloop

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, run_on_subject_core
from benchmarks.harness.valkey import valkey_binaries, valkey_server
from prefix_store.identity.keys import KeyChain, root_key
from prefix_store.index.index import RedisIndex, open_index
from prefix_store.index.owner import TierKind

_NAMESPACE = bytes(16)
_BLOCK_SIZE = 16
_PROMPT, _PRESENT, _PUBLISHED = 1_000, 700, 100
_FILLED = 100_000
_CHAIN = 500
_ROUNDS = 5
_QUESTIONS = 200
_PATIENT = 10.0
_HOLDER = b"engine-7@memory"
_HOLDERS, _NOBODY = b"*1\r\n$%d\r\n%s\r\n" % (len(_HOLDER), _HOLDER), b"*0\r\n"
_METHOD = """\
A Valkey server over TCP on one core, one client on the other. The prompt has 1,000 blocks of 16 tokens, 700 of which
one engine of eight holds. Five rounds of each way in turn, 200 questions a round (50 and 5 of the slow ones), one after
the other. The lookup is `RedisIndex.match`, with redis-py on uvloop as the engine's server uses them: keys packed, one
script, holders unpacked, with the keys there already; what computing those costs stands beside it. Pipelined HKEYS is
how llm-d asks: a hash for each block whose fields are its holders, all 1,000 asked in one pipeline. Sequential EXISTS
asks block by block until one is missing. Both of these have no client at all: commands are made by hand and replies are
not parsed, which is more than fair to them. Bytes a block are `used_memory` of a new server with 100,000 blocks in
chains of 500, everything that is in it counted, less that of the empty server."""


class Asked(msgspec.Struct, kw_only=True):
    """What one client measured: the median of each round, ms, by what was done."""

    medians: dict[str, list[float]]
    match_p99: list[float]
    match_server: float
    keys: float


class Filled(msgspec.Struct, kw_only=True):
    """Bytes a block in one server, and which server that is."""

    server: str
    one_holder: float
    two_holders: float


async def measure(quick: bool) -> Figure:
    binaries = valkey_binaries()
    async with valkey_server(binaries[0]) as started:
        words = ("--port", str(started.port), *(["--quick"] if quick else []))
        asked = msgspec.json.decode(await run_on_subject_core("benchmarks.prefix.index", *words), type=Asked)
    blocks = _FILLED // 10 if quick else _FILLED
    filled = []
    for binary in binaries:
        async with valkey_server(binary) as started:
            words = ("--port", str(started.port), "--fill", str(blocks))
            said = await run_on_subject_core("benchmarks.prefix.index", *words)
            filled.append(msgspec.json.decode(said, type=Filled))
    return Figure(
        figure="prefix_index", title="The index of KV blocks", method=_METHOD, rows=(*_times(asked), *_sizes(filled))
    )


def _times(asked: Asked) -> list[Row]:
    medians = asked.medians
    beside = {
        "p99 ms": float(np.median(asked.match_p99)),
        "of it in the server ms": asked.match_server,
        "computing the 1,000 keys ms": asked.keys,
    }
    prompt = f"{_PROMPT:,}-block prompt, {_PRESENT} present"
    return [
        Row(
            what=f"{prompt}: one lookup, p50",
            unit="ms",
            rounds=tuple(medians["match"]),
            target=Target("most", 1.0),
            beside=(beside,),
        ),
        Row(what=f"{prompt}: pipelined HKEYS, p50", unit="ms", rounds=tuple(medians["hkeys"])),
        Row(what=f"{prompt}: sequential EXISTS, p50", unit="ms", rounds=tuple(medians["exists"])),
        Row(what=f"publish {_PUBLISHED} new blocks, p50", unit="ms", rounds=tuple(medians["publish"])),
        Row(what=f"withdraw {_PUBLISHED} blocks, p50", unit="ms", rounds=tuple(medians["withdraw"])),
    ]


def _sizes(filled: list[Filled]) -> list[Row]:
    first, *others = filled
    beside: dict[str, float | str] = {"with a second holder": first.two_holders}
    for other in others:
        beside |= {f"in {other.server}": other.one_holder, f"in {other.server} with two": other.two_holders}
    row = Row(
        what=f"memory a block, in {first.server}",
        unit="bytes",
        rounds=(first.one_holder,),
        target=Target("most", 200.0),
        beside=(beside,),
    )
    return [row]


@asynccontextmanager
async def valkey_running() -> AsyncIterator[str]:
    """The URL of a Valkey that keeps nothing, until the end of the block. Raises CannotMeasure."""
    async with valkey_server() as started:
        yield f"redis://127.0.0.1:{started.port}"


class _Bare:
    """A connection without a client: replies are read, by their length, and not parsed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, commands: bytes, as_long_as: bytes) -> bytes:
        self._writer.write(commands)
        return await self._reader.readexactly(len(as_long_as))


@asynccontextmanager
async def _bare(url: str) -> AsyncIterator[_Bare]:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**20)
    yield _Bare(reader, writer)
    writer.close()


async def ask(url: str, quick: bool) -> Asked:
    """All ways to ask, in turn."""
    tokens = np.arange(_PROMPT * _BLOCK_SIZE, dtype=np.int32)
    chain = KeyChain(root_key(_NAMESPACE), _BLOCK_SIZE)
    keys = chain.keys_of(tokens)
    plain = redis.asyncio.from_url(url, protocol=2, driver_info=None)
    async with open_index(url, _NAMESPACE, deadline=_PATIENT, lifetime=60.0) as index, _bare(url) as bare:
        await _engines(index, keys[:_PRESENT])
        await _hashes(plain, keys[:_PRESENT])
        questions = 20 if quick else _QUESTIONS
        measured: dict[str, list[list[float]]] = {}
        for number in range(1 if quick else _ROUNDS):
            for name, times in (await _round(index, bare, chain, keys, questions, number)).items():
                measured.setdefault(name, []).append(times)
        in_server = await _server_time(plain, index, keys, questions)
        making = [await _milliseconds(_keys_made, chain, tokens) for _ in range(questions)]
    await plain.aclose()
    return Asked(
        medians={name: [float(np.median(times)) for times in rounds] for name, rounds in measured.items()},
        match_p99=[float(np.percentile(times, 99)) for times in measured["match"]],
        match_server=in_server,
        keys=float(np.median(making)),
    )


async def _engines(index: RedisIndex, keys: list[bytes]) -> None:
    """Eight engines, of which the last one holds these blocks."""
    owners = [index.own(f"engine-{number}", TierKind.MEMORY, lambda: ()) for number in range(8)]
    await index.next_heartbeat()
    owners[-1].publish(keys)
    await index.flush()


async def _hashes(plain: "redis.asyncio.Redis", keys: list[bytes]) -> None:
    pipeline = plain.pipeline(transaction=False)
    for key in keys:
        pipeline.hset(_hash_name(key), _HOLDER, "1")
    await pipeline.execute()


async def _round(
    index: RedisIndex,
    bare: _Bare,
    chain: KeyChain,
    keys: list[bytes],
    questions: int,
    number: int,
) -> dict[str, list[float]]:
    """Milliseconds of each question, by what was asked."""
    own = index.own(f"writer-{number}", TierKind.MEMORY, lambda: ())
    await index.next_heartbeat()
    times: dict[str, list[float]] = {"match": [await _milliseconds(_match, index, keys) for _ in range(questions)]}
    times["hkeys"] = [await _milliseconds(_hkeys, bare, keys) for _ in range(max(2, questions // 4))]
    times["exists"] = [await _milliseconds(_exists, bare, keys) for _ in range(max(2, questions // 40))]
    times |= {"publish": [], "withdraw": []}
    for question in range(questions):
        seed = np.full(_PUBLISHED * _BLOCK_SIZE, number * questions + question, np.int32)
        new = chain.keys_of(seed)
        times["publish"].append(await _milliseconds(_written, index, own.publish, new))
        times["withdraw"].append(await _milliseconds(_written, index, own.forget, new[::-1]))
    await index.disown(own)
    return times


async def _written(index: RedisIndex, write: Callable[[list[bytes]], None], keys: list[bytes]) -> None:
    write(keys)
    await index.flush()


async def _match(index: RedisIndex, keys: list[bytes]) -> None:
    found = await index.match(keys)
    if found.blocks != _PRESENT:
        raise CannotMeasure(f"The lookup found {found.blocks} blocks, not {_PRESENT}.")


async def _hkeys(bare: _Bare, keys: list[bytes]) -> None:
    replies = await bare.ask(
        b"".join(_command(b"HKEYS", key) for key in keys), _HOLDERS * _PRESENT + _NOBODY * (_PROMPT - _PRESENT)
    )
    if replies.find(_NOBODY) != _PRESENT * len(_HOLDERS):
        raise CannotMeasure(f"HKEYS did not find {_PRESENT} blocks.")


async def _exists(bare: _Bare, keys: list[bytes]) -> None:
    for number, key in enumerate(keys):
        if await bare.ask(_command(b"EXISTS", key), b":0\r\n") == b":0\r\n":
            if number != _PRESENT:
                raise CannotMeasure(f"EXISTS found {number} blocks, not {_PRESENT}.")
            return


async def _keys_made(chain: KeyChain, tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> None:
    chain.keys_of(tokens)


def _hash_name(key: bytes) -> bytes:
    return b"model@" + key.hex().encode()


def _command(name: bytes, key: bytes) -> bytes:
    hash_name = _hash_name(key)
    return b"*2\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(name), name, len(hash_name), hash_name)


async def _server_time(plain: "redis.asyncio.Redis", index: RedisIndex, keys: list[bytes], questions: int) -> float:
    """Milliseconds that the server itself takes for a match."""
    await plain.config_resetstat()
    for _ in range(questions):
        await _match(index, keys)
    return float((await plain.info("commandstats"))["cmdstat_evalsha"]["usec_per_call"]) / 1e3


async def _milliseconds(question: Callable[..., Awaitable[object]], *words: Any) -> float:
    begun = time.perf_counter()
    await question(*words)
    return (time.perf_counter() - begun) * 1e3


async def fill(url: str, blocks: int) -> Filled:
    """Bytes a block: held by one, and by two."""
    plain = redis.asyncio.from_url(url, protocol=2, driver_info=None)
    chain = KeyChain(root_key(_NAMESPACE), _BLOCK_SIZE)
    chains = [chain.keys_of(np.full(_CHAIN * _BLOCK_SIZE, number, np.int32)) for number in range(blocks // _CHAIN)]
    async with open_index(url, _NAMESPACE, deadline=_PATIENT, lifetime=600.0) as index:
        owners = [index.own(f"engine-{number}", TierKind.MEMORY, lambda: ()) for number in range(2)]
        await index.next_heartbeat()
        empty = await _used(plain)
        sizes = []
        for owner in owners:
            for keys in chains:
                owner.publish(keys)
                await index.flush()
            sizes.append((await _used(plain) - empty) / blocks)
        if (found := (await index.match(chains[-1])).blocks) != _CHAIN:
            raise CannotMeasure(f"{found} blocks of a chain are there, not {_CHAIN}.")
        about = await plain.info("server")
    await plain.aclose()
    name = "Valkey" if "valkey_version" in about else "Redis"
    version = about.get("valkey_version", about["redis_version"])
    return Filled(server=f"{name} {version}", one_holder=sizes[0], two_holders=sizes[1])


async def _used(plain: "redis.asyncio.Redis") -> int:
    return int((await plain.info("memory"))["used_memory"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix.index")
    parser.add_argument("--port", type=int, required=True, help="of a server that has nothing else in it")
    parser.add_argument("--fill", type=int, metavar="BLOCKS", help="measure memory with that many blocks")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    options = parser.parse_args()
    url = f"redis://127.0.0.1:{options.port}"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = runner.run(fill(url, options.fill) if options.fill else ask(url, options.quick))
    sys.stdout.buffer.write(msgspec.json.encode(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
