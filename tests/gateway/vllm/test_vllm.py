"""What the gateway makes of vLLM's salts and KV cache events."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest

from cache.entries.key import namespace_for
from gateway.http.background_tasks import background_tasks
from gateway.routing.prefixes.asking import Asker, Prompt
from gateway.routing.prefixes.event_follower import EventFollower
from gateway.routing.prefixes.views import PublishedBlocks
from gateway.settings.settings import TimeoutSettings
from gateway.settings.upstreams import UpstreamSettings
from gateway.tenants.credentials import NAMESPACE_HEADER
from gateway.upstreams.connection import open_connections
from gateway.upstreams.upstream import Upstream
from tests.compose.monitoring import free_port
from tests.gateway.client import Client
from tests.gateway.conftest import Stage
from tests.prefix_store.connectors.vllm_server.models import smollm2
from tests.prefix_store.connectors.vllm_server.server import VllmServer, vllm_server
from tests.waiting import until

pytestmark = pytest.mark.timeout(900)  # a server takes half a minute to start, and longer beside others

LONG = "The spade is behind the shed, and the rake is beside it. " * 30


def free_pair() -> int:
    """A free port whose next one is free as well."""
    while True:
        port = free_port()
        with socket.socket() as next_one, contextlib.suppress(OSError):
            next_one.bind(("127.0.0.1", port + 1))
            return port


def start(port: int) -> AbstractContextManager[VllmServer]:
    """A server that publishes at `port`, with the replay at the next one."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{port + 1}",
    }
    options = ("--enable-prefix-caching", "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events))
    return vllm_server(smollm2(), None, *options)


@pytest.fixture(scope="module")
def server() -> Iterator[VllmServer]:
    with start(free_pair()) as running:
        yield running


@pytest.fixture
async def client(stage: Stage, server: VllmServer) -> Client:
    client = await stage.gateway(UpstreamSettings(url=server.url))
    await client.gateway.router.refresh()
    return client


def chat(question: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": LONG + question}], **fields}


async def cached(client: Client, question: str, **fields: Any) -> int:
    """How many tokens of a long prompt vLLM has found."""
    answer = await client.post(chat(question, **fields))
    assert answer.status == 200
    found: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def test_tenants_share_no_blocks(client: Client) -> None:
    """Each finds its own again, and those with a salt of its own apart; who has no credential shares."""
    ours, theirs = client.tenant("sk-ours"), client.tenant("sk-theirs")
    for tenant, fields in ((ours, {}), (theirs, {}), (client, {}), (ours, {"cache_salt": "x"})):
        assert await cached(tenant, "one", **fields) == 0
        assert await cached(tenant, "two", **fields) > 200
    assert await cached(theirs, "three", cache_salt="x") == 0


async def test_a_salt_is_in_every_form_of_api(client: Client) -> None:
    """A tenant's blocks are found from each, and by nobody else."""
    for number, name in enumerate(("sk-red", "sk-blue")):
        tenant = client.tenant(name)
        texts = iter(f"{LONG}{number}{part}" for part in "abc")
        assert await cached(tenant, "first") == 0
        messages = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": next(texts)}]}
        usage = (await tenant.send("POST", "/v1/messages", messages)).json["usage"]
        assert usage["cache_read_input_tokens"] > 200
        responses = {"model": "m", "max_output_tokens": 1, "input": next(texts)}
        usage = (await tenant.send("POST", "/v1/responses", responses)).json["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] > 200


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_an_empty_list_of_tools_is_answered(client: Client, path: str, choice: dict[str, str]) -> None:
    """vLLM refuses one in a chat completion, and chat UIs send it."""
    asked = {"model": "m", "max_output_tokens": 1, "input": "Hello"} if "responses" in path else chat("hello")
    assert (await client.send("POST", path, {**asked, "tools": [], **choice})).status == 200


@pytest.fixture
async def tasks() -> AsyncIterator[Any]:
    async with background_tasks() as tasks:
        yield tasks


async def test_what_a_tenant_holds_is_foretold(client: Client, server: VllmServer, tasks: Any) -> None:
    """By the events where vLLM lists them, also those of before; in the whole blocks that vLLM finds."""
    await cached(client.tenant("sk-green"), "one")
    async with open_connections(5.0) as pool:
        settings = UpstreamSettings(url=server.url, name="vllm", kv_events="auto", cache_salt=True)
        upstream = Upstream(server.url, pool, TimeoutSettings(), settings=settings)
        follower = EventFollower(tasks)
        follower.follow([upstream])
        view = PublishedBlocks(Asker(10.0), follower.blocks)

        async def foretold(tenant: str) -> float:
            own = {NAMESPACE_HEADER: namespace_for(f"Bearer {tenant}")}
            return (await view.shares([upstream], Prompt(chat("two"), own=own))).get("vllm", 0.0)

        async def is_known() -> bool:
            return await foretold("sk-green") > 0

        await until(is_known)
        share = await foretold("sk-green")
        assert await foretold("sk-nobody") == 0
        usage = (await client.tenant("sk-green").post(chat("two"))).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == round(share * usage["prompt_tokens"]) > 200


async def test_an_engine_that_was_killed_holds_nothing_once_it_is_back(tasks: Any) -> None:
    """It is known before its first request; what it then stores is known as well."""
    port = free_pair()
    settings = UpstreamSettings(url="http://127.0.0.1:1/v1", name="vllm", kv_events=f"tcp://127.0.0.1:{port}")
    with ExitStack() as first, ExitStack() as second:
        killed: VllmServer = await asyncio.to_thread(first.enter_context, start(port))
        async with open_connections(5.0) as pool:
            follower = EventFollower(tasks)
            follower.follow([Upstream(settings.url, pool, TimeoutSettings(), settings=settings)])
            blocks = follower.blocks["vllm"]
            await asyncio.to_thread(killed.complete, range(1_000, 1_100))
            await until(lambda: blocks.leading(range(1_000, 1_100)) == 96)
            killed.kill()
            again: VllmServer = await asyncio.to_thread(second.enter_context, start(port))
            await until(lambda: len(blocks) == 0 and blocks.is_whole)
            await asyncio.to_thread(again.complete, range(2_000, 2_100))
            await until(lambda: blocks.leading(range(2_000, 2_100)) == 96)
            assert blocks.leading(range(1_000, 1_100)) == 0
            follower.follow([])
