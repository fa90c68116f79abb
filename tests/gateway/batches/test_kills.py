"""Batches whose process is killed or stopped, and several processes on one state directory."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, closing

import msgspec
from msgspec.structs import replace

from gateway.batches.input_file import InputFile
from gateway.batches.output import OutputWriter
from gateway.batches.results import Outcome, Response, ResultsFile
from gateway.batches.runner import open_batches
from gateway.batches.store import BatchStore
from gateway.upstreams.mock import Reply
from tests.gateway.batches.batch_client import OPTIONS, request
from tests.gateway.batches.conftest import MAX_FILE, BatchStage
from tests.gateway.batches.runner_process import runner_process, said
from tests.waiting import until

_IN_FLIGHT = 4


def sent(stage: BatchStage) -> Counter[str]:
    """How often each request has reached the upstream."""
    return Counter(received.fields["messages"][0]["content"] for received in stage.upstream.received)


async def test_a_killed_batch_goes_on_where_it_was(stage: BatchStage) -> None:
    """After SIGKILL, again and again, only what was under way is sent once more; each line has one result."""
    client = await stage.client()
    stage.upstream.replies[:] = [Reply(delay=0.005)]
    names = [f"body {number}" for number in range(200)]
    made = await client.create(*(request(f"{name} {copy}", name) for name in names for copy in range(2)))
    kills = 3
    for kill in range(1, kills + 1):
        async with runner_process(stage.state, stage.upstream.url) as process:
            await stage.upstream.wait_for(50 * kill)
            process.kill()
            await process.wait()
    async with runner_process(stage.state, stage.upstream.url):
        batch = await client.ended(made.id)
    assert batch.status == "completed"
    assert await client.texts(batch) == {f"{name} {copy}": name for name in names for copy in range(2)}
    counts = sent(stage)
    assert set(counts) == set(names)
    assert sum(counts.values()) - len(names) <= _IN_FLIGHT * kills
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 400, "completed": 400, "failed": 0}
    assert len((await client.sdk.files.list(purpose="batch_output")).data) == 1


async def test_one_process_runs_a_batch_and_another_takes_over(stage: BatchStage) -> None:
    """A second process leaves a running batch alone, and finishes it when the first has been killed."""
    client = await stage.client()
    stage.upstream.hold.clear()
    made = await client.create(*(request(f"{number}", f"body {number}") for number in range(20)))
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(runner_process(stage.state, stage.upstream.url))
        await stage.upstream.wait_for(_IN_FLIGHT)
        second = await stack.enter_async_context(runner_process(stage.state, stage.upstream.url))
        for _ in range(2):
            await said(second, f"{made.id} is run by another process")
        assert len(stage.upstream.received) == _IN_FLIGHT
        first.kill()
        await first.wait()
        await stage.upstream.wait_for(2 * _IN_FLIGHT)
        stage.upstream.hold.set()
        batch = await client.ended(made.id)
    assert len(await client.texts(batch)) == 20
    assert len(stage.upstream.received) == 20 + _IN_FLIGHT


async def test_two_processes_divide_batches_and_send_nothing_twice(stage: BatchStage) -> None:
    """Each request of many small batches is sent by one of them."""
    client = await stage.client()
    made = [await client.create(*(request(f"{n}", f"{batch} {n}") for n in range(8))) for batch in range(12)]
    async with (
        runner_process(stage.state, stage.upstream.url),
        runner_process(stage.state, stage.upstream.url),
    ):
        for batch in made:
            assert (await client.ended(batch.id)).status == "completed"
    assert set(sent(stage).values()) == {1}
    assert len(stage.upstream.received) == 96


async def test_another_process_cancels_a_batch(stage: BatchStage) -> None:
    """The process that runs it notices, and gives up what is under way."""
    client = await stage.client()
    stage.upstream.hold.clear()
    made = await client.create(*(request(f"{number}", f"body {number}") for number in range(20)))
    async with runner_process(stage.state, stage.upstream.url):
        await stage.upstream.wait_for(_IN_FLIGHT)
        await client.sdk.batches.cancel(made.id)
        assert (await client.ended(made.id)).status == "cancelled"
    await stage.upstream.wait_for_cancelled(_IN_FLIGHT)


async def test_a_stopped_runner_goes_on_in_the_same_process(stage: BatchStage) -> None:
    """It stops at once, gives up what is under way, and releases the batch for the next one."""
    client = await stage.client()
    stage.upstream.replies[:] = [Reply(when="slow", delay=600)]
    made = await client.create(request("a", "fast"), *(request(f"s{n}", f"slow {n}") for n in range(5)))
    async with open_batches(stage.store, stage.upstream.url.removesuffix("/v1"), OPTIONS):
        await stage.upstream.wait_for(1 + _IN_FLIGHT)
        before = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - before < 5
    await stage.upstream.wait_for_cancelled(_IN_FLIGHT)
    stage.upstream.replies[:] = []
    async with open_batches(BatchStore(stage.state, MAX_FILE), stage.upstream.url.removesuffix("/v1"), OPTIONS):
        batch = await client.ended(made.id)
    assert len(await client.texts(batch)) == 6
    assert sent(stage)["fast"] == 1


async def test_output_is_written_once(stage: BatchStage) -> None:
    """A process that is killed between the files of a batch and its record leaves files that the next one finds."""
    client = await stage.client()
    await client.create(*(request(f"{number}", f"body {number}") for number in range(3)))
    (unfinished,) = stage.store.unfinished()
    batch = replace(unfinished.load(), status="finalizing")
    with (
        closing(InputFile(unfinished.input_path, batch.endpoint, 2**20)) as batch_input,
        closing(ResultsFile(unfinished.results_path)) as results,
    ):
        assert list(batch_input.scan())
        for digest, status in zip(batch_input.digests[:2], (200, 400), strict=True):
            results.append(digest, Outcome(Response(status, "req", msgspec.Raw(b"{}"))))
        written = []
        for _ in range(2):
            output = OutputWriter(stage.store.files, unfinished.namespace, batch, "expired", batch.created_at)
            assert list(output.write(batch_input, results, 3600))
            written.append((output.output_file_id, output.error_file_id))
    assert written[0] == written[1]
    assert {file.id for file in (await client.sdk.files.list(purpose="batch_output")).data} == set(written[0])
    assert list(await client.lines(written[0][0])) == ["0"]
    assert list(await client.lines(written[0][1])) == ["1", "2"]


async def test_a_batch_killed_after_its_record_is_moved(stage: BatchStage) -> None:
    """One whose record says that it has ended is not run again, and what it does not need any more is removed."""
    client = await stage.client()
    made = await client.create(request("a", "hi"))
    (unfinished,) = stage.store.unfinished()
    unfinished.update(lambda batch: replace(batch, status="completed"))
    await stage.run()
    await until(lambda: not stage.store.unfinished())
    assert (await client.sdk.batches.retrieve(made.id)).status == "completed"
    assert stage.upstream.received == []
    assert [path.name for path in stage.state.rglob(f"{made.id}/*")] == ["record.json"]
