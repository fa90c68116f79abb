"""The embedder computes the texts of many callers in one thread: batches, order, limits and errors."""

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from cache.semantic.embedding.embedder import MAX_TOKENS, MAX_WAITING, Embedder, open_embedder
from cache.semantic.embedding.encoder import Encoder, Vectors
from cache.semantic.embedding.errors import EmbeddingFailed

LONG = "why " * 100
TEXTS = ["How do I top up?", "", "Where is my card?", LONG, "我的银行卡", "How do I top up?", "a b c d e f g"]


class Gate:
    """The real encoder behind a gate: the test sees each call, and says when it may go on."""

    def __init__(self, encoder: Encoder) -> None:
        self.name, self.fingerprint, self.dimensions = encoder.name, encoder.fingerprint, encoder.dimensions
        self.calls: list[list[str]] = []
        self.entered = threading.Semaphore(0)
        self.open = threading.Semaphore(0)
        self._encoder = encoder

    def encode(self, texts: list[str]) -> Vectors:
        self.calls.append(texts)
        self.entered.release()
        assert self.open.acquire(timeout=60)
        if "poison" in texts:
            raise RuntimeError("no such kernel: poison")
        vectors = self._encoder.encode(texts)
        vectors[[text == "nowhere" for text in texts]] = np.nan
        return vectors[: -1 if "one too few" in texts else None]

    async def reached(self) -> None:
        """Wait until a call has begun."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=60)

    def let(self, calls: int = 1000) -> None:
        """Let this many calls go on."""
        self.open.release(calls)


@pytest.fixture
def gate(encoder: Encoder) -> Iterator[Gate]:
    gate = Gate(encoder)
    yield gate
    gate.let()


async def asked(embedder: Embedder, *texts: str) -> list["asyncio.Task[Vectors]"]:
    """Ask for texts, in this order, and come back when all of them wait."""
    tasks = [asyncio.create_task(embedder.embed(text)) for text in texts]
    await asyncio.sleep(0)
    return tasks


async def test_each_caller_gets_the_vector_of_its_text(encoder: Encoder) -> None:
    """Each caller gets the vector of its own text, whatever the batch."""
    expected = [encoder.encode([text])[0] for text in TEXTS]
    async with open_embedder(encoder) as embedder:
        for _ in range(20):
            vectors = await asyncio.gather(*map(embedder.embed, TEXTS))
            for ours, theirs in zip(vectors, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-5)
                assert ours.flags.owndata


async def test_texts_that_arrive_during_a_call_share_the_next_one(gate: Gate) -> None:
    """Texts that arrive during a call are computed together in the next one."""
    async with open_embedder(gate) as embedder:
        first = await asked(embedder, "first")
        await gate.reached()
        others = await asked(embedder, *TEXTS)
        gate.let()
        await asyncio.gather(*first, *others)
        assert [sorted(call) for call in gate.calls] == [["first"], sorted(TEXTS)]
        assert (embedder.calls, embedder.texts) == (2, 1 + len(TEXTS))


async def test_a_call_has_bounded_tokens_and_takes_short_texts_first(gate: Gate) -> None:
    """A call has at most the bound of tokens, and takes short texts before long ones."""
    async with open_embedder(gate) as embedder:
        first = await asked(embedder, "first")
        await gate.reached()
        others = await asked(embedder, *[LONG] * 30, "short")
        gate.let()
        await asyncio.gather(*first, *others)
        assert "short" in gate.calls[1]
        assert sum(map(len, gate.calls)) == 32
        assert all(sum(len(text) // 4 + 2 for text in call) <= MAX_TOKENS for call in gate.calls)
        assert len(gate.calls) == 1 + 30 // (MAX_TOKENS // (len(LONG) // 4 + 2))


async def test_a_long_text_that_waited_long_goes_before_short_ones(gate: Gate) -> None:
    """A long text that has waited long enough goes before short texts that arrive later."""
    crowd = ["a b c d e f g h"] * 60
    async with open_embedder(gate) as embedder:
        first = await asked(embedder, "first")
        await gate.reached()
        long = await asked(embedder, LONG)
        # The texts below come when even the longest text has waited enough.
        await asyncio.sleep(len(LONG) / 4 * 1e-3 + 0.01)
        later = await asked(embedder, *crowd)
        gate.let()
        await asyncio.gather(*first, *long, *later)
        assert LONG in gate.calls[1]
        assert len(gate.calls) > 2


async def test_a_text_whose_caller_left_is_not_computed(gate: Gate) -> None:
    """A text whose caller was cancelled or timed out is not computed."""
    async with open_embedder(gate) as embedder:
        first = await asked(embedder, "first")
        await gate.reached()
        [gone, stays] = await asked(embedder, "gone", "stays")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await gone
        first[0].cancel()
        gate.let()
        np.testing.assert_allclose(np.linalg.norm(await stays), 1, atol=1e-6)
        assert gate.calls == [["first"], ["stays"]]


async def test_a_text_beyond_a_full_queue_is_refused_at_once(gate: Gate) -> None:
    """A full queue raises EmbeddingFailed until a waiting caller leaves."""
    async with open_embedder(gate) as embedder:
        first = await asked(embedder, "first")
        await gate.reached()
        waiting = await asked(embedder, *["text"] * MAX_WAITING)
        with pytest.raises(EmbeddingFailed, match="busy"):
            await embedder.embed("one more")
        waiting[7].cancel()
        await asyncio.sleep(0)
        [late] = await asked(embedder, "late")
        gate.let()
        await asyncio.gather(*first, late)


async def test_a_fault_of_the_model_reaches_each_caller_of_its_batch(gate: Gate) -> None:
    """An error of the model reaches each caller of its batch without their texts, and no later caller."""
    async with open_embedder(gate) as embedder:
        first = await asked(embedder, "first")
        await gate.reached()
        harmed = await asked(embedder, "poison", "beside it")
        gate.let()
        await first[0]
        for task in harmed:
            with pytest.raises(EmbeddingFailed, match=r"^the embedding model failed: RuntimeError$"):
                await task
        assert (await embedder.embed("after")).shape == (embedder.model.dimensions,)


async def test_a_model_that_gives_too_few_vectors_fails_its_batch(gate: Gate) -> None:
    """A model whose result lacks a vector fails for all texts of the batch, and computes later ones."""
    gate.let()
    async with asyncio.timeout(60), open_embedder(gate) as embedder:
        for task in await asked(embedder, "one too few", "beside it"):
            with pytest.raises(EmbeddingFailed, match=r"^the embedding model failed: ValueError$"):
                await task
        assert (await embedder.embed("after")).shape == (embedder.model.dimensions,)


async def test_a_text_without_direction_fails_alone(gate: Gate) -> None:
    """A text whose vector has no direction raises EmbeddingFailed, and the others of its batch succeed."""
    async with open_embedder(gate) as embedder:
        first = await asked(embedder, "first")
        await gate.reached()
        [nowhere, beside] = await asked(embedder, "nowhere", "beside it")
        gate.let()
        await asyncio.gather(*first, beside)
        with pytest.raises(EmbeddingFailed, match="no direction"):
            await nowhere


async def test_closing_ends_the_thread_and_fails_all_callers(gate: Gate) -> None:
    """Closing an embedder ends its thread and raises EmbeddingFailed for current and later callers."""
    async with open_embedder(gate) as embedder:
        tasks = await asked(embedder, "computing")
        await gate.reached()
        tasks += await asked(embedder, "waiting")
        asyncio.get_running_loop().call_later(0.05, gate.let)
    for task in tasks:
        with pytest.raises(EmbeddingFailed, match="closed"):
            await task
    with pytest.raises(EmbeddingFailed, match="closed"):
        await embedder.embed("late")
    assert [thread for thread in threading.enumerate() if thread.name.startswith("embedder")] == []


async def test_a_patient_embedder_does_not_delay_another(encoder: Encoder, gate: Gate) -> None:
    """An embedder answers while a patient one of the same model computes a long text."""
    async with open_embedder(gate, patient=True) as patient, open_embedder(encoder) as embedder:
        (waiting,) = await asked(patient, LONG)
        await gate.reached()
        async with asyncio.timeout(60):
            vectors = [await embedder.embed(text) for text in TEXTS]
        assert not waiting.done()
        gate.let()
        assert float(vectors[TEXTS.index(LONG)] @ await waiting) == pytest.approx(1.0, abs=1e-5)


async def test_a_running_call_is_waited_for_though_its_callers_have_left(gate: Gate) -> None:
    """It is computed to its end, so that a text would wait as long as if they had stayed."""
    async with open_embedder(gate, patience=50.0) as embedder:
        embedder._text_seconds = 20.0
        running = await asked(embedder, "one", "two", "three")
        await gate.reached()
        for each in running:
            each.cancel()
        await asyncio.wait(running)
        with pytest.raises(EmbeddingFailed, match="busy"):
            await embedder.embed("later")
        assert gate.calls == [["one", "two", "three"]]
        gate.let()


async def test_a_text_that_would_wait_too_long_is_refused_at_once(gate: Gate) -> None:
    """A text raises EmbeddingFailed if the texts before it are expected to take longer than the patience."""
    async with open_embedder(gate, patience=1e-9) as embedder:
        first = await asked(embedder, "measured")
        gate.let(1)
        await asyncio.gather(*first)
        await gate.reached()
        second = await asked(embedder, "alone")
        await gate.reached()
        with pytest.raises(EmbeddingFailed, match="busy"):
            await embedder.embed("after it")
        gate.let()
        await asyncio.gather(*second)
        assert gate.calls == [["measured"], ["alone"]]
