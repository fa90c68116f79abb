"""A real cluster on loopback, and masters watched by real sentinels, as child processes."""

import asyncio
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from tests.cache.valkey import server_binary
from tests.waiting import until

SLOTS = 16_384
_READY_WITHIN = 30.0
_NODE_TIMEOUT = 1000
_COMMON = ("--save", "", "--repl-diskless-sync-delay", "0")


@dataclass(slots=True)
class Node:
    """A server; `port` is for clients, `bus` for the other nodes of a cluster."""

    port: int
    folder: Path
    options: tuple[str, ...]
    bus: int = 0
    process: "asyncio.subprocess.Process | None" = None

    async def start(self) -> None:
        """Return when the server answers."""
        self.folder.mkdir(exist_ok=True)
        self.process = await asyncio.create_subprocess_exec(
            *(server_binary(), *self.options, "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--dir", str(self.folder), "--loglevel", "warning"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await until(self._answers, _READY_WITHIN)

    async def ask(self, *words: str | int | bytes) -> Any:
        """The raw reply to a command."""
        client = redis.asyncio.Redis(port=self.port, protocol=2, single_connection_client=True)
        try:
            client.response_callbacks.clear()
            if self.bus:  # else a replica of a cluster answers nothing
                await client.execute_command("READONLY")  # type: ignore[no-untyped-call]
            return await client.execute_command(*words)  # type: ignore[no-untyped-call]
        finally:
            await client.aclose()

    async def says(self, text: str, *words: str) -> bool:
        try:
            return text.encode() in await self.ask(*words)
        except RedisError:
            return False

    def freeze(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """End the server as a power cut does."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def _answers(self) -> bool:
        assert self.process
        assert self.process.returncode is None, "the server ended while it was starting"
        try:
            await self.ask("PING")
        except RedisError:
            return False
        return True


@dataclass(slots=True)
class ValkeyCluster:
    """Three masters, each with a third of the slots; `replicas[n]`, where there are some, is that of `masters[n]`."""

    masters: list[Node]
    replicas: list[Node]

    @property
    def nodes(self) -> list[Node]:
        return [*self.masters, *self.replicas]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.masters)

    def master_of(self, key: str) -> int:
        """Which of the masters has a key, before anything has moved."""
        return redis.crc.key_slot(key.encode()) * 3 // SLOTS

    async def names(self) -> list[str]:
        """The cluster's names of the masters."""
        return [(await node.ask("CLUSTER", "MYID")).decode() for node in self.masters]

    async def flush(self) -> None:
        for node in self.masters:
            await node.ask("FLUSHALL")

    async def begin_moving(self, slot: int, source: int, target: int) -> None:
        names = await self.names()
        await self.masters[target].ask("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
        await self.masters[source].ask("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])

    async def move_keys(self, slot: int, source: int, target: int) -> None:
        while keys := await self.masters[source].ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
            port = self.masters[target].port
            await self.masters[source].ask("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)

    async def end_moving(self, slot: int, target: int) -> None:
        names = await self.names()
        for node in (self.masters[target], *(n for n in self.masters if n is not self.masters[target])):
            await node.ask("CLUSTER", "SETSLOT", slot, "NODE", names[target])

    def _write_configuration(self) -> None:
        """Before the start: a cluster that forms by itself takes some seconds for it."""
        lines = []
        for number, node in enumerate(self.nodes):
            third, is_master = number % 3, number < 3
            slots = f" {-(-third * SLOTS // 3)}-{-(-(third + 1) * SLOTS // 3) - 1}" if is_master else ""
            role = "master -" if is_master else f"slave {_name(third)}"
            lines.append(f"{_name(number)} 127.0.0.1:{node.port}@{node.bus} {role} 0 0 {third + 1} connected{slots}")
        for number, node in enumerate(self.nodes):
            own = [line.replace(" master ", " myself,master ").replace(" slave ", " myself,slave ") for line in lines]
            text = [*lines[:number], own[number], *lines[number + 1 :], "vars currentEpoch 3 lastVoteEpoch 0", ""]
            node.folder.mkdir()
            (node.folder / "nodes.conf").write_text("\n".join(text))

    async def _ready(self) -> None:
        for node in self.nodes:
            await until(lambda node=node: node.says("cluster_state:ok", "CLUSTER", "INFO"), _READY_WITHIN)  # type: ignore[misc]
            await until(lambda node=node: self._knows_all(node), _READY_WITHIN)  # type: ignore[misc]
        for node in self.replicas:
            await until(lambda node=node: node.says("link_status:up", "INFO", "replication"), _READY_WITHIN)  # type: ignore[misc]

    async def _knows_all(self, node: Node) -> bool:
        slots = await node.ask("CLUSTER", "SLOTS")
        return len(slots) == 3 and all(len(entry) == 3 + bool(self.replicas) for entry in slots)


@dataclass(slots=True)
class ValkeySentinels:
    """Three sentinels that watch `servers[0]`, with replicas, under the name `main`."""

    servers: list[Node]
    sentinels: list[Node]

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(f"127.0.0.1:{node.port}" for node in self.sentinels) + "/main"

    @property
    def nodes(self) -> list[Node]:
        return [*self.servers, *self.sentinels]

    async def flush(self) -> None:
        await (await self.master()).ask("FLUSHALL")

    async def master(self) -> Node:
        """The one that the sentinels name."""
        _, port = await self.sentinels[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
        return next(node for node in self.servers if node.port == int(port))


@asynccontextmanager
async def running_cluster(*options: str, with_replicas: bool = False) -> AsyncIterator[ValkeyCluster]:
    """A cluster, ready for commands, until the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="kg-"))
    ports = _free_ports(12 if with_replicas else 6)
    settings = (*_COMMON, "--cluster-enabled", "yes", "--cluster-node-timeout", str(_NODE_TIMEOUT), *options)
    nodes = [
        Node(port, folder / str(port), (*settings, "--cluster-port", str(bus)), bus)
        for port, bus in zip(ports[::2], ports[1::2], strict=True)
    ]
    cluster = ValkeyCluster(nodes[:3], nodes[3:])
    try:
        cluster._write_configuration()
        await asyncio.gather(*(node.start() for node in nodes))
        await cluster._ready()
        yield cluster
    finally:
        await asyncio.gather(*(node.kill() for node in nodes))
        shutil.rmtree(folder)


@asynccontextmanager
async def running_sentinels(*options: str) -> AsyncIterator[ValkeySentinels]:
    """A master with two replicas and three sentinels that agree, until the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="kg-"))
    ports = _free_ports(6)
    replica = ("--replicaof", f"127.0.0.1 {ports[0]}")
    servers = [
        Node(port, folder / str(port), (*_COMMON, *options, *(replica if number else ())))
        for number, port in enumerate(ports[:3])
    ]
    sentinels = []
    for number, port in enumerate(ports[3:], start=3):
        file = folder / f"{port}.conf"
        # What they would find out from each other within some seconds.
        replicas = [f"sentinel known-replica main 127.0.0.1 {each}" for each in ports[1:3]]
        others = [
            f"sentinel known-sentinel main 127.0.0.1 {each} {_name(place)}"
            for place, each in enumerate(ports[3:], start=3)
            if place != number
        ]
        settings = [
            f"sentinel myid {_name(number)}",
            f"sentinel monitor main 127.0.0.1 {ports[0]} 2",
            "sentinel down-after-milliseconds main 500",
            "sentinel failover-timeout main 3000",
        ]
        file.write_text("\n".join([*settings, *replicas, *others, ""]))
        sentinels.append(Node(port, folder / str(port), (str(file), "--sentinel")))
    try:
        await asyncio.gather(*(node.start() for node in servers))
        for node in servers[1:]:
            await until(lambda node=node: node.says("link_status:up", "INFO", "replication"), _READY_WITHIN)  # type: ignore[misc]
        await asyncio.gather(*(node.start() for node in sentinels))
        for node in sentinels:
            await until(lambda node=node: _is_whole(node), _READY_WITHIN)  # type: ignore[misc]
        yield ValkeySentinels(servers, sentinels)
    finally:
        await asyncio.gather(*(node.kill() for node in (*servers, *sentinels)))
        shutil.rmtree(folder)


async def _is_whole(sentinel: Node) -> bool:
    reply = await sentinel.ask("SENTINEL", "MASTER", "main")
    fields: dict[bytes, bytes] = dict(zip(reply[::2], reply[1::2], strict=True))
    return (fields[b"num-slaves"], fields[b"num-other-sentinels"], fields[b"flags"]) == (b"2", b"2", b"master")


def _name(number: int) -> str:
    """A node's name in a cluster, and a sentinel's."""
    return f"{number + 1:040x}"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
