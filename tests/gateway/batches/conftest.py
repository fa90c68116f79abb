"""The Files and Batch API on a free port, and a scripted upstream to which the batches' requests go."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import openai
import pytest
from aiohttp import web

from gateway.api.app_keys import SETTINGS
from gateway.api.batches import BATCHES, ROUTES
from gateway.api.identification import identifying
from gateway.batches.runner import open_batches
from gateway.batches.store import BatchStore
from gateway.http.middleware import answering_errors, mark_started
from gateway.settings.cache import CacheSettings
from gateway.settings.settings import Settings, TimeoutSettings
from gateway.tenants.callers import Callers
from gateway.upstreams.mock import MockUpstream
from tests.gateway.batches.batch_client import OPTIONS, BatchClient

MAX_FILE = 2**20


class BatchStage:
    """The API, whose batches run once `run` has been called."""

    def __init__(self, stack: AsyncExitStack, state: Path) -> None:
        self._stack = stack
        self.state = state
        self.store = BatchStore(state, MAX_FILE)
        self.upstream = MockUpstream()
        self.url = ""

    async def serve(self, namespace: str = "authorization", client_timeout: float = 60.0) -> None:
        settings = Settings(cache=CacheSettings(namespace=namespace), timeouts=TimeoutSettings(client=client_timeout))
        application = web.Application(
            middlewares=[
                answering_errors(lambda _, error: error.response()),
                identifying(Callers(None, settings)),
            ]
        )
        application.on_response_prepare.append(mark_started)
        application[SETTINGS] = settings
        application[BATCHES] = self.store
        application.add_routes(ROUTES)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def run(self, url: str = "") -> None:
        """Run batches in this process, against the scripted upstream or another one."""
        url = (url or self.upstream.url).removesuffix("/v1")
        await self._stack.enter_async_context(open_batches(self.store, url, OPTIONS))

    async def client(self, key: str = "alice", **headers: str) -> BatchClient:
        """A tenant's client; `headers` with underscores for hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sdk = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, default_headers=named)
        return BatchClient(await self._stack.enter_async_context(sdk))

    async def session(self) -> aiohttp.ClientSession:
        """For what the SDK does not send."""
        return await self._stack.enter_async_context(aiohttp.ClientSession(self.url))


@pytest.fixture
async def unserved(tmp_path: Path) -> AsyncIterator[BatchStage]:
    """The parts, before `serve`."""
    async with AsyncExitStack() as stack:
        stage = BatchStage(stack, tmp_path / "state")
        await stack.enter_async_context(stage.upstream.serving())
        yield stage


@pytest.fixture
async def stage(unserved: BatchStage) -> BatchStage:
    await unserved.serve()
    return unserved
