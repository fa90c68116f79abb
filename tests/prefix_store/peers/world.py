"""An engine that serves, and a client, over real sockets."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from prefix_store.eviction.access import Access
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.frames.block_id import BlockId
from prefix_store.peers.exchange import Address
from prefix_store.peers.protocol import PATH
from prefix_store.peers.server import BlockServer
from prefix_store.tiers.host_memory import HostMemory
from tests.prefix_store.tiers.blocks import Memory, format_of

SECRET = "a secret of the fleet"
EPOCH = "epoch 7"


@asynccontextmanager
async def listening(*routes: web.RouteDef) -> AsyncIterator[str]:
    """URL of a server with these routes."""
    application = web.Application()
    application.add_routes(routes)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(chain: list[BlockId], epoch: str = EPOCH) -> AsyncIterator[tuple[Address, HostMemory, BlockServer]]:
    """An engine that has a chain in its memory."""
    form = format_of()
    tier = HostMemory(form, 100 * form.frame_bytes, LeastRecentlyUsed())
    memory = Memory(len(chain))
    assert await tier.write(chain, memory.fill(chain), Access(0.0)) == len(chain)
    server = BlockServer([tier], SECRET, epoch)
    async with listening(*server.routes()) as url:
        yield Address(url, epoch), tier, server
    await tier.close()


@asynccontextmanager
async def impostor(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[Address]:
    """A peer with any handler."""
    async with listening(web.post(PATH, handler)) as url:
        yield Address(url, EPOCH)
