"""After a change of the embedding model: stored questions are embedded anew, and vectors of two models never meet."""

import threading
from typing import Any

import msgspec
import numpy as np
import redis.asyncio

from cache.semantic.embedding.encoder import Encoder, Vectors
from gateway.upstreams.mock import MockUpstream
from tests.cache.valkey import Valkey
from tests.gateway.client import Client, chat
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

HEADER_BYTES = 12
QUESTIONS = [f"{ASKED[:-1]} number {number}?" for number in range(40)]


class Other:
    """Another model: the default one's vectors with their components moved along, so that a mixture is no likeness.

    A test may hold up all stored questions but the first `free`, and `refused` fails whatever is computed with it.
    """

    def __init__(self, encoder: Encoder, fingerprint: str = "another", free: int = 10**9) -> None:
        self.name, self.fingerprint, self.dimensions = "another model", fingerprint, encoder.dimensions
        self.texts: list[str] = []
        self.free = free
        self.refused = ""
        self.is_held_up = False
        self.goes_on = threading.Event()
        self._encoder = encoder

    def encode(self, texts: list[str]) -> Vectors:
        stored = [text for text in texts if text in (ASKED, *QUESTIONS)]
        if stored and len(self.texts) + len(stored) > self.free:
            self.is_held_up = True
            assert self.goes_on.wait(60)
        if self.refused in texts:
            raise ValueError("no vector for these")
        self.texts += stored
        return np.roll(self._encoder.encode(texts), 1, axis=1)


async def fingerprints(raw: redis.asyncio.Redis) -> list[str]:
    """The models of all vectors in Redis."""
    keys = [key async for key in raw.scan_iter("keepgate:semantic:record:*")]
    found = [await raw.get(key) for key in keys]
    return [msgspec.msgpack.decode(data[HEADER_BYTES:])[1] for data in found if isinstance(data, bytes)]


async def filled(semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, questions: list[str]) -> None:
    """These questions are in Redis, by a service on the default model that has ended.

    One that still judges them would store some anew while another one embeds them, which then counts them twice.
    """
    client = await semantic.gateway(mock, redis=valkey.url)
    for question in questions:
        await client.post(chat(question), x_keepgate_max_risk="0")
    await until_known(client, len(questions))
    await semantic.end_services()


async def on(semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, encoder: Encoder, **settings: Any) -> Client:
    """A gateway on a service with this model."""
    service = await semantic.service(valkey.url, encoder=encoder, **{**SERVES_ALL, "deadline": 5.0, **settings})
    return await semantic.gateway(mock, redis=valkey.url, service=service)


async def test_stored_questions_are_found_by_the_new_model(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, raw: redis.asyncio.Redis, minilm: Encoder
) -> None:
    """Each is embedded once, its new vector takes the place of the old one, and the next process computes none."""
    await filled(semantic, mock, valkey, [ASKED, *QUESTIONS])
    assert set(await fingerprints(raw)) == {minilm.fingerprint}
    other = Other(minilm)
    client = await on(semantic, mock, valkey, other)
    await until_figure(client, "reembedding", {"left": 0, "done": 41, "failed": 0})
    assert sorted(other.texts) == sorted([ASKED, *QUESTIONS])
    answer = await client.post(chat(AGAIN))
    assert (answer.headers["x-keepgate-layer"], answer.text) == ("semantic", ANSWER)
    near = float(minilm.encode([ASKED])[0] @ minilm.encode([AGAIN])[0])
    assert abs(float(answer.headers["x-keepgate-similarity"]) - near) < 0.01, "a likeness within one model"

    third = Other(minilm)
    late = await on(semantic, mock, valkey, third)
    await until_known(late, 41)
    assert await figure(late, "reembedding") == {"left": 0, "done": 0, "failed": 0}
    assert third.texts == []
    assert set(await fingerprints(raw)) == {"another"}


async def test_meanwhile_only_new_vectors_are_compared_and_a_restart_goes_on(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, raw: redis.asyncio.Redis, minilm: Encoder
) -> None:
    """Held up half way, the index has the new vectors only; the next process computes the rest and no more."""
    await filled(semantic, mock, valkey, QUESTIONS)
    other = Other(minilm, free=20)
    client = await on(semantic, mock, valkey, other)
    await until_figure(client, "reembedding", {"left": 24, "done": 16, "failed": 0})
    asked = f"{ASKED[:-1]} of number 99?"
    answer = await client.post(chat(asked), x_keepgate_max_risk="0")
    similarity = float((minilm.encode(other.texts[:16]) @ minilm.encode([asked])[0]).max())
    assert abs(float(answer.headers["x-keepgate-similarity"]) - similarity) < 1e-3, "the nearest of the sixteen"
    waiting = next(question for question in QUESTIONS if question not in other.texts)
    same = await client.post(chat(f"  {waiting.lower()} "))
    assert same.headers["x-keepgate-layer"] == "normalized", "a normal form needs no vector"

    other.goes_on.set()
    await semantic.end_services()
    left = (await fingerprints(raw)).count(minilm.fingerprint)
    assert left <= 24
    third = Other(minilm)
    late = await on(semantic, mock, valkey, third)
    await until_figure(late, "reembedding", {"left": 0, "done": left, "failed": 0})
    assert len(third.texts) == left


async def test_a_text_that_the_new_model_refuses_holds_up_no_other(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, raw: redis.asyncio.Redis, minilm: Encoder
) -> None:
    """It is given up after some tries, alone, and counted."""
    await filled(semantic, mock, valkey, QUESTIONS)
    other = Other(minilm)
    other.refused = QUESTIONS[7]
    client = await on(semantic, mock, valkey, other)
    await until_figure(client, "reembedding", {"left": 0, "done": 39, "failed": 1})
    assert (await fingerprints(raw)).count(minilm.fingerprint) == 1


async def test_what_is_deleted_meanwhile_does_not_come_back(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, raw: redis.asyncio.Redis, minilm: Encoder
) -> None:
    """An entry that is deleted while its vector is computed is in no index and not in Redis."""
    await filled(semantic, mock, valkey, [ASKED])
    other = Other(minilm, free=0)
    client = await on(semantic, mock, valkey, other)
    await until_figure(client, "reembedding.left", 1)
    entry = (await client.post(chat(ASKED))).headers["x-keepgate-entry"]
    assert (await client.send("DELETE", f"/v1/cache/entries/{entry}")).status == 200
    await until_known(client, 0)
    other.goes_on.set()
    await until_figure(client, "reembedding.left", 0)
    assert (await figure(client, "entries"), await figure(client, "partitions")) == (0, 0)
    assert await fingerprints(raw) == []


async def test_an_answer_that_comes_meanwhile_is_found_too(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, minilm: Encoder
) -> None:
    """Another host that has the old model stores a fresh answer while the vector for the former one is computed."""
    await filled(semantic, mock, valkey, [ASKED])
    other = Other(minilm, free=0)
    client = await on(semantic, mock, valkey, other)
    await until_figure(client, "reembedding.left", 1)
    await until(lambda: other.is_held_up)
    old = await on(semantic, mock, valkey, minilm)
    await until_known(old, 1)
    await old.post(chat(ASKED), Cache_Control="no-cache")
    await old.post(chat("Who painted the ceiling of the Sistine Chapel?"))
    await until_known(client, 2)  # so the one before has come as well
    other.goes_on.set()
    await until_figure(client, "reembedding", {"left": 0, "done": 2, "failed": 0})
    assert (await client.post(chat(AGAIN))).headers["x-keepgate-layer"] == "semantic"


async def test_what_was_learned_of_one_model_s_likenesses_is_not_used_for_another(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, minilm: Encoder
) -> None:
    """The other model begins without labels; they are kept, and are there again with the first model."""
    settings = {"policy": "budget"}
    client = await semantic.gateway(mock, redis=valkey.url, semantic=settings)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    await client.post(chat(AGAIN))
    await until_figure(client, "labels_from_miss", 1)
    await until_figure(client, "policy.labels", 1)
    await semantic.end_services()
    for encoder, labels in ((Other(minilm), 0), (minilm, 1)):
        later = await on(semantic, mock, valkey, encoder, **settings)
        await until_known(later, 2)
        await until_figure(later, "loaded", True)
        assert await figure(later, "policy.labels") == labels
