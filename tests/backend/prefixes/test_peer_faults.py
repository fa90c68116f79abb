"""A peer may be dead, frozen, another one, slow, or lie: every answer is right and in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from tests.backend.prefixes.conftest import Start
from tests.backend.prefixes.engine_process import EngineProcess, fresh, start_all
from tests.backend.prefixes.keeping import claiming, until_met
from tests.backend.prefixes.liar import Honest, Liar, Tell, standing_between, the_truth, trickled
from tests.backend.prefixes.models import BLOCK, BLOCK_BYTES
from tests.cache.entries.entry_examples import until
from tests.cache.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 300
BLOCKS = TOKENS // BLOCK
WHOLE = BLOCKS * BLOCK


@dataclass
class Pair:
    """An engine that is reached through somebody, and one that asks it."""

    index: str
    liar: Liar
    near: EngineProcess
    far: EngineProcess

    async def kept(self, tokens: int = TOKENS) -> list[int]:
        """A prompt that the near engine has and of which the index knows."""
        prompt = fresh(tokens)
        async with claiming(self.index, tokens // BLOCK):
            await self.near.ask(prompt)
        return prompt

    def forget(self) -> None:
        """Start the asking engine anew: it leaves a liar alone for a minute, and what it thought of a peer is gone."""
        self.liar.tell = the_truth
        self.far.kill()
        self.far.restart()

    async def works(self) -> None:
        """Return when the one serves the other."""
        self.liar.tell = the_truth
        await until_met(self.index, self.near, self.far)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(launch: Start, index: Valkey, secret: Path) -> AsyncIterator[Pair]:
    options = ("--prefix-memory", "64MiB", "--prefix-index", index.url, "--prefix-secret-file", str(secret))
    async with standing_between() as liar:
        near = launch(*options, "--prefix-name", "near", "--prefix-address", liar.url)
        far = launch(*options, "--prefix-name", "far")
        start_all([near, far])
        liar.engine = near.url
        yield Pair(index.url, liar, near, far)


async def test_a_peer_is_asked_at_its_address(pair: Pair, plain: EngineProcess) -> None:
    """The one that it gave out, and with a truthful answer the other engine need not compute."""
    await pair.works()
    prompt = await pair.kept()
    seen_before = len(pair.liar.responses)
    answer = await pair.far.ask(prompt)
    assert answer.restored == WHOLE
    assert answer.choices == (await plain.ask(prompt)).choices
    assert len(pair.liar.responses) > seen_before
    assert sum(len(honest.body) for honest in pair.liar.responses[seen_before:]) >= BLOCKS * BLOCK_BYTES


async def flipped(request: web.Request, honest: Honest) -> web.StreamResponse:
    """One bit in the middle is another."""
    body = bytearray(honest.body)
    body[len(body) // 2] ^= 1
    return honest.response(bytes(body))


async def page(request: web.Request, honest: Honest) -> web.StreamResponse:
    """What a proxy says of a server that is gone."""
    return web.Response(status=502, text="<html>bad gateway</html>", content_type="text/html")


async def elsewhere(request: web.Request, honest: Honest) -> web.StreamResponse:
    """To an address that is none of the engines'."""
    raise web.HTTPFound("http://127.0.0.1:9/secret")


async def endless(request: web.Request, honest: Honest) -> web.StreamResponse:
    """The truth, and then bytes without end."""

    async def body() -> AsyncIterator[bytes]:
        yield honest.body
        while True:
            yield bytes(2**16)

    return await trickled(request, honest, body())


async def endless_garbage(request: web.Request, honest: Honest) -> web.StreamResponse:
    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b"\xa5" * 2**16

    return await trickled(request, honest, body())


async def drop_by_drop(request: web.Request, honest: Honest) -> web.StreamResponse:
    """The truth, a byte every tenth of a second."""

    async def body() -> AsyncIterator[bytes]:
        for byte in honest.body:
            yield bytes([byte])
            await asyncio.sleep(0.1)

    return await trickled(request, honest, body())


async def silence(request: web.Request, honest: Honest) -> web.StreamResponse:
    """The head, and then nothing for a minute."""

    async def body() -> AsyncIterator[bytes]:
        yield b""
        await asyncio.sleep(60)

    return await trickled(request, honest, body())


LIES: list[Tell] = [flipped, endless, endless_garbage]
FAILURES: list[Tell] = [page, elsewhere, drop_by_drop, silence]


@pytest.mark.parametrize("lie", LIES, ids=[lie.__name__ for lie in LIES])
async def test_a_peer_that_lies(pair: Pair, plain: EngineProcess, lie: Tell) -> None:
    """The answer is right, within ten seconds, and the peer is not asked again for the next one."""
    await pair.works()
    prompt, other = await pair.kept(), await pair.kept()
    expected = await plain.ask(prompt)
    seen_before = len(pair.liar.responses)
    pair.liar.tell = lie
    answer = await pair.far.ask(prompt)
    assert len(pair.liar.responses) > seen_before
    assert answer.choices == expected.choices
    if lie is not endless:  # which begins with the truth
        assert answer.restored < WHOLE
    seen_before = len(pair.liar.responses)
    assert (await pair.far.ask(other)).choices == (await plain.ask(other)).choices
    assert len(pair.liar.responses) == seen_before
    pair.forget()


async def test_frames_of_another_prompt(pair: Pair, plain: EngineProcess) -> None:
    """Whole and true, and asked for before, by the same engine: not those of this prompt, so they are not used."""
    await pair.works()
    asked, other = await pair.kept(), await pair.kept()
    seen_before = len(pair.liar.responses)
    assert (await pair.far.ask(other)).restored == WHOLE
    recorded = pair.liar.responses[seen_before:]

    async def replay(request: web.Request, honest: Honest) -> web.StreamResponse:
        return honest.response(recorded[0].body)

    pair.liar.tell = replay
    answer = await pair.far.ask(asked)
    assert len(pair.liar.responses) > seen_before + len(recorded)
    assert answer.restored == 0
    assert answer.choices == (await plain.ask(asked)).choices
    pair.forget()


@pytest.mark.parametrize("failure", FAILURES, ids=[failure.__name__ for failure in FAILURES])
async def test_a_peer_that_fails(pair: Pair, plain: EngineProcess, failure: Tell) -> None:
    """The answer is right within ten seconds, and when the peer is well again it is asked again."""
    await pair.works()
    prompt = await pair.kept()
    seen_before = len(pair.liar.responses)
    pair.liar.tell = failure
    answer = await pair.far.ask(prompt)
    assert len(pair.liar.responses) > seen_before
    assert answer.restored < WHOLE
    assert answer.choices == (await plain.ask(prompt)).choices
    await pair.works()


async def test_a_client_that_leaves_while_its_prefix_is_fetched(pair: Pair, plain: EngineProcess) -> None:
    """Nothing stays behind: no running request and no held block, and the next one with that prompt is right."""
    await pair.works()
    prompt = await pair.kept()
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def halfway(request: web.Request, honest: Honest) -> web.StreamResponse:
        async def body() -> AsyncIterator[bytes]:
            yield honest.body[: len(honest.body) // 2]
            asked.set()
            await go_on.wait()
            yield honest.body[len(honest.body) // 2 :]

        return await trickled(request, honest, body())

    pair.liar.tell = halfway
    leaving = asyncio.create_task(pair.far.ask(prompt))
    async with asyncio.timeout(10):
        await asked.wait()
    leaving.cancel()
    await asyncio.wait([leaving])
    go_on.set()
    assert leaving.cancelled()

    async def is_idle() -> bool:
        held = [await pair.far.counted(name) for name in ("running_sequences", "waiting_sequences", "kv_blocks_held")]
        return not any(held)

    await until(is_idle, 20.0, 0.02)
    pair.liar.tell = the_truth
    assert (await pair.far.ask(prompt)).choices == (await plain.ask(prompt)).choices
    assert await pair.far.counted("integrity_problems_total") == 0


async def test_a_frozen_peer(pair: Pair, plain: EngineProcess) -> None:
    """It accepts connections and says nothing: the other one computes, within ten seconds, and asks again later."""
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


async def test_a_killed_peer(pair: Pair, plain: EngineProcess) -> None:
    """Killed between two requests, and started again under its name, at its port, with nothing: what the index said of
    its former life is nobody's, and its new one serves.
    """
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
    """Who has seen a peer take longer than computing does computes; when the peer is fast again it is asked."""
    await pair.works()

    async def slow(request: web.Request, honest: Honest) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return honest.response()

    for _ in range(4):
        prompt = await pair.kept()
        pair.liar.tell = slow
        answer = await pair.far.ask(prompt)
        assert answer.choices == (await plain.ask(prompt)).choices
    await pair.works()
