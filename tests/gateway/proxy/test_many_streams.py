"""Each of many clients sees exactly the bytes of its stream, whoever else joins, leaves, or reads slowly."""

import asyncio
import contextlib
import random
from collections.abc import Iterable

import msgspec
import pytest

from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.proxy.test_single_flight import USAGE
from tests.gateway.raw_upstream import CHUNKED_EVENT_STREAM, Connection, chunked
from tests.gateway.wire import request_bytes, wire

QUESTIONS = 25
CLIENTS = 8  # of each question
DEADLINE = 60.0


class Script:
    """One question: what its upstream says, and how its clients listen.

    Each client joins when the upstream has said a random share; the upstream says its last bytes when all have joined.
    The first client stays to the end.
    """

    def __init__(self, seed: int) -> None:
        self.question = f"question {seed}"
        self.rng = random.Random(seed)  # noqa: S311  # not a secret
        self.texts = list(texts(self.rng, self.rng.choice([3, 40, 400])))
        said = [event(text) for text in self.texts]
        self.with_usage = b"".join([*said, event(None), USAGE_EVENT, b"data: [DONE]\n\n"])
        self.plain = b"".join([*said, event(None), b"data: [DONE]\n\n"]).replace(b',"usage":null', b"")
        self.share = 0.0
        self.joined = 0
        self.changed = asyncio.Condition()

    async def note(self, share: float = 0.0, joined: int = 0) -> None:
        async with self.changed:
            self.share = max(self.share, share)
            self.joined += joined
            self.changed.notify_all()

    async def converse(self, connection: Connection) -> None:
        rng = random.Random(self.question)  # noqa: S311
        await connection.send(CHUNKED_EVENT_STREAM)
        cuts = sorted(rng.sample(range(1, len(self.with_usage)), rng.choice([3, 30, 300])))
        for start, end in zip([0, *cuts[:-1]], cuts, strict=True):
            await connection.send(chunked(self.with_usage[start:end]))
            await self.note(share=start / cuts[-1])
            await pause(rng, 3)
        await self.note(share=1.0)
        async with self.changed:
            await self.changed.wait_for(lambda: self.joined == CLIENTS)
        await connection.send(chunked(self.with_usage[cuts[-1] :]) + chunked(b""))

    async def listen(self, client: Client, number: int) -> None:
        rng = random.Random(f"{self.question}, client {number}")  # noqa: S311
        if number:
            share = rng.random()
            async with self.changed:
                await self.changed.wait_for(lambda: self.share >= share)
        asks_usage = rng.random() < 0.5
        expected = self.with_usage if asks_usage else self.plain
        leaves_after = rng.randrange(len(expected)) if number and rng.random() < 0.3 else len(expected)
        heard = b""
        async with wire(client, receive_buffer=rng.choice([None, 2**12])) as connection:
            shape = USAGE if asks_usage else {"stream": True}
            await connection.send(request_bytes(msgspec.json.encode(chat(self.question, **shape))))
            await connection.reader.readuntil(b"\r\n\r\n")
            await self.note(joined=1)
            while len(heard) < leaves_after and (size := int(await connection.reader.readline(), 16)):
                heard += (await connection.reader.readexactly(size + 2))[:-2]
                await pause(rng, rng.choice([0, 0, 20]))
        assert heard[:leaves_after] == expected[:leaves_after], (self.question, number)
        assert len(heard) == len(expected) or leaves_after < len(expected)


USAGE_EVENT = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8}}\n\n'


def event(text: str | None) -> bytes:
    """A chunk with a text, or the one with the finish reason."""
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": "stop" if text is None else None}
    return b"data: " + msgspec.json.encode({"id": "c", "choices": [choice], "usage": None}) + b"\n\n"


def texts(rng: random.Random, count: int) -> Iterable[str]:
    return ("".join(rng.choices('ab "\\{}ü\n😀,:', k=rng.choice([1, 8, 300, 3_000]))) for _ in range(count))


async def pause(rng: random.Random, at_most: int) -> None:
    for _ in range(rng.randint(0, at_most)):
        await asyncio.sleep(0)


@pytest.mark.parametrize("max_answer", [2**24, 2**14], ids=["kept", "beyond the limit"])
async def test_every_client_sees_its_own_stream(stage: Stage, max_answer: int) -> None:
    """Of 200 streams each client gets all bytes that are meant for it, in order, and no others."""
    scripts = {script.question: script for script in map(Script, range(QUESTIONS))}

    async def converse(connection: Connection) -> None:
        script = scripts[msgspec.json.decode(connection.body)["messages"][-1]["content"]]
        with contextlib.suppress(RuntimeError):  # of uvloop, when all clients of this flight have left
            await script.converse(connection)

    client = await stage.gateway(await stage.raw(converse), cache={"max_answer": max_answer})
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as clients:
        for script in scripts.values():
            for number in range(CLIENTS):
                clients.create_task(script.listen(client, number))
    await client.until("flights", 0)
    for question, script in scripts.items():
        if len(script.with_usage) < max_answer:
            answer = await client.post(chat(question))
            assert (answer.cache, answer.text) == ("hit", "".join(script.texts))
