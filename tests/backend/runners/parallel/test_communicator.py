"""What ranks send each other without shared memory, as on devices; here each is a thread, and gloo connects them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from backend.engine.model_runner import StepOutput
from backend.model import load_part
from backend.models.partition import ModelPart, partition
from backend.runners.parallel import communicator as communicator_module
from backend.runners.parallel import shared_memory
from backend.runners.parallel.communicator import Communicator, PeerLost
from backend.runners.parallel.messages import RankJob, SharedDescriptors
from backend.runners.parallel.parts import build_part
from backend.runners.parallel.process_group import process_group
from backend.runners.parallel.settings import ParallelSettings
from backend.runners.torch.runner import TorchRunner
from tests.backend.random_models import KINDS, Paged, random_tokens, save, step_of
from tests.backend.runners.cuda.random_model import CONFIG
from tests.backend.runners.parallel.ranks import BLOCKS, CONTEXT, model_config, one_rank

SECONDS = 90.0
WIDTHS = [3, 4]


def exchanged(part: ModelPart, rendezvous: Path) -> list[object]:
    """One operation of each kind among four ranks, in two stages."""
    communicator = Communicator(part, rendezvous)
    rank, own = part.rank, part.tensor_rank
    total = communicator.sum(torch.full((2, 3), 10.0**rank))
    whole = communicator.gather(torch.full((2, WIDTHS[own]), float(rank)), WIDTHS)
    none = communicator.gather(torch.empty(0, WIDTHS[own]), WIDTHS)
    sent = communicator.send(torch.tensor([rank]), (rank + 2) % 4)
    received = communicator.receive((1,), torch.int64, (rank + 2) % 4)
    sent()
    least = communicator.least(7 - rank)
    communicator.finish()
    communicator.close()
    return [total, whole, none, int(received), least]


def test_tensors_are_added_gathered_and_sent(tmp_path: Path) -> None:
    """Sums and gatherings are of the ranks of a stage, the least number is that of all ranks."""
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(exchanged, part, tmp_path / "store") for part in partition(CONFIG, 2, 2)]
        found = [future.result(SECONDS) for future in futures]
    for rank, (total, whole, none, received, least) in enumerate(found):
        first = rank - rank % 2
        assert isinstance(total, torch.Tensor)
        assert torch.equal(total, torch.full((2, 3), 10.0**first + 10.0 ** (first + 1)))
        assert (received, least) == ((rank + 2) % 4, 4)
        if rank % 2:
            assert whole is None
            continue
        assert isinstance(whole, torch.Tensor)
        assert isinstance(none, torch.Tensor)
        assert whole.tolist() == [[float(first)] * 3 + [float(first + 1)] * 4] * 2
        assert none.shape == (0, 7)


def test_a_sum_without_the_other_rank_is_an_error(tmp_path: Path) -> None:
    """A rank that has gone ends the operations that wait for it."""
    parts = partition(CONFIG, 2, 1)

    def leave() -> None:
        Communicator(parts[1], tmp_path / "store").close()

    with ThreadPoolExecutor(1) as threads:
        gone = threads.submit(leave)
        communicator = Communicator(parts[0], tmp_path / "store")
        gone.result(SECONDS)
        with pytest.raises(PeerLost):
            communicator.sum(torch.ones(3))
        with pytest.raises(PeerLost):
            communicator.least(1)
        communicator.close()


def test_no_operation_begins_after_an_abort(tmp_path: Path) -> None:
    """Each raises an error at once, although the other rank lives and will not take part."""
    parts = partition(CONFIG, 2, 1)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda part: Communicator(part, tmp_path / "store"), parts)
    one.abort()
    began = time.monotonic()
    for operation in (
        lambda: one.sum(torch.ones(3)),
        lambda: one.gather(torch.ones(1, 3), WIDTHS),
        lambda: one.least(1),
        lambda: one.send(torch.ones(3), 1),
        lambda: one.receive((3,), torch.float32, 1),
    ):
        with pytest.raises(PeerLost, match=r"^an operation was given up$"):
            operation()
    assert time.monotonic() - began < 5
    one.close()
    other.close()


class Watched(Communicator):
    """Knows with which ranks it has exchanged what."""

    def send(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        self.__dict__.setdefault("links", []).append(f"{int(tensor)} to {rank}")
        return super().send(tensor, rank)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
        tensor = super().receive(shape, dtype, rank)
        self.__dict__.setdefault("links", []).append(f"{int(tensor)} from {rank}")
        return tensor


def test_links_between_stages_are_tried_at_the_start(tmp_path: Path) -> None:
    """Each pair of ranks that send each other something in a step has done so once when all are connected."""
    with ThreadPoolExecutor(4) as threads:
        watched = list(threads.map(lambda part: Watched(part, tmp_path / "store"), partition(CONFIG, 2, 2)))
    assert [of.__dict__["links"] for of in watched] == [
        ["0 to 2", "2 from 2"],
        ["1 to 3"],
        ["0 from 0", "2 to 0"],
        ["1 from 1"],
    ]
    for of in watched:
        of.close()


class Wrong(Communicator):
    """Sends something else, as a broken connection between devices may."""

    def send(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        return super().send(tensor + 5, rank)


def test_a_link_that_brings_something_else_is_an_error(tmp_path: Path) -> None:
    """The message names the rank from which it came."""
    first, second = partition(CONFIG, 1, 2)
    with ThreadPoolExecutor(2) as threads:
        right = threads.submit(Communicator, first, tmp_path / "store")
        wrong = threads.submit(Wrong, second, tmp_path / "store")
        with pytest.raises(PeerLost, match=r"^rank 1 has sent its number, and 6 has arrived$"):
            right.result(SECONDS)
        wrong.result(SECONDS).close()


class StandIn:
    """In the place of NCCL's group: it cannot be aborted while a graph is left in which it was recorded."""

    def __init__(self) -> None:
        self.graphs_freed, self.aborted = threading.Event(), threading.Event()
        self.error = RuntimeError()

    def abort(self) -> None:
        self.graphs_freed.wait(SECONDS)
        self.aborted.set()

    def recv(self, *_: object) -> None:
        raise self.error


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """What connects devices that are not the CPU."""
    made = StandIn()
    monkeypatch.setattr(
        communicator_module,
        "process_group",
        lambda store, name, rank, size, device: (
            process_group(store, name, rank, size, device) if device.type == "cpu" else made
        ),
    )
    return made


def test_closing_does_not_wait_for_the_groups_of_devices(tmp_path: Path, stand_in: StandIn) -> None:
    """They are aborted, once, when nothing is left in which they were recorded."""
    communicator = Communicator(partition(CONFIG, 1, 1)[0], tmp_path / "store", torch.device("meta"))
    communicator.close()
    assert not stand_in.aborted.is_set()
    communicator.abort()
    assert [thread.name for thread in threading.enumerate()].count("nccl-abort") == 1
    stand_in.graphs_freed.set()
    assert stand_in.aborted.wait(SECONDS)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("Connection closed by peer\nat gloo.cc:1"), "Connection closed by peer"),
        (
            RuntimeError("NCCL error in: nccl.cpp:9, remote error\nncclRemoteError\nLast error:\nsocket closed\n"),
            "socket closed",
        ),
        (torch.cuda.OutOfMemoryError("out of memory"), None),
        (torch.AcceleratorError("misaligned address"), None),
    ],
)
def test_errors_of_others_are_told_from_those_of_the_own_device(
    error: RuntimeError, message: str | None, tmp_path: Path, stand_in: StandIn
) -> None:
    """Another rank's loss has the reason that torch or NCCL gives; what fails here is raised as it is."""
    communicator = Communicator(partition(CONFIG, 1, 1)[0], tmp_path / "store", torch.device("meta"))
    stand_in.graphs_freed.set()
    stand_in.error = error
    with pytest.raises(PeerLost if message else type(error), match=f"^{message or error}$"):
        communicator.receive((1,), torch.float32, 0)
    communicator.close()


class InOrder(Communicator):
    """Sends as devices do: what is sent has to be taken before anything else goes on."""

    def send(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        super().send(tensor, rank)()
        return lambda: None


def test_stages_never_wait_for_each_other_in_a_circle(tmp_path: Path) -> None:
    """A step in several micro-batches ends although each message between two ranks waits for the one before."""
    save(KINDS["llama"], tmp_path)
    config = model_config(tmp_path)
    parts = partition(config, 1, 2)
    settings = ParallelSettings(parts, "none", "float32", "auto", BLOCKS, CONTEXT, 1)
    tokens = random_tokens(50)
    kv = shared_memory.create(BLOCKS * TorchRunner.block_bytes(config))

    def computed(part: ModelPart) -> StepOutput | None:
        weights, _ = load_part(tmp_path, config, part, "none")
        communicator = InOrder(part, tmp_path / "store")
        job = RankJob(tmp_path, config, part, settings, tmp_path / "store", SharedDescriptors(kv, kv))
        runner = build_part(job, weights, communicator, lambda sentence: None)
        output = runner.run(step_of([(Paged(tokens, [2, 0, 1, 5]), 50)]))
        communicator.close()
        return output

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(computed, part) for part in parts]
        got, nothing = (future.result(SECONDS) for future in futures)
    os.close(kv)
    assert nothing is None
    assert got is not None
    expected = one_rank(tmp_path).run(step_of([(Paged(tokens, [2, 0, 1, 5]), 50)]))
    assert float((got.logits - expected.logits).abs().max()) < 1e-4
    assert float((got.hidden - expected.hidden).abs().max()) < 1e-4
