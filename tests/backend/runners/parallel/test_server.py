"""Servers of a model on several ranks, as processes: what their users see of a rank that is lost, and what is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from tests.backend.prefixes.engine_process import EngineProcess, fresh, start_all
from tests.backend.prefixes.models import write_model
from tests.backend.runners.parallel.test_failures import is_running
from tests.gateway.processes.serving import Serving, serving
from tests.waiting import until

CLIENTS = 6
WITHIN = 20.0
"""Seconds for an engine that has lost a rank to end; a stopped rank is given five."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model that takes chats."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


@pytest.fixture
def divided(tmp_path: Path, tiny: Path) -> Iterator[EngineProcess]:
    """An engine on two ranks; not started."""
    engine = EngineProcess(tmp_path, tiny, "--kv-memory", "32MiB", "--tensor-parallel", "2")
    yield engine
    engine.stop()


@pytest.fixture
def whole(tmp_path: Path, tiny: Path) -> Iterator[EngineProcess]:
    """An engine of the same model in one process; not started."""
    engine = EngineProcess(tmp_path, tiny, "--kv-memory", "32MiB")
    yield engine
    engine.stop()


async def get(engine: EngineProcess, path: str) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    async with ClientSession(engine.url) as client, client.get(path) as response:
        return response.status, await response.json()


async def pid_of_rank(engine: EngineProcess, rank: int) -> int:
    """Its process, as the server says."""
    _, info = await get(engine, "/v1/model/info")
    assert [each["rank"] for each in info["parallel"]["ranks"]] == [0, 1]
    assert info["parallel"]["ranks"][0]["pid"] == engine.pid
    return int(info["parallel"]["ranks"][rank]["pid"])


async def health_that_names_a_rank(engine: EngineProcess) -> str:
    """The message of the first 503 of the health endpoint."""
    async with asyncio.timeout(WITHIN):
        while True:
            status, answer = await get(engine, "/health")
            if status == 503:
                return str(answer["error"]["message"])


class Load:
    """Clients that ask one question after the other, each of them new, until they are told to stop."""

    def __init__(self, gateway: Serving) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self._gateway = gateway
        self._numbers = count()
        self._stop = asyncio.Event()
        self._clients = [asyncio.create_task(self._ask()) for _ in range(CLIENTS)]

    async def _ask(self) -> None:
        while not self._stop.is_set():
            answer = await self._gateway.ask(f"Question {next(self._numbers)}?", model="tiny", max_tokens=24)
            self.answered += 1
            if answer.status != 200:
                self.failed.append(answer.body.decode())

    async def until_more(self, answers: int) -> None:
        """Return when so many further questions have been answered."""
        wanted = self.answered + answers
        await until(lambda: self.answered >= wanted, WITHIN)

    async def ended(self) -> None:
        """Stop all clients after their last answer."""
        self._stop.set()
        await asyncio.gather(*self._clients)


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (signal.SIGKILL, "rank 1 (part 2 of 2) was killed by SIGKILL"),
        (signal.SIGSTOP, "rank 1 (part 2 of 2) has not answered for 5 s"),
    ],
)
async def test_a_lost_rank_costs_no_request(
    number: signal.Signals, what: str, divided: EngineProcess, whole: EngineProcess, tmp_path: Path
) -> None:
    """While requests run, a rank is killed or stopped: its engine says so and ends with status 1, and the gateway
    answers every request with the other engine.
    """
    start_all([divided, whole])
    rank = await pid_of_rank(divided, 1)
    upstreams = [f"--upstream={engine.url}/v1" for engine in (divided, whole)]
    async with serving(tmp_path / "state", *upstreams, "--redis=none") as gateway:
        load = Load(gateway)
        await load.until_more(2 * CLIENTS)
        assert await divided.counted("step_seconds_count") > 0, "the divided engine has taken part"
        os.kill(rank, number)
        assert await health_that_names_a_rank(divided) == f"the engine has lost a part of itself: {what}"
        status = await asyncio.to_thread(divided.wait, WITHIN)
        await load.until_more(2 * CLIENTS)
        await load.ended()
    assert load.failed == [], gateway.said
    assert status == 1
    assert f"keepgate backend: {what}" in divided.said
    assert "Traceback" not in divided.said
    assert not is_running(rank)


async def test_an_answer_is_the_same_on_two_ranks(divided: EngineProcess, whole: EngineProcess) -> None:
    """Greedy answers of a whole server are the same in one process and on two ranks, and both stop with status 0."""
    whole.launch("--dtype", "float32", "--kv-memory", "32MiB")
    divided.launch()
    whole.until_ready()
    divided.until_ready()
    for _ in range(4):
        prompt = fresh(70)
        answers = [(await engine.ask(prompt, max_tokens=24)).choices[0]["text"] for engine in (whole, divided)]
        assert answers[0] == answers[1]
    rank = await pid_of_rank(divided, 1)
    assert (whole.stop(), divided.stop()) == (0, 0)
    assert not is_running(rank)


async def test_a_killed_engine_leaves_no_rank(divided: EngineProcess) -> None:
    """Ranks end by themselves when the engine's process is killed."""
    divided.launch()
    divided.until_ready()
    rank = await pid_of_rank(divided, 1)
    divided.kill()
    await until(lambda: not is_running(rank), WITHIN)


async def test_divisions_that_cannot_be_served_are_refused(tmp_path: Path, tiny: Path) -> None:
    """A wrong number of ranks, and settings that there are not in parallel, end the start with one line."""
    for options, message in {
        ("--tensor-parallel", "7"): "--tensor-parallel 7: this model has 1 KV heads with 6 heads each",
        ("--pipeline-parallel", "5"): "--pipeline-parallel 5: this model has 4 layers",
        (
            "--tensor-parallel",
            "6",
            "--pipeline-parallel",
            "4",
            "--device",
            "cuda",
        ): "--device cuda: --tensor-parallel 6 "
        "and --pipeline-parallel 4: 24 devices are needed, one for each rank, and torch sees ",
        ("--tensor-parallel", "2", "--quantization", "auto"): "--quantization auto: ",
        ("--tensor-parallel", "0"): "argument --tensor-parallel",
    }.items():
        engine = EngineProcess(tmp_path, tiny, *options)
        engine.launch()
        assert await asyncio.to_thread(engine.wait, 60.0) in (1, 2)
        assert message in engine.said
        assert "Traceback" not in engine.said
