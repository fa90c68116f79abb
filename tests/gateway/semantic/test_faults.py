"""A semantic cache that is frozen, killed or wrong delays a request by its deadline at most, and recovers."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import redis.asyncio
import xxhash

from cache.entries.key import namespace_for
from cache.semantic.embedding.encoder import Encoder, Vectors
from cache.semantic.embedding.model_files import find_model
from cache.semantic.service.record_log import Event
from cache.semantic.service.records import Record
from gateway.settings.cache import SemanticSettings
from gateway.upstreams.mock import MockUpstream
from tests.cache.valkey import Valkey
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.processes.serving import parent_of, processes, serving
from tests.gateway.semantic.stage import (
    AGAIN,
    ANSWER,
    ASKED,
    ONCE_MORE,
    SERVES_ALL,
    SemanticStage,
    entries,
    figure,
    until_known,
)
from tests.waiting import until

STARTS_WITHIN = 60.0

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def child() -> int:
    """The pid of the semantic cache's process, a child of this one."""
    found = [pid for pid, words in processes().items() if "cache.semantic.service" in words]
    (pid,) = [pid for pid in found if parent_of(pid) == os.getpid()]
    return pid


async def until_ready(client: Client) -> None:
    async def is_available() -> bool:
        return bool(await figure(client, "available"))

    await until(is_available, STARTS_WITHIN, every=0.05)


async def test_a_frozen_process_costs_one_deadline_once(
    stage: Stage, mock: MockUpstream, valkey: Valkey, minilm: Encoder
) -> None:
    """A frozen process fails no request, delays one by its deadline, and serves again afterwards."""
    client = await stage.gateway(
        mock,
        redis=valkey.url,
        semantic=SemanticSettings(mode="on", deadline=1.0, **SERVES_ALL),
    )
    await until_ready(client)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    pid = child()
    os.kill(pid, signal.SIGSTOP)
    try:
        took = []
        for number in range(6):
            began = time.monotonic()
            assert (await client.post(chat(f"Where is office number {number}?"))).cache == "miss"
            took.append(time.monotonic() - began)
    finally:
        os.kill(pid, signal.SIGCONT)
    await until_ready(client)

    assert took[0] >= 1.0, "the first waits for it"
    assert sum(seconds >= 1.0 for seconds in took[1:]) <= 1, "the others do not, but for a busy machine"
    assert (await client.post(chat(AGAIN))).status == 200


async def test_a_killed_process_fails_no_request_and_is_replaced(
    stage: Stage, mock: MockUpstream, valkey: Valkey, raw: redis.asyncio.Redis, minilm: Encoder
) -> None:
    """A killed process fails no request, and its successor reads the records from Redis."""

    async def is_stored() -> bool:
        return bool(await raw.zcard("keepgate:semantic:records"))

    async def is_loaded() -> bool:
        return bool(await figure(client, "loaded"))

    client = await stage.gateway(
        mock,
        redis=valkey.url,
        semantic=SemanticSettings(mode="on", deadline=5.0, **SERVES_ALL),
    )
    await until_ready(client)
    await client.post(chat(ASKED))
    await until(is_stored, STARTS_WITHIN, every=0.05)
    first = child()
    os.kill(first, signal.SIGKILL)
    answers = await asyncio.gather(*(client.post(chat(f"Who is number {number}?")) for number in range(20)))
    assert {answer.status for answer in answers} == {200}
    await until_ready(client)

    assert child() != first
    await until(is_loaded, STARTS_WITHIN, every=0.05)
    answer = await client.post(chat(AGAIN))
    assert (answer.headers["x-keepgate-layer"], answer.text) == ("semantic", ANSWER)


async def test_a_missing_model_is_reported_in_one_line(tmp_path: Path) -> None:
    """A missing embedding model ends the gateway with one line that names it."""
    model = {"KEEPGATE_SEMANTIC_MODE": "on", "KEEPGATE_SEMANTIC_MODEL": "/nowhere/at/all"}
    async with serving(tmp_path, "--upstream", "mock:", ready=False, **model) as gateway:
        assert await gateway.ended() == 1
        assert len([line for line in gateway.lines if "/nowhere/at/all" in line]) == 1
        assert gateway.lines[-1].startswith("keepgate: semantic.model:")


async def _until_logged(caplog: pytest.LogCaptureFixture, words: str) -> None:
    await until(lambda: words in caplog.text, STARTS_WITHIN, every=0.05)


async def test_a_process_that_cannot_start_again_is_tried_until_it_can(
    stage: Stage,
    mock: MockUpstream,
    minilm: Encoder,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that cannot start again is tried until it can, and the gateway serves meanwhile."""
    model, python = tmp_path / "model", tmp_path / "python"
    model.symlink_to(find_model("default").folder)
    python.symlink_to(sys.prefix)
    monkeypatch.setattr(sys, "executable", str(python / Path(sys.executable).relative_to(sys.prefix)))
    client = await stage.gateway(mock, semantic=SemanticSettings(mode="on", model=str(model)))
    await until_ready(client)
    for link, words in ((model, "with status 2"), (python, "No such file")):
        away = link.rename(link.with_suffix(".away"))
        os.kill(child(), signal.SIGKILL)
        await _until_logged(caplog, words)
        assert (await client.post(chat(f"What is the capital of {link.name}?"))).status == 200
        away.rename(link)
        await until_ready(client)


async def test_workers_share_one_process(mock: MockUpstream, tmp_path: Path) -> None:
    """All workers use one process, which ends with them."""
    settings = {"MODE": "on", "POLICY": "threshold", "THRESHOLD": "0.6", "DEADLINE": "5"}
    words = ("--upstream", mock.url, "--workers", "3")
    variables: dict[str, Any] = {f"KEEPGATE_SEMANTIC_{name}": value for name, value in settings.items()}
    async with serving(tmp_path, *words, **variables) as gateway:
        pid = gateway.child("cache.semantic.service")
        # Each worker connects in its own time, and any of them may be called.
        for asked in range(1, 4):
            await gateway.until_semantic("available")
            await gateway.ask(ASKED if asked == 1 else f"What is the capital of country number {asked}?")
            await gateway.until_semantic("entries", asked)
        names = ("Ann", "Bob", "Eve", "Tom", "Kim", "Lee")
        answers = [await gateway.ask(f"{AGAIN} Thanks, {name}.") for name in names]
        assert {answer.text for answer in answers} == {ANSWER}
        assert await gateway.signal(signal.SIGTERM) == 0
        assert pid not in processes()
    assert len(mock.received) + sum(answer.cache == "hit" for answer in answers) == 3 + len(names)


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def _garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(os.urandom(200) + b"\n")
    await reader.read()


async def _endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    while not writer.is_closing():
        writer.write(b"x" * 100_000)
        await writer.drain()


async def _wrong_reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        writer.write(msgspec.json.encode([msgspec.json.decode(line)[0], ["evicted", True, 3]]) + b"\n")


async def _stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Finds an entry that does not exist."""
    while line := await reader.readline():
        reply = ["found", 1, 0.9, 0.001, "public.nobody", 1.0, "semantic", False]
        writer.write(msgspec.json.encode([msgspec.json.decode(line)[0], reply]) + b"\n")


async def _leaver(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.close()


@pytest.mark.parametrize("talk", [_silent, _garbage, _endless, _wrong_reply, _stranger, _leaver])
async def test_a_request_is_answered_whatever_the_process_replies(
    stage: Stage, mock: MockUpstream, folder: Path, talk: Talk
) -> None:
    """A request takes at most its deadline and the upstream's time, whatever the process replies."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    socket = folder / "liar"
    server = await asyncio.start_unix_server(converse, socket)
    try:
        client = await stage.gateway(mock, semantic=SemanticSettings(mode="on", deadline=0.1), semantic_socket=socket)
        began = time.monotonic()
        answers = [await client.post(chat(question)) for question in (ASKED, AGAIN, ASKED)]
        took = time.monotonic() - began
    finally:
        server.close()

    assert [(answer.status, answer.cache) for answer in answers] == [(200, "miss"), (200, "miss"), (200, "hit")]
    assert took < 2.0


@pytest.mark.parametrize("published", [True, False])
async def test_a_faulty_process_cannot_cross_tenants(
    stage: Stage, mock: MockUpstream, folder: Path, published: bool
) -> None:
    """The gateway serves only entries of the own and of published tenants, whatever the process replies."""
    lie: list[Any] = ["not found", 1]

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if number := msgspec.json.decode(line)[0]:  # else it is a note
                writer.write(msgspec.json.encode([number, lie]) + b"\n")
        writer.close()

    names = (namespace_for("Bearer sk-victim"),) if published else ()
    semantic = SemanticSettings(mode="on", deadline=5.0, published=names)
    server = await asyncio.start_unix_server(converse, folder / "liar")
    try:
        client = await stage.gateway(mock, semantic=semantic, semantic_socket=folder / "liar")
        victim, thief = client.tenant("sk-victim"), client.tenant("sk-thief")
        first = await victim.post(chat(ASKED))
        created = (await client.get(f"/v1/cache/entries/{first.entry}")).json["created"]
        lie[:] = ["found", 1, 0.9, 0.001, first.entry, created, "semantic", False]
        own, other = await victim.post(chat(AGAIN)), await thief.post(chat(AGAIN))
    finally:
        server.close()

    assert own.cache == "hit"
    assert other.cache == ("hit" if published else "miss")
    assert ("x-keepgate-similarity" in other.headers) is published


async def test_a_missing_process_delays_no_request(stage: Stage, mock: MockUpstream, folder: Path) -> None:
    """A request does not wait where no process listens on the socket."""
    client = await stage.gateway(mock, semantic=SemanticSettings(mode="on"), semantic_socket=folder / "none")

    assert (await client.post(chat(ASKED))).status == 200
    assert (await client.get("/v1/cache/stats")).json["layers"]["semantic"]["available"] is False


def _stored(record: Record, vector: bytes, encoder: str) -> bytes:
    payload = msgspec.msgpack.encode([record, encoder, vector])
    return b"KGS1" + xxhash.xxh3_64_digest(payload) + payload


async def test_invalid_records_are_ignored_and_the_others_serve(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, minilm: Encoder
) -> None:
    """Records that are cut, foreign, NaN, of another length or under another tenant's id are ignored."""
    one = await semantic.gateway(mock, redis=valkey.url)
    await one.post(chat(ASKED))
    await until_known(one, 1)
    raw = redis.asyncio.Redis.from_url(valkey.url)
    (good,) = [key async for key in raw.scan_iter("keepgate:semantic:record:*")]
    data: Any = await raw.get(good)
    poisoned = Record("public.evil", "victim.context", AGAIN, "public.evil", "mock", "0.0.0", 1.0, time.time() + 60)
    nan = np.full(minilm.dimensions, np.nan, dtype="<f4").tobytes()
    unit = np.eye(1, minilm.dimensions, dtype="<f4").tobytes()
    honest = msgspec.structs.replace(poisoned, partition="public.context")
    bad: dict[str, Any] = {
        "public.cut": data[:-3],
        "public.bytes": os.urandom(100),
        "public.empty": b"",
        "public.copy": data,
        "public.evil": _stored(poisoned, unit, minilm.fingerprint),
        "public.nan": _stored(msgspec.structs.replace(honest, entry="public.nan"), nan, minilm.fingerprint),
        "public.always": _stored(
            msgspec.structs.replace(honest, entry="public.always", expires=float("nan")), unit, minilm.fingerprint
        ),
        "public.short": _stored(msgspec.structs.replace(honest, entry="public.short"), unit[:-4], minilm.fingerprint),
    }
    for entry, value in bad.items():
        await raw.set(f"keepgate:semantic:record:{entry}", value)
        await raw.zadd("keepgate:semantic:records", {entry: time.time() + 60})
        await raw.xadd("keepgate:semantic:log", {"event": msgspec.msgpack.encode(Event("x", 1, "put", entry))})
    label = msgspec.msgpack.encode(Event("x", 1, "label", label=os.urandom(30)))
    events: tuple[Any, ...] = ({"event": label}, {"event": os.urandom(30)}, {"what": "?"})
    for event in events:
        await raw.xadd("keepgate:semantic:log", event)
    await raw.zadd("keepgate:semantic:records", {b"\xff\xfe": time.time() + 60})
    learned = "keepgate:semantic:policy:threshold:" + minilm.fingerprint
    await raw.hset(learned, mapping={"position": b"\xff", "state": b"y"})
    await raw.aclose()
    other = await semantic.gateway(mock, redis=valkey.url)
    await until_known(other, 1)

    for client in (one, other):
        answer = await client.post(chat(AGAIN), x_keepgate_max_risk="1")
        assert (answer.headers["x-keepgate-layer"], answer.text) == ("semantic", ANSWER)
        assert await entries(client) == 1
        assert await figure(client, "corrupt_records") > 0


async def test_an_entry_that_is_gone_from_the_store_is_forgotten(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey
) -> None:
    """An entry that the store evicted is removed from the index at the next lookup."""
    client = await semantic.gateway(mock, redis=valkey.url)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    raw = redis.asyncio.Redis.from_url(valkey.url)
    async for key in raw.scan_iter("keepgate:entry:*"):
        await raw.delete(key)
    await raw.aclose()
    for entry_id in client.gateway.cache.memory.ids():
        await client.gateway.cache.memory.delete(entry_id)

    assert (await client.post(chat(AGAIN), cache_control="only-if-cached")).status == 504
    await until_known(client, 0)
    assert (await client.post(chat(AGAIN))).cache == "miss"
    await until_known(client, 1)
    assert (await client.post(chat(ONCE_MORE))).headers["x-keepgate-layer"] == "semantic"
    assert await entries(client) == 1


async def test_a_frozen_store_costs_a_semantic_hit_and_no_request(
    semantic: SemanticStage, mock: MockUpstream, own_valkey: Valkey
) -> None:
    """A frozen store fails no request, and learning goes on after it."""
    client = await semantic.gateway(mock, redis=own_valkey.url)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    own_valkey.freeze()
    try:
        answers = [await client.post(chat(question)) for question in (AGAIN, "What is the capital of France?")]
    finally:
        own_valkey.thaw()

    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].headers["x-keepgate-layer"] == "semantic"
    assert answers[1].cache == "miss"
    await until_known(client, 2)


class SlowEncoder:
    """The small model, delayed by `seconds`."""

    def __init__(self, encoder: Encoder) -> None:
        self.name, self.fingerprint, self.dimensions = encoder.name, encoder.fingerprint, encoder.dimensions
        self.seconds = 0.0
        self._encoder = encoder

    def encode(self, texts: list[str]) -> Vectors:
        time.sleep(self.seconds)  # in the embedder's own thread
        return self._encoder.encode(texts)


async def test_a_late_reply_does_not_count_as_served(
    stage: Stage, mock: MockUpstream, minilm: Encoder, folder: Path
) -> None:
    """A repeated question after a reply that came too late is no rejection."""
    slow = SlowEncoder(minilm)
    async with AsyncExitStack() as stack:
        service = await SemanticStage(stage, stack, slow, folder).service(**SERVES_ALL)
        semantic = SemanticSettings(mode="on", deadline=0.1, **SERVES_ALL)
        client = await stage.gateway(mock, semantic=semantic, semantic_socket=service.socket)
        await until_ready(client)
        await client.post(chat(ASKED))
        await until_known(client, 1)
        slow.seconds = 0.4
        assert (await client.post(chat(AGAIN))).cache == "miss"
        slow.seconds = 0.0
        await until_ready(client)
        await until_known(client, 2)
        await client.post(chat(AGAIN), Cache_Control="no-cache")

        assert await figure(client, "labels_from_user") == 0
