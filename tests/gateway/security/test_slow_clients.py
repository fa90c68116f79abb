"""Clients that send slowly, or do not read, hold nothing for long."""

import asyncio

import pytest

from gateway.processes import app
from gateway.upstreams.mock import MockUpstream
from tests.gateway.client import DEADLINE, Client
from tests.gateway.conftest import Stage
from tests.gateway.wire import request_bytes, wire

PARTIAL = {
    "nothing": b"",
    "half a line": b"POST /v1/chat/comp",
    "half a head": b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nX-A: ",
}


@pytest.mark.parametrize("sent", PARTIAL.values(), ids=PARTIAL.keys())
async def test_a_head_that_does_not_arrive_ends_the_connection(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """After the time for idle connections, also for a client that goes on with a byte now and then."""
    monkeypatch.setattr(app, "_IDLE_CONNECTION_SECONDS", 0.3)
    client = await stage.gateway(await stage.mock())
    async with wire(client) as connection, asyncio.timeout(DEADLINE):
        await connection.send(sent)
        drip = asyncio.create_task(_drip(connection.writer, bool(sent)))
        try:
            await connection.reader.read()
        except ConnectionError:
            pass  # a byte was under way
        finally:
            drip.cancel()


async def _drip(writer: asyncio.StreamWriter, is_sending: bool) -> None:
    while is_sending:
        writer.write(b"a")
        await asyncio.sleep(0.05)  # slower than the gateway waits in all


async def test_a_body_that_does_not_arrive_is_refused(served: tuple[Client, MockUpstream]) -> None:
    """After the setting timeouts.client in all, also for a client that goes on with a byte now and then."""
    client, mock = served
    whole = request_bytes(b'{"model":"mock","messages":[]}' + b" " * 10_000)
    async with wire(client) as connection, asyncio.timeout(DEADLINE):
        await connection.send(whole[:-9_990])
        drip = asyncio.create_task(_drip(connection.writer, is_sending=True))
        try:
            assert (await connection.answer()).status == 408
        finally:
            drip.cancel()
    assert mock.received == []
