"""Identical requests and the semantic cache: one lookup for all of them, and one computation."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from cache.semantic.embedding.encoder import Encoder, Vectors
from cache.semantic.embedding.errors import EmbedderBusy
from cache.semantic.messages import LookupMiss, LookupRequest, Refused
from cache.semantic.policy.policy import Decision, Evidence
from cache.semantic.policy.threshold import ThresholdPolicy
from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.client import DEADLINE, Answer, Client, chat
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

HERD = 12


class Gate:
    """The small model, which computes nothing while the gate is closed."""

    def __init__(self, encoder: Encoder) -> None:
        self.name, self.fingerprint, self.dimensions = encoder.name, encoder.fingerprint, encoder.dimensions
        self.length = encoder.length
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


async def test_identical_requests_ask_once_and_all_get_what_is_found(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate
) -> None:
    """All have the headers of the hit, and none counts as a rejection by coming second."""
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


async def test_identical_requests_ask_once_and_share_the_call_when_nothing_is_found(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate
) -> None:
    """Many requests are one question and one upstream call."""
    client = await semantic.gateway(mock)
    gate.open.clear()
    asking = await _asking(client, HERD)
    gate.open.set()
    answers = await asyncio.gather(*asking)

    assert {(answer.status, answer.cache) for answer in answers} == {(200, "miss")}
    assert await figure(client, "asked") == 1
    assert len(mock.received) == 1


async def test_who_comes_while_the_answer_is_under_way_waits_for_it_and_asks_nobody(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate
) -> None:
    """It joins the flight without a lookup, since the answer may be finished before a reply."""
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


async def test_an_answer_that_lands_while_the_semantic_cache_is_asked_is_not_computed_again(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate
) -> None:
    """A no-cache request may store it meanwhile."""
    client = await semantic.gateway(mock)
    gate.open.clear()
    (first,) = await _asking(client)
    assert (await client.post(chat(AGAIN), Cache_Control="no-cache")).cache == "bypass"
    gate.open.set()
    answer = await first

    assert (answer.cache, answer.text) == ("hit", ANSWER)
    assert len(mock.received) == 1


async def test_who_asked_first_may_leave(semantic: SemanticStage, mock: MockUpstream, gate: Gate) -> None:
    """The others get the answer."""
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
async def test_each_keeps_his_own_limits(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate, limit: dict[str, str], strict_first: bool
) -> None:
    """Identical concurrent requests with other limits are answered by their own limits."""
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


async def test_who_needs_usage_asks_with_the_others_and_takes_no_entry_without(
    semantic: SemanticStage, stage: Stage, gate: Gate
) -> None:
    """There is one lookup for all shapes."""
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


class _AuditsAll(ThresholdPolicy):
    """Audits every hit."""

    def decide(self, evidence: Evidence | None, max_risk: float = 1.0, compares: bool = False) -> Decision:
        return super().decide(evidence, max_risk, compares=True)


async def test_a_hit_that_many_share_is_audited_once(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one comparison, in any order, and even if one of them forbids its own upstream call."""
    monkeypatch.setattr("cache.semantic.service.service.ThresholdPolicy", _AuditsAll)
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


async def test_observing_asks_once_and_nobody_waits_for_it(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate
) -> None:
    """Observing does not change the answer."""
    client = await semantic.gateway(mock, mode="observe")
    gate.open.clear()
    mock.hold.clear()
    asking = await _asking(client, HERD)
    mock.hold.set()
    answers = await asyncio.gather(*asking)
    assert not gate.open.is_set()
    gate.open.set()

    assert {(answer.status, answer.cache) for answer in answers} == {(200, "miss")}
    assert await figure(client, "asked") == 1
    assert len(mock.received) == 1


async def test_only_if_cached_asks_though_the_answer_is_under_way(semantic: SemanticStage, mock: MockUpstream) -> None:
    """It does not wait for another request's upstream call."""
    client = await semantic.gateway(mock)
    await _learned(client)
    mock.hold.clear()
    (first,) = await _asking(client, x_keepgate_max_risk="0")
    await mock.wait_for(2)
    answer = await client.post(chat(AGAIN), Cache_Control="only-if-cached")
    mock.hold.set()

    assert (answer.status, answer.headers["x-keepgate-layer"]) == (200, "semantic")
    assert (await first).cache == "miss"


async def test_what_is_found_too_late_costs_nothing_of_the_budget(
    semantic: SemanticStage, mock: MockUpstream, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that continued without the answer was not served it."""
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


async def test_a_question_that_nobody_waits_for_any_more_is_not_embedded(semantic: SemanticStage, gate: Gate) -> None:
    """So under overload later questions are in time."""
    service = await semantic.service(**SERVES_ALL, deadline=0.1)
    gate.open.clear()
    asks = [LookupRequest(f"public.{text}", "public.context", text, 1.0, True) for text in (ASKED, AGAIN, "And now?")]
    assert await service.handle(asks[0]) == Refused("the semantic cache: not in time")
    with pytest.raises(EmbedderBusy):
        await service.handle(asks[1])
    gate.open.set()
    last = None
    async with asyncio.timeout(DEADLINE):
        while last is None:
            with contextlib.suppress(EmbedderBusy):
                last = await service.handle(asks[2])
            await asyncio.sleep(0.005)

    assert isinstance(last, LookupMiss)
    assert AGAIN not in gate.texts
