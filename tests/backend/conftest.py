"""The real model, loaded once for all tests of the backend, and a real server for each test that asks for one."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import ClientSession

from backend.runners.fused.thread_count import limit_spinning

limit_spinning()  # before anything imports torch
# The CUDA kernels run in Triton's interpreter here, whatever the machine has; tests/gpu runs them on a device.
if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.fail("Triton was imported before it was told to interpret; a test imports it too early", pytrace=False)
os.environ["TRITON_INTERPRET"] = "1"

from backend.api.app import create_app  # noqa: E402
from backend.api.http_server import listening  # noqa: E402
from backend.api.server_state import STATE, ServerState  # noqa: E402
from backend.chat.chat_template import ChatTemplate  # noqa: E402
from backend.engine.config import EngineConfig  # noqa: E402
from backend.engine.step import Speculator  # noqa: E402
from backend.model import ServedModel, load_model  # noqa: E402
from backend.model_loader.source import ModelSource, resolve_model  # noqa: E402
from backend.model_loader.weights import ModelWeights, load_weights, read_config  # noqa: E402
from backend.models.config import ModelConfig  # noqa: E402
from backend.models.generation_config import SamplingDefaults  # noqa: E402
from backend.runners.errors import RunnerUnavailable  # noqa: E402
from backend.runners.fused.build import load_fused_library  # noqa: E402
from telemetry.tracing.span import NO_TRACING, Tracing  # noqa: E402
from tests.prefix_store.tiers.waiting import until  # noqa: E402

ENGINE = EngineConfig(kv_memory=192 * 2**20, max_batch=8, max_context=2048, threads=2, max_waiting=24)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
MODEL = "SmolLM2-135M-Instruct"


def quiet(sentence: str) -> None:
    """Progress that is thrown away."""


def built_library() -> ctypes.CDLL:
    """The fused CPU step, as this machine's compiler builds it."""
    try:
        return load_fused_library(quiet)
    except RunnerUnavailable as reason:
        pytest.skip(f"the fused CPU step is not available: {reason}")


@pytest.fixture(scope="session")
def source() -> ModelSource:
    return resolve_model("default", quiet)


@pytest.fixture(scope="session")
def config(source: ModelSource) -> ModelConfig:
    return read_config(source.directory)


@pytest.fixture(scope="session")
def weights(source: ModelSource, config: ModelConfig) -> ModelWeights:
    return load_weights(source.directory, config)


@pytest.fixture(scope="session")
def model(source: ModelSource) -> ServedModel:
    return load_model(source, ENGINE, quiet)


@dataclasses.dataclass
class Served:
    """A running server and a client of it."""

    state: ServerState
    client: ClientSession
    url: str

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Posts a body that must be answered with 200; the model's name is filled in."""
        async with self.client.post(path, json={"model": MODEL, **body}) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer

    async def text(self, prompt: str, **body: Any) -> str:
        """Text of the first answer to a completion request."""
        answer = await self.post(COMPLETIONS, prompt=prompt, **body)
        return str(answer["choices"][0]["text"])

    async def forget_own_blocks(self) -> None:
        """Empties the engine's own cache, so that the next request has to use the tiers."""
        engine, forgotten = self.state.engine, threading.Event()
        engine.command(engine.engine.forget_prefixes)
        engine.command(forgotten.set)
        await until(forgotten.is_set, "the engine has forgotten its blocks")


StartServer = Callable[..., Awaitable[Served]]


@pytest.fixture
async def start_server(model: ServedModel) -> AsyncIterator[StartServer]:
    """Starts servers on free ports; keyword arguments change the engine's limits.

    ``runner`` replaces what computes, ``template`` the chat template, ``sampling`` what the model recommends;
    ``send_buffer`` is the kernel's for each connection, in bytes.
    """
    async with AsyncExitStack() as stack:

        async def start(
            runner: Any = None,
            send_buffer: int | None = None,
            template: str | None = None,
            tracing: Tracing = NO_TRACING,
            speculator: Speculator | None = None,
            sampling: SamplingDefaults | None = None,
            **limits: Any,
        ) -> Served:
            served = model if runner is None else dataclasses.replace(model, runner=runner)
            if sampling is not None:
                served = dataclasses.replace(served, sampling=sampling)
            if template is not None:
                tokenizer = dataclasses.replace(served.tokenizer, chat_template=ChatTemplate(template, {}))
                served = dataclasses.replace(served, tokenizer=tokenizer)
            app = create_app(served, dataclasses.replace(ENGINE, **limits), tracing, speculator)
            sock = socket.create_server(("127.0.0.1", 0))
            if send_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            await stack.enter_async_context(listening(app, sock, shutdown_timeout=1.0))
            host, port = sock.getsockname()
            client = await stack.enter_async_context(ClientSession(f"http://{host}:{port}"))
            return Served(app[STATE], client, f"http://{host}:{port}")

        yield start


@pytest.fixture
async def server(start_server: StartServer) -> Served:
    """One server with the usual limits."""
    return await start_server()
