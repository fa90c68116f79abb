"""A rank that dies, is stopped or makes an error ends all ranks within seconds, and is named."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.engine.model_runner import StepInput
from backend.errors import EngineLost
from backend.runners.parallel.ranks import RankProcesses
from backend.runners.parallel.runner import ParallelRunner
from tests.backend.random_models import KINDS, Paged, random_tokens, save, step_of
from tests.backend.runners.parallel.ranks import many_ranks

SECONDS = 12.0
"""Within which everything has ended; a stopped rank is given five."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    saved = tmp_path_factory.mktemp("llama")
    save(KINDS["llama"], saved)
    return saved


@pytest.fixture
def four_ranks(directory: Path) -> Iterator[ParallelRunner]:
    """It, in two stages of two ranks."""
    with many_ranks(directory, 2, 2) as runner:
        yield runner


def some_step() -> StepInput:
    return step_of([(Paged(random_tokens(64), [4, 7, 1, 2]), 64)])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Steps:
    """Runs steps in a thread, as an engine does, until one raises."""

    def __init__(self, runner: ParallelRunner) -> None:
        self.first_done = threading.Event()
        self.error: Exception | None = None
        self._runner = runner
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            while True:
                self._runner.run(some_step())
                self.first_done.set()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def ended(self) -> Exception | None:
        """The error, once a step has raised it."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "a step hangs"
        return self.error


@pytest.mark.parametrize(
    ("number", "what"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "has not answered for 5 s")],
)
def test_a_rank_is_lost_while_steps_run(number: signal.Signals, what: str, four_ranks: ParallelRunner) -> None:
    """The step raises an error that names the rank, every process ends, and later steps raise the same at once."""
    steps = Steps(four_ranks)
    assert steps.first_done.wait(SECONDS)
    os.kill(four_ranks.ranks.pids[2], number)
    error = steps.ended()
    assert isinstance(error, EngineLost)
    assert str(error) == f"rank 2 (stage 2 of 2, part 1 of 2) {what}"
    with pytest.raises(EngineLost, match="rank 2"):
        four_ranks.run(some_step())
    four_ranks.close()
    assert not any(map(is_running, four_ranks.ranks.pids.values()))


def test_a_rank_is_lost_while_nothing_is_computed(four_ranks: ParallelRunner) -> None:
    """Listeners are told which one it was, those who come later too."""
    told: list[str] = []
    first, later = threading.Event(), threading.Event()

    def tell(event: threading.Event, message: str) -> None:
        told.append(message)
        event.set()

    four_ranks.ranks.on_failure(lambda message: tell(first, message))
    os.kill(four_ranks.ranks.pids[3], signal.SIGKILL)
    assert first.wait(SECONDS)
    four_ranks.ranks.on_failure(lambda message: tell(later, message))
    assert later.wait(SECONDS)
    assert told == ["rank 3 (stage 2 of 2, part 2 of 2) was killed by SIGKILL"] * 2


def test_rank_0_alone_decides_when_ranks_end(four_ranks: ParallelRunner) -> None:
    """A stop signal to all processes, as service managers send it, ends no rank amid the last requests."""
    for pid in four_ranks.ranks.pids.values():
        os.kill(pid, signal.SIGTERM)
    for _ in range(3):
        four_ranks.run(some_step())
    assert four_ranks.ranks.failure is None


def test_an_error_in_a_step_ends_the_engine(four_ranks: ParallelRunner) -> None:
    """A step that cannot be computed raises an error that names a rank and what was wrong, and ends all."""
    beyond = replace(some_step(), slot_mapping=np.full(64, 10**6, dtype=np.int64))
    began = time.monotonic()
    with pytest.raises(EngineLost, match=r"rank \d \(stage . of 2, part . of 2\): IndexError"):
        four_ranks.run(beyond)
    assert time.monotonic() - began < SECONDS


def test_a_connection_that_is_never_made_ends_at_its_deadline() -> None:
    """The error names the rank that waits; one of another rank ends the wait before."""
    never = threading.Event()
    ranks = RankProcesses([], [])
    title = "rank 0 (part 1 of 2)"
    assert ranks.connect(title, lambda: 7) == 7
    with pytest.raises(EngineLost, match=r"^rank 0 \(part 1 of 2\) has not reached the other ranks within 0\.05 s$"):
        ranks.connect(title, never.wait, 0.05)
    ranks.close()

    ranks = RankProcesses([], [])

    def lose() -> bool:
        ranks.fail("rank 1 (part 2 of 2) was killed by SIGKILL")
        return never.wait()

    with pytest.raises(EngineLost, match=r"^rank 1 .* was killed by SIGKILL$"):
        ranks.connect(title, lose)
    ranks.close()
    never.set()


def test_a_rank_that_cannot_load_is_named(directory: Path, tmp_path: Path) -> None:
    """A weight that is not a number in another rank's part is refused with the rank, the file and the tensor."""
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][-1, 0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with (
        pytest.raises(EngineLost, match=r"rank 1 \(part 2 of 2\): .*model.safetensors: tensor lm_head.weight holds"),
        many_ranks(tmp_path, 2),
    ):
        pytest.fail("it was served")
