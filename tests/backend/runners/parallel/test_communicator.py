"""What ranks send each other without shared memory, as on devices; here each is a thread, and gloo connects them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from backend.engine.model_runner import StepOutput
from backend.model import load_part
from backend.models.partition import ModelPart, partition
from backend.runners.parallel import shared_memory
from backend.runners.parallel.communicator import Communicator, PeerLost
from backend.runners.parallel.messages import RankJob, SharedDescriptors
from backend.runners.parallel.parts import build_part
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
