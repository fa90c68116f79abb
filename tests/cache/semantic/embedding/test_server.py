"""A model at an embedding server: its vectors, what a failing server costs, and what is no longer the same model."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import ClassVar

import aiohttp
import numpy as np
import pytest

from cache.semantic.embedding.embedder import Embedder, Embedders, open_embedders
from cache.semantic.embedding.encoder import Encoder
from cache.semantic.embedding.errors import EmbeddingFailed, ModelChanged
from cache.semantic.embedding.server import EmbeddingServer
from tests.cache.semantic.embedding.embedding_server import EmbeddingsApi, embedding_server
from tests.waiting import until

KEY = "sk-never-shown"
TEXTS = ["How do I top up?", "Where is my card?", "", "我的银行卡", "half a \ud83d pair"]
PATIENT = 30.0


@pytest.fixture
async def api(encoder: Encoder) -> AsyncIterator[EmbeddingsApi]:
    async with embedding_server(encoder) as api:
        yield api


@asynccontextmanager
async def opened(server: EmbeddingServer, deadline: float = PATIENT) -> AsyncIterator[Embedders]:
    """The embedders of a server, watched."""
    async with open_embedders(server, PATIENT, deadline) as embedders:
        watching = [asyncio.create_task(each.model.breaker.watch()) for each in embedders]
        try:
            yield embedders
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)


async def embedded(embedder: Embedder, texts: list[str]) -> list[np.ndarray]:
    return list(await asyncio.gather(*map(embedder.embed, texts)))


async def test_a_text_has_the_unit_vector_of_the_server_s_model(api: EmbeddingsApi, encoder: Encoder) -> None:
    """Texts that come together share a request, with the prompt before each; vectors are scaled to length 1."""
    server = EmbeddingServer(api.url, "tiny", KEY, "query: ")
    expected = encoder.encode([f"query: {text}".replace("\ud83d", "?") for text in TEXTS])
    async with opened(server) as embedders:
        for _ in range(2):
            vectors = await embedded(embedders.lookups, TEXTS)
            np.testing.assert_allclose(vectors, expected, atol=1e-5)
        np.testing.assert_allclose(await embedded(embedders.background, TEXTS), expected, atol=1e-5)
        model = embedders.lookups.model
        assert (model.name, model.dimensions) == (f"tiny at 127.0.0.1:{api.port}", encoder.dimensions)
    assert len(api.requests) == 1 + 3
    assert {body["model"] for body in api.requests} == {"tiny"}
    assert (set(api.paths), set(api.keys)) == ({"/v1/embeddings"}, {f"Bearer {KEY}"})
    assert KEY not in repr(server)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://a:1", "http://a:1/v1/embeddings"),
        ("http://a:1/v1/", "http://a:1/v1/embeddings"),
        ("http://a:1/api/v3", "http://a:1/api/v3/embeddings"),
        ("http://a:1/openai/embeddings", "http://a:1/openai/embeddings"),
    ],
)
def test_a_url_may_be_the_server_s_the_version_s_or_the_endpoint_s(url: str, endpoint: str) -> None:
    """What is missing of the endpoint is added."""
    assert EmbeddingServer(url, "m").endpoint == endpoint


async def test_models_are_told_apart_by_url_name_prompt_and_vector(api: EmbeddingsApi, minilm: Encoder) -> None:
    """Each of the four changes the fingerprint; the key and the last bits of a vector do not."""
    servers = [
        EmbeddingServer(api.url, "m"),
        EmbeddingServer(api.url, "other"),
        EmbeddingServer(api.url, "m", prompt="q: "),
        EmbeddingServer(f"http://localhost:{api.port}", "m"),
    ]
    found = []
    for server in servers:
        async with opened(server) as embedders:
            found.append(embedders.lookups.model.fingerprint)
    for encoder in (_Shifted(api.encoder), minilm):
        api.encoder = encoder
        async with opened(servers[0]) as embedders:
            found.append(embedders.lookups.model.fingerprint)
    assert len(set(found)) == len(found) == 6
    api.encoder = _Inexact(minilm)
    async with opened(EmbeddingServer(api.url, "m", KEY)) as embedders:
        assert embedders.lookups.model.fingerprint == found[-1]


async def test_a_server_that_hangs_costs_one_deadline_once(api: EmbeddingsApi) -> None:
    """The texts of one call wait; later ones fail at once, until a probe is answered."""
    async with opened(EmbeddingServer(api.url, "m"), deadline=0.5) as embedders:
        lookups = embedders.lookups
        api.goes_on.clear()
        for text in ("a", "b", "c"):
            with pytest.raises(EmbeddingFailed):
                await lookups.embed(text)
        assert (lookups.model.breaker.is_open, lookups.model.failures) == (True, 1)
        assert embedders.figures()["available"] is False
        assert not embedders.background.model.breaker.is_open, "its deadline has not passed"
        api.goes_on.set()
        await asyncio.wait_for(lookups.model.breaker.wait_closed(), PATIENT)
        assert (await lookups.embed("d")).shape == (lookups.model.dimensions,)
    assert {"a", "b", "c"} & set(api.asked) == {"a"}, "one deadline, not three"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"data": []}',
        b'{"data": [{"index": 1, "embedding": [1.0]}]}',
        b'{"data": [{"index": 0, "embedding": []}]}',
        b'{"data": [{"index": 0, "embedding": [[1.0]]}]}',
        b'{"data": [{"index": 0, "embedding": ["1.0"]}]}',
        b'{"data": [{"index": 0, "embedding": null}]}',
        b'{"data": ' + b"[" * 100_000,
        b'{"padding": "' + b" " * 17 * 2**20 + b'"}',
    ],
    ids=range(11),
)
async def test_a_reply_without_embeddings_is_a_failure_of_the_server(api: EmbeddingsApi, body: bytes) -> None:
    """It opens the breaker, and the error has no word of the text."""
    async with opened(EmbeddingServer(api.url, "m")) as embedders:
        api.body = body
        with pytest.raises(EmbeddingFailed) as failure:
            await embedders.lookups.embed("a secret question")
        assert embedders.lookups.model.breaker.is_open
        assert "secret" not in str(failure.value)


async def test_refused_texts_are_not_the_server_s_failure(api: EmbeddingsApi) -> None:
    """A text that the server refuses has no vector, and others are asked as before."""
    async with opened(EmbeddingServer(api.url, "m")) as embedders:
        for api.status in (400, 413, 422):
            with pytest.raises(EmbeddingFailed, match=f"refuses these texts with status {api.status}"):
                await embedders.lookups.embed("poison")
        api.status = 200
        assert (await embedders.lookups.embed("plain")).size


async def test_a_key_that_is_refused_is_a_failure_of_the_server(api: EmbeddingsApi) -> None:
    """So are a missing model, an overload and a redirect, which is not followed."""
    async with opened(EmbeddingServer(api.url, "m", KEY)) as embedders:
        for api.status in (301, 401, 404, 429, 500):
            before = len(api.requests)
            with pytest.raises(EmbeddingFailed, match=f"status {api.status}"):
                await embedders.lookups.embed("x")
            assert len(api.requests) >= before + 1
            api.status = 200
            await asyncio.wait_for(embedders.lookups.model.breaker.wait_closed(), PATIENT)


async def test_a_server_that_is_down_at_first_is_waited_for(
    api: EmbeddingsApi, caplog: pytest.LogCaptureFixture
) -> None:
    """The embedders are there when it answers, and one line is logged meanwhile, without the key."""
    api.status = 503
    caplog.set_level(logging.INFO)
    opening = asyncio.create_task(_first_vector(EmbeddingServer(api.url, "tiny", KEY)))
    await until(lambda: len(api.requests) >= 3)
    assert not opening.done()
    assert f"the embedding server of tiny at 127.0.0.1:{api.port} is unavailable (status 503)" in caplog.text
    api.status = 200
    assert (await asyncio.wait_for(opening, PATIENT)).size
    assert KEY not in caplog.text


class _Faulty(EmbeddingServer):
    """It is down at first, and then there is a fault of ours."""

    errors: ClassVar[Iterator[Exception]] = iter((EmbeddingFailed("down"), ValueError("a fault")))

    async def probe(self, session: aiohttp.ClientSession) -> np.ndarray:
        raise next(self.errors)


async def test_a_fault_while_a_server_is_waited_for_ends_the_wait() -> None:
    """The error of the probe is raised, and nothing waits for a server any more."""
    async with asyncio.timeout(PATIENT):
        with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="a fault")):
            await _first_vector(_Faulty("http://127.0.0.1:1", "tiny", KEY))


async def _first_vector(server: EmbeddingServer) -> np.ndarray:
    async with opened(server) as embedders:
        return await embedders.lookups.embed("x")


@pytest.mark.parametrize("is_wider", [True, False], ids=["of other dimensions", "of the same dimensions"])
async def test_another_model_under_the_same_name_is_noticed(
    is_wider: bool, api: EmbeddingsApi, encoder: Encoder, minilm: Encoder
) -> None:
    """After an outage, or as soon as a vector has another length, the watch ends with an error."""
    async with open_embedders(EmbeddingServer(api.url, "m"), PATIENT, PATIENT) as embedders:
        watching = asyncio.create_task(embedders.lookups.model.breaker.watch())
        if is_wider:
            api.encoder = minilm
        else:
            api.encoder = _Shifted(encoder)
            api.status = 503
        with pytest.raises(EmbeddingFailed):
            await embedders.lookups.embed("x")
        api.status = 200
        with pytest.raises(ModelChanged, match="is another model than before"):
            await asyncio.wait_for(watching, PATIENT)


class _Shifted:
    """A model of the same dimensions with other vectors."""

    def __init__(self, encoder: Encoder) -> None:
        self.name, self.fingerprint, self.dimensions = encoder.name, encoder.fingerprint, encoder.dimensions
        self._encoder = encoder

    def encode(self, texts: list[str]) -> np.ndarray:
        return np.roll(self._encoder.encode(texts), 1, axis=1)


class _Inexact(_Shifted):
    """The same model, as another machine computes it."""

    def encode(self, texts: list[str]) -> np.ndarray:
        vectors = self._encoder.encode(texts)
        return vectors + np.random.default_rng(1).normal(0, 1e-5, vectors.shape).astype(np.float32)
