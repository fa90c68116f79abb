"""Batches from their creation to their files, through OpenAI's own client."""

import asyncio
import json
import stat
import time
from typing import Any

import openai
import pytest
from msgspec.structs import replace
from yarl import URL

from gateway.batches.store import UnfinishedBatch
from gateway.upstreams.mock import Reply
from tests.gateway.batches.batch_client import CHAT, jsonl, request
from tests.gateway.batches.conftest import BatchStage
from tests.gateway.raw_upstream import Connection, RawUpstream, json_reply, saying
from tests.waiting import until

_SECRET = "pssst-tell-nobody"


def unfinished(stage: BatchStage, batch_id: str) -> UnfinishedBatch:
    (found,) = (each for each in stage.store.unfinished() if each.id == batch_id)
    return found


async def test_each_line_gets_its_answer_in_the_output_file(stage: BatchStage) -> None:
    """A batch goes from validating to completed, and its output file has OpenAI's line for each request."""
    client = await stage.client()
    made = await client.create(request("a", "one"), request("b", "two"), metadata={"night": "1"})
    assert made.status == "validating"
    assert made.expires_at == made.created_at + 86_400
    await stage.run()
    batch = await client.ended(made.id)
    assert batch.status == "completed"
    assert batch.model_extra == {}
    assert batch.error_file_id is None
    assert batch.metadata == {"night": "1"}
    assert batch.model == "mock"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 2, "completed": 2, "failed": 0}
    assert batch.in_progress_at
    assert batch.finalizing_at
    assert batch.completed_at
    lines = await client.lines(batch.output_file_id)
    assert list(lines) == ["a", "b"]
    line = lines["a"]
    assert set(line) == {"id", "custom_id", "response", "error"}
    assert line["id"].startswith("batch_req_")
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    assert line["response"]["request_id"]
    assert await client.texts(batch) == {"a": "one", "b": "two"}
    assert batch.output_file_id is not None
    file = await client.sdk.files.retrieve(batch.output_file_id)
    assert file.purpose == "batch_output"
    assert file.expires_at == file.created_at + 30 * 86_400


async def test_usage_is_the_sum_of_the_answers(stage: BatchStage) -> None:
    """`usage` has the tokens of all answers in the output file, in the names of the Batch API."""
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": None,
    }
    stage.upstream.replies[:] = [
        Reply(body={"usage": usage}, when="one"),
        Reply(body={"usage": {"prompt_tokens": "x"}}),
    ]
    client = await stage.client()
    await stage.run()
    made = await client.create(request("a", "one"), request("b", "one"), request("c", "two"))
    batch = await client.ended(made.id)
    assert batch.usage is not None
    assert batch.usage.model_dump() == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 16,
    }


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"model": "mock", "prompt": "hi"}),
        ("/v1/embeddings", {"model": "mock", "input": "hi"}),
        ("/v1/responses", {"model": "mock", "input": "hi"}),
        ("/v1/messages", {"model": "mock", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_a_batch_of_each_endpoint(stage: BatchStage, endpoint: str, body: dict[str, Any]) -> None:
    """Each request goes to the endpoint of the batch, with its own bytes and at low priority."""
    async with RawUpstream(saying(json_reply(b"{}"))).serving() as upstream:
        client = await stage.client()
        await stage.run(upstream.url)
        line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
        batch = await client.ended((await client.create(line, endpoint=endpoint)).id)
    assert batch.status == "completed"
    (connection,) = upstream.connections
    assert connection.request_line == f"POST {endpoint} HTTP/1.1"
    assert connection.body == json.dumps(body).encode()
    assert b"\r\nx-keepgate-priority: batch\r\n" in connection.head
    assert b"\r\nContent-Type: application/json\r\n" in connection.head


async def test_the_same_body_is_computed_once(stage: BatchStage) -> None:
    """Lines whose bodies are the same JSON, in whichever order of keys, are one request; each gets the answer."""
    client = await stage.client()
    await stage.run()
    turned = request("c", "same", seed=1)
    turned["body"] = dict(reversed(turned["body"].items()))
    batch = await client.create(
        request("a", "same", seed=1), request("b", "same", seed=1), turned, request("d", "same", seed=2)
    )
    ended = await client.ended(batch.id)
    assert len(stage.upstream.received) == 2
    assert await client.texts(ended) == dict.fromkeys("abcd", "same")
    assert ended.request_counts is not None
    assert ended.request_counts.completed == 4


async def test_an_error_of_the_upstream_is_the_lines_result(stage: BatchStage) -> None:
    """A 4xx answer is not tried again; its line is in the error file, as OpenAI writes it."""
    refusal = {"message": "Too long.", "type": "invalid_request_error", "param": "messages", "code": "too_long"}
    stage.upstream.replies[:] = [Reply(when="bad", status=400, error=refusal)]
    client = await stage.client()
    await stage.run()
    batch = await client.ended((await client.create(request("a", "good"), request("b", "bad"))).id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}
    assert list(await client.lines(batch.output_file_id)) == ["a"]
    errors = await client.lines(batch.error_file_id)
    assert list(errors) == ["b"]
    assert errors["b"]["error"] is None
    assert errors["b"]["response"]["status_code"] == 400
    assert errors["b"]["response"]["body"] == {"error": refusal}
    assert len(stage.upstream.received) == 2


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_temporary_error_is_tried_again(stage: BatchStage, status: int) -> None:
    """After 429, 503 and other 5xx the request is sent again, as often as the retries say; the last answer stays."""
    stage.upstream.replies[:] = [Reply(status=status, error={"message": "Later."}, headers={"Retry-After": "0"})]
    client = await stage.client()
    await stage.run()
    batch = await client.ended((await client.create(request("a", "hi"))).id)
    assert len(stage.upstream.received) == 3
    assert (await client.lines(batch.error_file_id))["a"]["response"]["status_code"] == status


async def test_retry_after_is_waited(stage: BatchStage) -> None:
    """The next attempt is not before the time that Retry-After names."""
    stage.upstream.replies[:] = [Reply(status=429, error={"message": "Later."}, headers={"Retry-After": "1"})]
    client = await stage.client()
    await stage.run()
    made = await client.create(request("a", "hi"))
    await stage.upstream.wait_for(1)
    began = time.monotonic()
    stage.upstream.replies[:] = []
    assert await client.texts(await client.ended(made.id)) == {"a": "hi"}
    assert time.monotonic() - began >= 0.9


async def test_an_upstream_that_forbids_it_is_not_asked_again(stage: BatchStage) -> None:
    """`x-should-retry: false` makes an error final."""
    reply = Reply(status=504, error={"message": "Not cached."}, headers={"x-should-retry": "false"})
    stage.upstream.replies[:] = [reply]
    client = await stage.client()
    await stage.run()
    await client.ended((await client.create(request("a", "hi"))).id)
    assert len(stage.upstream.received) == 1


async def test_no_more_requests_than_the_limit_are_under_way(stage: BatchStage) -> None:
    """All batches of a process share its four places; a small batch does not wait for the end of a large one."""
    stage.upstream.hold.clear()
    client = await stage.client()
    await stage.run()
    large = await client.create(*(request(f"a{number}", f"a{number}") for number in range(40)))
    await stage.upstream.wait_for(4)
    small = await client.create(request("b", "b"))
    await client.until(small.id, "in_progress")
    assert len(stage.upstream.received) == 4
    stage.upstream.hold.set()
    assert (await client.ended(small.id)).status == "completed"
    assert (await client.ended(large.id)).status == "completed"
    order = [received.fields["messages"][0]["content"] for received in stage.upstream.received]
    assert order.index("b") < 12


async def test_a_cancelled_batch_has_what_was_finished(stage: BatchStage) -> None:
    """Requests under way are given up, the finished answers are in the output file, all others in the error file."""
    client = await stage.client()
    await stage.run()
    stage.upstream.replies[:] = [Reply(when="slow", delay=600)]
    made = await client.create(request("a", "fast"), *(request(f"s{number}", f"slow {number}") for number in range(6)))

    async def is_counted() -> bool:
        counts = (await client.sdk.batches.retrieve(made.id)).request_counts
        return counts is not None and counts.completed == 1

    await until(is_counted)
    await stage.upstream.wait_for(5)
    cancelling = await client.sdk.batches.cancel(made.id)
    assert cancelling.status == "cancelling"
    assert cancelling.cancelling_at
    batch = await client.until(made.id, "cancelled")
    assert batch.cancelled_at
    assert await client.texts(batch) == {"a": "fast"}
    errors = await client.lines(batch.error_file_id)
    assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
    assert {line["response"] for line in errors.values()} == {None}
    assert len(errors) == 6
    await stage.upstream.wait_for_cancelled(4)
    assert len(stage.upstream.received) == 5


async def test_a_batch_that_no_process_runs_yet_can_be_cancelled(stage: BatchStage) -> None:
    """It sends nothing once a process finds it."""
    client = await stage.client()
    made = await client.create(request("a", "hi"))
    await client.sdk.batches.cancel(made.id)
    again = await client.sdk.batches.cancel(made.id)
    assert again.status == "cancelling"
    await stage.run()
    assert (await client.ended(made.id)).status == "cancelled"
    assert stage.upstream.received == []


async def test_an_ended_batch_cannot_be_cancelled(stage: BatchStage) -> None:
    """The error names the status."""
    client = await stage.client()
    await stage.run()
    made = await client.ended((await client.create(request("a", "hi"))).id)
    with pytest.raises(openai.BadRequestError, match="is completed cannot be cancelled"):
        await client.sdk.batches.cancel(made.id)


async def test_an_expired_batch_has_what_was_finished(stage: BatchStage) -> None:
    """At the deadline requests under way are given up; the lines without an answer are in the error file."""
    client = await stage.client()
    stage.upstream.replies[:] = [Reply(when="slow", delay=600)]
    made = await client.create(request("a", "fast"), request("b", "slow"))
    soon = int(time.time()) + 2
    unfinished(stage, made.id).update(lambda batch: replace(batch, expires_at=soon))
    await stage.run()
    batch = await client.until(made.id, "expired")
    assert time.time() >= soon
    assert batch.expired_at
    assert await client.texts(batch) == {"a": "fast"}
    errors = await client.lines(batch.error_file_id)
    assert errors["b"]["error"] == {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    }
    assert len(errors) == 1


async def test_a_batch_whose_time_is_over_sends_nothing(stage: BatchStage) -> None:
    """Where no process ran before the deadline, all lines are in the error file."""
    client = await stage.client()
    made = await client.create(request("a", "hi"))
    unfinished(stage, made.id).update(lambda batch: replace(batch, expires_at=1))
    await stage.run()
    batch = await client.until(made.id, "expired")
    assert batch.output_file_id is None
    assert list(await client.lines(batch.error_file_id)) == ["a"]
    assert stage.upstream.received == []


async def test_invalid_lines_fail_the_batch(stage: BatchStage) -> None:
    """`errors` has the number of each invalid line and its field; nothing is sent."""
    client = await stage.client()
    await stage.run()
    lines = [
        request("a", "hi"),
        request("a", "hi"),
        request("b", "hi", url="/v1/embeddings"),
        {"custom_id": "c"},
        request("d", "hi", stream=True),
        {**request("e", "hi"), "method": "GET"},
        {**request("f", "hi"), "priority": 1},
        {**request("g", "hi"), "body": []},
        {**request("h", "hi"), "custom_id": 7},
    ]
    file_id = await client.upload(jsonl(lines) + b"\n{not json\n")
    made = await client.create_of(file_id)
    batch = await client.ended(made.id)
    assert batch.status == "failed"
    assert batch.failed_at
    assert batch.errors is not None
    assert batch.errors.object == "list"
    assert [(error.line, error.code, error.param) for error in batch.errors.data or ()] == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "invalid_url", "url"),
        (4, "missing_required_parameter", "method"),
        (5, "stream_not_supported", "body.stream"),
        (6, "invalid_method", "method"),
        (7, "unknown_parameter", "priority"),
        (8, "invalid_body", "body"),
        (9, "invalid_custom_id", "custom_id"),
        (11, "invalid_json_line", None),
    ]
    assert stage.upstream.received == []


async def test_an_empty_file_fails_the_batch(stage: BatchStage) -> None:
    """A batch without requests is an error, not a success."""
    client = await stage.client()
    await stage.run()
    made = await client.create_of(await client.upload(b"\n"))
    batch = await client.ended(made.id)
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or ()] == ["empty_file"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "../../etc"}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": []}, "output_expires_after"),
        ({"extra_body": {"model": "x"}}, "model"),
        ({"extra_body": {"endpoint": ["/v1/embeddings"]}}, "endpoint"),
    ],
)
async def test_an_invalid_batch_is_refused_by_field(stage: BatchStage, fields: dict[str, Any], param: str) -> None:
    """The error names the field."""
    client = await stage.client()
    with pytest.raises(openai.APIStatusError) as refused:
        await client.create(request("a", "hi"), **fields)
    assert refused.value.status_code in (400, 404)
    assert refused.value.param == param


async def test_a_file_of_another_purpose_is_no_input(stage: BatchStage) -> None:
    """The input must have been uploaded for a batch."""
    client = await stage.client()
    file = await client.sdk.files.create(file=("a.jsonl", b"x"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="purpose batch") as refused:
        await client.create_of(file.id)
    assert refused.value.param == "input_file_id"


async def test_the_output_expires_when_the_client_says(stage: BatchStage) -> None:
    """`output_expires_after` counts from the creation of the output file."""
    client = await stage.client()
    await stage.run()
    made = await client.create(request("a", "hi"), output_expires_after={"anchor": "created_at", "seconds": 7200})
    batch = await client.ended(made.id)
    assert batch.output_file_id is not None
    file = await client.sdk.files.retrieve(batch.output_file_id)
    assert file.expires_at == file.created_at + 7200


async def test_batches_are_listed_newest_first_in_pages(stage: BatchStage) -> None:
    """The client's iterator goes through all pages; ended batches and others are one list."""
    client = await stage.client()
    made = [(await client.create(request("a", "hi"))).id for _ in range(3)]
    await stage.run()
    for batch_id in made:
        await client.ended(batch_id)
    await client.sdk.files.delete((await client.sdk.batches.retrieve(made[0])).output_file_id or "")
    page = await client.sdk.batches.list(limit=2)
    assert [batch.id for batch in page.data] == made[:0:-1]
    assert page.has_more
    assert [batch.id async for batch in client.sdk.batches.list(limit=1)] == made[::-1]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.sdk.batches.list(limit=101)
    assert refused.value.param == "limit"


async def test_another_tenants_batch_is_not_found(stage: BatchStage) -> None:
    """Neither to read, to cancel nor to list, and its files are no input."""
    alice, bob = await stage.client("alice"), await stage.client("bob")
    made = await alice.create(request("a", "hi"))
    for ask in (bob.sdk.batches.retrieve, bob.sdk.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await ask(made.id)
    assert (await bob.sdk.batches.list()).data == []
    with pytest.raises(openai.NotFoundError):
        await bob.create_of(made.input_file_id)


@pytest.mark.parametrize("batch_id", ["..%2F..%2Fended", "batch_", "batch_" + "g" * 32, "batch_" + "0" * 32])
async def test_no_identifier_leads_elsewhere(stage: BatchStage, batch_id: str) -> None:
    """What is no identifier of a batch is not found."""
    session = await stage.session()
    async with session.get(f"/v1/batches/{batch_id}") as response:
        assert response.status == 404


async def test_requests_carry_the_headers_of_the_batch(unserved: BatchStage) -> None:
    """Credentials, the tenant's header and what may change an answer are sent with each request, and nothing else."""
    await unserved.serve(namespace="header:x-team")
    client = await unserved.client(_SECRET, x_team="red", cache_control="no-store", x_other="1")
    await unserved.run()
    await client.ended((await client.create(request("a", "hi"))).id)
    (received,) = unserved.upstream.received
    assert received.headers["Authorization"] == f"Bearer {_SECRET}"
    assert received.headers["x-team"] == "red"
    assert received.headers["Cache-Control"] == "no-store"
    assert "x-other" not in received.headers


async def test_a_header_that_is_no_text_is_refused(stage: BatchStage) -> None:
    """What cannot be stored and sent again as it was is an error at once."""
    client = await stage.client()
    file_id = await client.upload(jsonl([request("a", "hi")]))
    body = json.dumps({"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}).encode()
    head = b"POST /v1/batches HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer alice\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(stage.url).port)
    writer.write(head + b"api-key: \xff\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"The header api-key must be UTF-8 text." in answer


async def test_credentials_are_stored_for_this_user_alone_and_no_longer_than_needed(
    stage: BatchStage, caplog: pytest.LogCaptureFixture
) -> None:
    """They are in one file that only its owner reads; nothing of them is left when the batch has ended, or logged."""
    caplog.set_level("DEBUG")
    client = await stage.client(_SECRET)

    def files_with_secret() -> list[str]:
        return [
            path.name for path in stage.state.rglob("*") if path.is_file() and _SECRET.encode() in path.read_bytes()
        ]

    made = await client.create(request("a", "hi"))
    assert files_with_secret() == ["private.json"]
    (private,) = stage.state.rglob("private.json")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(private.parent.parent.stat().st_mode) == 0o700
    await stage.run()
    ended = await client.ended(made.id)
    await until(lambda: not stage.store.unfinished())
    assert files_with_secret() == []
    assert _SECRET not in ended.model_dump_json()
    assert _SECRET not in caplog.text


async def test_an_answer_over_several_lines_becomes_one(stage: BatchStage) -> None:
    """The output file stays a line for each request, whatever space the server puts into its JSON."""
    async with RawUpstream(saying(json_reply(b'{\n  "a": [1,\r\n 2]\n}'))).serving() as upstream:
        client = await stage.client()
        await stage.run(upstream.url)
        batch = await client.ended((await client.create(request("a", "hi"))).id)
    assert (await client.lines(batch.output_file_id))["a"]["response"]["body"] == {"a": [1, 2]}


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b'{"a":"\xff"}', b"{" * 9999, b""])
async def test_an_answer_that_is_no_object_is_a_failure(stage: BatchStage, body: bytes) -> None:
    """Its line has no response, and an error that says so."""
    async with RawUpstream(saying(json_reply(body))).serving() as upstream:
        client = await stage.client()
        await stage.run(upstream.url)
        batch = await client.ended((await client.create(request("a", "hi"))).id)
    line = (await client.lines(batch.error_file_id))["a"]
    assert line["response"] is None
    assert line["error"]["code"] == "invalid_answer"


async def test_a_broken_connection_is_tried_again(stage: BatchStage) -> None:
    """After as many attempts as the retries say the line is a failure."""

    async def cut(connection: Connection) -> None:
        connection.cut()

    async with RawUpstream(cut).serving() as upstream:
        client = await stage.client()
        await stage.run(upstream.url)
        batch = await client.ended((await client.create(request("a", "hi"))).id)
        assert len(upstream.connections) == 3
    assert (await client.lines(batch.error_file_id))["a"]["error"]["code"] == "connection_error"
