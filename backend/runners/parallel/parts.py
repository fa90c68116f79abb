"""Connects a rank with the others, and builds what computes its part: the torch runner, or the CUDA runner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from backend.checkpoints.gguf.convert import Progress
from backend.errors import ModelError
from backend.model_loader.weights import ModelWeights
from backend.runners.errors import RunnerUnavailable
from backend.runners.parallel import shared_exchange, shared_memory
from backend.runners.parallel.communicator import Communicator
from backend.runners.parallel.messages import RankJob
from backend.runners.parallel.part_exchange import PartExchange
from backend.runners.parallel.part_runner import LayersRunner, PartRunner
from backend.runners.parallel.settings import DeviceSettings
from backend.runners.torch.kv_memory import KvMemory
from backend.runners.torch.runner import TorchRunner

_TESTED_TOKENS = 512


def connect(job: RankJob) -> Communicator:
    """Connects a rank with the others. Raises PeerLost."""
    if job.shared is None:
        return Communicator(job.part, job.rendezvous, _device(job))
    size = shared_exchange.size_of(job.part.tensor_ranks)
    shared = shared_memory.attach(job.shared.exchange)
    return Communicator(job.part, job.rendezvous, shared=shared[job.part.stage * size :][:size])


def shared_kv(job: RankJob) -> KvMemory | None:
    """The KV memory of the whole model, which all ranks share; None: each has its own, on its device."""
    settings = job.settings
    if job.shared is None:
        return None
    assert settings.num_blocks is not None  # noqa: S101 - it is the devices alone that say how many there are
    buffer = shared_memory.attach(job.shared.kv)
    return KvMemory(job.config, settings.num_blocks, getattr(torch, settings.dtype), settings.kv_dtype, buffer)


def check_part(job: RankJob, weights: ModelWeights) -> None:
    """Tests the kernels for devices with the first layers of a part, as if there were no other part.

    Raises:
        ModelError: they do not run, or do not compute what torch does.
    """
    from backend.runners.cuda.choice import check_kernels

    # Not every part has an embedding and a head; those of the test are of some tokens, and the same in all parts.
    config = replace(job.part.config(job.config), vocab_size=_TESTED_TOKENS)
    rows = torch.randn(_TESTED_TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(0))
    alone = replace(job.part, vocabulary=range(_TESTED_TOKENS))
    exchange = PartExchange(alone, lambda addend: addend, lambda number: number)
    with _refused():
        dtype = getattr(torch, job.settings.dtype)
        check_kernels(config, replace(weights, embedding=rows, head=rows), dtype, str(_device(job)), exchange)


def build_part(job: RankJob, weights: ModelWeights, communicator: Communicator, progress: Progress) -> PartRunner:
    """What computes a rank's part.

    Raises:
        ModelError: a device has no room for it, or cannot compute it.
        PeerLost: another rank does not take part.
    """
    exchange = PartExchange(job.part, communicator.sum, communicator.least)
    devices = job.settings.devices
    runner = (
        _on_cpu(job, weights, exchange) if devices is None else _on_device(job, weights, devices, exchange, progress)
    )
    return PartRunner(job, runner, communicator)


def _on_cpu(job: RankJob, weights: ModelWeights, exchange: PartExchange) -> LayersRunner:
    settings, memory = job.settings, shared_kv(job)
    assert memory is not None  # noqa: S101 - processes on the CPU share it
    own = (slice(of.start, of.stop) for of in (job.part.layers, job.part.kv_heads))
    return TorchRunner(
        job.part.config(job.config),
        weights,
        settings.num_blocks or 0,
        settings.max_context,
        getattr(torch, settings.dtype),
        settings.kv_dtype,
        memory=memory.part(*own),
        exchange=exchange,
    )


def _on_device(
    job: RankJob, weights: ModelWeights, devices: DeviceSettings, exchange: PartExchange, progress: Progress
) -> LayersRunner:
    from backend.runners.cuda.choice import unavailable_reasons
    from backend.runners.cuda.runner import CudaRunner, block_bytes

    settings, dtype = job.settings, getattr(torch, job.settings.dtype)
    with _refused(), unavailable_reasons():
        runner = CudaRunner(
            job.part.config(job.config),
            weights,
            settings.num_blocks,
            settings.max_context,
            devices.max_batch,
            dtype,
            str(_device(job)),
            kv_memory=devices.kv_memory,
            step_tokens=devices.step_tokens,
            exchange=exchange,
            model_block_bytes=block_bytes(job.config, dtype),
        )
        runner.choose_products(progress)
        # A rank that cannot record ends all of them: NCCL wants an operation recorded in every rank, or in none.
        if job.part.stages == 1:
            runner.record_steps(progress)
        else:
            progress("launching steps kernel by kernel: what stages send each other is not recorded")
    return runner


def _device(job: RankJob) -> torch.device:
    """Of a rank, and from now on the one that its calling thread uses."""
    device = torch.device(job.settings.device_of(job.part.rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except RunnerUnavailable as reason:
        raise ModelError(f"ranks cannot compute on devices: {reason}; expected --device cpu") from reason
