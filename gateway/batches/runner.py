"""Runs batches: in every process of a host, and each batch in one of them at a time.

A process that ends, in whatever way, leaves a state from which another one, or itself, goes on.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from msgspec.structs import replace

from gateway.batches.batch import ENDED, Batch, BatchError, BatchErrors, RequestCounts
from gateway.batches.files import FileStore
from gateway.batches.input_file import InputFile
from gateway.batches.output import OutputWriter, counts_of
from gateway.batches.results import Outcome, ResultsFile
from gateway.batches.sender import Retries, Sender
from gateway.batches.store import BatchStore, UnfinishedBatch
from gateway.batches.threads import in_thread, run_in_slices
from gateway.http.background_tasks import BackgroundTasks, background_tasks

log = logging.getLogger(__name__)

_MAX_BATCHES = 16
_SYNC_LINES = 100
_CLEANING = 3600.0


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How batches are run. Times are in seconds."""

    concurrency: int = 4
    """Requests that this process has under way at the same time, of all batches."""
    max_line: int = 32 * 2**20
    """The longest line of an input file, in bytes."""
    answer_timeout: float = 720.0
    """For the gateway to send the next bytes of an answer."""
    retries: Retries = field(default_factory=Retries)
    poll: float = 5.0
    """Between two looks for batches that no process runs."""
    tick: float = 1.0
    """Between two looks at whether a running batch has been cancelled; results are synced then."""
    pause: float = 10.0
    """After a failure to write."""


@asynccontextmanager
async def open_batches(store: BatchStore, url: str, options: RunnerOptions) -> AsyncIterator[None]:
    """Run batches against the gateway at `url`, such as http://127.0.0.1:8080, while the context is open."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=options.answer_timeout, sock_read=options.answer_timeout)
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout
        ) as session,
        background_tasks() as tasks,
    ):
        sender = Sender(session, url, asyncio.Semaphore(options.concurrency), options.retries)
        runner = Runner(store, sender, options, tasks)
        tasks.keep(runner.find_batches)
        tasks.keep(runner.clean)
        yield


class Runner:
    """Finds batches that no process runs, and runs them."""

    def __init__(self, store: BatchStore, sender: Sender, options: RunnerOptions, tasks: BackgroundTasks) -> None:
        self._store = store
        self._sender = sender
        self._options = options
        self._tasks = tasks
        self._running: set[str] = set()

    async def find_batches(self) -> None:
        """Runs without end."""
        while True:
            self._store.created.clear()
            for unfinished in await in_thread(self._store.unfinished):
                if len(self._running) == _MAX_BATCHES:
                    break
                if unfinished.id not in self._running:
                    await self._start(unfinished)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.poll):
                    await self._store.created.wait()

    async def clean(self) -> None:
        """Runs without end."""
        while True:
            try:
                await in_thread(self._store.clean)
            except OSError as error:
                log.error("what has expired cannot be removed: %s", error.strerror)
            await asyncio.sleep(_CLEANING)

    async def _start(self, unfinished: UnfinishedBatch) -> None:
        try:
            if not await in_thread(unfinished.acquire):
                log.debug("%s is run by another process", unfinished.id)
                return
            self._running.add(unfinished.id)
            run = self._tasks.start_isolated(self._run(unfinished))
            run.add_done_callback(lambda _: unfinished.release())
        except BaseException:
            unfinished.release()
            raise

    async def _run(self, unfinished: UnfinishedBatch) -> None:
        """Run a batch to its end. After a failure of the disk it is started again; after a fault it is not."""
        try:
            await _run_batch(self._store, unfinished, self._sender, self._options)
        except* OSError as errors:
            log.error("%s is interrupted: %s", unfinished.id, _reason(errors))
            unfinished.release()
            await asyncio.sleep(self._options.pause)
        self._running.discard(unfinished.id)


async def _run_batch(store: BatchStore, unfinished: UnfinishedBatch, sender: Sender, options: RunnerOptions) -> None:
    batch = await in_thread(unfinished.load)
    if batch.status not in ENDED and (errors := await _run_lines(batch, store, unfinished, sender, options)):
        failed = {"status": "failed", "errors": BatchErrors(data=errors)}
        await in_thread(unfinished.update, lambda batch: replace(batch, failed_at=int(time.time()), **failed))
    await in_thread(store.end, unfinished)


async def _run_lines(
    batch: Batch, store: BatchStore, unfinished: UnfinishedBatch, sender: Sender, options: RunnerOptions
) -> list[BatchError]:
    """Returns why the input cannot be run; nothing when the batch has ended otherwise."""
    try:
        batch_input = InputFile(unfinished.input_path, batch.endpoint, options.max_line)
    except FileNotFoundError:
        return [BatchError("file_not_found", "The input file is gone.", "input_file_id")]
    with contextlib.closing(batch_input):
        await run_in_slices(batch_input.scan())
        if not batch_input.errors:
            with contextlib.closing(ResultsFile(unfinished.results_path)) as results:
                await BatchRun(store.files, unfinished, sender, options, batch_input, results).run()
        return batch_input.errors


class BatchRun:
    """A batch with a valid input, from where an earlier run has left it to its end."""

    def __init__(
        self,
        files: FileStore,
        unfinished: UnfinishedBatch,
        sender: Sender,
        options: RunnerOptions,
        batch_input: InputFile,
        results: ResultsFile,
    ) -> None:
        self._files = files
        self._unfinished = unfinished
        self._sender = sender
        self._options = options
        self._input = batch_input
        self._results = results
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Raises OSError, also in groups."""
        private = await in_thread(self._unfinished.private)
        await run_in_slices(self._results.recover())
        batch = await in_thread(self._unfinished.update, self._in_progress)
        await self._answer(batch, private.headers)
        batch = await in_thread(self._unfinished.update, self._finalizing)
        if batch.status == "cancelling":
            ended, ended_at = "cancelled", batch.cancelling_at
        else:
            ended = "completed" if len(self._results.succeeded) == len(self._input.digests) else "expired"
            ended_at = batch.finalizing_at
        output = OutputWriter(self._files, self._unfinished.namespace, batch, ended, ended_at or batch.expires_at)
        await run_in_slices(output.write(self._input, self._results, private.output_lifetime))
        await in_thread(self._unfinished.update, functools.partial(_ended, ended=ended, output=output))

    async def _answer(self, batch: Batch, headers: list[list[str]]) -> None:
        """Send all requests that have no result, until they have one, the batch is cancelled, or its time is over."""
        digests = self._input.digests
        pending = iter([number for number, digest in enumerate(digests) if digest not in self._results.succeeded])
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._send_all(pending, batch.endpoint, headers))
            while not sending.done():
                remaining = batch.expires_at - time.time()
                if batch.status == "cancelling" or remaining <= 0:
                    sending.cancel()
                    break
                await asyncio.wait([sending], timeout=min(self._options.tick, remaining))
                batch = await self._checkpoint(batch)

    async def _send_all(self, pending: Iterator[int], endpoint: str, headers: list[list[str]]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._options.concurrency):
                group.create_task(self._send_next(pending, endpoint, headers))

    async def _send_next(self, pending: Iterator[int], endpoint: str, headers: list[list[str]]) -> None:
        """Send one request after the other; several of these share the iterator."""
        for number in pending:
            body = await in_thread(self._input.body, number)
            outcome = await self._sender.send(endpoint, headers, body)
            await self._keep(self._input.digests[number], outcome)

    async def _keep(self, digest: bytes, outcome: Outcome) -> None:
        """Write a result. While the disk takes none, no further request is sent: it would be in vain."""
        while True:
            try:
                async with self._writing:
                    await in_thread(self._write, digest, outcome)
                return
            except OSError as error:
                log.error("a result of %s cannot be written, and waits: %s", self._unfinished.id, error.strerror)
            await asyncio.sleep(self._options.pause)

    def _write(self, digest: bytes, outcome: Outcome) -> None:
        if digest not in self._results.succeeded:
            self._results.append(digest, outcome)
        self._results.sync(_SYNC_LINES)

    async def _checkpoint(self, batch: Batch) -> Batch:
        """Sync the results and save the counts; returns the batch as it is now, or as it was if the disk is full."""
        try:
            async with self._writing:
                return await in_thread(self._save)
        except OSError as error:
            log.warning("the progress of %s cannot be saved: %s", batch.id, error.strerror)
            return batch

    def _save(self) -> Batch:
        self._results.sync()
        counts = counts_of(self._input, self._results)
        return self._unfinished.update(lambda batch: replace(batch, request_counts=counts))

    def _in_progress(self, batch: Batch) -> Batch:
        if batch.status != "validating":
            return batch
        counts = RequestCounts(self._input.total)
        now = int(time.time())
        return replace(batch, status="in_progress", in_progress_at=now, model=self._input.model, request_counts=counts)

    def _finalizing(self, batch: Batch) -> Batch:
        self._results.sync()
        batch = replace(batch, request_counts=counts_of(self._input, self._results))
        if batch.status == "cancelling":
            return batch
        return replace(batch, status="finalizing", finalizing_at=batch.finalizing_at or int(time.time()))


def _ended(batch: Batch, ended: str, output: OutputWriter) -> Batch:
    return replace(
        batch,
        status=ended,
        output_file_id=output.output_file_id,
        error_file_id=output.error_file_id,
        usage=output.usage,
        **{f"{ended}_at": int(time.time())},
    )


def _reason(errors: BaseExceptionGroup[OSError]) -> str:
    """The first one's, without its path."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else type(error).__name__
