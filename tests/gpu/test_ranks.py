"""Ranks on devices over NCCL: one rank where there is one device, all that a division needs where there are more."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from backend.engine.config import EngineConfig
from backend.errors import EngineLost, ModelError
from backend.model import load_part
from backend.models.partition import partition
from backend.runners.choice import choose_parallel
from backend.runners.cuda.runner import CudaRunner
from backend.runners.parallel.part_exchange import PartExchange
from backend.runners.parallel.process_group import GroupExchange, process_group
from backend.runners.parallel.runner import ParallelRunner
from backend.runners.parallel.settings import DeviceSettings
from backend.runners.torch.runner import TorchRunner
from tests.backend.random_models import KINDS, Kind, Paged, random_tokens, save, step_of
from tests.backend.runners.cuda.random_model import CONFIG, STEPS, random_weights
from tests.backend.runners.cuda.references import relative_error
from tests.backend.runners.parallel.ranks import BLOCKS, CONTEXT, continued, many_ranks, model_config, one_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda")
SECONDS = 12.0
"""Within which everything has ended."""
DEVICES = DeviceSettings("cuda", None, 8, 128)
KIND = Kind("Llama", {**KINDS["llama"].changes, "hidden_size": 128, "head_dim": 64, "vocab_size": 307})


def needs(devices: int) -> pytest.MarkDecorator:
    """Skips a test where there are fewer devices."""
    return pytest.mark.skipif(torch.cuda.device_count() < devices, reason=f"needs {devices} GPUs")


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[GroupExchange]:
    """NCCL among the ranks of a stage that has one.

    Such a group launches nothing for a sum in place: its tests see that calls are taken, not that they are recorded.
    """
    group = process_group(FileStore(str(tmp_path / "store"), 1), "stage", 0, 1, CUDA)
    yield GroupExchange(group, 0)
    # It waits until no graph is left, and a test that fails keeps its own.
    threading.Thread(target=group.abort, daemon=True).start()


def test_nccl_of_one_rank_takes_calls_while_a_graph_is_recorded(nccl: GroupExchange) -> None:
    """Operations of a group of one rank change nothing, launched and within a recording."""
    addend = torch.arange(6, dtype=torch.float32, device=CUDA)
    nccl.add(addend)
    assert addend.tolist() == [0, 1, 2, 3, 4, 5]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = addend * 2
        nccl.add(doubled)
        doubled += 1
    addend.fill_(3)
    graph.replay()
    assert doubled.tolist() == [7] * 6
    rows = nccl.gather(addend.view(2, 3), [3])
    assert rows is not None
    assert rows.tolist() == [[3, 3, 3], [3, 3, 3]]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 4e-2)])
def test_recorded_steps_with_nccl_of_one_rank_match_the_reference(
    dtype: torch.dtype, limit: float, nccl: GroupExchange
) -> None:
    """A part that is the whole model, with calls of NCCL in its recorded decode steps, has the reference's logits."""

    def add(addend: torch.Tensor) -> torch.Tensor:
        nccl.add(addend)
        return addend

    weights = random_weights(CONFIG)
    exchange = PartExchange(partition(CONFIG, 1, 1)[0], add, lambda number: number)
    runner = CudaRunner(CONFIG, weights, 8, 64, 4, dtype, exchange=exchange)
    said: list[str] = []
    runner.record_steps(said.append)
    assert "recorded decode steps" in said[-1]
    reference = TorchRunner(CONFIG, weights, 8, 64)
    for step in (*STEPS, *STEPS[3:]):
        assert relative_error(runner.run(step).logits.cpu(), reference.run(step).logits) < limit


def test_more_ranks_than_devices_are_refused() -> None:
    """The message names the flags, the devices that are needed, and those that there are."""
    found = torch.cuda.device_count()
    engine = EngineConfig(tensor_parallel=2, pipeline_parallel=found, device="cuda")
    config = replace(CONFIG, num_layers=found)
    flags = "--tensor-parallel 2" + (f" and --pipeline-parallel {found}" if found > 1 else "")
    message = rf"^--device cuda: {flags}: {2 * found} devices are needed, one for each rank, and torch sees {found}; "
    with pytest.raises(ModelError, match=message):
        choose_parallel(config, engine, 64, lambda sentence: None)
    said: list[str] = []
    chosen = choose_parallel(config, replace(engine, device="auto"), 64, said.append)
    assert chosen.devices is None
    assert "serving on the CPU, although there is a CUDA device" in said[-1]


@pytest.mark.parametrize(
    ("tensor", "stages"),
    [pytest.param(2, 1, marks=needs(2)), pytest.param(1, 2, marks=needs(2)), pytest.param(2, 2, marks=needs(4))],
)
def test_logits_over_nccl_are_those_of_one_device(tensor: int, stages: int, tmp_path: Path) -> None:
    """Logits in float32 are within 1e-4 of one device's for prefill, chunks and recorded decodes, and greedy answers
    are the same.
    """
    save(KIND, tmp_path)
    one = one_device(tmp_path, "cuda")
    tokens = random_tokens(60)
    with many_ranks(tmp_path, tensor, stages, devices=DEVICES) as many:
        first, second = Paged(tokens, [3, 5, 7, 9]), Paged(tokens[20:], [2, 4, 6])
        for chunks in ([(first, 20), (second, 33)], [(first, 1), (second, 1)], [(first, 17), (second, 1)]):
            step = step_of(chunks)
            assert float((many.run(step).logits - one.run(step).logits).abs().max()) < 1e-4
        assert continued(many, tokens[:30], 16) == continued(one, tokens[:30], 16)


@needs(2)
def test_a_rank_that_is_lost_amid_sums_is_named(tmp_path: Path) -> None:
    """A device that waits for a dead rank does not keep the engine: the next step raises an error that names it."""
    save(KIND, tmp_path)
    with many_ranks(tmp_path, 2, devices=DEVICES) as many:
        os.kill(many.ranks.pids[1], signal.SIGSTOP)
        with pytest.raises(EngineLost, match=r"^rank 1 \(part 2 of 2\) has not answered for 5 s$"):
            many.run(step_of([(Paged(random_tokens(20), [0, 1]), 20)]))


@needs(2)
def test_ranks_with_recorded_steps_close_within_seconds(tmp_path: Path) -> None:
    """Sums that were recorded are replayed, and do not keep the engine from closing while the recordings are there."""
    save(KIND, tmp_path)
    tokens = random_tokens(30)
    with many_ranks(tmp_path, 2, devices=DEVICES) as many:
        assert continued(many, tokens, 16) == continued(one_device(tmp_path, "cuda"), tokens, 16)
        began = time.monotonic()
        many.close()
        assert time.monotonic() - began < SECONDS


@needs(2)
def test_a_rank_that_is_killed_amid_prefills_is_named(tmp_path: Path) -> None:
    """Launches that wait for a device which waits for a dead rank end, although decode steps have been recorded."""
    save(KIND, tmp_path)
    with many_ranks(tmp_path, 2, devices=DEVICES) as many, ThreadPoolExecutor(1) as threads:
        continued(many, random_tokens(30), 4)
        begun = threading.Event()

        def steps() -> None:
            while True:
                many.run(step_of([(Paged(random_tokens(120), list(range(8))), 120)]))
                begun.set()

        working = threads.submit(steps)
        assert begun.wait(SECONDS)
        os.kill(many.ranks.pids[1], signal.SIGKILL)
        with pytest.raises(EngineLost, match=r"^rank 1 \(part 2 of 2\) was killed by SIGKILL$"):
            working.result(SECONDS)


@needs(2)
def test_memory_is_what_fits_every_device(tmp_path: Path) -> None:
    """Ranks agree on as many KV blocks as fit the device with the least memory."""
    save(KIND, tmp_path)
    config = model_config(tmp_path)
    engine = EngineConfig(tensor_parallel=2, device="cuda", dtype="float32", kv_memory=2**24)
    settings = choose_parallel(config, engine, CONTEXT, lambda sentence: None)
    assert settings.device_of(1) == "cuda:1"
    runner = ParallelRunner(config, tmp_path, settings, lambda part: load_part(tmp_path, config, part, "none")[0])
    try:
        assert runner.num_blocks == 2**24 // (16 * runner.kv_bytes_per_token)
        assert runner.num_blocks > BLOCKS
    finally:
        runner.close()
