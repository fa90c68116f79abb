"""A server on a device, as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import ClientSession

from tests.backend.prefixes.engine_process import EngineProcess, fresh
from tests.backend.prefixes.models import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    """A server of a small model; not started."""
    made = EngineProcess(tmp_path, write_model(tmp_path / "tiny", seed=1), "--kv-memory", "256MiB")
    yield made
    made.stop()


async def runner_of(engine: EngineProcess) -> Any:
    """The name of what computes."""
    async with ClientSession(engine.url) as client, client.get("/engine") as response:
        return (await response.json())["runner"]


async def test_a_server_answers_many_at_once(engine: EngineProcess) -> None:
    """All of them come to an end, a stream is whole, and it stops when it is told to."""
    engine.restart()
    assert (await runner_of(engine)).startswith("cuda")
    answers = await asyncio.gather(*(engine.ask(fresh(30 + 11 * number), max_tokens=40) for number in range(32)))
    assert {choice["finish_reason"] for answer in answers for choice in answer.choices} <= {"length", "stop"}
    async with engine.post(fresh(50), max_tokens=40, logprobs=None, stream=True) as response:
        lines = (await response.text()).splitlines()
    assert lines[-2:] == ["data: [DONE]", ""]
    assert engine.stop() == 0
    assert "Traceback" not in engine.said


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
async def test_a_server_on_two_devices_ends_with_a_killed_rank(engine: EngineProcess) -> None:
    """A server answers on two devices; when a rank is killed, it ends with status 1 and names it."""
    engine.restart("--kv-memory", "256MiB", "--device", "cuda", "--tensor-parallel", "2")
    answers = await asyncio.gather(*(engine.ask(fresh(30 + 11 * number), max_tokens=40) for number in range(16)))
    assert {choice["finish_reason"] for answer in answers for choice in answer.choices} <= {"length", "stop"}
    async with ClientSession(engine.url) as client, client.get("/v1/model/info") as response:
        ranks = (await response.json())["parallel"]["ranks"]
    assert [rank["device"] for rank in ranks] == ["cuda:0", "cuda:1"]
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    assert await asyncio.to_thread(engine.wait, 30.0) == 1
    assert "rank 1 (part 2 of 2) was killed by SIGKILL" in engine.said
