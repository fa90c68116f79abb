"""A peer may be dead, frozen, restarted, slow, or wrong: every answer is right and in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from tests.backend.prefixes.altering_proxy import (
    Alter,
    AlteringProxy,
    PeerResponse,
    standing_between,
    trickled,
    unchanged,
)
from tests.backend.prefixes.conftest import Start
from tests.backend.prefixes.engine_process import Answer, EngineProcess, fresh, start_all
from tests.backend.prefixes.keeping import claiming, until_idle, until_met
from tests.backend.prefixes.models import BLOCK, BLOCK_BYTES
from tests.cache.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 300
BLOCKS = TOKENS // BLOCK
WHOLE = BLOCKS * BLOCK


@dataclass
class Pair:
    """An engine that is reached through a proxy, and one that asks it."""

    index: str
    proxy: AlteringProxy
    near: EngineProcess
    far: EngineProcess

    async def kept(self, tokens: int = TOKENS) -> list[int]:
        """A prompt that the near engine has and of which the index knows."""
        prompt = fresh(tokens)
        async with claiming(self.index, tokens // BLOCK):
            await self.near.ask(prompt)
        return prompt

    def forget(self) -> None:
        """Restarts the asking engine, which leaves a wrong peer alone for a minute, so that it asks again."""
        self.proxy.alter = unchanged
        self.far.kill()
        self.far.restart()

    async def asked_with(self, alter: Alter, prompt: list[int], plain: EngineProcess) -> Answer:
        """The far engine's answer while the proxy alters what the near one sends; it asked the proxy and is right.

        On a busy machine it may compute a prompt instead: then another prompt is asked.
        """
        for _ in range(5):
            seen_before = len(self.proxy.responses)
            self.proxy.alter = alter
            answer = await self.far.ask(prompt)
            assert answer.choices == (await plain.ask(prompt)).choices
            if len(self.proxy.responses) > seen_before:
                return answer
            await self.works()
            prompt = await self.kept(len(prompt))
        raise AssertionError("it computes all prompts")

    async def works(self) -> None:
        """Returns when the far engine is served by the near one."""
        self.proxy.alter = unchanged
        await until_met(self.index, self.near, self.far)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(launch: Start, index: Valkey, secret: Path) -> AsyncIterator[Pair]:
    options = ("--prefix-memory", "64MiB", "--prefix-index", index.url, "--prefix-secret-file", str(secret))
    async with standing_between() as proxy:
        near = launch(*options, "--prefix-name", "near", "--prefix-address", proxy.url)
        far = launch(*options, "--prefix-name", "far")
        start_all([near, far])
        proxy.engine = near.url
        yield Pair(index.url, proxy, near, far)


async def test_a_peer_is_asked_at_its_address(pair: Pair, plain: EngineProcess) -> None:
    """A peer is asked at the address that it published, and its blocks are used."""
    await pair.works()
    prompt = await pair.kept()
    seen_before = len(pair.proxy.responses)
    answer = await pair.far.ask(prompt)
    assert answer.restored == WHOLE
    assert answer.choices == (await plain.ask(prompt)).choices
    assert len(pair.proxy.responses) > seen_before
    assert sum(len(original.body) for original in pair.proxy.responses[seen_before:]) >= BLOCKS * BLOCK_BYTES


async def flipped(request: web.Request, original: PeerResponse) -> web.StreamResponse:
    """One bit in the middle is flipped."""
    body = bytearray(original.body)
    body[len(body) // 2] ^= 1
    return original.response(bytes(body))


async def page(request: web.Request, original: PeerResponse) -> web.StreamResponse:
    """The error page of a proxy whose server is gone."""
    return web.Response(status=502, text="<html>bad gateway</html>", content_type="text/html")


async def elsewhere(request: web.Request, original: PeerResponse) -> web.StreamResponse:
    """A redirect to an address that is none of the engines'."""
    raise web.HTTPFound("http://127.0.0.1:9/secret")


async def endless(request: web.Request, original: PeerResponse) -> web.StreamResponse:
    """The right bytes, and then bytes without end."""

    async def body() -> AsyncIterator[bytes]:
        yield original.body
        while True:
            yield bytes(2**16)

    return await trickled(request, original, body())


async def endless_garbage(request: web.Request, original: PeerResponse) -> web.StreamResponse:
    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b"\xa5" * 2**16

    return await trickled(request, original, body())


async def drop_by_drop(request: web.Request, original: PeerResponse) -> web.StreamResponse:
    """The right bytes, one every tenth of a second."""

    async def body() -> AsyncIterator[bytes]:
        for byte in original.body:
            yield bytes([byte])
            await asyncio.sleep(0.1)

    return await trickled(request, original, body())


async def stalled(request: web.Request, original: PeerResponse) -> web.StreamResponse:
    """The head, and then nothing for a minute."""

    async def body() -> AsyncIterator[bytes]:
        yield b""
        await asyncio.sleep(60)

    return await trickled(request, original, body())


WRONG_BYTES: list[Alter] = [flipped, endless, endless_garbage]
FAILURES: list[Alter] = [page, elsewhere, drop_by_drop, stalled]


@pytest.mark.parametrize("wrong", WRONG_BYTES, ids=[wrong.__name__ for wrong in WRONG_BYTES])
async def test_a_peer_with_wrong_frames_is_not_asked_again(pair: Pair, plain: EngineProcess, wrong: Alter) -> None:
    """Wrong bytes of a peer change no answer, and that peer is not asked for the next prompt."""
    await pair.works()
    prompt, other = await pair.kept(), await pair.kept()
    answer = await pair.asked_with(wrong, prompt, plain)
    if wrong is not endless:  # which begins with the right bytes
        assert answer.restored < WHOLE
    seen_before = len(pair.proxy.responses)
    assert (await pair.far.ask(other)).choices == (await plain.ask(other)).choices
    assert len(pair.proxy.responses) == seen_before
    pair.forget()


async def test_frames_of_another_prompt_are_not_used(pair: Pair, plain: EngineProcess) -> None:
    """Valid frames of another prompt, which the same engine fetched before, are not used."""
    await pair.works()
    asked, other = await pair.kept(), await pair.kept()
    seen_before = len(pair.proxy.responses)
    assert (await pair.far.ask(other)).restored == WHOLE
    recorded = pair.proxy.responses[seen_before]

    async def replay(request: web.Request, original: PeerResponse) -> web.StreamResponse:
        return original.response(recorded.body)

    answer = await pair.asked_with(replay, asked, plain)
    assert answer.restored == 0
    pair.forget()


@pytest.mark.parametrize("failure", FAILURES, ids=[failure.__name__ for failure in FAILURES])
async def test_a_peer_that_failed_is_asked_again(pair: Pair, plain: EngineProcess, failure: Alter) -> None:
    """A peer that fails or is too slow changes no answer, and is asked again when it works."""
    await pair.works()
    answer = await pair.asked_with(failure, await pair.kept(), plain)
    assert answer.restored < WHOLE
    await pair.works()


async def test_a_client_that_leaves_while_its_prefix_is_fetched(pair: Pair, plain: EngineProcess) -> None:
    """A client that disconnects during a fetch leaves no running request and no held block behind."""
    await pair.works()
    prompt = await pair.kept()
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def halfway(request: web.Request, original: PeerResponse) -> web.StreamResponse:
        async def body() -> AsyncIterator[bytes]:
            yield original.body[: len(original.body) // 2]
            asked.set()
            await go_on.wait()
            yield original.body[len(original.body) // 2 :]

        return await trickled(request, original, body())

    pair.proxy.alter = halfway
    leaving = asyncio.create_task(pair.far.ask(prompt))
    async with asyncio.timeout(10):
        await asked.wait()
    leaving.cancel()
    await asyncio.wait([leaving])
    go_on.set()
    assert leaving.cancelled()
    await until_idle(pair.far)
    pair.proxy.alter = unchanged
    assert (await pair.far.ask(prompt)).choices == (await plain.ask(prompt)).choices
    assert await pair.far.counted("integrity_problems_total") == 0


async def test_a_frozen_peer_delays_no_answer(pair: Pair, plain: EngineProcess) -> None:
    """Prompts of a frozen peer are computed within the deadline, and the peer is asked again when it resumes."""
    await pair.works()
    prompts = [await pair.kept() for _ in range(3)]
    expected = [await plain.ask(prompt) for prompt in prompts]
    pair.near.freeze()
    try:
        for prompt, right in zip(prompts, expected, strict=True):
            assert (await pair.far.ask(prompt)).choices == right.choices
    finally:
        pair.near.thaw()
    await pair.works()


async def test_a_restarted_peer_is_not_taken_for_its_former_life(pair: Pair, plain: EngineProcess) -> None:
    """Index entries of a killed peer are not used after it restarts empty under its name, and its new blocks are."""
    await pair.works()
    prompts = [await pair.kept() for _ in range(2)]
    pair.near.kill()
    gone = await pair.far.ask(prompts[0])
    assert gone.restored == 0
    assert gone.choices == (await plain.ask(prompts[0])).choices
    pair.near.restart()
    began = time.monotonic()
    answer = await pair.far.ask(prompts[1])
    assert answer.restored == 0
    assert answer.choices == (await plain.ask(prompts[1])).choices
    assert time.monotonic() - began < 10
    await pair.works()


async def test_a_peer_that_was_slow_is_asked_again(pair: Pair, plain: EngineProcess) -> None:
    """A peer that was slower than computing is asked again when it is fast."""
    await pair.works()

    async def slow(request: web.Request, original: PeerResponse) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return original.response()

    for _ in range(4):
        prompt = await pair.kept()
        pair.proxy.alter = slow
        answer = await pair.far.ask(prompt)
        assert answer.choices == (await plain.ask(prompt)).choices
    await pair.works()
