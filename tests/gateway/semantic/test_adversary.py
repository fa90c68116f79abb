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

from cache.entries.key import namespace_for
from cache.semantic.embedding.encoder import Encoder, Vectors
from cache.semantic.messages import AnswerStored, LookupHit, LookupMiss, LookupRequest
from cache.semantic.service.record_log import Event, RecordLog
from cache.semantic.service.records import Record
from cache.stores.encryption import NoEncryption
from cache.stores.redis_store import open_topology
from gateway.settings.cache import SemanticSettings
from gateway.settings.fields import Secret
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
    AuditsAll,
    SemanticStage,
    entries,
    figure,
    until_figure,
    until_known,
)
from tests.waiting import until

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


async def test_texts_of_unknown_characters_do_not_share_answers(semantic: SemanticStage, stage: Stage) -> None:
    """Texts of unknown characters, whose vectors are equal, do not get each other's answers."""
    mock = await stage.mock()  # it answers each with its own text
    client = await semantic.gateway(mock, semantic={"threshold": 0.01})
    for text in ODD_TEXTS:
        first = await client.post(chat(text))
        assert (first.status, first.text, first.cache) == (200, text, "miss"), repr(text[:20])
    for text in ODD_TEXTS:
        again = await client.post(chat(text))
        assert (again.text, again.headers["x-keepgate-layer"]) == (text, "exact"), repr(text[:20])


async def test_questions_beyond_the_deadline_go_upstream(semantic: SemanticStage, mock: MockUpstream) -> None:
    """Many concurrent questions are all answered, beyond the deadline by the upstream, and delay no later one."""
    client = await semantic.gateway(mock, semantic={"deadline": 0.05})
    answers = await asyncio.gather(*(client.post(chat(f"Is seat number {number} free?")) for number in range(300)))
    assert {(answer.status, answer.text) for answer in answers} == {(200, ANSWER)}

    async with asyncio.timeout(2.0):
        assert (await client.post(chat(ASKED))).status == 200


async def test_a_cut_answer_is_not_learned(semantic: SemanticStage, mock: MockUpstream) -> None:
    """An answer whose client disconnects before its end is not learned."""
    client = await semantic.gateway(mock)
    mock.hold.clear()
    async with client.stream(chat(ASKED, stream=True)) as stream:
        await stream.event()
    await mock.wait_for_cancelled(1)
    mock.hold.set()
    await _settled(client)

    assert await entries(client) == 1
    assert (await client.post(chat(AGAIN))).cache == "miss"


async def test_a_no_store_request_is_neither_looked_up_nor_learned(semantic: SemanticStage, mock: MockUpstream) -> None:
    """A question with no-store, of the client or the upstream, is neither looked up nor learned."""
    client = await semantic.gateway(mock)
    asked = await figure(client, "asked")
    assert (await client.post(chat(ASKED), Cache_Control="no-store")).cache == "bypass"
    assert await figure(client, "asked") == asked
    mock.replies[:] = [Reply(text=ANSWER, headers={"Cache-Control": "no-store"})]
    assert (await client.post(chat(ASKED))).cache == "miss"
    mock.replies[:] = [Reply(text=ANSWER)]
    await _settled(client)

    assert await entries(client) == 1


async def test_a_tenant_cannot_evict_the_entry_of_another(semantic: SemanticStage, mock: MockUpstream) -> None:
    """A rejection of another tenant's entry gives 401 or 404 and does not change the entry."""
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
    """Repeated confirmations of a tenant count once, and the publisher's own do not count."""
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
    """An answer whose request began before a purge is not learned."""
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


async def test_an_entry_deleted_while_it_is_learned_is_not_served(semantic: SemanticStage, mock: MockUpstream) -> None:
    """An entry that is deleted right after its answer is not served."""
    client = await semantic.gateway(mock)
    first = await client.post(chat(ASKED))
    await client.send("DELETE", f"/v1/cache/entries/{first.entry}")
    mock.replies[:] = [Reply(text="Ask your administrator.")]

    assert (await client.post(chat(AGAIN))).text == "Ask your administrator."
    assert (await client.post(chat(ASKED.lower()))).text == "Ask your administrator."


async def test_neither_prompts_nor_keys_are_logged(mock: MockUpstream, tmp_path: Path) -> None:
    """The debug logs of the gateway and of the semantic cache's process have neither prompts nor keys."""
    secret = "Is Xylophonius Quaggmire the one who reset my password?"
    async with serving(
        tmp_path,
        *("--upstream", mock.url),
        KEEPGATE_LOG_LEVEL="debug",
        KEEPGATE_SEMANTIC_MODE="on",
        KEEPGATE_SEMANTIC_POLICY="threshold",
        KEEPGATE_SEMANTIC_THRESHOLD="0.6",
    ) as gateway:
        await gateway.until_semantic("available")
        for number in range(3):
            body = chat(f"{secret} {'Please. ' * number}")
            await gateway.send("POST", "/v1/chat/completions", body, Authorization="Bearer sk-hidden")
        await gateway.until_semantic("entries")
        assert await gateway.signal(signal.SIGTERM) == 0
        said = gateway.said.lower()

    for word in ("xylophonius", "quaggmire", "sk-hidden", "click reset password"):
        assert word not in said


async def test_repeated_rejections_evict_one_answer_and_no_other(semantic: SemanticStage, mock: MockUpstream) -> None:
    """Repeated rejections give one label and leave the answers to other questions."""
    client = await semantic.gateway(mock)
    other = "What is the capital of Australia?"
    for known, question in enumerate((ASKED, other), start=1):
        await client.post(chat(question))
        await until_known(client, known)
    assert (await client.post(chat(AGAIN))).cache == "hit"
    for _ in range(5):
        await client.post(chat(AGAIN), Cache_Control="no-cache")
    await until_figure(client, "labels_from_user", 1)
    answer = await client.post(chat("Which city is the Australian capital?"))

    assert (answer.cache, await figure(client, "labels_from_user")) == ("hit", 1)


async def test_a_reply_to_another_question_is_not_used(semantic: SemanticStage) -> None:
    """A reply with the number of another question is not used."""
    service = await semantic.service(**SERVES_ALL)
    berlin = await service.handle(
        LookupRequest("a.context", "What is the weather in Berlin today?", 1.0, key="a.1", serve=True)
    )
    assert isinstance(berlin, LookupMiss)
    now = time.time()
    message = {"role": "assistant", "content": ANSWER}
    body = msgspec.json.encode({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    await service.handle(AnswerStored(berlin.query, "a.2", "a.context", ASKED, "mock", "0.0.0", now, now + 60, body))
    replies: list[object] = []

    async def is_found() -> bool:
        replies.append(await service.handle(LookupRequest("a.context", AGAIN, 1.0, key="a.3", serve=True)))
        return isinstance(replies[-1], LookupHit)

    await until(is_found, DEADLINE)

    reply = replies[-1]
    assert isinstance(reply, LookupHit)
    assert reply.entry == "a.2"
    again = await service.handle(
        LookupRequest("a.context", "What is the weather like in Berlin today?", 1.0, key="a.4", serve=True)
    )
    assert isinstance(again, LookupMiss)
    assert again.similarity is not None
    assert again.similarity < 0.5


async def test_an_entry_that_became_a_tool_call_is_not_served(semantic: SemanticStage, mock: MockUpstream) -> None:
    """An entry whose new answer is a tool call is not served for similar questions."""
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    mock.replies[:] = [TOOL_CALL]
    await client.post(chat(ASKED), Cache_Control="no-cache")
    mock.replies[:] = [Reply(text=ANSWER)]
    answer = await client.post(chat(AGAIN))

    assert (answer.cache, answer.text) == ("miss", ANSWER)
    await until_known(client, 1)


async def test_replacing_a_confirmed_answer_removes_its_confirmations(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """A confirmed answer that its publisher replaces is not confirmed any more."""
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


async def test_the_same_answer_to_another_question_confirms_nothing(semantic: SemanticStage, stage: Stage) -> None:
    """An equal answer to another question does not confirm an entry."""
    mock = await stage.mock(Reply(text="Yes, a small dose with some water is safe."))
    published = (namespace_for("Bearer sk-docs"),)
    client = await semantic.gateway(mock, semantic={"published": published, "confirmations": 3})
    await client.tenant("sk-docs").post(chat("Is a small dose of ibuprofen safe for dogs?"))
    await until_known(client, 1)
    for known, tenant in enumerate(("sk-a", "sk-b", "sk-c"), start=2):
        await client.tenant(tenant).post(chat("Is a small dose of ibuprofen safe for adults?"))
        await until_known(client, known)

    assert (await client.tenant("sk-d").post(chat("Is a small dose of ibuprofen safe for a dog?"))).cache == "miss"


async def test_an_answer_too_old_for_the_client_is_not_rejected_by_it(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """A repeated question does not reject an answer that was too old for its client."""
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    assert (await client.post(chat(AGAIN), Cache_Control="max-age=0")).cache == "miss"
    await until_known(client, 2)
    await client.post(chat(AGAIN), Cache_Control="no-cache")
    await _settled(client)

    assert await figure(client, "labels_from_user") == 0


async def test_only_if_cached_is_not_forwarded_even_to_be_audited(
    semantic: SemanticStage, mock: MockUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with only-if-cached leads to no upstream call for an audit."""
    monkeypatch.setattr("cache.semantic.service.service.ThresholdPolicy", AuditsAll)
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    assert (await client.post(chat(AGAIN), Cache_Control="only-if-cached")).cache == "hit"
    await _settled(client)

    assert len(mock.received) == 2


async def test_an_audited_answer_gives_no_second_label_by_a_rejection(
    semantic: SemanticStage, mock: MockUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A served answer that was audited and then rejected gives one label."""
    monkeypatch.setattr("cache.semantic.service.service.ThresholdPolicy", AuditsAll)
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    assert (await client.post(chat(AGAIN))).cache == "hit"
    await until_figure(client, "labels_from_audit", 1)
    await client.post(chat(AGAIN), Cache_Control="no-cache")
    await _settled(client)

    assert await figure(client, "labels_from_user") == 0


async def test_a_hanging_model_delays_the_first_questions_only(
    semantic: SemanticStage, mock: MockUpstream, minilm: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions to a hanging model wait their deadline at first, and not at all later."""
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
    assert min(took[-3:]) < 0.2


async def test_a_report_of_a_false_hit_can_be_repeated_after_503(
    semantic: SemanticStage, mock: MockUpstream, folder: Path
) -> None:
    """A report of a false hit gives 503, and again 503, while the semantic cache is unavailable."""
    away = SemanticSettings(mode="on")
    client = await semantic.stage.gateway(mock, semantic=away, semantic_socket=folder / "none")
    first = await client.post(chat(ASKED))
    for _ in range(2):
        answer = await client.send("DELETE", f"/v1/cache/entries/{first.entry}?reason=wrong")
        assert answer.status == 503


async def test_a_false_hit_is_learned_from_by_the_host_that_served_it(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey
) -> None:
    """A false hit that is reported to another host gives a label on the host that served it."""
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


async def test_an_answer_that_redis_refuses_is_learned_locally(
    semantic: SemanticStage, mock: MockUpstream, own_valkey: Valkey
) -> None:
    """An answer is learned locally while Redis is out of memory."""
    client = await semantic.gateway(mock, redis=own_valkey.url, semantic={"policy": "budget"})
    await client.post(chat(ASKED))
    await until_known(client, 1)
    async with redis.asyncio.from_url(own_valkey.url) as raw:
        await raw.config_set("maxmemory", "1")
    await client.post(chat(AGAIN))

    await until_figure(client, "policy.labels", 1)


def _kind(event: bytes) -> str:
    return msgspec.msgpack.decode(event, type=Event).kind


async def test_a_label_that_is_written_twice_is_learned_once(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey
) -> None:
    """A label that was written twice, as after a lost reply, counts once."""
    settings = {"policy": "budget"}
    one = await semantic.gateway(mock, redis=valkey.url, semantic=settings)
    other = await semantic.gateway(mock, redis=valkey.url, semantic=settings)
    await one.post(chat(ASKED))
    await until_known(one, 1)
    await one.post(chat(AGAIN))
    await until_figure(other, "policy.labels", 1)
    async with redis.asyncio.from_url(valkey.url) as raw:
        events: Any = await raw.xrange("keepgate:semantic:log")
        (label,) = [said for _, said in events if _kind(said[b"event"]) == "label"]
        await raw.xadd("keepgate:semantic:log", label)
    await one.post(chat("Who painted the ceiling of the Sistine Chapel?", temperature=0.5))  # near nothing
    await until_known(other, 3)

    assert await figure(other, "policy.labels") == 1
    assert await figure(one, "policy.labels") == 1


async def test_the_log_ends_when_it_is_cancelled_while_it_writes(valkey: Valkey, minilm: Encoder) -> None:
    """A cancellation at any moment of a write ends the log."""
    vector = np.eye(1, minilm.dimensions, dtype=np.float32)[0]
    for steps in range(60):
        # Only the log itself can be cancelled after a number of steps.
        async with open_topology(valkey.url) as topology:
            shared = RecordLog(topology, minilm.fingerprint, minilm.dimensions, NoEncryption())
            writing = asyncio.create_task(shared.write())
            await asyncio.sleep(0)
            now = time.time()
            shared.save(Record("a.1", "a.context", "Who?", "a.1", "mock", "0.0.0", now, now + 60), vector)
            for _ in range(steps // 2):
                await asyncio.sleep(0)
            writing.cancel()
            done, _ = await asyncio.wait({writing}, timeout=DEADLINE)
            assert done, f"after {steps // 2} steps"
