"""A gateway, its upstreams and a client of it, all in the test's own event loop, on real sockets."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.processes.app import open_gateway
from gateway.settings.cache import CacheSettings
from gateway.settings.operations import SecuritySettings
from gateway.settings.settings import Settings, TimeoutSettings
from gateway.settings.upstreams import RetrySettings, UpstreamSettings
from gateway.upstreams.mock import MockUpstream, Reply

# The servers of the cache's tests serve here too.
from tests.cache.conftest import (
    folder,
    late_valkey,
    minilm,
    own_valkey,
    pytest_asyncio_loop_factories,
    raw,
    shared_valkey,
    valkey,
)
from tests.gateway.api.prefix_upstream import PrefixUpstream
from tests.gateway.client import Client, chat
from tests.gateway.raw_upstream import Conversation, RawUpstream
from tests.waiting import until

__all__ = [
    "folder",
    "late_valkey",
    "minilm",
    "own_valkey",
    "pytest_asyncio_loop_factories",
    "raw",
    "shared_valkey",
    "valkey",
]

SECRET = "pssst-tell-nobody"
"""A tenant's text, in requests and answers; `secret_is_not_logged` looks for it."""
LIMIT = 2**20
"""The longest body that the gateway of `served` accepts."""

HASTY: dict[str, Any] = {"redis_deadline": 0.02}
"""Settings of the cache as they are shipped, for tests in which Redis is away."""


class Stage:
    """Starts the servers of a test, and stops them in reverse order at its end."""

    def __init__(self, stack: AsyncExitStack, state: Path) -> None:
        self._stack = stack
        self._state = state

    async def mock(self, *replies: Reply, models: tuple[str, ...] = ("mock",)) -> MockUpstream:
        """The scripted upstream that Keepgate ships."""
        return await self._stack.enter_async_context(MockUpstream(replies, models).serving())

    async def raw(self, conversation: Conversation) -> RawUpstream:
        """An upstream of raw bytes."""
        return await self._stack.enter_async_context(RawUpstream(conversation).serving())

    async def prefix(self, *models: str) -> PrefixUpstream:
        """An upstream with a prefix store."""
        return await self._stack.enter_async_context(PrefixUpstream(models or ("mock",)).serving())

    async def gateway(
        self, *upstreams: MockUpstream | RawUpstream | PrefixUpstream | UpstreamSettings | str, **settings: Any
    ) -> Client:
        """A client of a new gateway. `cache` and `timeouts` are dicts; without `redis` there is none.

        It sends a request once, unless `retries` say otherwise: the upstreams of tests count.
        """
        urls = tuple(
            upstream if isinstance(upstream, str | UpstreamSettings) else upstream.url for upstream in upstreams
        )
        # A busy machine must not turn a hit into a miss.
        cached = {"redis_deadline": 2.0, **settings.pop("cache", {})}
        cache = msgspec.convert(cached, CacheSettings, dec_hook=lambda kind, value: kind(value))
        timeouts = TimeoutSettings(**{"shutdown": 0.5, **settings.pop("timeouts", {})})
        semantic_socket = settings.pop("semantic_socket", None)
        values = {
            "port": 0,
            "retries": RetrySettings(attempts=0),
            "security": SecuritySettings(hosts=("*",)),
            "redis": "none",
            "state_dir": str(self._state),
            "upstreams": urls,
            **settings,
        }
        gateway = await self._stack.enter_async_context(
            open_gateway(Settings(cache=cache, timeouts=timeouts, **values), semantic_socket=semantic_socket)
        )
        session = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                auto_decompress=False,
            )
        )
        return Client(gateway, session, {})


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        yield Stage(stack, tmp_path)
    # Connections end a moment after their server; a task that stays is a leak, and TimeoutError names none of it.
    await until(lambda: not asyncio.all_tasks() - before - {asyncio.current_task()}, within=5, every=0)


@pytest.fixture
def secret_is_not_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """After the test SECRET is in no line of any logger, at any level."""
    caplog.set_level(logging.DEBUG)
    yield
    # The audit log names what an operator has named.
    records = [record for record in caplog.get_records("call") if record.name != "keepgate.audit"]
    said = "\n".join(logging.Formatter().format(record) for record in records)
    assert SECRET not in said
    assert SECRET.encode().hex() not in said


@pytest.fixture
async def served(stage: Stage) -> AsyncIterator[tuple[Client, MockUpstream]]:
    """A gateway that must still answer when the test is over."""
    mock = await stage.mock()
    client = await stage.gateway(mock, max_body=LIMIT, timeouts={"client": 0.3})
    yield client, mock
    mock.replies[:] = [Reply(text="alive")]
    assert (await client.post(chat("are you there?"))).text == "alive"
    assert (await client.post(chat("are you there?"))).cache == "hit"
    await client.until("flights", 0)
