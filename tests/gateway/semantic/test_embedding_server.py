"""A semantic cache whose vectors a server computes: what clients see while it answers, hangs and is away."""

import time
from collections.abc import AsyncIterator

import pytest

from cache.semantic.embedding.encoder import Encoder
from gateway.settings.cache import SemanticSettings
from gateway.upstreams.mock import MockUpstream
from tests.cache.semantic.embedding.embedding_server import EmbeddingsApi, embedding_server
from tests.cache.valkey import Valkey
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.semantic.stage import (
    AGAIN,
    ANSWER,
    ASKED,
    SERVES_ALL,
    SemanticStage,
    figure,
    until_figure,
    until_known,
)
from tests.waiting import until

STARTS_WITHIN = 60.0


@pytest.fixture
async def api(minilm: Encoder) -> AsyncIterator[EmbeddingsApi]:
    async with embedding_server(minilm) as api:
        yield api


async def until_embedder(client: Client, available: bool) -> None:
    async def is_so() -> bool:
        return bool(await figure(client, "embedder.available")) is available

    await until(is_so, STARTS_WITHIN, every=0.02)


async def test_a_similar_question_is_found_with_a_server_s_vectors(
    semantic: SemanticStage, mock: MockUpstream, api: EmbeddingsApi
) -> None:
    """The server computes each question once, and the figures say whose vectors they are."""
    client = await semantic.gateway(mock, semantic={"model": "minilm", "model_url": api.url})
    await client.post(chat(ASKED))
    await until_known(client, 1)
    answer = await client.post(chat(AGAIN))
    assert (answer.headers["x-keepgate-layer"], answer.text) == ("semantic", ANSWER)
    assert api.asked[1:] == [ASKED, AGAIN]
    assert await figure(client, "model") == f"minilm at 127.0.0.1:{api.port}"
    assert await figure(client, "embedder.dimensions") == 384


async def test_while_the_server_hangs_requests_go_to_the_upstream(
    semantic: SemanticStage, mock: MockUpstream, api: EmbeddingsApi
) -> None:
    """One request waits for one deadline, the others not at all; the figures count it, and hits come back with it."""
    settings = {"model": "minilm", "model_url": api.url, "deadline": 1.0}
    client = await semantic.gateway(mock, semantic=settings)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    api.goes_on.clear()
    took = []
    for number in range(4):
        began = time.monotonic()
        answer = await client.post(chat(f"Where is office number {number}?"))
        took.append(time.monotonic() - began)
        assert (answer.status, answer.cache) == (200, "miss")
    assert 0.8 <= took[0] < 5.0
    assert sum(seconds >= 0.8 for seconds in took[1:]) <= 1, "no later request waits, but for a busy machine"
    assert (await client.post(chat(ASKED.lower()))).headers["x-keepgate-layer"] == "normalized", "it needs no vector"
    assert await figure(client, "available")
    assert not await figure(client, "embedder.available")
    assert await figure(client, "embedder.failures") >= 1
    page = (await client.get("/metrics")).body.decode()
    assert "keepgate_semantic_embedder_available 0.0" in page
    api.goes_on.set()
    await until_embedder(client, True)
    assert (await client.post(chat(AGAIN))).headers["x-keepgate-layer"] == "semantic"


async def test_a_gateway_starts_without_its_embedding_server(
    stage: Stage, mock: MockUpstream, minilm: Encoder, valkey: Valkey
) -> None:
    """Requests are answered by the upstream until the server is there; then similar questions are found."""
    async with embedding_server(minilm) as api:
        port = api.port
    settings = SemanticSettings(
        mode="on", model="minilm", model_url=f"http://127.0.0.1:{port}", deadline=5.0, **SERVES_ALL
    )
    client = await stage.gateway(mock, redis=valkey.url, semantic=settings)
    assert (await client.post(chat("Is anybody there?"))).cache == "miss"
    assert not await figure(client, "available")
    async with embedding_server(minilm, port):
        await until_figure(client, "available", True)
        await client.post(chat(ASKED))

        async def is_found() -> bool:
            # A miss would be stored, and then found exactly.
            found = await client.post(chat(AGAIN), Cache_Control="only-if-cached")
            return found.headers.get("x-keepgate-layer") == "semantic"

        await until(is_found, STARTS_WITHIN, every=0.1)
