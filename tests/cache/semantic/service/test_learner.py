"""What is learned from fresh answers while the judge is slow, absent, or told of answers that are gone."""

import asyncio
import dataclasses
import functools
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import numpy as np
import pytest

from cache.semantic.embedding.embedder import Embedder, open_embedder
from cache.semantic.embedding.encoder import Encoder
from cache.semantic.index.index import VectorIndex
from cache.semantic.judge.embedding_judge import EmbeddingJudge
from cache.semantic.judge.judge import Judge
from cache.semantic.judge.llm_judge import open_llm_judge
from cache.semantic.language.text import Text
from cache.semantic.messages import AnswerStored
from cache.semantic.policy.policy import Decision
from cache.semantic.policy.vcache import VCachePolicy
from cache.semantic.service import answers as answers_module
from cache.semantic.service import learner as learner_module
from cache.semantic.service import neighbours as neighbours_module
from cache.semantic.service.answers import Answers
from cache.semantic.service.labels import Labels
from cache.semantic.service.learner import JudgeBudget, Learner
from cache.semantic.service.metrics import ServiceMetrics
from cache.semantic.service.neighbours import Neighbours, first_allowed, neighbourhood_of
from cache.semantic.service.queries import Query
from cache.semantic.service.queues import LookupPriority
from cache.semantic.service.records import Record
from tests.cache.semantic.judge.chat_server import ChatServer, chat_server

PARTITION = "a.context"
ASKED = "How do I reset my password?"
AGAIN = "How can I reset my password?"
ANSWER = "Open the settings, choose Security, and click Reset password."
SAME_ANSWER = "Click Reset password: it is under Security, in the settings."
# Longer than any test waits.
PATIENT = 60.0


class Host:
    """A learner with its parts, and what it has learned."""

    def __init__(self, embedder: Embedder, judge: Judge, share: float) -> None:
        self.embedder = embedder
        self.policy = VCachePolicy(0.05, random.Random(0))  # noqa: S311 - reproducible
        self.neighbours = Neighbours(VectorIndex(embedder.dimensions), lambda record: True, (), 1)
        self.labels = Labels(self.policy, "")
        self.figures = ServiceMetrics()
        self.priority = LookupPriority()
        self.learner = Learner(
            embedder,
            self.neighbours,
            Answers(None),
            judge,
            JudgeBudget(share),
            self.labels,
            None,
            self.figures,
            self.priority,
            10_000,
        )

    async def record_answer(
        self,
        name: str,
        text: str,
        answer: str,
        created: float = 1.0,
        *,
        asked: bool = False,
        query: Query | None = None,
    ) -> None:
        """An answer; `asked` if the question was looked up before, so that a label comes of it."""
        body = {"choices": [{"message": {"content": answer}, "finish_reason": "stop"}]}
        note = AnswerStored(
            1, f"a.{name}", PARTITION, text, "m", "0.0.0", created, time.time() + 60, msgspec.json.encode(body)
        )
        await self.learner.record_answer(note, await self.query(text) if asked else query)

    async def query(self, text: str) -> Query:
        vector = await self.embedder.embed(text)
        near = await self.neighbours.near(PARTITION, vector)
        evidence = self.policy.weigh(neighbourhood_of(near))
        return Query("a.key", PARTITION, text, vector, evidence, evidence.entry, Decision(False, 1.0), False)

    def record(self, name: str) -> Record | None:
        return self.neighbours.records.get(f"a.{name}")

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():  # noqa: ASYNC110  # what it looks at are plain values
                await asyncio.sleep(0.005)

    def figure(self, name: str) -> int:
        return int(self.figures.as_dict().get(name, 0))


@asynccontextmanager
async def _working(embedder: Embedder, judge: Judge, share: float = math.inf) -> AsyncIterator[Host]:
    host = Host(embedder, judge, share)
    working = asyncio.create_task(host.learner.work())
    try:
        yield host
    finally:
        working.cancel()
        await asyncio.wait([working])
        host.neighbours.close()


@pytest.fixture
async def embedder(minilm: Encoder) -> AsyncIterator[Embedder]:
    async with open_embedder(minilm) as opened:
        yield opened


@pytest.fixture
async def server() -> AsyncIterator[ChatServer]:
    async with chat_server() as opened:
        yield opened


@pytest.fixture
async def slow(embedder: Embedder, server: ChatServer) -> AsyncIterator[Host]:
    """A host whose judge answers nothing until `server.goes_on`; it says SAME of everything."""
    server.goes_on.clear()
    async with AsyncExitStack() as stack:
        judge = await stack.enter_async_context(open_llm_judge(server.url, "m", deadline=PATIENT))
        yield await stack.enter_async_context(_working(embedder, judge))
        server.goes_on.set()


async def test_an_answer_is_found_before_a_slow_judge_has_compared_it(slow: Host, server: ChatServer) -> None:
    """Its group and its label follow, to the record as it is then."""
    await slow.record_answer("one", ASKED, ANSWER)
    await slow.until(lambda: slow.record("one") is not None)
    await slow.record_answer("two", AGAIN, SAME_ANSWER, asked=True)
    await slow.until(lambda: slow.record("two") is not None)

    kept = slow.record("two")
    assert kept is not None
    assert kept.answer == "a.two", "what it says is not known yet"
    assert slow.labels.count == 0
    slow.neighbours.records.confirm("a.two", 1.0, "b")
    server.goes_on.set()
    await slow.learner.idle()
    assert slow.record("two") == msgspec.structs.replace(kept, answer="a.one", confirmed=("b",))
    assert slow.labels.count == slow.figure("labels_from_miss") == 1


async def test_no_answer_waits_for_those_before_it(slow: Host, server: ChatServer) -> None:
    """A hundred answers are found while the judge has answered nothing; he is asked some at once."""
    for number in range(100):
        await slow.record_answer(str(number), f"How do I reset password number {number}?", f"Press key {number}.")
    await slow.until(lambda: len(slow.neighbours.records) == 100)

    assert server.requests, "somebody is asked"
    assert slow.figure("judged_same") == 0
    server.goes_on.set()
    await slow.learner.idle()
    assert slow.figure("judged_same") >= 99
    assert 1 < server.most_at_once <= 4


async def test_where_too_many_wait_for_the_judge_the_oldest_are_not_compared(
    embedder: Embedder, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But found they are, each of them."""
    monkeypatch.setattr(learner_module, "_MAX_WAITING", 10)
    server.goes_on.clear()
    async with (
        open_llm_judge(server.url, "m", deadline=PATIENT) as judge,
        _working(embedder, judge) as host,
    ):
        for number in range(40):
            await host.record_answer(str(number), f"How do I reset password number {number}?", f"Press key {number}.")
            await host.until(lambda number=number: host.record(str(number)) is not None)  # type: ignore[misc]
        server.goes_on.set()
        await host.learner.idle()

        assert len(host.neighbours.records) == 40
        assert host.figure("unjudged") == 40 - 1 - 4 - 10, "the first is compared with nobody"
        kept = host.record("39")
        assert kept is not None
        assert kept.answer != "a.39"


async def test_a_verdict_is_of_the_answers_that_were_compared(slow: Host, server: ChatServer) -> None:
    """One that was computed anew meanwhile is neither blamed nor joined for what the old one said."""
    await slow.record_answer("one", ASKED, ANSWER)
    await slow.until(lambda: slow.record("one") is not None)
    await slow.record_answer("two", AGAIN, SAME_ANSWER, asked=True)
    await server.arrived.acquire()
    await slow.record_answer("one", ASKED, "There are no passwords any more.", created=2.0)
    await slow.until(lambda: getattr(slow.record("one"), "created", 0) == 2.0)
    server.goes_on.set()
    await slow.learner.idle()

    two = slow.record("two")
    assert two is not None
    assert two.answer == "a.two"
    assert slow.labels.count == 0


async def test_what_was_computed_anew_before_its_turn_is_not_compared(
    embedder: Embedder, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The label would be of an answer that nobody was asked about."""
    monkeypatch.setattr(learner_module, "_JUDGED_AT_ONCE", 1)
    server.goes_on.clear()
    async with (
        open_llm_judge(server.url, "m", deadline=PATIENT) as judge,
        _working(embedder, judge) as host,
    ):
        for name, text, asked in (("one", ASKED, False), ("two", AGAIN, False), ("three", f"Hi. {ASKED}", True)):
            await host.record_answer(name, text, f"{ANSWER} {name}", asked=asked)
            await host.until(lambda name=name: host.record(name) is not None)  # type: ignore[misc]
        await host.record_answer("one", ASKED, "There are no passwords any more.", created=2.0)
        await host.until(lambda: getattr(host.record("one"), "created", 0) == 2.0)
        server.goes_on.set()
        await host.learner.idle()

        assert host.labels.count == 0
        assert {r["messages"][1]["content"].count("no passwords") for r in server.requests[:2]} == {0}
        assert getattr(host.record("three"), "answer", None) == "a.two"


async def test_nobody_waits_for_the_judge_while_many_wait_to_be_found(
    slow: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are found first, and compared later."""
    monkeypatch.setattr(learner_module, "_PATIENCE", PATIENT)
    monkeypatch.setattr(learner_module, "_MAX_PATIENT", 1)
    await slow.record_answer("one", ASKED, ANSWER)
    await slow.until(lambda: slow.record("one") is not None)
    await slow.record_answer("two", AGAIN, SAME_ANSWER)
    await slow.record_answer("three", f"Hi. {ASKED}", SAME_ANSWER)
    await slow.until(lambda: len(slow.neighbours.records) == 3)


async def test_the_group_of_an_answer_that_is_gone_is_nobodys(slow: Host, server: ChatServer) -> None:
    """Evicted, or computed anew, while the judge had not answered."""
    await slow.record_answer("one", ASKED, ANSWER)
    await slow.until(lambda: slow.record("one") is not None)
    await slow.record_answer("two", AGAIN, SAME_ANSWER)
    await slow.record_answer("three", "Please, how do I reset my password?", SAME_ANSWER)
    await slow.until(lambda: len(slow.neighbours.records) == 3)
    three = slow.record("three")
    assert three is not None
    vector = np.asarray(await slow.embedder.embed(three.text))
    await slow.neighbours.put(msgspec.structs.replace(three, created=3.0), vector)
    await slow.learner.forget("a.two")
    server.goes_on.set()
    await slow.learner.idle()

    assert slow.record("two") is None
    assert getattr(slow.record("three"), "answer", None) == "a.three"


async def test_a_quick_judge_is_waited_for(embedder: Embedder) -> None:
    """Nobody finds an answer before it is known what it says the same as, though many come at once."""
    async with _working(embedder, EmbeddingJudge(embedder)) as host:
        for number in range(20):
            await host.record_answer(str(number), f"{ASKED} I am number {number}.", ANSWER)
        await host.learner.idle()

        assert {record.answer for record in host.neighbours.records} == {"a.0"}
        assert host.figure("judged_same") == 19


async def test_a_neighbour_whose_answer_nobody_has_is_left_out(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a store old answers are unknown; the fresh one is compared with the others, and kept."""
    monkeypatch.setattr(answers_module, "_KEPT_CHARACTERS", len(ANSWER) + 10)
    async with _working(embedder, EmbeddingJudge(embedder)) as host:
        await host.record_answer("old", ASKED, "Ask your administrator to do that for you, please.")
        await host.record_answer("one", f"{AGAIN} Thanks.", ANSWER)
        await host.learner.idle()
        await host.record_answer("two", AGAIN, ANSWER)
        await host.learner.idle()

        assert {record.entry for record in host.neighbours.records} == {"a.old", "a.one", "a.two"}
        two = host.record("two")
        assert two is not None
        assert two.answer == "a.one"
        assert host.figure("not_learned") == 0


async def test_those_who_wait_for_the_judge_are_compared_once_with_what_turns_out_the_same(
    embedder: Embedder, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it was not known that the neighbours say the same, each counted as another answer."""
    monkeypatch.setattr(learner_module, "_JUDGED_AT_ONCE", 1)
    server.goes_on.clear()
    async with (
        open_llm_judge(server.url, "m", deadline=PATIENT) as judge,
        _working(embedder, judge) as host,
    ):
        for number in range(20):
            await host.record_answer(
                str(number), f"{ASKED} I am number {number}.", f"{ANSWER} Greetings, number {number}."
            )
        await host.until(lambda: len(host.neighbours.records) == 20)
        server.goes_on.set()
        await host.learner.idle()

        assert {record.answer for record in host.neighbours.records} == {"a.0"}
        assert len(server.requests) == 19


async def test_what_is_learned_is_read_before_somebody_asks(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guards find its words at hand, also those of what comes from other processes."""
    read: list[str] = []
    real = Text.of.__func__  # type: ignore[attr-defined]  # of a classmethod

    def noted(text: str) -> Text:
        read.append(text)
        return real(Text, text)  # type: ignore[no-any-return]

    monkeypatch.setattr(neighbours_module, "_read_short", functools.lru_cache(neighbours_module._TEXTS_KEPT)(noted))
    async with _working(embedder, EmbeddingJudge(embedder)) as host:
        await host.record_answer("one", ASKED, ANSWER)
        await host.until(lambda: host.record("one") is not None)
        await host.learner.idle()
        one = host.record("one")
        assert one is not None
        other = msgspec.structs.replace(one, entry="a.other", text=AGAIN)
        await host.neighbours.put_all([(other, await embedder.embed(AGAIN))])
        near = await host.neighbours.near(PARTITION, await embedder.embed(ASKED))
        assert read == [ASKED, AGAIN]
        assert first_allowed(ASKED, near, range(2))[0] == 0
        assert read == [ASKED, AGAIN]


async def test_a_judge_who_costs_is_asked_for_a_share_and_for_each_audit(
    embedder: Embedder, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first it is one of ten fresh answers where the share is a tenth; the others teach nothing."""
    monkeypatch.setattr("cache.semantic.service.learner._FIRST", 1.0)
    async with open_llm_judge(server.url, "m") as judge, _working(embedder, judge, 0.1) as host:
        await host.record_answer("known", ASKED, ANSWER)
        await host.learner.idle()
        for number in range(21):
            await host.record_answer(
                f"e{number}", f"{AGAIN} {'Really! ' * number}", f"{SAME_ANSWER} {number}", asked=True
            )
            await host.learner.idle()
        asked = len(server.requests)
        assert asked == 2
        assert host.labels.count == 2
        query = await host.query(AGAIN)
        audited = dataclasses.replace(query, decision=Decision(True, 0.01, 0.01, True, 0.1), served=True)
        await host.record_answer("audit", AGAIN, f"{SAME_ANSWER} audited", query=audited)
        await host.learner.idle()
        assert len(server.requests) == asked + 1


async def test_what_others_have_learned_is_bounded_too(embedder: Embedder) -> None:
    """Those that were used longest ago go, here alone."""
    async with _working(embedder, EmbeddingJudge(embedder)) as host:
        for name in ("one", "two", "three"):
            await host.record_answer(name, f"What is {name}?", ANSWER)
            await host.learner.idle()
        host.neighbours.records.use("a.one")
        await host.neighbours.bound(2)
        assert [record.entry for record in host.neighbours.records] == ["a.three", "a.one"]
        assert len(host.neighbours.index) == 2
