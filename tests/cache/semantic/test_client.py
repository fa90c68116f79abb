"""A gateway's connection to the process of the semantic cache, when that ends connections."""

import asyncio
from pathlib import Path

from cache.errors import StoreUnavailable
from cache.semantic.client import SemanticClient
from cache.semantic.messages import Stats, StatsRequest, from_gateway, line_of


async def test_a_connection_that_ends_is_opened_anew(folder: Path) -> None:
    """Whenever it ends, a question fails as unavailable or is answered, and the service is found again."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(5):
            if not (line := await reader.readline()):
                break
            writer.write(line_of(from_gateway(line)[0], Stats({})))
        writer.transport.abort()  # with questions that nobody reads

    async def ask_often(client: SemanticClient) -> int:
        answered = 0
        for _ in range(20):
            await client.breaker.wait_closed()
            try:
                await client.ask(StatsRequest(), Stats)
                answered += 1
            except StoreUnavailable:
                pass
        return answered

    server = await asyncio.start_unix_server(converse, folder / "s")
    client = SemanticClient(folder / "s", 5.0)
    watching = asyncio.create_task(client.watch())
    async with asyncio.timeout(30):
        answered = await asyncio.gather(*(ask_often(client) for _ in range(10)))
    assert not watching.done()
    assert sum(answered) > 0
    assert client.breaker.times_opened > 0
    watching.cancel()
    await asyncio.wait([watching])
    server.close()
