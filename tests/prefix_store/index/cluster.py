"""A real cluster of three nodes as child processes."""

import asyncio
import contextlib
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from tests.cache.valkey import server_binary

_SLOTS = 16_384
_NODES = 3
_READY_WITHIN = 30.0
_ASK_EVERY = 0.02


@dataclass(frozen=True, slots=True)
class Node:
    """One server; `port` for clients."""

    port: int
    bus: int
    process: "asyncio.subprocess.Process"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Cluster:
    """Three masters on loopback; `nodes[3]`, if requested, is a replica of the first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.nodes: list[Node] = []

    @classmethod
    @contextlib.contextmanager
    def running(cls, with_replica: bool = False) -> Iterator["Cluster"]:
        """The cluster, ready for commands, until the end of the block."""
        folder = Path(tempfile.mkdtemp(prefix="kg-"))
        cluster = cls(folder)
        # A loop of its own: the servers outlive the loops of the tests.
        with asyncio.Runner() as runner:
            try:
                runner.run(cluster._start(with_replica))
                yield cluster
            finally:
                runner.run(cluster._stop())
                shutil.rmtree(folder)

    async def _start(self, with_replica: bool) -> None:
        count = _NODES + with_replica
        ports = _free_ports(2 * count)
        for number in range(count):
            self.nodes.append(await self._server(number, ports[2 * number], ports[2 * number + 1]))
        async with asyncio.timeout(_READY_WITHIN):
            for node in self.nodes:
                await _until_answered(node, "PING")
            share = -(-_SLOTS // _NODES)
            for number, node in enumerate(self.nodes[:_NODES]):
                last = min(_SLOTS, (number + 1) * share) - 1
                await _ask(node, "CLUSTER", "ADDSLOTSRANGE", number * share, last)
            for node in self.nodes[1:]:
                await _ask(self.nodes[0], "CLUSTER", "MEET", "127.0.0.1", node.port, node.bus)
            for node in self.nodes:
                while b"cluster_state:ok" not in await _ask(node, "CLUSTER", "INFO"):  # noqa: ASYNC110 (in another process)
                    await asyncio.sleep(_ASK_EVERY)
            if with_replica:
                await self._replicate(self.nodes[3], self.nodes[0])

    async def _replicate(self, replica: Node, master: Node) -> None:
        name = await _ask(master, "CLUSTER", "MYID")
        while True:
            try:
                await _ask(replica, "CLUSTER", "REPLICATE", name.decode())
                break
            except ResponseError:  # it does not have that node yet
                await asyncio.sleep(_ASK_EVERY)
        while b"master_link_status:up" not in await _ask(replica, "INFO", "replication"):  # noqa: ASYNC110
            await asyncio.sleep(_ASK_EVERY)

    async def _server(self, number: int, port: int, bus: int) -> Node:
        folder = self._folder / str(number)
        folder.mkdir()
        process = await asyncio.create_subprocess_exec(
            *(server_binary(), "--port", str(port), "--cluster-port", str(bus), "--bind", "127.0.0.1"),
            *("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--dir", str(folder), "--save", ""),
            *("--loglevel", "warning"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return Node(port, bus, process)

    async def _stop(self) -> None:
        for node in self.nodes:
            node.process.kill()
            await node.process.wait()


async def _ask(node: Node, *words: str | int) -> Any:
    client = redis.asyncio.Redis(port=node.port)
    try:
        # Raw replies: what redis-py makes of CLUSTER INFO depends on its version.
        client.response_callbacks.clear()
        return await client.execute_command(*words)  # type: ignore[no-untyped-call]
    finally:
        await client.aclose()


async def _until_answered(node: Node, *words: str) -> None:
    while True:
        try:
            await _ask(node, *words)
            return
        except RedisError:
            assert node.process.returncode is None, "a node ended while it was starting"
            await asyncio.sleep(_ASK_EVERY)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
