"""A connector's HTTP interface, over a real socket."""

import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from prefix_store.connectors.http_api import StoreApi, serving, token_blocks
from prefix_store.connectors.options import Listening
from prefix_store.connectors.transfers import NO_NAMESPACE, PartNames
from prefix_store.eviction.access import Access
from prefix_store.frames.block_id import BlockId
from prefix_store.identity.tenants import Tenants
from prefix_store.peers.protocol import PATH
from prefix_store.store.chain import Chain
from prefix_store.store.config import StoreConfig
from prefix_store.store.open_store import OpenStore, open_store
from prefix_store.tiers.cancellation import CancelToken
from tests.cache.valkey import Valkey
from tests.prefix_store.connectors.paged_engine.engine import SECRET
from tests.prefix_store.connectors.paged_engine.toy_model import BLOCK
from tests.prefix_store.tiers.blocks import LAYOUT, NAMESPACE, Memory

PROMPT = list(range(BLOCK * 5 + 1))
TENANTS = Tenants(BLOCK, bytes(16), SECRET.encode())


@dataclass
class Served:
    """A store whose interface is served, and a client of it."""

    opened: OpenStore
    client: ClientSession

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        async with self.client.request(method, path, json=body) as response:
            return response.status, await response.json()

    async def keep(self, tokens: list[int], salt: str = "") -> None:
        """Stores a prompt as the scheduler's side and the worker name its blocks."""
        chain = named(tokens, salt)
        sources = Memory(len(chain)).fill(chain)
        await self.opened.store.keep(chain, sources, Access(time.monotonic()), True, CancelToken())


def named(tokens: list[int], salt: str) -> list[BlockId]:
    """The blocks that a prompt fills."""
    keys = TENANTS.keys([f"cache_salt:{salt}"] if salt else [])
    chain = Chain(NO_NAMESPACE, keys.root, BLOCK)
    full = tokens[: len(tokens) // BLOCK * BLOCK]
    chain.extend(keys.keys_of(full), full)
    return [PartNames(NAMESPACE).of(block) for block in chain.blocks]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@asynccontextmanager
async def served(config: StoreConfig, tenants: Tenants = TENANTS) -> AsyncIterator[Served]:
    async with open_store(config, NAMESPACE, LAYOUT) as opened:
        api = StoreApi(opened, BLOCK, token_blocks(BLOCK, tenants, PartNames(NAMESPACE)), lambda: {"engine": "toy"})
        port = free_port()
        async with (
            serving(api.application(), Listening("127.0.0.1", port)),
            ClientSession(f"http://127.0.0.1:{port}") as client,
        ):
            yield Served(opened, client)


@pytest.fixture
async def api() -> AsyncIterator[Served]:
    """With a memory tier."""
    async with served(StoreConfig(memory_bytes=2**20)) as started:
        yield started


async def test_the_state_is_told(api: Served) -> None:
    """As the connector describes it."""
    assert await api.ask("GET", "/v1/prefix") == (200, {"engine": "toy"})


async def test_a_prompt_is_looked_up(api: Served) -> None:
    """Its leading tokens in each tier, by its salt."""
    await api.keep(PROMPT[:12], "one")
    for salt, tokens in (("one", 12), ("other", 0), ("", 0)):
        status, found = await api.ask("POST", "/v1/prefix/lookup", {"tokens": PROMPT, "cache_salt": salt})
        assert status == 200
        assert found == {"tokens": 21, "block_size": BLOCK, "leading_tokens": {"memory": tokens}, "engines": []}


async def test_a_prompt_is_pinned_and_unpinned(api: Served) -> None:
    """The answers are in tokens."""
    await api.keep(PROMPT)
    body = {"tokens": PROMPT}
    assert await api.ask("POST", "/v1/prefix/pin", body) == (200, {"pinned_tokens": {"memory": 20}})
    assert await api.ask("POST", "/v1/prefix/unpin", body) == (200, {"unpinned_tokens": {"memory": 20}})
    assert await api.ask("POST", "/v1/prefix/unpin", body) == (200, {"unpinned_tokens": {"memory": 0}})


async def test_the_tiers_are_emptied(api: Served) -> None:
    """The answer is how many blocks there were."""
    await api.keep(PROMPT)
    assert await api.ask("DELETE", "/v1/prefix") == (200, {"removed": 5})
    assert await api.ask("DELETE", "/v1/prefix") == (200, {"removed": 0})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "missing required field `tokens`"),
        ([1], "expected an object with tokens"),
        ({"tokens": "text"}, "Expected `array`"),
        ({"tokens": [1, "x"]}, "Expected `int`"),
        ({"tokens": [2**31]}, "expected numbers that fit in 32 bits"),
        ({"tokens": [1], "cache_salt": 7}, "cache_salt"),
    ],
)
@pytest.mark.parametrize("path", ["lookup", "pin", "unpin"])
async def test_a_bad_prompt_is_refused(api: Served, body: Any, message: str, path: str) -> None:
    """With a message that names the field."""
    status, answer = await api.ask("POST", f"/v1/prefix/{path}", body)
    assert status == 400
    assert message in answer["error"]["message"]


async def test_a_salted_prompt_needs_a_secret() -> None:
    """Without one, each process has names of its own for the blocks of tenants: none would be found."""
    async with served(StoreConfig(memory_bytes=2**20), Tenants(BLOCK)) as api:
        status, answer = await api.ask("POST", "/v1/prefix/lookup", {"tokens": PROMPT, "cache_salt": "one"})
        assert status == 400
        assert answer["error"]["message"].startswith("cache_salt: without a secret")
        assert (await api.ask("POST", "/v1/prefix/lookup", {"tokens": PROMPT}))[0] == 200


async def test_an_endless_prompt_is_refused(api: Served) -> None:
    """More tokens than any model reads are not hashed."""
    async with api.client.post("/v1/prefix/lookup", data=b'{"tokens":[' + b"1," * 2**24 + b"1]}") as response:
        assert response.status == 400
        assert "expected 16777216 at most" in (await response.json())["error"]["message"]


async def test_no_prompt_is_no_mistake(api: Served) -> None:
    """An empty one fills no block."""
    status, found = await api.ask("POST", "/v1/prefix/lookup", {"tokens": []})
    assert (status, found["leading_tokens"]) == (200, {"memory": 0})


async def test_other_engines_and_their_blocks_are_told(valkey: Valkey) -> None:
    """With an index a look-up names who has what, and the port is that of the blocks, too."""
    configs = [
        StoreConfig(memory_bytes=2**20, index=valkey.url, name=name, address="http://127.0.0.1:9", secret=SECRET)
        for name in ("one", "other")
    ]
    async with served(configs[0]) as one, served(configs[1]) as other:
        await one.keep(PROMPT)
        assert one.opened.index is not None
        await one.opened.index.flush()
        deadline = time.monotonic() + 20.0
        while not (found := (await other.ask("POST", "/v1/prefix/lookup", {"tokens": PROMPT}))[1])["engines"]:
            assert time.monotonic() < deadline
            assert other.opened.index is not None
            await other.opened.index.next_heartbeat()
        assert found["engines"] == [{"names": ["one"], "codec": "plain", "from": 0, "to": 20}]
        async with one.client.post(PATH) as response:
            assert response.status == 401


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    """The engine does not start with an address at which nobody reaches it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with open_store(StoreConfig(memory_bytes=2**20), NAMESPACE, LAYOUT) as opened:
            api = StoreApi(opened, BLOCK, lambda prompt: [], dict)
            with pytest.raises(ValueError, match=f"address: port {port} of 127.0.0.1 cannot be opened"):
                async with serving(api.application(), Listening("127.0.0.1", port)):
                    pass
