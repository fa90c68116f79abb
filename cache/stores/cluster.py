"""A Redis Cluster: each key is in one of 16,384 slots, and each slot at one master.

A reply may say that a slot has moved (MOVED) or is moving (ASK): that is followed at once. A server that does not
answer is left out until it does, so that it costs the others one deadline once.
"""

import asyncio
import itertools
import logging
from collections import defaultdict
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, RedisError, ResponseError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError

from cache.errors import StoreUnavailable
from cache.stores.redis_connections import CONNECT_SECONDS, Command, Connector, RedisConnections
from cache.stores.redis_url import Address, RedisUrl
from cache.stores.topology import ping, results, text_of

log = logging.getLogger(__name__)

_GENERATIONS = b"keepgate:generations"
_MAX_REDIRECTS = 5
_PAUSE = 0.02
_NODE_SECONDS = 0.5
_LOOK_EVERY = 0.25
_SECONDS_BETWEEN_REFRESHES = 0.1


class NodeDown(RedisError):
    """The server of a key is known not to answer."""


class Cluster:
    """The masters of a cluster, and their replicas for reads that may be old."""

    # Its slot is that of the hash of generations, whose name is no tag in itself.
    purges_name = "{keepgate:generations}:purges"

    def __init__(self, url: RedisUrl, connector: Connector) -> None:
        self._url = url
        self._connector = connector
        self._nodes: dict[Address, RedisConnections] = {}
        self._replica_nodes: dict[Address, RedisConnections] = {}
        self._masters: list[Address | None] = [None] * 2**14
        self._replicas: dict[Address, list[Address]] = {}
        self._down: set[Address] = set()
        self._turn = itertools.count()
        self._is_stale = asyncio.Event()

    async def ask(self, *commands: Command) -> list[Any]:
        if len(commands) == 1:
            return [await self._ask_one(commands[0])]
        by_node: defaultdict[Address, list[int]] = defaultdict(list)
        for number, command in enumerate(commands):
            by_node[self._master_of(_slot_of(command))].append(number)
        replies: list[Any] = [None] * len(commands)

        async def ask(address: Address, numbers: list[int]) -> None:
            if address in self._down:
                answers: list[Any] = [_down(address)] * len(numbers)
            else:
                answers = await self._node(address).ask(*(commands[number] for number in numbers))
            for number, reply in zip(numbers, answers, strict=True):
                replies[number] = reply

        asked = await asyncio.gather(*(ask(*part) for part in by_node.items()), return_exceptions=True)
        for outcome in asked:
            if isinstance(outcome, BaseException):
                raise outcome
        for number, reply in enumerate(replies):
            if isinstance(reply, AskError | TryAgainError):
                replies[number] = await self._follow(commands[number], reply)
        return replies

    async def ask_replica(self, command: Command) -> Any:
        replicas = self._replicas.get(self._master_of(_slot_of(command)))
        if not self._url.reads_replicas or not replicas:
            return await self._ask_one(command)
        address = replicas[next(self._turn) % len(replicas)]
        try:
            (reply,) = await self._replica_node(address).ask(command)
        except (RedisError, OSError):
            self._lose_replica(address)
            return await self._ask_one(command)
        except asyncio.CancelledError:  # perhaps by a deadline, which the next lookups should not wait for as well
            self._lose_replica(address)
            raise
        return await self._ask_one(command) if isinstance(reply, ResponseError) else reply

    async def transact(self, *commands: Command) -> list[Any]:
        slot = _slot_of(commands[0])
        address = self._master_of(slot)
        prefix: tuple[Command, ...] = ()
        for _ in range(_MAX_REDIRECTS):
            if address in self._down:
                raise _down(address)
            replies = await self._node(address).ask(*prefix, ("MULTI",), *commands, ("EXEC",))
            redirection = next((reply for reply in replies if isinstance(reply, AskError | TryAgainError)), None)
            if redirection is None:
                return results(replies)
            address, prefix = await self._redirected(slot, address, redirection)
        raise RedisError("the nodes of the cluster send each other's clients round in a circle")

    async def masters(self) -> list[RedisConnections]:
        """The connections to every master that has slots. Raises RedisError if one of them is down."""
        found = sorted({address for address in self._masters if address is not None})
        for address in found:
            if address in self._down:
                raise _down(address)
        return [self._node(address) for address in found]

    async def check(self) -> None:
        """Returns when the master of the purges answers; others that do not are left out until they do."""
        await self._refresh()
        await self._look_after_nodes()
        address = self._masters[key_slot(_GENERATIONS)]
        if self._down:
            self._is_stale.set()
        if address is None or address in self._down:
            raise StoreUnavailable("redis: the cluster has no master for the purges")

    async def maintain(self) -> None:
        while True:
            await self._is_stale.wait()
            self._is_stale.clear()
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await self._refresh()
                    await self._look_after_nodes()
            except (RedisError, OSError, TimeoutError):
                self._is_stale.set()
            if self._down:
                self._is_stale.set()
            await asyncio.sleep(_LOOK_EVERY if self._is_stale.is_set() else _SECONDS_BETWEEN_REFRESHES)

    async def close(self) -> None:
        for node in (*self._nodes.values(), *self._replica_nodes.values()):
            await node.close()

    async def _ask_one(self, command: Command) -> Any:
        address = self._master_of(_slot_of(command))
        if address in self._down:
            return _down(address)
        (reply,) = await self._node(address).ask(command)
        return await self._follow(command, reply) if isinstance(reply, AskError | TryAgainError) else reply

    async def _follow(self, command: Command, reply: AskError | TryAgainError) -> Any:
        slot = _slot_of(command)
        address = self._master_of(slot)
        for _ in range(_MAX_REDIRECTS):
            address, prefix = await self._redirected(slot, address, reply)
            if address in self._down:
                return _down(address)
            *_, reply = await self._node(address).ask(*prefix, command)
            if not isinstance(reply, AskError | TryAgainError):
                return reply
        raise RedisError("the nodes of the cluster send each other's clients round in a circle")

    async def _redirected(
        self, slot: int, address: Address, reply: AskError | TryAgainError
    ) -> tuple[Address, tuple[Command, ...]]:
        """Where to send a command again, and what to send before it."""
        if isinstance(reply, TryAgainError):  # some of its keys have moved
            await asyncio.sleep(_PAUSE)
            return address, ()
        target = (reply.host or address[0], reply.port)  # no host: the same one
        if isinstance(reply, MovedError):
            self._masters[slot] = target
            self._is_stale.set()
            return target, ()
        return target, (("ASKING",),)

    async def _refresh(self) -> None:
        """Learns the slots from the first server that answers. Raises RedisError, OSError."""
        known = dict.fromkeys(
            (*(address for address in self._nodes if address not in self._down), *self._url.addresses)
        )
        failure: Exception | None = None
        for address in known:
            try:
                async with asyncio.timeout(_NODE_SECONDS):
                    (slots,) = await self._node(address).ask(("CLUSTER", "SLOTS"))
            except (RedisError, OSError, TimeoutError) as error:
                failure = error
                continue
            if isinstance(slots, RedisError):
                failure = slots
            elif slots:
                await self._take_over(address, slots)
                return
        raise RedisConnectionError(f"no node of the cluster answers: {failure or type(failure).__name__}") from failure

    async def _take_over(self, asked: Address, slots: list[Any]) -> None:
        """Each of `slots` is [first slot, last slot, [host, port, …] of the master, of its replicas …]."""
        masters: list[Address | None] = [None] * 2**14
        replicas: dict[Address, list[Address]] = {}
        for first, last, *nodes in slots:
            # A node that does not know its own host leaves it out: it is the one that was asked.
            addresses = [(text_of(host or b"") or asked[0], int(port)) for host, port, *_ in nodes]
            masters[first : last + 1] = [addresses[0]] * (last + 1 - first)
            replicas[addresses[0]] = addresses[1:]
        self._masters, self._replicas = masters, replicas
        used = {*replicas, *self._url.addresses, *(address for group in replicas.values() for address in group)}
        self._down &= set(replicas)
        for nodes_of in (self._nodes, self._replica_nodes):
            for address in [address for address in nodes_of if address not in used]:
                await nodes_of.pop(address).close()

    async def _look_after_nodes(self) -> None:
        """Finds out which masters and, where they are read, which replicas answer."""
        masters = list(self._replicas)
        answer = await asyncio.gather(*(self._answers(self._node(address)) for address in masters))
        self._down = {address for address, answers in zip(masters, answer, strict=True) if not answers}
        if self._url.reads_replicas:
            for master, group in self._replicas.items():
                self._replicas[master] = [each for each in group if await self._answers(self._replica_node(each))]

    async def _answers(self, node: RedisConnections) -> bool:
        try:
            async with asyncio.timeout(_NODE_SECONDS):
                await ping(node)
        except (RedisError, OSError, TimeoutError):
            await node.close()  # the idle connections may have failed for the same reason
            return False
        return True

    def _master_of(self, slot: int) -> Address:
        address = self._masters[slot]
        if address is None:
            self._is_stale.set()
            raise RedisConnectionError("the cluster's slots are not known")
        return address

    def _node(self, address: Address) -> RedisConnections:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = RedisConnections(lambda: self._connector(address))
        return node

    def _replica_node(self, address: Address) -> RedisConnections:
        node = self._replica_nodes.get(address)
        if node is None:
            node = self._replica_nodes[address] = RedisConnections(
                lambda: self._connector(address, redis_connect_func=_connect_for_reads)
            )
        return node

    def _lose_replica(self, address: Address) -> None:
        for group in self._replicas.values():
            if address in group:
                group.remove(address)
        self._is_stale.set()


def _down(address: Address) -> NodeDown:
    return NodeDown(f"{address[0]}:{address[1]} does not answer")


async def _connect_for_reads(connection: AbstractConnection) -> None:
    """A replica refuses reads (MOVED) until its client says that they may be old."""
    await connection.on_connect()
    await connection.send_command("READONLY", check_health=False)
    await connection.read_response()


_KEY_PLACES = {"EVAL": 3, "EVALSHA": 3, "FCALL": 3, "XGROUP": 2, "OBJECT": 2, "BITOP": 2}


def _slot_of(command: Command) -> int:
    """The slot of a command's first key; those without a key go to the master of slot 0."""
    name = str(command[0])
    if name in ("XREAD", "XREADGROUP"):
        key: Any = command[command.index("STREAMS") + 1]
    else:
        place = _KEY_PLACES.get(name, 1)
        key = command[place] if len(command) > place else b""
    return key_slot(key if isinstance(key, bytes) else str(key).encode())
