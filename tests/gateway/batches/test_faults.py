"""Full disks, damaged files and missing ones, while a batch runs."""

import json
from collections import Counter
from pathlib import Path

import pytest

from gateway.upstreams.mock import Reply
from tests.gateway.batches.batch_client import request
from tests.gateway.batches.conftest import BatchStage
from tests.gateway.batches.runner_process import runner_process
from tests.gateway.batches.test_files import file_size_limit
from tests.waiting import until


def sent(stage: BatchStage) -> Counter[str]:
    """How often each request has reached the upstream."""
    return Counter(received.fields["messages"][0]["content"] for received in stage.upstream.received)


async def results_of(stage: BatchStage, requests: int) -> Path:
    """The results file of the only batch, whose process has been killed after that many results."""
    async with runner_process(stage.state, stage.upstream.url) as process:

        def is_written() -> bool:
            return sum(path.read_bytes().count(b"\n") for path in stage.state.rglob("results.jsonl")) >= requests

        await until(is_written)
        process.kill()
        await process.wait()
    (path,) = stage.state.rglob("results.jsonl")
    return path


async def test_a_full_disk_stops_requests_until_there_is_room(
    stage: BatchStage, caplog: pytest.LogCaptureFixture
) -> None:
    """A result that cannot be written waits, no further request is sent in vain, and none is sent twice."""
    client = await stage.client()
    made = await client.create(*(request(f"{number}", f"body {number} " + "x" * 900) for number in range(40)))
    with file_size_limit(2**14):
        await stage.run()
        await until(lambda: caplog.text.count("cannot be written") > 8)
        during = len(stage.upstream.received)
        assert during < 25
        await until(lambda: caplog.text.count("cannot be written") > 16)
        assert len(stage.upstream.received) == during
    batch = await client.ended(made.id)
    assert len(await client.texts(batch)) == 40
    assert set(sent(stage).values()) == {1}


async def test_output_that_cannot_be_written_is_written_later(
    stage: BatchStage, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the disk is full at the end, the batch stays unfinished until there is room, and sends nothing again."""
    client = await stage.client()
    lines = [request(f"{number}", "x" * 400) for number in range(64)]
    made = await client.create(*lines)
    with file_size_limit(2**14):
        await stage.run()
        await until(lambda: caplog.text.count("is interrupted") > 1)
        assert (await client.sdk.batches.retrieve(made.id)).status == "finalizing"
    batch = await client.ended(made.id)
    assert batch.status == "completed"
    assert len(await client.texts(batch)) == 64
    assert len(stage.upstream.received) == 1


async def test_damaged_results_are_computed_again(stage: BatchStage, caplog: pytest.LogCaptureFixture) -> None:
    """A torn last line is cut off, a damaged one inside is noticed by its checksum; all others stay."""
    client = await stage.client()
    stage.upstream.replies[:] = [Reply(delay=0.01)]
    made = await client.create(*(request(f"{number}", f"body {number}") for number in range(60)))
    path = await results_of(stage, 20)
    before = sent(stage)
    lines = path.read_bytes().splitlines(keepends=True)
    kept = len(lines) - 4
    lines[3] = lines[3].replace(b"body ", b"BODY ")
    lines[4] = b"\x00\xff\n"
    lines[5] = b"[]\n"
    lines[-1] = lines[-1][:-5]
    path.write_bytes(b"".join(lines))
    await stage.run()
    batch = await client.ended(made.id)
    assert await client.texts(batch) == {f"{number}": f"body {number}" for number in range(60)}
    assert caplog.text.count("has a damaged line") == 3
    assert sum((sent(stage) - before).values()) == 60 - kept


async def test_a_results_file_of_garbage_is_no_obstacle(stage: BatchStage) -> None:
    """Everything is computed again."""
    client = await stage.client()
    stage.upstream.replies[:] = [Reply(delay=0.01)]
    made = await client.create(*(request(f"{number}", f"body {number}") for number in range(20)))
    (await results_of(stage, 4)).write_bytes(bytes(range(256)) * 40)
    await stage.run()
    assert len(await client.texts(await client.ended(made.id))) == 20


async def test_a_batch_outlives_its_input_file(stage: BatchStage) -> None:
    """The file is gone for its tenant once it is deleted, and the batch is answered all the same."""
    client = await stage.client()
    stage.upstream.hold.clear()
    made = await client.create(*(request(f"{number}", f"body {number}") for number in range(12)))
    await stage.run()
    await stage.upstream.wait_for(4)
    await client.sdk.files.delete(made.input_file_id)
    stage.upstream.hold.set()
    assert len(await client.texts(await client.ended(made.id))) == 12
    await until(lambda: not list(stage.state.rglob("input.jsonl")))


async def test_a_batch_whose_input_is_lost_fails(stage: BatchStage) -> None:
    """Where somebody has removed the batch's own copy, the batch says so."""
    client = await stage.client()
    made = await client.create(request("a", "hi"))
    for path in stage.state.rglob("input.jsonl"):
        path.unlink()
    await stage.run()
    batch = await client.ended(made.id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or ()] == ["file_not_found"]


async def test_a_damaged_batch_does_not_stop_others(stage: BatchStage, caplog: pytest.LogCaptureFixture) -> None:
    """Its record cannot be read: it is reported once, and the next one runs."""
    client = await stage.client()
    damaged = await client.create(request("a", "hi"))
    (record,) = stage.state.rglob(f"{damaged.id}/record.json")
    record.write_text(json.dumps({"id": damaged.id}))
    other = await client.create(request("a", "hi"))
    await stage.run()
    assert (await client.ended(other.id)).status == "completed"
    assert caplog.text.count("background work failed") == 1
