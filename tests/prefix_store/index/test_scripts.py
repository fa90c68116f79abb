"""The scripts against a model, operation by operation, on a real Valkey."""

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefix_store.index.connection import IndexConnection
from prefix_store.index.layout import held, packed_epoch, packed_kind, packed_names
from prefix_store.index.node import RedisNode
from prefix_store.index.scripts import ScriptName
from tests.cache.valkey import Valkey
from tests.prefix_store.index.blocks import new_namespace

_DEADLINE = 10.0
_LONG = 100_000
# Two chains with a common prefix, and keys in several batches of 128; look-ups are chains of either.
_KEYS = [bytes([number]) * 16 for number in range(6)]
_CHAINS = [_KEYS[:4], [*_KEYS[:2], *_KEYS[4:]]]
_NAMES = ["a", "b", "disk"]


@dataclass
class Model:
    """The expected contents."""

    claims: dict[bytes, dict[int, tuple[int, int]]] = field(default_factory=dict)
    """key -> epoch -> (tier, codec), in the order of the claims."""
    epochs: dict[str, int] = field(default_factory=dict)

    def match(self, keys: list[bytes]) -> list[tuple[int, list[tuple[int, int, int]]]]:
        runs: list[tuple[int, list[tuple[int, int, int]]]] = []
        for key in keys:
            alive = self.epochs.values()
            holders = [(epoch, *kind) for epoch, kind in self.claims.get(key, {}).items() if epoch in alive]
            if not holders:
                break
            if runs and runs[-1][1] == holders:
                runs[-1] = (runs[-1][0] + 1, holders)
            else:
                runs.append((1, holders))
        return runs


class World:
    """The scripts and the model, with the same operations."""

    def __init__(self, connection: IndexConnection) -> None:
        self._connection = connection
        self.model = Model()
        self._instances = {name: secrets.token_bytes(8) for name in _NAMES}
        self._all_epochs: list[int] = []

    async def ask(self, name: ScriptName, *words: bytes | str | int, again: bool) -> object:
        """A call may be repeated after a lost reply: that changes nothing."""
        reply = await self._connection.ask(name, *words, deadline=_DEADLINE)
        return await self._connection.ask(name, *words, deadline=_DEADLINE) if again else reply

    async def start(self, name: str, again: bool) -> None:
        """An owner starts or restarts."""
        model, lasting = self.model, name == "disk"
        before = model.epochs.get(name)
        if not lasting:
            self._instances[name] = secrets.token_bytes(8)
        words = (name, b"", self._instances[name], int(lasting), _LONG, _LONG, b"")
        reply = await self.ask("announce", *words, again=again)
        assert isinstance(reply, bytes)
        epoch = int.from_bytes(reply, "big")
        if lasting and before is not None:
            assert epoch == before
        else:
            assert epoch > max(self._all_epochs, default=0)
            self._all_epochs.append(epoch)
        model.epochs[name] = epoch

    async def heartbeat(self, name: str, number: int, again: bool) -> None:
        """An announcement under a present or an earlier epoch."""
        if name in self.model.epochs and name != "disk":
            epoch = self._all_epochs[number % len(self._all_epochs)]
            instance = secrets.token_bytes(8)
            reply = await self.ask("announce", name, packed_epoch(epoch), instance, 0, _LONG, _LONG, b"", again=again)
            assert reply == b""
            words = (packed_epoch(self.model.epochs[name]), self._instances[name], 0, _LONG, _LONG, b"")
            assert await self.ask("announce", name, *words, again=again) == packed_epoch(self.model.epochs[name])

    async def retire(self, name: str, again: bool) -> None:
        if (epoch := self.model.epochs.pop(name, None)) is not None:
            await self.ask("retire", name, packed_epoch(epoch), again=again)

    async def publish(self, number: int, keys: list[bytes], kind: tuple[int, int], again: bool) -> None:
        if not self._all_epochs:
            return
        epoch = self._all_epochs[number % len(self._all_epochs)]
        words = (packed_epoch(epoch), packed_kind(*kind), _LONG, b"".join(keys))
        known = await self.ask("publish", *words, again=again)
        assert known == (epoch in self.model.epochs.values())
        for key in keys if known else ():
            claims = self.model.claims.setdefault(key, {})
            claims.pop(epoch, None)
            claims[epoch] = kind

    async def touch(self, number: int, keys: list[bytes], again: bool) -> None:
        if self._all_epochs:
            epoch = self._all_epochs[number % len(self._all_epochs)]
            found = await self.ask("touch", packed_epoch(epoch), _LONG, b"".join(keys), again=again)
            assert found == sum(epoch in self.model.claims.get(key, {}) for key in keys)

    async def withdraw(self, number: int, keys: list[bytes], again: bool) -> None:
        if self._all_epochs:
            epoch = self._all_epochs[number % len(self._all_epochs)]
            await self.ask("withdraw", packed_epoch(epoch), b"".join(keys), again=again)
            for key in keys:
                self.model.claims.get(key, {}).pop(epoch, None)

    async def check(self, keys: list[bytes]) -> None:
        """Scripts and model find the same runs of a chain."""
        reply = await self._connection.ask(
            "match", packed_names(self._connection.block_names, keys), deadline=_DEADLINE
        )
        runs = [(blocks, list(held(claims))) for blocks, claims in zip(reply[::2], reply[1::2], strict=True)]
        assert runs == self.model.match(keys)


_part = st.sampled_from(_CHAINS).flatmap(
    lambda keys: st.tuples(st.integers(0, 3), st.integers(1, 4)).map(lambda cut: keys[cut[0] :][: cut[1]] or keys)
)
_tails_first = _part.map(lambda keys: keys[::-1])
_numbers = st.integers(0, 5)
_kinds = st.tuples(st.integers(0, 15), st.integers(0, 15))
_operations = st.one_of(
    st.tuples(st.just("start"), st.sampled_from(_NAMES)),
    st.tuples(st.just("start"), st.sampled_from(_NAMES)),
    st.tuples(st.just("heartbeat"), st.sampled_from(_NAMES), _numbers),
    st.tuples(st.just("retire"), st.sampled_from(_NAMES)),
    st.tuples(st.just("publish"), _numbers, _part, _kinds),
    st.tuples(st.just("publish"), _numbers, _part, _kinds),
    st.tuples(st.just("touch"), _numbers, _part),
    st.tuples(st.just("withdraw"), _numbers, _tails_first),
)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all examples."""
    with asyncio.Runner() as started:
        yield started


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(st.tuples(_operations, st.booleans()), min_size=5, max_size=40))
def test_the_scripts_do_what_the_model_says(
    shared_valkey: Valkey, runner: asyncio.Runner, operations: list[tuple[tuple[str, ...], bool]]
) -> None:
    """Scripts and model agree for any operations, in any order, some of them repeated."""

    async def run() -> None:
        node = RedisNode(shared_valkey.url)
        world = World(IndexConnection(node, new_namespace()))
        for name in ("a", "disk"):
            await world.start(name, again=False)
        for (operation, *arguments), again in operations:
            # A repeated start is another start, except for lasting owners.
            twice = again and operation != "start"
            await getattr(world, operation)(*arguments, again=twice)
            for keys in _CHAINS:
                await world.check(keys)
        await node.close()

    runner.run(run())


async def test_a_chain_of_several_batches_is_withdrawn(valkey: Valkey) -> None:
    """Blocks of a chain longer than one batch of a script are withdrawn in parts; a repeated call changes nothing."""
    node = RedisNode(valkey.url)
    world = World(IndexConnection(node, new_namespace()))
    for name in ("a", "b"):
        await world.start(name, again=False)
    keys = [secrets.token_bytes(16) for _ in range(500)]
    await world.publish(0, keys, (1, 0), again=True)
    await world.publish(1, keys[:200], (1, 0), again=True)
    for first in (300, 100, 0):
        await world.withdraw(0, keys[first:][::-1], again=True)
        await world.check(keys)
    await world.withdraw(1, keys[::-1], again=True)
    await world.check(keys)
    assert not any(world.model.claims.values())
    await node.close()
