"""Engines that keep prefixes, each a process of its own, and what a caller of them sees."""

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.harness.processes import CannotMeasure, Server, cores, free_port, server

MODEL = "SmolLM2-135M-Instruct"
_READY_DEADLINE = 120.0
_DEADLINE = 120.0
_WRITES = "keepgate_backend_prefix_writes_total"
_POLL_SECONDS = 0.02
_SAMPLE = re.compile(rb"^(\w+)(?:\{tier=\"(\w+)\"\})? ([-+.e0-9]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Answer:
    """`seconds` until the first token was there; `cached` tokens of the prompt were not computed."""

    seconds: float
    cached: int


@dataclass(frozen=True, slots=True)
class PrefixEngine:
    """An engine that answers."""

    process: Server
    session: aiohttp.ClientSession

    async def ask(self, prompt: list[int], tokens: int = 1) -> Answer:
        """A streamed completion of these tokens, as a conversation's. Raises CannotMeasure."""
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        headers = {"x-keepgate-reuse": "conversation"}
        asked = time.perf_counter()
        first = 0.0
        async with self.session.post(f"{self.process.url}/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise CannotMeasure(f"An engine answers with status {response.status}: {await response.text()}")
            async for line in response.content:
                if line.startswith(b"data: {") and not first:
                    first = time.perf_counter() - asked
        if not first:
            raise CannotMeasure("An engine streamed nothing.")
        return Answer(first, int(response.headers["x-keepgate-prefix-tokens"]))

    async def until_kept(self, blocks: int, *places: str) -> None:
        """Returns when these tiers have taken so many blocks since the start. Raises CannotMeasure."""
        async with _lookup_timeout():
            while min([(await self.samples())[_WRITES, place] for place in places]) < blocks:
                await _pause()

    async def samples(self) -> dict[tuple[str, str], float]:
        """Values of the engine's metrics by name and place."""
        async with self.session.get(f"{self.process.url}/metrics") as response:
            text = await response.read()
        return {(name.decode(), place.decode()): float(value) for name, place, value in _SAMPLE.findall(text)}


@asynccontextmanager
async def prefix_engine(*options: str) -> AsyncIterator[PrefixEngine]:
    """An engine with these options on all cores, ready, until the end of the block. Raises CannotMeasure."""
    port, threads = free_port(), str(len(cores().all))
    command = [sys.executable, "-m", "backend", "--port", str(port), "--threads", threads, *options]
    timeout = aiohttp.ClientTimeout(total=_DEADLINE)
    async with (
        server(command, port, cores().all, None, _READY_DEADLINE) as process,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        async with _lookup_timeout():
            while not await _is_ready(session, process.url):
                await _pause()
        yield PrefixEngine(process, session)


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with session.get(f"{url}/ready") as response:
            return response.status == 200
    return False


@asynccontextmanager
async def _lookup_timeout() -> AsyncIterator[None]:
    """Ends a wait that takes too long. Raises CannotMeasure."""
    try:
        async with asyncio.timeout(_DEADLINE):
            yield
    except TimeoutError as error:
        raise CannotMeasure(f"An engine took more than {_DEADLINE:g} s to do what it was waited for.") from error


async def _pause() -> None:
    await asyncio.sleep(_POLL_SECONDS)  # a process of its own cannot set an event
