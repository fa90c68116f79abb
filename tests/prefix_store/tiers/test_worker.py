"""Cancelled work in a thread."""

import asyncio
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from prefix_store.tiers.cancellation import Cancelled, CancelToken
from prefix_store.tiers.worker import Worker
from tests.prefix_store.tiers.waiting import until


@pytest.mark.parametrize("how", ["halted", "cancelled"])
async def test_work_that_fails_after_it_was_given_up_is_mentioned_and_no_error_of_the_loop(
    caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Its caller, which would have handled the error, was cancelled."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    worker, cancel, begun, go_on = Worker("test"), CancelToken(), threading.Event(), threading.Event()

    def fail(cancel: CancelToken) -> None:
        begun.set()
        go_on.wait(10)
        raise OSError("the peer did not answer")

    working = asyncio.create_task(worker.run(fail, cancel))
    await asyncio.to_thread(begun.wait, 10)
    if how == "halted":
        cancel.set()
    else:
        working.cancel()
    with pytest.raises(Cancelled if how == "halted" else asyncio.CancelledError):
        await working
    go_on.set()
    await until(lambda: bool(caplog.records or complaints), "somebody hears of it")
    await worker.close()
    assert complaints == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the peer did not answer" in caplog.text


async def test_work_that_ends_as_it_was_told_to_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    """Neither is work that was cancelled before it began."""
    worker, cancel, begun, go_on = Worker("test"), CancelToken(), threading.Event(), threading.Event()

    def stop(cancel: CancelToken) -> None:
        begun.set()
        go_on.wait(10)
        with cancel:
            raise AssertionError("it was halted")

    first, second = (asyncio.create_task(worker.run(stop, cancel)) for _ in range(2))
    await asyncio.to_thread(begun.wait, 10)
    cancel.set()
    for working in (first, second):
        with pytest.raises(Cancelled):
            await working
    go_on.set()
    await worker.close()
    assert caplog.records == []


async def test_what_has_not_begun_when_it_closes_is_cancelled_and_what_has_is_waited_for() -> None:
    """New work is refused."""
    worker, begun, go_on = Worker("test"), threading.Event(), threading.Event()

    def work(cancel: CancelToken) -> str:
        begun.set()
        go_on.wait(10)
        return "done"

    first = asyncio.create_task(worker.run(work))
    await asyncio.to_thread(begun.wait, 10)
    second = asyncio.create_task(worker.run(work))
    await asyncio.sleep(0)
    closing = asyncio.create_task(worker.close())
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not closing.done()
    go_on.set()
    await closing
    assert await first == "done"
    with pytest.raises(RuntimeError, match="closed"):
        await worker.run(work)


_HANGS = """
import asyncio, threading
from prefix_store.tiers import worker

worker._CLOSE_SECONDS = 0.1

async def main():
    hanging, begun = worker.Worker("hangs", 2), threading.Event()

    def hang(halt):
        begun.set()
        threading.Event().wait()

    working = asyncio.create_task(hanging.run(hang))
    await asyncio.to_thread(begun.wait, 10)
    working.cancel()
    await hanging.close()
    print("closed")

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where each thread has a niceness")
@pytest.mark.parametrize(("is_urgent", "niceness"), [(True, 0), (False, 10)])
async def test_a_thread_for_what_nobody_waits_for_gives_way(is_urgent: bool, niceness: int) -> None:
    """An engine that computes on all processors loses less of them to saves."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    worker = Worker("test", is_urgent=is_urgent)
    try:
        assert await worker.run(lambda cancel: os.getpriority(os.PRIO_PROCESS, 0)) == min(19, own + niceness)
    finally:
        await worker.close()


def test_a_thread_that_never_returns_holds_no_process_that_ends() -> None:
    """Its threads are daemons, so that a hanging disk does not block the process's end."""
    ended = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "closed\n", "")
