"""What is learned from fresh answers while the judge is slow, absent, or told of answers that are gone."""

import asyncio
import dataclasses
import functools
import math
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import numpy as np
import pytest

from cache.semantic.embedding.embedder import Embedder, open_embedder
from cache.semantic.embedding.encoder import Encoder
from cache.semantic.index.index import VectorIndex
from cache.semantic.judge.embedding_judge import EmbeddingJudge
from cache.semantic.judge.error_rates import PRIOR_ERROR, ErrorRates, JudgedPair
from cache.semantic.judge.judge import Judge
from cache.semantic.judge.llm_judge import open_llm_judge
from cache.semantic.judge.repeatability import is_unrepeatable
from cache.semantic.messages import AnswerStored, LookupRequest
from cache.semantic.policy import state as state_module
from cache.semantic.policy.budget import BudgetPolicy
from cache.semantic.policy.policy import Decision, EqualAnswers, Label
from cache.semantic.service import answers as answers_module
from cache.semantic.service import learner as learner_module
from cache.semantic.service import neighbours as neighbours_module
from cache.semantic.service.answers import Answers
from cache.semantic.service.labels import Labels
from cache.semantic.service.learner import Learner
from cache.semantic.service.lookups import Query
from cache.semantic.service.neighbours import Neighbours, compare_texts
from cache.semantic.service.records import Record
from cache.semantic.wording.text import Text
from tests.cache.semantic.judge.chat_server import ChatServer, chat_server
from tests.waiting import until

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
        self.policy = BudgetPolicy(0.05, PRIOR_ERROR, random.Random(0))  # noqa: S311 - reproducible
        self.neighbours = Neighbours(VectorIndex(embedder.model.dimensions))
        self.errors = ErrorRates(judge.same_above)
        self.labels = Labels(self.policy, self.errors, "policy", "judge")
        self.answers = Answers(None)
        self.learner = Learner(embedder, self.neighbours, self.answers, judge, self.labels, 10_000, share)

    async def record_answer(
        self,
        name: str,
        text: str,
        answer: str,
        created: float = 1.0,
        *,
        asked: bool = False,
        query: Query | None = None,
        generation: str = "0.0.0",
    ) -> None:
        """An answer; `asked` if the question was looked up before, so that a label comes of it."""
        body = {"choices": [{"message": {"content": answer}, "finish_reason": "stop"}]}
        note = AnswerStored(
            1, f"a.{name}", PARTITION, text, "m", generation, created, time.time() + 60, msgspec.json.encode(body)
        )
        self.learner.record_answer(note, await self.query(text) if asked else query)

    async def query(self, text: str) -> Query:
        vector = await self.embedder.embed(text)
        near = await self.neighbours.near(PARTITION, vector)
        evidence = self.policy.vote([(record.answer, similarity) for record, similarity in near])
        ask = LookupRequest(PARTITION, text, 1.0, key="a.key", serve=False)
        return Query(ask, near[evidence.members[0]].record.entry, vector, evidence, Decision(False, 1.0))

    def record(self, name: str) -> Record | None:
        return self.neighbours.records.get(f"a.{name}")

    def figure(self, name: str) -> int:
        return int(self.learner.figures.as_dict().get(name, 0))


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


@pytest.fixture
def one_comparison_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner has the judge compare one answer at a time, for which there is no setting."""
    monkeypatch.setattr(learner_module, "_JUDGED_AT_ONCE", 1)


async def test_an_answer_is_found_before_a_slow_judge_has_compared_it(slow: Host, server: ChatServer) -> None:
    """An answer is found before the judge has compared it, and gets its group and label afterwards."""
    await slow.record_answer("one", ASKED, ANSWER)
    await until(lambda: slow.record("one") is not None)
    await slow.record_answer("two", AGAIN, SAME_ANSWER, asked=True)
    await until(lambda: slow.record("two") is not None)

    kept = slow.record("two")
    assert kept is not None
    assert kept.answer == "a.two@1.0", "what it says is not known yet"
    assert slow.figure("labels_from_miss") == 0
    slow.neighbours.records.change("a.two", 1.0, confirmed=("b",))
    server.goes_on.set()
    await slow.learner.idle()
    assert slow.record("two") == msgspec.structs.replace(kept, answer="a.one@1.0", confirmed=("b",))
    assert slow.figure("labels_from_miss") == 1


@pytest.mark.parametrize(("name", "joined"), [("a.two", "a.one@1.0"), ("b.two", "b.two")])
async def test_names_of_one_answer_are_joined(slow: Host, server: ChatServer, name: str, joined: str) -> None:
    """By three fresh answers that are equal to both, and never with the name of another tenant's answer."""
    server.goes_on.set()
    await slow.record_answer("one", ASKED, ANSWER)
    await slow.record_answer("two", AGAIN, SAME_ANSWER)
    await slow.learner.idle()
    slow.neighbours.records.change("a.two", 1.0, answer=name)  # as if the judge had missed it
    names = []
    for number in range(3):
        await slow.record_answer(str(number), f"{ASKED} Now, please {number}", SAME_ANSWER)
        await slow.learner.idle()
        names.append(slow.policy.name_of(name))
    assert names == [name, name, joined]


async def test_what_a_judge_says_nothing_of_joins_no_names(embedder: Embedder) -> None:
    """Fresh answers are equal to the one answer, and it has no verdict on the other one."""
    async with (
        chat_server(lambda body: "SAME" if ANSWER not in str(body) else "I cannot say.") as server,
        open_llm_judge(server.url, "m", deadline=PATIENT) as judge,
        _working(embedder, judge) as host,
    ):
        await host.record_answer("one", ASKED, ANSWER)
        await host.record_answer("two", AGAIN, SAME_ANSWER)
        for number in range(4):
            await host.record_answer(str(number), f"{ASKED} Now, please {number}", SAME_ANSWER)
            await host.learner.idle()
        assert min(host.figure("judged_same"), host.figure("judged_unsure")) >= 4, "both are compared"
        assert host.policy.name_of("a.two@1.0") == "a.two@1.0"


async def test_names_are_not_joined_by_the_answers_of_other_tenants(slow: Host, server: ChatServer) -> None:
    """Not even where such an answer has a name of this tenant."""
    server.goes_on.set()
    await slow.record_answer("one", ASKED, ANSWER)
    await slow.learner.idle()
    theirs = Record("b.two", PARTITION, AGAIN, "a.two@1.0", "m", "0.0.0", 1.0, time.time() + 60)
    slow.answers.record_answer(theirs, SAME_ANSWER)
    await slow.neighbours.put([(theirs, await slow.embedder.embed(AGAIN))])
    for number in range(4):
        await slow.record_answer(str(number), f"{ASKED} Now, please {number}", SAME_ANSWER)
        await slow.learner.idle()
    assert slow.figure("judged_same") >= 8, "both are compared"
    assert slow.policy.name_of("a.two@1.0") == "a.two@1.0"


async def test_an_answer_that_is_computed_anew_has_a_name_of_its_own(slow: Host, server: ChatServer) -> None:
    """What its entry said before, and which names were joined with that, are nothing that it says."""
    server.goes_on.set()
    await slow.record_answer("one", ASKED, ANSWER)
    await slow.learner.idle()
    before = slow.record("one")
    assert before is not None
    slow.policy.join(EqualAnswers("a.0", before.answer))
    await slow.learner.forget("a.one")
    await slow.record_answer("one", ASKED, "It cannot be reset.", created=2.0)
    await slow.learner.idle()
    after = slow.record("one")
    assert after is not None
    assert slow.policy.name_of(before.answer) == "a.0"
    assert slow.policy.name_of(after.answer) == after.answer != before.answer


async def test_a_fresh_answer_is_not_removed_with_purged_ones(slow: Host) -> None:
    """One that comes to a purged entry while the records of others are removed stays."""
    vector = await slow.embedder.embed(ASKED)
    for number in range(100):
        old = Record(f"a.{number}", PARTITION, ASKED, "a.0", "m", "0.0.0", 1.0, time.time() + 60)
        await slow.neighbours.put([(old, vector)])
    purging = asyncio.create_task(slow.learner.discard(lambda record: True))
    await until(lambda: len(slow.neighbours.records) < 100, every=0)
    fresh = msgspec.structs.replace(old, created=2.0)
    await slow.neighbours.put([(fresh, vector)])
    await purging
    assert list(slow.neighbours.records) == [fresh]


async def test_answers_are_found_while_the_judge_is_busy(slow: Host, server: ChatServer) -> None:
    """Answers are found before the judge has compared earlier ones, a few of which it compares at once."""
    for number in range(100):
        await slow.record_answer(str(number), f"How do I reset password number {number}?", f"Press key {number}.")
    await until(lambda: len(slow.neighbours.records) == 100)

    assert server.requests, "the judge is asked"
    assert slow.figure("judged_same") == 0
    server.goes_on.set()
    await slow.learner.idle()
    assert slow.figure("judged_same") >= 99
    assert 1 < server.most_at_once <= 4


async def test_answers_beyond_what_may_wait_for_the_judge_are_not_compared(
    embedder: Embedder, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are found all the same."""
    monkeypatch.setattr(learner_module, "_MAX_WAITING", 10)  # no setting, and too many for a test
    server.goes_on.clear()
    async with (
        open_llm_judge(server.url, "m", deadline=PATIENT) as judge,
        _working(embedder, judge) as host,
    ):
        for number in range(40):
            await host.record_answer(str(number), f"How do I reset password number {number}?", f"Press key {number}.")
            await until(lambda number=number: host.record(str(number)) is not None)  # type: ignore[misc]
        server.goes_on.set()
        await host.learner.idle()

        assert len(host.neighbours.records) == 40
        assert host.figure("unjudged") == 40 - 1 - 10, "the first has no neighbour"
        kept = host.record("39")
        assert kept is not None
        assert kept.answer == "a.39@1.0"


async def test_a_verdict_on_a_replaced_answer_is_dropped(slow: Host, server: ChatServer) -> None:
    """A verdict on an answer that was replaced meanwhile sets no group and no label."""
    await slow.record_answer("one", ASKED, ANSWER)
    await until(lambda: slow.record("one") is not None)
    await slow.record_answer("two", AGAIN, SAME_ANSWER, asked=True)
    await server.arrived.acquire()
    await slow.record_answer("one", ASKED, "There are no passwords any more.", created=2.0)
    await until(lambda: getattr(slow.record("one"), "created", 0) == 2.0)
    server.goes_on.set()
    await slow.learner.idle()

    two = slow.record("two")
    assert two is not None
    assert two.answer == "a.two@1.0"
    assert slow.figure("labels_from_miss") == 0


@pytest.mark.usefixtures("one_comparison_at_once")
async def test_an_answer_replaced_before_its_turn_is_not_compared(embedder: Embedder, server: ChatServer) -> None:
    """A neighbour whose answer is replaced before its turn is left out of the comparison."""
    server.goes_on.clear()
    async with (
        open_llm_judge(server.url, "m", deadline=PATIENT) as judge,
        _working(embedder, judge) as host,
    ):
        for name, text, asked in (("one", ASKED, False), ("two", AGAIN, False), ("three", f"Hi. {ASKED}", True)):
            await host.record_answer(name, text, f"{ANSWER} {name}", asked=asked)
            await until(lambda name=name: host.record(name) is not None)  # type: ignore[misc]
        await host.record_answer("one", ASKED, "There are no passwords any more.", created=2.0)
        await until(lambda: getattr(host.record("one"), "created", 0) == 2.0)
        server.goes_on.set()
        await host.learner.idle()

        assert host.figure("labels_from_miss") == 0
        assert {r["messages"][1]["content"].count("no passwords") for r in server.requests[:2]} == {0}
        assert getattr(host.record("three"), "answer", None) == "a.two@1.0"


async def test_answers_do_not_wait_for_the_judge_while_others_wait(slow: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer does not wait for the judge while too many others wait to be found."""
    # No settings: how long an answer waits for the judge, and how many may.
    monkeypatch.setattr(learner_module, "_PATIENCE", PATIENT)
    monkeypatch.setattr(learner_module, "_MAX_PATIENT", 1)
    await slow.record_answer("one", ASKED, ANSWER)
    await until(lambda: slow.record("one") is not None)
    await slow.record_answer("two", AGAIN, SAME_ANSWER)
    await slow.record_answer("three", f"Hi. {ASKED}", SAME_ANSWER)
    await until(lambda: len(slow.neighbours.records) == 3)


async def test_a_removed_or_replaced_answer_gets_no_group(slow: Host, server: ChatServer) -> None:
    """A verdict on an answer that was removed or replaced meanwhile changes no record."""
    await slow.record_answer("one", ASKED, ANSWER)
    await until(lambda: slow.record("one") is not None)
    await slow.record_answer("two", AGAIN, SAME_ANSWER)
    await slow.record_answer("three", "Please, how do I reset my password?", SAME_ANSWER)
    await until(lambda: len(slow.neighbours.records) == 3)
    three = slow.record("three")
    assert three is not None
    vector = np.asarray(await slow.embedder.embed(three.text))
    await slow.neighbours.put([(msgspec.structs.replace(three, created=3.0), vector)])
    await slow.learner.forget("a.two")
    server.goes_on.set()
    await slow.learner.idle()

    assert slow.record("two") is None
    assert getattr(slow.record("three"), "answer", None) == "a.three@1.0"


async def test_a_quick_judge_compares_an_answer_before_it_is_found(embedder: Embedder) -> None:
    """An answer is found only with its group where the judge is quick."""
    async with _working(embedder, EmbeddingJudge(embedder.embed)) as host:
        for number in range(20):
            await host.record_answer(str(number), f"{ASKED} I am number {number}.", ANSWER)
        await host.learner.idle()

        assert {record.answer for record in host.neighbours.records} == {"a.0@1.0"}
        assert host.figure("judged_same") == 19


async def test_a_neighbour_whose_answer_is_unknown_is_left_out(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour whose answer is no longer known is left out of the comparison."""
    monkeypatch.setattr(answers_module, "_KEPT_CHARACTERS", len(ANSWER) + 10)  # no setting
    async with _working(embedder, EmbeddingJudge(embedder.embed)) as host:
        await host.record_answer("old", ASKED, "Ask your administrator to do that for you, please.")
        await host.record_answer("one", f"{AGAIN} Thanks.", ANSWER)
        await host.learner.idle()
        await host.record_answer("two", AGAIN, ANSWER)
        await host.learner.idle()

        assert {record.entry for record in host.neighbours.records} == {"a.old", "a.one", "a.two"}
        two = host.record("two")
        assert two is not None
        assert two.answer == "a.one@1.0"
        assert host.figure("not_learned") == 0


@pytest.mark.usefixtures("one_comparison_at_once")
async def test_waiting_answers_are_compared_once_with_each_group(embedder: Embedder, server: ChatServer) -> None:
    """An answer that waits for the judge is compared once with neighbours found to say the same."""
    server.goes_on.clear()
    async with (
        open_llm_judge(server.url, "m", deadline=PATIENT) as judge,
        _working(embedder, judge) as host,
    ):
        for number in range(20):
            await host.record_answer(
                str(number), f"{ASKED} I am number {number}.", f"{ANSWER} Greetings, number {number}."
            )
        await until(lambda: len(host.neighbours.records) == 20)
        server.goes_on.set()
        await host.learner.idle()

        assert {record.answer for record in host.neighbours.records} == {"a.0@1.0"}
        assert len(server.requests) == 19


async def test_texts_are_read_when_they_are_learned(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vetoes read a text when it is learned, not during a lookup."""
    read: list[str] = []
    real = Text.of.__func__  # type: ignore[attr-defined]  # of a classmethod

    def noted(text: str) -> Text:
        read.append(text)
        return real(Text, text)  # type: ignore[no-any-return]

    # The cache of read texts is inside: nothing public says when a text is read. It is full, as after a while.
    monkeypatch.setattr(neighbours_module, "_read", functools.lru_cache(3)(noted))
    monkeypatch.setattr(neighbours_module, "_TEXTS_KEPT", 3)
    for number in range(3):
        compare_texts(str(number), [str(number)])
    read.clear()
    async with _working(embedder, EmbeddingJudge(embedder.embed)) as host:
        await host.record_answer("one", ASKED, ANSWER)
        await until(lambda: host.record("one") is not None)
        await host.learner.idle()
        one = host.record("one")
        assert one is not None
        other = msgspec.structs.replace(one, entry="a.other", text=AGAIN)
        await host.neighbours.put([(other, await embedder.embed(AGAIN))])
        near = await host.neighbours.near(PARTITION, await embedder.embed(ASKED))
        assert read == [ASKED, AGAIN]
        assert compare_texts(ASKED, [each.record.text for each in near]).place == 0
        assert read == [ASKED, AGAIN]


async def test_a_costly_judge_compares_a_share_and_each_audit(
    embedder: Embedder, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judge with a budget compares that share of fresh answers, and every audit."""
    monkeypatch.setattr(learner_module, "_FIRST", 1.0)  # no setting: how much is compared at first
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
        assert host.figure("labels_from_miss") == 2
        query = await host.query(AGAIN)
        audited = dataclasses.replace(query, decision=Decision(True, 0.01, 0.01, True, 0.1))
        await host.record_answer("audit", AGAIN, f"{SAME_ANSWER} audited", query=audited)
        await host.learner.idle()
        assert len(server.requests) == asked + 1


async def test_the_least_recently_used_records_beyond_a_bound_are_removed(embedder: Embedder) -> None:
    """Records beyond a bound are removed, the least recently used ones first."""
    async with _working(embedder, EmbeddingJudge(embedder.embed)) as host:
        for name in ("one", "two", "three"):
            await host.record_answer(name, f"What is {name}?", ANSWER)
            await host.learner.idle()
        host.neighbours.records.use("a.one")
        await host.neighbours.bound(2)
        assert [record.entry for record in host.neighbours.records] == ["a.three", "a.one"]
        assert len(host.neighbours.index) == 2


POEM = "Write a poem about the sea"
POEMS = (
    "The tide comes in on silver feet, it hums a song both low and sweet.",
    "Blue and endless, cold and wide, the sea has secrets deep inside.",
    "O restless water, salt and foam, you call the sailor far from home.",
    "A grey gull writes upon the breeze the only letters that it sees.",
)


async def test_the_same_question_again_shows_the_judges_recall(embedder: Embedder) -> None:
    """From its second pair on, of a question that has one answer: so a poem says nothing of the recall."""
    async with _working(embedder, EmbeddingJudge(embedder.embed)) as host:
        for number in range(5):
            await host.record_answer("fact", ASKED, ANSWER, created=float(number))
            await host.record_answer("poem", POEM, POEMS[number % 4], created=float(number))
            await host.learner.idle()

        (short,) = [each for each in host.errors.figures() if each["answers"] == "short"]
        assert short["same_pairs"] == 3, "four pairs, of which the first one showed that it has one answer"
        assert host.figure("agreed_with_itself") == 4
        assert host.figure("disagreed_with_itself") == 4


async def test_an_answer_that_disagrees_with_itself_is_known(embedder: Embedder) -> None:
    """Its evidence stays with the record, also where the older one had expired; an agreeing answer's says otherwise."""
    async with _working(embedder, EmbeddingJudge(embedder.embed)) as host:
        for number, text in enumerate(POEMS):
            await host.record_answer("poem", POEM, text, created=float(number))
            await host.record_answer("fact", ASKED, ANSWER, created=float(number))
            await host.learner.idle()
            if number == 1:
                await host.neighbours.remove(["a.poem"])

        poem, fact = host.record("poem"), host.record("fact")
        assert poem is not None
        assert fact is not None
        assert is_unrepeatable(host.errors, poem)
        assert fact.disagreement < -3.0


async def test_the_same_question_written_differently_is_the_same_question(embedder: Embedder) -> None:
    """Answers to two spellings of one question are a pair too."""
    async with _working(embedder, EmbeddingJudge(embedder.embed)) as host:
        await host.record_answer("one", ASKED, ANSWER)
        await host.learner.idle()
        await host.record_answer("two", ASKED.lower(), ANSWER, created=2.0)
        await host.learner.idle()
        assert host.figure("agreed_with_itself") == 1


async def test_an_answer_from_before_a_purge_is_no_older_answer(embedder: Embedder) -> None:
    """What an operator has purged may have become wrong, so that it need not agree."""
    async with _working(embedder, EmbeddingJudge(embedder.embed)) as host:
        await host.record_answer("fact", ASKED, ANSWER)
        await host.record_answer("fact", ASKED, "There are no passwords.", created=2.0, generation="0.0.1")
        await host.learner.idle()
        assert host.figure("disagreed_with_itself") == 0


async def test_a_label_says_how_often_its_judge_errs(embedder: Embedder) -> None:
    """By the recall of its class: after pairs that were not recognised it is no longer taken for perfect."""
    async with _working(embedder, EmbeddingJudge(embedder.embed)) as host:
        await host.record_answer("known", ASKED, ANSWER)
        await host.learner.idle()
        learned: list[Label | JudgedPair | EqualAnswers] = []
        host.labels.learn = learned.append  # type: ignore[method-assign, assignment]  # the real one keeps none
        await host.record_answer("first", AGAIN, ANSWER, asked=True)
        await host.learner.idle()
        for _ in range(50):
            host.errors.count(JudgedPair("m", "short", "again", -5.0))
        await host.record_answer("second", f"{AGAIN} Thanks", ANSWER, asked=True)
        await host.learner.idle()

        labels = [each for each in learned if isinstance(each, Label)]
        first, second = (label.judge for label in labels)
        assert first is not None
        assert second is not None
        assert first.recall > 0.999
        assert second.recall < 0.4
        assert [label.same for label in labels] == [True, True]


def test_labels_of_another_version_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rolling update leaves as many as the stream is long: one line for each version, and a count."""
    labels = Labels(BudgetPolicy(0.05, PRIOR_ERROR, random.Random(0)), ErrorRates(1.0), "policy", "judge")  # noqa: S311
    for version, number in ((3, 1000), (5, 10)):
        with monkeypatch.context() as patch:
            patch.setattr(state_module, "VERSION", version)
            theirs = labels.encode(JudgedPair("m", "prose", "again", 3.0))
        for _ in range(number):
            labels.take(theirs)
    labels.take(b"damaged")
    for version, record in zip((3, 5), caplog.records, strict=False):
        assert record.getMessage().startswith(f"ignoring labels in redis: judged pair: written in version {version};")
    assert len(caplog.records) == 3
    assert labels.of_other_versions == {3: 1000, 5: 10}
    assert labels.count == 0


async def test_pairs_reach_the_errors_of_other_processes() -> None:
    """Those of the same judge; and a state brings back both what the policy and what the errors have learned."""
    errors, others = ErrorRates(1.0), ErrorRates(1.0)
    pair = JudgedPair("m", "prose", "again", 3.0)
    policy = BudgetPolicy(0.05, PRIOR_ERROR, random.Random(0))  # noqa: S311 - reproducible
    here, there = Labels(policy, errors, "policy", "judge"), Labels(policy, others, "policy", "judge")
    there.take(here.encode(pair))
    here.learn(pair)
    assert others.figures() == errors.figures() != []

    there.take(here.encode(EqualAnswers("a", "b")))
    assert policy.name_of("b") == "a"

    restarted = Labels(policy, ErrorRates(1.0), "policy", "judge")
    assert restarted.restore(here.snapshot())
    assert restarted.errors.figures() == errors.figures()
    with_a_model = Labels(policy, ErrorRates(1.0), "policy", "another judge")
    with_a_model.take(here.encode(pair))
    assert with_a_model.restore(here.snapshot())
    assert with_a_model.errors.figures() == [], "another judge has other errors"
    assert not restarted.restore(b"damaged")
    assert not restarted.restore(b"\x93\xc4\x00\xa1\xff\xc4\x00"), "a name that is not UTF-8"
    assert restarted.errors.figures() == errors.figures()
