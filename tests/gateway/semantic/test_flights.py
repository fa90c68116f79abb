"""Identical requests and the semantic cache: one lookup for all of them, and one computation."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from cache.semantic.embedding.encoder import Encoder, Vectors
from cache.semantic.embedding.errors import EmbeddingFailed
from cache.semantic.messages import LookupMiss, LookupRequest, Refused
from cache.semantic.policy.policy import Decision, Evidence, ThresholdPolicy
from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.client import DEADLINE, Answer, Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.semantic.stage import (
    AGAIN,
    ANSWER,
    ASKED,
    SERVES_ALL,
    AuditsAll,
    SemanticStage,
    figure,
    until_figure,
    until_known,
)
from tests.waiting import until

HERD = 12


class Gate:
    """The small model, which computes nothing while the gate is closed."""

    def __init__(self, encoder: Encoder) -> None:
        self.name, self.fingerprint, self.dimensions = encoder.name, encoder.fingerprint, encoder.dimensions
        self.open = threading.Event()
        self.open.set()
        self.texts: list[str] = []
        self._encoder = encoder

    def encode(self, texts: list[str]) -> Vectors:
        assert self.open.wait(DEADLINE)  # in the embedder's own thread
        self.texts += texts
        return self._encoder.encode(texts)


@pytest.fixture
async def gate(minilm: Encoder) -> AsyncIterator[Gate]:
    gate = Gate(minilm)
    yield gate
    gate.open.set()


@pytest.fixture
async def semantic(stage: Stage, gate: Gate, folder: Path) -> AsyncIterator[SemanticStage]:
    async with AsyncExitStack() as stack:
        yield SemanticStage(stage, stack, gate, folder)


async def _learned(client: Client) -> None:
    await client.post(chat(ASKED))
    await until_known(client, 1)


async def _asking(client: Client, count: int = 1, /, **headers: str) -> list[asyncio.Task[Answer]]:
    """Requests that have missed the exact cache when this returns."""
    before = await client.figure("tier_lookups_total", tier="memory", outcome="miss")
    asking = [asyncio.create_task(client.post(chat(AGAIN), **headers)) for _ in range(count)]
    await client.until("tier_lookups_total", before + count, tier="memory", outcome="miss")
    return asking


async def test_identical_requests_share_one_lookup_and_its_hit(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate
) -> None:
    """Identical concurrent requests make one lookup, and all get its hit without a rejection."""
    client = await semantic.gateway(mock)
    await _learned(client)
    asked = await figure(client, "asked")
    gate.open.clear()
    asking = await _asking(client, HERD)
    gate.open.set()
    answers = await asyncio.gather(*asking)

    assert {(answer.cache, answer.headers["x-keepgate-layer"], answer.text) for answer in answers} == {
        ("hit", "semantic", ANSWER)
    }
    assert len({(answer.entry, answer.headers["x-keepgate-similarity"]) for answer in answers}) == 1
    assert await figure(client, "asked") == asked + 1
    assert await figure(client, "labels_from_user") == 0
    assert len(mock.received) == 1


async def test_identical_requests_share_one_lookup_and_the_upstream_call(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate
) -> None:
    """Identical concurrent requests without a hit make one lookup and one upstream call."""
    client = await semantic.gateway(mock)
    gate.open.clear()
    asking = await _asking(client, HERD)
    gate.open.set()
    answers = await asyncio.gather(*asking)

    assert {(answer.status, answer.cache) for answer in answers} == {(200, "miss")}
    assert await figure(client, "asked") == 1
    assert len(mock.received) == 1


async def test_a_request_that_joins_a_flight_makes_no_lookup(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate
) -> None:
    """A request whose answer is under way joins the flight without a lookup."""
    client = await semantic.gateway(mock)
    mock.hold.clear()
    (first,) = await _asking(client)
    await mock.wait_for(1)
    gate.open.clear()
    later = await _asking(client, HERD)
    mock.hold.set()
    answers = await asyncio.gather(first, *later)

    assert {answer.text for answer in answers} == {ANSWER}
    assert len(mock.received) == 1
    gate.open.set()
    assert await figure(client, "asked") == 1


async def test_an_answer_stored_during_a_lookup_is_not_computed_again(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate
) -> None:
    """An answer that a no-cache request stores during a lookup is served."""
    client = await semantic.gateway(mock)
    gate.open.clear()
    (first,) = await _asking(client)
    assert (await client.post(chat(AGAIN), Cache_Control="no-cache")).cache == "bypass"
    gate.open.set()
    answer = await first

    assert (answer.cache, answer.text) == ("hit", ANSWER)
    assert len(mock.received) == 1


async def test_the_request_that_made_the_lookup_may_leave(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate
) -> None:
    """The other requests get the answer when the one that made the lookup leaves."""
    client = await semantic.gateway(mock)
    await _learned(client)
    asked = await figure(client, "asked")
    gate.open.clear()
    (first,) = await _asking(client)
    others = await _asking(client, 3)
    first.cancel()
    for _ in range(5):  # until the gateway has seen that the connection is closed
        await client.get("/health")
    gate.open.set()
    answers = await asyncio.gather(*others)

    assert {answer.headers["x-keepgate-layer"] for answer in answers} == {"semantic"}
    assert await figure(client, "asked") == asked + 1
    assert len(mock.received) == 1


@pytest.mark.parametrize("limit", [{"Cache_Control": "max-age=0"}, {"x_keepgate_max_risk": "0"}])
@pytest.mark.parametrize("strict_first", [True, False])
async def test_each_request_keeps_its_own_limits(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate, limit: dict[str, str], strict_first: bool
) -> None:
    """Identical concurrent requests with different limits are answered by their own."""
    client = await semantic.gateway(mock)
    await _learned(client)
    gate.open.clear()
    if strict_first:
        (strict,) = await _asking(client, **limit)
        others = await _asking(client, 3)
    else:
        others = await _asking(client, 3)
        (strict,) = await _asking(client, **limit)
    gate.open.set()

    assert {(await other).headers["x-keepgate-layer"] for other in others} == {"semantic"}
    assert (await strict).cache == "miss"
    assert await figure(client, "labels_from_user") == 0
    assert len(mock.received) == 2


async def test_a_stream_with_usage_shares_the_lookup_and_needs_usage(
    semantic: SemanticStage, stage: Stage, gate: Gate
) -> None:
    """Requests of all shapes make one lookup, and a stream with usage takes no entry without it."""
    choice = {"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}
    without_usage = Reply(when=ASKED, body={"object": "chat.completion", "choices": [choice]})
    mock = await stage.mock(without_usage, Reply(text=ANSWER))
    client = await semantic.gateway(mock)
    await _learned(client)
    asked = await figure(client, "asked")
    gate.open.clear()
    others = await _asking(client, 3)
    with_usage = chat(AGAIN, stream=True, stream_options={"include_usage": True})
    before = await client.figure("tier_lookups_total", tier="memory", outcome="miss")
    needy = asyncio.create_task(client.post(with_usage))
    await client.until("tier_lookups_total", before + 1, tier="memory", outcome="miss")
    gate.open.set()

    assert {(await other).headers["x-keepgate-layer"] for other in others} == {"semantic"}
    assert (await needy).cache == "miss"
    assert (await needy).chunks[-1]["usage"]
    assert await figure(client, "asked") == asked + 1


async def test_a_hit_that_many_share_is_audited_once(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hit that several requests share is audited once, even if one of them forbids an upstream call."""
    monkeypatch.setattr("cache.semantic.service.service.ThresholdPolicy", AuditsAll)
    client = await semantic.gateway(mock)
    await _learned(client)
    before = await client.figure("semantic_audits_total")
    gate.open.clear()
    asking = await _asking(client, Cache_Control="only-if-cached")
    asking += await _asking(client, HERD)
    gate.open.set()
    answers = await asyncio.gather(*asking)

    assert {answer.headers["x-keepgate-layer"] for answer in answers} == {"semantic"}
    await until_figure(client, "labels_from_audit", 1)
    assert await client.figure("semantic_audits_total") == before + 1
    assert len(mock.received) == 2


async def test_observing_makes_one_lookup_and_delays_no_request(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate
) -> None:
    """The mode observe makes one lookup, delays no request and changes no answer."""
    client = await semantic.gateway(mock, mode="observe")
    gate.open.clear()
    mock.hold.clear()
    asking = await _asking(client, HERD)
    mock.hold.set()
    answers = await asyncio.gather(*asking)
    assert not gate.open.is_set()
    gate.open.set()

    assert {(answer.status, answer.cache) for answer in answers} == {(200, "miss")}
    await until_figure(client, "asked", 1)
    assert len(mock.received) == 1


async def test_only_if_cached_makes_a_lookup_beside_a_flight(semantic: SemanticStage, mock: MockUpstream) -> None:
    """A request with only-if-cached makes its lookup and does not join a flight."""
    client = await semantic.gateway(mock)
    await _learned(client)
    mock.hold.clear()
    (first,) = await _asking(client, x_keepgate_max_risk="0")
    await mock.wait_for(2)
    answer = await client.post(chat(AGAIN), Cache_Control="only-if-cached")
    mock.hold.set()

    assert (answer.status, answer.headers["x-keepgate-layer"]) == (200, "semantic")
    assert (await first).cache == "miss"


async def test_a_late_reply_costs_nothing_of_the_budget(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hit that comes after its deadline does not count towards the budget."""
    decided: asyncio.Queue[Decision] = asyncio.Queue()

    class Told(ThresholdPolicy):
        def decide(self, evidence: Evidence | None, max_risk: float = 1.0, compares: bool = False) -> Decision:
            decision = super().decide(evidence, max_risk, compares)
            if evidence is not None:
                decided.put_nowait(decision)
            return decision

    monkeypatch.setattr("cache.semantic.service.service.ThresholdPolicy", Told)
    service = await semantic.service(**SERVES_ALL, deadline=DEADLINE)
    client = await semantic.gateway(mock, service=service, semantic={"deadline": 0.2})
    await _learned(client)
    gate.open.clear()
    (late,) = await _asking(client)
    assert (await late).cache == "miss"
    # At the reply to this the service has the note that no request waits.
    assert await figure(client, "served") == 0
    gate.open.set()
    async with asyncio.timeout(DEADLINE):
        assert not (await decided.get()).serve


async def test_a_question_past_its_deadline_is_not_embedded(semantic: SemanticStage, gate: Gate) -> None:
    """A question whose deadline has passed is not embedded, so that later ones are in time."""
    service = await semantic.service(**SERVES_ALL, deadline=0.1)
    gate.open.clear()
    asks = [
        LookupRequest("public.context", text, 1.0, key=f"public.{text}", serve=True)
        for text in (ASKED, AGAIN, "And now?")
    ]
    assert await service.handle(asks[0]) == Refused("the semantic cache: not in time")
    with pytest.raises(EmbeddingFailed, match="busy"):
        await service.handle(asks[1])
    gate.open.set()
    replies = []

    async def is_answered() -> bool:
        try:
            replies.append(await service.handle(asks[2]))
        except EmbeddingFailed as error:
            if "busy" not in str(error):
                raise
        return bool(replies)

    await until(is_answered, DEADLINE)

    assert isinstance(replies[0], LookupMiss)
    assert AGAIN not in gate.texts
