"""Runs batches in a process of its own: `python -m tests.gateway.batches.runner_process STATE URL`."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.batches.runner import open_batches
from gateway.batches.store import BatchStore
from tests.gateway.batches.batch_client import OPTIONS

ROOT = Path(__file__).resolve().parents[3]


async def _run(state: str, url: str) -> None:
    store = BatchStore(Path(state), 2**20)
    async with open_batches(store, url, OPTIONS):
        print("running", file=sys.stderr, flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def runner_process(state: Path, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that runs the batches in `state`, and has begun to; killed on exit. Its log is its standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        str(state),
        url.removesuffix("/v1"),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await said(process, "running")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said(process: asyncio.subprocess.Process, words: str) -> None:
    """Return when a line of its log has these words. Raises TimeoutError."""
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while words not in (line := (await process.stderr.readline()).decode()):
            assert line, "the process has ended"


if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG, format="%(name)s %(message)s")
    asyncio.run(_run(*sys.argv[1:]))
