"""Which upstream gets a request, and which models are listed."""

import asyncio
import socket

import pytest

from gateway.upstreams.mock import Reply
from tests.gateway.client import DEADLINE, Answer, chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import Connection, json_reply
from tests.gateway.upstreams.upstream_examples import nothing_listens
from tests.waiting import until


async def test_another_upstream_answers_when_one_cannot_be_reached(stage: Stage) -> None:
    """A request goes to the next upstream when one cannot be reached, in any order of the list."""
    mock = await stage.mock()
    for upstreams in ((nothing_listens(), mock), (mock, nothing_listens())):
        client = await stage.gateway(*upstreams)
        answers = [await client.post(chat(f"{number}")) for number in range(4)]
        assert {answer.status for answer in answers} == {200}
    assert len(mock.received) == 8


async def test_a_request_that_got_an_error_is_not_sent_elsewhere(stage: Stage) -> None:
    """A request that got a 500 is not sent to another upstream, and the error is relayed."""
    error = Reply(status=500, error={"message": "no"})
    one, other = await stage.mock(error), await stage.mock(error)
    client = await stage.gateway(one, other)
    answer = await client.post(chat())

    assert answer.status == 500
    assert len(one.received) + len(other.received) == 1


async def test_a_request_that_was_read_is_sent_to_no_other_upstream(stage: Stage) -> None:
    """A request that makes upstreams close reaches one of them, and the gateway stays ready."""

    async def converse(connection: Connection) -> None:
        connection.cut()

    raws = [await stage.raw(converse) for _ in range(3)]
    client = await stage.gateway(*raws)
    await client.gateway.router.refresh()
    answer = await client.post(chat())

    assert (answer.status, answer.error["code"]) == (502, "upstream_cut")
    assert sum(len(raw.connections) for raw in raws) == 1
    assert (await client.get("/ready")).status == 200


async def test_a_request_goes_where_its_model_is(stage: Stage) -> None:
    """A request goes to the upstream that lists its model, also with a slash in the name."""
    one = await stage.mock(models=("small", "org/large"))
    other = await stage.mock(models=("huge",))
    client = await stage.gateway(one, other)
    await client.gateway.router.refresh()
    for model in ("small", "org/large", "huge", "huge", "small"):
        await client.post(chat(f"for {model}", model=model), Cache_Control="no-cache")

    assert [r.fields["model"] for r in one.received] == ["small", "org/large", "small"]
    assert [r.fields["model"] for r in other.received] == ["huge", "huge"]


async def test_other_endpoints_go_where_their_model_is(stage: Stage) -> None:
    """The model in the body selects the upstream of other endpoints."""
    chats, embeddings = await stage.mock(models=("chat",)), await stage.mock(models=("embed",))
    client = await stage.gateway(chats, embeddings)
    await client.gateway.router.refresh()
    for _ in range(4):
        await client.post({"model": "embed", "input": "x"}, "/v1/moderations")

    assert (len(chats.received), len(embeddings.received)) == (0, 4)


async def test_an_unlisted_model_is_sent_to_an_upstream(stage: Stage) -> None:
    """A request for an unlisted model goes to an upstream, whose answer is relayed."""
    mock = await stage.mock(Reply(status=404, error={"message": "no such model", "code": "model_not_found"}))
    client = await stage.gateway(mock)
    await client.gateway.router.refresh()
    answer = await client.post(chat(model="unheard-of"))

    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")


async def test_requests_are_spread_over_upstreams_of_one_model(stage: Stage) -> None:
    """The least busy upstream of a model gets the next request."""
    mocks = [await stage.mock() for _ in range(3)]
    client = await stage.gateway(*mocks)
    await client.gateway.router.refresh()
    for mock in mocks:
        mock.hold.clear()
    asking: list[asyncio.Task[Answer]] = []

    def all_are_received() -> bool:
        return sum(len(mock.received) for mock in mocks) >= len(asking)

    for number in range(9):
        asking.append(asyncio.create_task(client.post(chat(f"{number}"))))
        await until(all_are_received, DEADLINE, every=0)
    for mock in mocks:
        mock.hold.set()
    await asyncio.gather(*asking)

    assert [len(mock.received) for mock in mocks] == [3, 3, 3]


async def test_an_unreachable_upstream_gets_no_request_without_a_model(stage: Stage) -> None:
    """Requests without a model, or with an unlisted one, go to an upstream that answers."""
    mock = await stage.mock()
    for upstreams in ((nothing_listens(), mock), (mock, nothing_listens())):
        client = await stage.gateway(*upstreams)
        await client.gateway.router.refresh()
        answers = [
            await client.get("/v1/models"),
            await client.post({"input": "x"}, "/v1/embeddings"),
            await client.post(chat(model="alias")),
        ]
        assert [answer.status for answer in answers] == [200, 200, 200]


async def test_ready_when_an_upstream_can_be_reached(stage: Stage) -> None:
    """The endpoint /ready is 200 while an upstream can be reached, and /health always."""
    url = nothing_listens()
    client = await stage.gateway(url)
    await client.gateway.router.refresh()
    assert ((await client.get("/health")).status, (await client.get("/ready")).status) == (200, 503)

    client = await stage.gateway(url, await stage.mock())
    await client.gateway.router.refresh()
    assert ((await client.get("/health")).status, (await client.get("/ready")).status) == (200, 200)


async def test_models_of_all_upstreams_are_listed_once(stage: Stage) -> None:
    """Each model is listed once, with all fields of the first upstream that has it."""
    one = await stage.mock(models=("a", "org/b"))
    other = await stage.mock(models=("org/b", "c"))
    client = await stage.gateway(one, other, nothing_listens())
    answer = await client.get("/v1/models")

    assert answer.json["object"] == "list"
    assert sorted(model["id"] for model in answer.json["data"]) == ["a", "c", "org/b"]
    assert all(model["owned_by"] == "keepgate" for model in answer.json["data"])


@pytest.mark.parametrize("path", ["/v1/models/org/large", "/v1/models/org%2Flarge"])
async def test_a_model_with_a_slash_is_shown(stage: Stage, path: str) -> None:
    """A model with a plain or an escaped slash in its name is shown."""
    client = await stage.gateway(await stage.mock(models=("small",)), await stage.mock(models=("org/large",)))
    await client.gateway.router.refresh()

    assert (await client.get(path)).json["id"] == "org/large"


async def test_an_unknown_model_is_404(stage: Stage) -> None:
    """The upstream's error on an unknown model is relayed."""
    client = await stage.gateway(await stage.mock())

    assert (await client.get("/v1/models/none")).json["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("listed", [b"[]", b'{"data":5}', b'{"data":[{"x":1}]}', b'{"data":[{"id":[]}]}', b"<html>"])
async def test_an_invalid_list_of_models_is_an_error(stage: Stage, listed: bytes) -> None:
    """An invalid list of models gives an error that names the upstream."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(json_reply(listed))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = await stage.gateway(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    answer = await client.get("/v1/models")
    server.close()

    assert (answer.status, answer.error["type"]) == (502, "upstream_error")


async def test_an_upstream_without_a_model_list_delays_no_list(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of models has those of the other upstreams when one does not answer."""
    monkeypatch.setattr("gateway.api.handlers._LIST_DEADLINE", 0.3)  # no setting, and too long for a test
    mock = await stage.mock()
    # Connections are made, and never accepted.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = await stage.gateway(f"http://127.0.0.1:{silent.getsockname()[1]}", mock)
        answer = await client.get("/v1/models")

    assert [model["id"] for model in answer.json["data"]] == ["mock"]
