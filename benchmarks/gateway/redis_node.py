"""What a Redis node has to do for gateways, and where it saturates.

As a program it is a client of a server that is there already: `python -m benchmarks.gateway.redis_node --port 6379
--command GET --seconds 4`.
"""

import argparse
import asyncio
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import redis.asyncio

from benchmarks.harness.client import Client
from benchmarks.harness.everything import EVERYTHING, gateway_with_everything
from benchmarks.harness.measurement import Figure, Row
from benchmarks.harness.processes import CannotMeasure, Server, cores, run_on_subject_core, upstream
from benchmarks.harness.request_bodies import chat, distinct_parts
from benchmarks.harness.valkey import valkey_server
from benchmarks.harness.wrk import DistinctRequests, Run, load, same_request

_CONNECTIONS = 32
_SERVICE_TIME = 0.05
_VALUE_BYTES = 2_048
_KEYS = 1_000
_ASKED_AGAIN = 500
_METHOD = f"""\
A Valkey server over TCP, and one gateway that has it as its Redis, with wrk's 32 connections. The figure is CPU time of
Valkey's process, by its CPU clock, divided by requests; it has one thread that does all commands. A miss looks its
answer up, is held to its limits, and has the answer written; the upstream takes 50 ms, and connections pause for up to
100 ms. For hits from Redis {_ASKED_AGAIN} chats come in turn, of which the gateway's own memory holds none. What stands
behind a figure are the gateway's CPU time, the commands of a request by INFO commandstats, and how many such requests a
second would take all of a node's time. At rest the worker asks for purges, for what others have routed and the like.
{EVERYTHING}
In the last rows a client on the other core asks the server directly, by 32 connections with one command each at a time:
GET and SET of 2 KB, made by hand, of replies that are not parsed. "Share of a core" near 1 means that Valkey was the
limit and not the client."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """One run: what the gateway and the node spent."""

    run: Run
    node_cpu: float
    """Seconds."""
    commands: dict[str, int]


class Hammered(msgspec.Struct):
    """What the client program has done."""

    commands: int
    seconds: float


async def measure(quick: bool) -> Figure:
    rounds, seconds = (1, 1) if quick else (3, 4)
    rows: list[Row] = []
    async with upstream(service_time=_SERVICE_TIME) as origin, valkey_server() as node:
        url = f"redis://127.0.0.1:{node.port}"
        with tempfile.NamedTemporaryFile() as file:
            file.write(chat())
            file.flush()
            body = Path(file.name)
            async with gateway_with_everything(origin.url, on=cores().subject, redis=f"{url}/0") as subject:
                distinct = DistinctRequests(distinct_parts())

                async def misses() -> Run:
                    script = distinct.script(seconds * 20_000, 2 * _SERVICE_TIME, subject)
                    return await load(subject, script, connections=_CONNECTIONS, seconds=seconds)

                async def hits() -> Run:
                    script = same_request(body, key=subject.key)
                    return await load(subject, script, connections=_CONNECTIONS, seconds=seconds)

                rows.append(await _row("miss, everything on: CPU of Redis", node, misses, rounds))
                rows.append(await _at_rest(node, rounds, seconds))
                await _ask_once(subject)
                rows.append(await _row("hit from memory, everything on: CPU of Redis", node, hits, rounds))
            async with gateway_with_everything(
                origin.url, on=cores().subject, redis=f"{url}/1", cache_memory="0"
            ) as forgetful:
                few = DistinctRequests(distinct_parts()).script(_ASKED_AGAIN, 0.0, forgetful)

                async def hits_of_redis() -> Run:
                    return await load(forgetful, few, connections=_CONNECTIONS, seconds=seconds)

                rows.append(await _row("hit from Redis: CPU of Redis", node, hits_of_redis, rounds))
        rows += [await _hammer(node, command, rounds, seconds) for command in ("GET", "SET")]
    return Figure(figure="redis_node", title="What a Redis node answers", method=_METHOD, rows=tuple(rows))


async def _ask_once(subject: Server) -> None:
    """So that the answer is stored."""
    async with Client(subject) as client:
        answer = await client.post(chat())
    if answer.status != 200:
        raise CannotMeasure(f"The gateway answered with status {answer.status}: {answer.body[:200]!r}")


async def _at_rest(node: Server, rounds: int, seconds: int) -> Row:
    """What one worker asks for without any request."""
    spent: list[float] = []
    for _ in range(rounds):
        before, begun = node.cpu_seconds(), time.monotonic()
        await asyncio.sleep(seconds)
        spent.append((node.cpu_seconds() - before) / (time.monotonic() - begun) * 1e6)
    return Row(what="worker at rest, everything on: CPU of Redis a second", unit="µs", rounds=tuple(spent))


async def _row(what: str, node: Server, run: Callable[[], Awaitable[Run]], rounds: int) -> Row:
    await run()  # connections are open, and the code is warm
    measured = [await _measured(node, run) for _ in range(rounds)]
    return Row(
        what=what,
        unit="µs",
        rounds=tuple(each.node_cpu / each.run.requests * 1e6 for each in measured),
        beside=tuple(_in_numbers(each) for each in measured),
    )


async def _measured(node: Server, run: Callable[[], Awaitable[Run]]) -> _Measured:
    plain = redis.asyncio.from_url(f"redis://127.0.0.1:{node.port}", protocol=2)
    try:
        await plain.config_resetstat()
        before = node.cpu_seconds()
        done = await run()
        spent = node.cpu_seconds() - before
        told = await plain.info("commandstats")
    finally:
        await plain.aclose()
    commands = {name.removeprefix("cmdstat_"): int(fields["calls"]) for name, fields in told.items()}
    return _Measured(done, spent, commands)


def _in_numbers(measured: _Measured) -> dict[str, float]:
    run = measured.run
    each = {
        name: calls / run.requests
        for name, calls in measured.commands.items()
        if name in ("get", "set", "evalsha", "hincrby", "xadd", "expire")
    }
    return {
        "requests per second": run.per_second,
        "gateway's CPU µs a request": run.cpu_per_request * 1e6,
        "share of a core, Redis": measured.node_cpu / run.seconds,
        "requests a second that a node can take": run.requests / measured.node_cpu,
        **{f"{name.upper()} a request": count for name, count in each.items() if count > 0.001},
    }


async def _hammer(node: Server, command: str, rounds: int, seconds: int) -> Row:
    rates, beside = [], []
    for _ in range(rounds):
        before = node.cpu_seconds()
        words = ("--port", str(node.port), "--command", command, "--seconds", str(seconds))
        said = await run_on_subject_core("benchmarks.gateway.redis_node", *words)
        spent = node.cpu_seconds() - before
        done = msgspec.json.decode(said, type=Hammered)
        rates.append(done.commands / done.seconds)
        beside.append({"share of a core, Redis": spent / done.seconds, "CPU µs a command": spent / done.commands * 1e6})
    what = {"GET": "lookups of 2 KB, directly", "SET": "writes of 2 KB, directly"}[command]
    return Row(what=what, unit="per second", rounds=tuple(rates), beside=tuple(beside))


def hammer(port: int, command: str, seconds: float) -> Hammered:
    """Send commands by many connections, one at a time each."""
    value = bytes(_VALUE_BYTES)
    names = [b"keepgate:bench:%06d" % number for number in range(_KEYS)]
    writes = [_encoded(b"SET", name, value, b"PX", b"60000") for name in names]
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(_CONNECTIONS)]
    try:
        for connection in sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for write in writes:
            sockets[0].sendall(write)
            _receive(sockets[0], b"+OK\r\n")
        commands = [_encoded(b"GET", name) for name in names] if command == "GET" else writes
        reply = b"$%d\r\n%s\r\n" % (len(value), value) if command == "GET" else b"+OK\r\n"
        done = 0
        begun = now = time.perf_counter()
        while now - begun < seconds:
            for connection in sockets:
                connection.sendall(commands[done % _KEYS])
                done += 1
            for connection in sockets:
                _receive(connection, reply)
            now = time.perf_counter()
        return Hammered(done, now - begun)
    finally:
        for connection in sockets:
            connection.close()


def _receive(connection: socket.socket, reply: bytes) -> None:
    """Raises CannotMeasure for another reply."""
    received = connection.recv(len(reply), socket.MSG_WAITALL)
    if received != reply:
        raise CannotMeasure(f"The server said {received[:100]!r}")


def _encoded(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway.redis_node")
    parser.add_argument("--port", type=int, required=True, help="of a server that has nothing else in it")
    parser.add_argument("--command", choices=["GET", "SET"], required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    sys.stdout.buffer.write(msgspec.json.encode(hammer(options.port, options.command, options.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
