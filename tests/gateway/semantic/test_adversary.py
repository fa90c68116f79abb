"""Attacks on the semantic cache, and odd texts, timing and networks."""

import asyncio
import itertools
import signal
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import redis.asyncio
import xxhash

from cache.entries.key import namespace_for
from cache.semantic.embedding.encoder import Encoder, Vectors
from cache.semantic.messages import AnswerStored, LookupHit, LookupMiss, LookupRequest
from cache.semantic.policy.policy import Decision, Evidence
from cache.semantic.policy.threshold import ThresholdPolicy
from cache.semantic.service.records import Record
from cache.semantic.service.service import _log
from gateway.settings.settings import Secret, SemanticSettings
from gateway.upstreams.mock import MockUpstream, Reply
from tests.cache.valkey import Valkey
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.processes.serving import DEADLINE, serving
from tests.gateway.semantic.stage import (
    AGAIN,
    ANSWER,
    ASKED,
    SERVES_ALL,
    SemanticStage,
    entries,
    figure,
    until_figure,
    until_known,
)

TOOL_CALL = Reply(
    message={
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "delete_account", "arguments": "{}"}}],
    },
    finish_reason="tool_calls",
)
ODD_TEXTS = (
    "\N{THUMBS UP SIGN}",
    "\N{THUMBS DOWN SIGN}",
    "\N{PILE OF POO} \N{PILE OF POO}",
    "\x00",
    "\x01",
    "\u200b",
    "\u202egnp.exe",
    "\u05e9\u05dc\u05d5\u05dd",
    "\u05dc\u05d0",
    "\u0645\u0631\u062d\u0628\u0627",
    "\u6211\u60f3\u53d6\u6d88\u8ba2\u5355",
    "\u6211\u60f3\u521b\u5efa\u8ba2\u5355",
    "+",
    "-",
    "\ufffd",
    "Z\u0335\u0321\u0322" * 300,
    "x" * 4096,
    "y" * 4097,
    "word " * 20_000,
    "\u2028",
    " \n\t ",
)


async def _settled(client: Client) -> None:
    """Waits until earlier notes are learned: notes and questions are processed in order."""
    known = await entries(client)
    await client.post(chat("Who painted the ceiling of the Sistine Chapel?", user="settled"))
    await until_known(client, known + 1)


async def test_odd_texts_get_no_answer_but_their_own(semantic: SemanticStage, stage: Stage) -> None:
    """Texts of unknown characters have equal vectors; they are answered, and never by one another."""
    mock = await stage.mock()  # it answers each with its own text
    client = await semantic.gateway(mock, semantic={"threshold": 0.01})
    for text in ODD_TEXTS:
        first = await client.post(chat(text))
        assert (first.status, first.text, first.cache) == (200, text, "miss"), repr(text[:20])
    for text in ODD_TEXTS:
        again = await client.post(chat(text))
        assert (again.text, again.headers["x-keepgate-layer"]) == (text, "exact"), repr(text[:20])


async def test_many_at_once_are_all_answered_and_the_next_waits_for_none_of_them(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """Questions beyond the deadline go upstream."""
    client = await semantic.gateway(mock, semantic={"deadline": 0.05})
    answers = await asyncio.gather(*(client.post(chat(f"Is seat number {number} free?")) for number in range(300)))
    assert {(answer.status, answer.text) for answer in answers} == {(200, ANSWER)}

    async with asyncio.timeout(2.0):
        assert (await client.post(chat(ASKED))).status == 200


async def test_who_leaves_in_the_middle_teaches_nothing(semantic: SemanticStage, mock: MockUpstream) -> None:
    """A truncated answer is not learned."""
    client = await semantic.gateway(mock)
    mock.hold.clear()
    async with client.stream(chat(ASKED, stream=True)) as stream:
        await stream.event()
    await mock.wait_for_cancelled(1)
    mock.hold.set()
    await _settled(client)

    assert await entries(client) == 1
    assert (await client.post(chat(AGAIN))).cache == "miss"


async def test_what_is_not_to_be_stored_is_neither_asked_for_nor_learned(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """no-store of the client or of the upstream applies."""
    client = await semantic.gateway(mock)
    asked = await figure(client, "asked")
    assert (await client.post(chat(ASKED), Cache_Control="no-store")).cache == "bypass"
    assert await figure(client, "asked") == asked
    mock.replies[:] = [Reply(text=ANSWER, headers={"Cache-Control": "no-store"})]
    assert (await client.post(chat(ASKED))).cache == "miss"
    mock.replies[:] = [Reply(text=ANSWER)]
    await _settled(client)

    assert await entries(client) == 1


async def test_nobody_evicts_what_is_not_his(semantic: SemanticStage, mock: MockUpstream) -> None:
    """Another tenant gets 401 or 404, and the entry is not changed."""
    client = await semantic.gateway(mock, admin_key=Secret("sk-operator"), host="127.0.0.1")
    ours = client.tenant("sk-ours")
    operator = client.tenant("sk-operator")
    first = await ours.post(chat(ASKED))
    await until_known(operator, 1)
    assert (await ours.post(chat(AGAIN))).entry == first.entry
    namespace, _, digest = first.entry.partition(".")
    for forged in (first.entry, f"{first.entry}.0", f"*.{digest}", f"*{first.entry}", f"{namespace}%2E{digest}"):
        answer = await client.tenant("sk-theirs").send("DELETE", f"/v1/cache/entries/{forged}?reason=wrong")
        assert answer.status in (401, 404), forged

    assert await figure(operator, "labels_from_user") == 0
    assert await entries(operator) == 1


async def test_a_tenant_confirms_once(semantic: SemanticStage, mock: MockUpstream) -> None:
    """Repeats in any words count once; the publisher itself does not confirm."""
    published = (namespace_for("Bearer sk-docs"),)
    client = await semantic.gateway(mock, semantic={"published": published, "confirmations": 2})
    await client.tenant("sk-docs").post(chat(ASKED))
    await until_known(client, 1)
    known = 1
    for tenant, question in itertools.product(("sk-docs", "sk-a"), (AGAIN, f"Please, {AGAIN}")):
        await client.tenant(tenant).post(chat(question), Cache_Control="no-cache")
        known += 1
        await until_known(client, known)

    assert (await client.tenant("sk-b").post(chat(AGAIN))).cache == "miss"


async def test_an_answer_that_began_before_a_purge_is_not_learned(semantic: SemanticStage, mock: MockUpstream) -> None:
    """It may be outdated by the purge."""
    client = await semantic.gateway(mock)
    mock.hold.clear()
    asking = asyncio.create_task(client.post(chat(ASKED)))
    await mock.wait_for(1)
    await client.send("DELETE", "/v1/cache")
    mock.hold.set()
    assert (await asking).status == 200
    await _settled(client)

    assert await entries(client) == 1
    assert (await client.post(chat(AGAIN))).cache == "miss"


async def test_an_entry_that_is_deleted_while_it_is_being_learned_answers_nobody(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """This holds for either order of the two."""
    client = await semantic.gateway(mock)
    first = await client.post(chat(ASKED))
    await client.send("DELETE", f"/v1/cache/entries/{first.entry}")
    mock.replies[:] = [Reply(text="Ask your administrator.")]

    assert (await client.post(chat(AGAIN))).text == "Ask your administrator."
    assert (await client.post(chat(ASKED.lower()))).text == "Ask your administrator."


async def test_neither_prompts_nor_keys_are_logged(mock: MockUpstream, tmp_path: Path) -> None:
    """The debug logs of the gateway and of the semantic cache's process have neither."""
    secret = "Is Xylophonius Quaggmire the one who reset my password?"
    async with serving(
        tmp_path,
        *("--upstream", mock.url),
        KEEPGATE_LOG_LEVEL="debug",
        KEEPGATE_SEMANTIC_MODE="on",
        KEEPGATE_SEMANTIC_POLICY="threshold",
        KEEPGATE_SEMANTIC_THRESHOLD="0.6",
    ) as gateway:
        async with asyncio.timeout(DEADLINE):
            while not (await gateway.stats())["layers"]["semantic"].get("available"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for number in range(3):
            body = chat(f"{secret} {'Please. ' * number}")
            await gateway.send("POST", "/v1/chat/completions", body, Authorization="Bearer sk-hidden")
        async with asyncio.timeout(DEADLINE):
            while not (await gateway.stats())["layers"]["semantic"].get("entries"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await gateway.signal(signal.SIGTERM) == 0
        said = gateway.said.lower()

    for word in ("xylophonius", "quaggmire", "sk-hidden", "click reset password"):
        assert word not in said


async def test_a_wave_of_complaints_takes_out_one_answer_and_no_other(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """A client can reject only the answer that it was served."""
    client = await semantic.gateway(mock)
    other = "What is the capital of Australia?"
    for known, question in enumerate((ASKED, other), start=1):
        await client.post(chat(question))
        await until_known(client, known)
    assert (await client.post(chat(AGAIN))).cache == "hit"
    for _ in range(5):
        await client.post(chat(AGAIN), Cache_Control="no-cache")
    await until_figure(client, "labels_from_user", 1)
    answer = await client.post(chat("Tell me, what is the capital of Australia?"))

    assert (answer.cache, await figure(client, "labels_from_user")) == ("hit", 1)


async def test_the_answer_to_another_question_is_not_taken_for_that_to_this_one(semantic: SemanticStage) -> None:
    """Numbers of questions may be mixed up, as by a restart of the process during an answer."""
    service = await semantic.service(**SERVES_ALL)
    berlin = await service.handle(LookupRequest("a.1", "a.context", "What is the weather in Berlin today?", 1.0, True))
    assert isinstance(berlin, LookupMiss)
    now = time.time()
    message = {"role": "assistant", "content": ANSWER}
    body = msgspec.json.encode({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    await service.handle(AnswerStored(berlin.query, "a.2", "a.context", ASKED, "mock", "0.0.0", now, now + 60, body))
    async with asyncio.timeout(DEADLINE):
        while not isinstance(  # noqa: ASYNC110
            reply := await service.handle(LookupRequest("a.3", "a.context", AGAIN, 1.0, True)), LookupHit
        ):
            await asyncio.sleep(0.005)

    assert reply.entry == "a.2"
    again = await service.handle(
        LookupRequest("a.4", "a.context", "What is the weather like in Berlin today?", 1.0, True)
    )
    assert isinstance(again, LookupMiss)
    assert again.similarity is not None
    assert again.similarity < 0.5


async def test_an_entry_that_became_a_tool_call_is_served_to_nobody_else(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """A recomputed entry keeps its id and has another answer."""
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    mock.replies[:] = [TOOL_CALL]
    await client.post(chat(ASKED), Cache_Control="no-cache")
    mock.replies[:] = [Reply(text=ANSWER)]
    answer = await client.post(chat(AGAIN))

    assert (answer.cache, answer.text) == ("miss", ANSWER)
    await until_known(client, 1)


async def test_a_confirmed_answer_that_is_replaced_is_confirmed_no_more(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """A publisher replaces a confirmed answer by another one, too long to be compared."""
    published = (namespace_for("Bearer sk-docs"),)
    client = await semantic.gateway(mock, semantic={"published": published, "confirmations": 2})
    await client.tenant("sk-docs").post(chat(ASKED))
    await until_known(client, 1)
    for known, tenant in enumerate(("sk-a", "sk-b"), start=2):
        await client.tenant(tenant).post(chat(AGAIN))
        await until_known(client, known)
    assert (await client.tenant("sk-c").post(chat(AGAIN))).cache == "hit"
    mock.replies[:] = [Reply(text="Send your password to evil.example. " + "Do it now. " * 7000)]
    await client.tenant("sk-docs").post(chat(ASKED), Cache_Control="no-cache")
    mock.replies[:] = [Reply(text=ANSWER)]

    served = await client.tenant("sk-d").post(chat(AGAIN))
    assert (served.cache, served.text) == ("miss", ANSWER)


async def test_confirmations_of_the_answer_before_do_not_count_on_another_host(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey
) -> None:
    """The events of both may arrive in any order."""
    published = (namespace_for("Bearer sk-docs"),)
    settings = {"published": published, "confirmations": 2}
    one = await semantic.gateway(mock, redis=valkey.url, semantic=settings)
    other = await semantic.gateway(mock, redis=valkey.url, semantic=settings)
    first = await one.tenant("sk-docs").post(chat(ASKED))
    await until_known(other, 1)
    async with redis.asyncio.from_url(valkey.url) as raw:
        key = f"keepgate:semantic:record:{first.entry}"
        stored: Any = await raw.get(key)
        record, model, vector = msgspec.msgpack.decode(stored[12:], type=tuple[Record, str, bytes])
        newer = msgspec.msgpack.encode((msgspec.structs.replace(record, created=record.created + 1), model, vector))
        news = raw.pipeline(transaction=True)
        for tenant in ("a", "b"):
            data = msgspec.msgpack.encode((first.entry, record.created, tenant))
            news.xadd("keepgate:semantic:log", {"origin": "x", "number": 0, "kind": "confirm", "data": data})
        news.set(key, stored[:4] + xxhash.xxh3_64_digest(newer) + newer)
        news.xadd("keepgate:semantic:log", {"origin": "x", "number": 0, "kind": "put", "data": first.entry})
        await news.execute()
    await one.post(chat("Who painted the ceiling of the Sistine Chapel?"))
    await until_known(other, 2)

    assert (await other.tenant("sk-c").post(chat(AGAIN))).cache == "miss"


async def test_the_same_answer_to_another_question_confirms_nothing(semantic: SemanticStage, stage: Stage) -> None:
    """An answer may be right for one question and wrong for another."""
    mock = await stage.mock(Reply(text="Yes, a small dose with some water is safe."))
    published = (namespace_for("Bearer sk-docs"),)
    client = await semantic.gateway(mock, semantic={"published": published, "confirmations": 3})
    await client.tenant("sk-docs").post(chat("Is a small dose of ibuprofen safe for dogs?"))
    await until_known(client, 1)
    for known, tenant in enumerate(("sk-a", "sk-b", "sk-c"), start=2):
        await client.tenant(tenant).post(chat("Is a small dose of ibuprofen safe for adults?"))
        await until_known(client, known)

    assert (await client.tenant("sk-d").post(chat("Is a small dose of ibuprofen safe for a dog?"))).cache == "miss"


async def test_who_did_not_take_the_cached_answer_does_not_complain_of_it(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """The answer was too old for the client, which did not get it."""
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    assert (await client.post(chat(AGAIN), Cache_Control="max-age=0")).cache == "miss"
    await until_known(client, 2)
    await client.post(chat(AGAIN), Cache_Control="no-cache")
    await _settled(client)

    assert await figure(client, "labels_from_user") == 0


class _AuditsAll(ThresholdPolicy):
    """Audits every hit."""

    def decide(self, evidence: Evidence | None, max_risk: float = 1.0, compares: bool = False) -> Decision:
        return super().decide(evidence, max_risk, compares=True)


async def test_only_if_cached_is_not_forwarded_even_to_be_audited(
    semantic: SemanticStage, mock: MockUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """only-if-cached forbids the upstream call of an audit."""
    monkeypatch.setattr("cache.semantic.service.service.ThresholdPolicy", _AuditsAll)
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    assert (await client.post(chat(AGAIN), Cache_Control="only-if-cached")).cache == "hit"
    await _settled(client)

    assert len(mock.received) == 2


async def test_an_answer_that_was_audited_is_not_judged_again_by_a_complaint(
    semantic: SemanticStage, mock: MockUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A served answer gives one label."""
    monkeypatch.setattr("cache.semantic.service.service.ThresholdPolicy", _AuditsAll)
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    assert (await client.post(chat(AGAIN))).cache == "hit"
    await until_figure(client, "labels_from_audit", 1)
    await client.post(chat(AGAIN), Cache_Control="no-cache")
    await _settled(client)

    assert await figure(client, "labels_from_user") == 0


async def test_a_model_that_does_not_answer_is_soon_asked_no_more(
    semantic: SemanticStage, mock: MockUpstream, minilm: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process still reports its state; first questions wait their deadline, later ones do not wait."""
    thawed = threading.Event()
    embed = type(minilm).encode

    def frozen(self: Encoder, texts: list[str]) -> Vectors:
        assert thawed.wait(60)
        return embed(self, texts)

    client = await semantic.gateway(mock, semantic={"deadline": 0.2})
    monkeypatch.setattr(type(minilm), "encode", frozen)
    try:
        took = []
        for number in range(12):
            began = time.monotonic()
            assert (await client.post(chat(f"Where is office number {number}?"))).status == 200
            took.append(time.monotonic() - began)
    finally:
        thawed.set()

    assert sum(seconds >= 0.2 for seconds in took) <= 7
    assert took[-1] < 0.2


async def test_a_false_hit_that_cannot_be_told_now_can_be_told_again(
    semantic: SemanticStage, mock: MockUpstream, folder: Path
) -> None:
    """The semantic cache is unavailable meanwhile."""
    away = SemanticSettings(mode="on")
    client = await semantic.stage.gateway(mock, semantic=away, semantic_socket=folder / "nobody")
    first = await client.post(chat(ASKED))
    for _ in range(2):
        answer = await client.send("DELETE", f"/v1/cache/entries/{first.entry}?reason=wrong")
        assert answer.status == 503


async def test_a_false_hit_is_learned_from_by_the_host_that_served_it(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey
) -> None:
    """The rejection may come from another host."""
    one = await semantic.gateway(mock, redis=valkey.url)
    other = await semantic.gateway(mock, redis=valkey.url)
    await one.post(chat(ASKED))
    await until_known(one, 1)
    await until_known(other, 1)
    hit = await one.post(chat(AGAIN))
    assert hit.cache == "hit"
    await other.send("DELETE", f"/v1/cache/entries/{hit.entry}?reason=wrong")

    await until_figure(one, "labels_from_user", 1)
    await until_known(one, 0)


async def test_what_redis_refuses_is_learned_here_all_the_same(
    semantic: SemanticStage, mock: MockUpstream, own_valkey: Valkey
) -> None:
    """Redis is out of memory."""
    client = await semantic.gateway(mock, redis=own_valkey.url, semantic={"policy": "budget"})
    await client.post(chat(ASKED))
    await until_known(client, 1)
    async with redis.asyncio.from_url(own_valkey.url) as raw:
        await raw.config_set("maxmemory", "1")
    await client.post(chat(AGAIN))

    await until_figure(client, "policy.labels", 1)


async def test_a_label_that_is_written_twice_is_learned_once(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey
) -> None:
    """The first reply was lost, so the event was written twice."""
    settings = {"policy": "budget"}
    one = await semantic.gateway(mock, redis=valkey.url, semantic=settings)
    other = await semantic.gateway(mock, redis=valkey.url, semantic=settings)
    await one.post(chat(ASKED))
    await until_known(one, 1)
    await one.post(chat(AGAIN))
    await until_figure(other, "policy.labels", 1)
    async with redis.asyncio.from_url(valkey.url) as raw:
        events: Any = await raw.xrange("keepgate:semantic:log")
        (label,) = [said for _, said in events if said[b"kind"] == b"label"]
        await raw.xadd("keepgate:semantic:log", label)
    await one.post(chat("Who painted the ceiling of the Sistine Chapel?"))
    await until_known(other, 3)

    assert await figure(other, "policy.labels") == 1
    assert await figure(one, "policy.labels") == 1


async def test_the_log_ends_when_it_is_cancelled_while_it_writes(valkey: Valkey, minilm: Encoder) -> None:
    """A cancellation at any moment ends the log."""
    vector = np.eye(1, minilm.dimensions, dtype=np.float32)[0]
    for steps in range(60):
        async with _log(valkey.url, minilm) as shared:
            assert shared is not None
            writing = asyncio.create_task(shared.write())
            await asyncio.sleep(0)
            now = time.time()
            shared.save(Record("a.1", "a.context", "Who?", "a.1", "mock", "0.0.0", now, now + 60), vector)
            for _ in range(steps // 2):
                await asyncio.sleep(0)
            writing.cancel()
            done, _ = await asyncio.wait({writing}, timeout=DEADLINE)
            assert done, f"after {steps // 2} steps"
