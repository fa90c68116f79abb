"""The runner of rank 0: starts the other ranks, sends them each step, and computes its own part of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backend.engine.kv_blocks import KvBlocks
from backend.engine.model_runner import BLOCK_SIZE, CPU_BATCH, CPU_STEP_TOKENS, StepInput, StepOutput
from backend.errors import EngineLost
from backend.model_loader.weights import ModelWeights
from backend.models.config import KvDtype, ModelConfig
from backend.models.partition import ModelPart
from backend.quantized_weights.names import Quantization
from backend.runners.parallel import shared_exchange, shared_memory
from backend.runners.parallel.communicator import Communicator, PeerLost
from backend.runners.parallel.messages import RankJob
from backend.runners.parallel.part_runner import PartRunner
from backend.runners.parallel.ranks import RankProcesses
from backend.runners.torch.kv_memory import KvMemory
from backend.runners.torch.runner import TorchRunner


@dataclass(frozen=True, slots=True)
class ParallelSettings:
    """How a model is computed by several ranks.

    Args:
        quantization: what each rank rounds its weights to.
        dtype: torch's name of the dtype of computation.
        threads: that compute in each rank.
    """

    parts: tuple[ModelPart, ...]
    quantization: Quantization
    dtype: str
    kv_dtype: KvDtype
    num_blocks: int
    max_context: int
    threads: int


class ParallelRunner:
    """Runs steps on several processes of this host, of which this is rank 0.

    Numbers, KV blocks included, are those of the torch runner but for the order in which sums are added up, so it has
    that runner's name. The KV memory is one for all ranks and has the blocks of the whole model: they can be stored and
    restored here whatever the division.

    An error in any rank ends the engine: the others are then amid a step that cannot be finished.

    Args:
        load: gives the weights of this rank, while the other ranks load theirs.

    Raises:
        EngineLost: a rank cannot start.
        OSError: there is not enough memory for the KV blocks, or no process can be started.
    """

    deterministic = False
    max_batch, step_tokens = CPU_BATCH, CPU_STEP_TOKENS

    def __init__(
        self,
        config: ModelConfig,
        directory: Path,
        settings: ParallelSettings,
        load: Callable[[ModelPart], ModelWeights],
    ) -> None:
        self.config = config
        self.parts = settings.parts
        self.num_blocks = settings.num_blocks
        dtype = getattr(torch, settings.dtype)
        size = settings.num_blocks * TorchRunner.block_bytes(config, dtype, settings.kv_dtype)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keepgate-ranks-")))
            exchange_size = settings.parts[0].stages * shared_exchange.size_of(settings.parts[0].tensor_ranks)
            descriptors = []
            for of in (size, exchange_size):
                descriptors.append(shared_memory.create(of))
                stack.callback(os.close, descriptors[-1])
            jobs = [
                RankJob(
                    directory=directory,
                    config=config,
                    part=part,
                    quantization=settings.quantization,
                    dtype=settings.dtype,
                    kv_dtype=settings.kv_dtype,
                    num_blocks=settings.num_blocks,
                    max_context=settings.max_context,
                    threads=settings.threads,
                    rendezvous=folder / "rendezvous",
                    kv_descriptor=descriptors[0],
                    kv_bytes=size,
                    exchange_descriptor=descriptors[1],
                )
                for part in settings.parts
            ]
            self.ranks = RankProcesses(jobs[1:], descriptors)
            stack.callback(self.ranks.close)
            torch.set_num_threads(settings.threads)
            weights = load(settings.parts[0])
            self.abouts: Sequence[object] = self.ranks.wait_loaded()
            """What the other ranks say of their weights."""
            self.ranks.connect()
            try:
                self._communicator = communicator_of(jobs[0])
                self.ranks.on_failure(lambda _: self._communicator.abort())
                stack.callback(self._communicator.close)
                memory, self._part = part_runner(jobs[0], weights, self._communicator)
            except PeerLost as error:
                raise self.ranks.lost(str(error)) from error
            self.ranks.wait_connected()
            self._open = stack.pop_all()
        one = self._part.runner
        self.name, self.kernels = one.name, one.kernels
        self.weights_precision, self.kv_precision = one.weights_precision, one.kv_precision
        self.kv_bytes_per_token = TorchRunner.block_bytes(config, dtype, settings.kv_dtype) // BLOCK_SIZE
        self.kv_blocks: KvBlocks | None = memory.blocks
        self._memory = memory

    def move_kv(self, moves: Sequence[tuple[int, int]]) -> None:
        """See ``ModelRunner.move_kv``. The memory is shared, and no rank is in a step."""
        self._memory.move(moves)

    def run(self, step: StepInput) -> StepOutput:
        """See ``ModelRunner.run``.

        Raises:
            EngineLost: a rank has failed, now or before.
        """
        if self.ranks.failure is not None:
            raise EngineLost(self.ranks.failure)
        self.ranks.broadcast(step)
        try:
            output = self._part.run(step)
        except PeerLost as error:
            raise self.ranks.lost(str(error)) from error
        except Exception as error:
            self.ranks.fail(f"{self.parts[0].title}: {type(error).__name__}: {error}")
            raise EngineLost(str(self.ranks.failure)) from error
        assert output is not None  # noqa: S101 - this is rank 0
        return output

    def described(self) -> dict[str, Any]:
        """The division, and what each rank has, for ``GET /v1/model/info``."""
        pids = {0: os.getpid(), **self.ranks.pids}
        return {
            "tensor": self.parts[0].tensor_ranks,
            "pipeline": self.parts[0].stages,
            "ranks": [
                {
                    "rank": part.rank,
                    "pid": pids[part.rank],
                    "layers": [part.layers.start, part.layers.stop],
                    "heads": [part.heads.start, part.heads.stop],
                    "kv_heads": [part.kv_heads.start, part.kv_heads.stop],
                }
                for part in self.parts
            ],
        }

    def close(self) -> None:
        """Ends the other ranks and waits for them; no step may be running."""
        self._open.close()


def communicator_of(job: RankJob) -> Communicator:
    """Connects a rank with the others. Raises PeerLost."""
    size = shared_exchange.size_of(job.part.tensor_ranks)
    shared = shared_memory.attach(job.exchange_descriptor, job.part.stages * size)
    return Communicator(job.part, job.rendezvous, shared[job.part.stage * size :][:size])


def part_runner(job: RankJob, weights: ModelWeights, communicator: Communicator) -> tuple[KvMemory, PartRunner]:
    """The KV memory of all ranks, and the runner of one rank's part."""
    dtype = getattr(torch, job.dtype)
    buffer = shared_memory.attach(job.kv_descriptor, job.kv_bytes)
    memory = KvMemory(job.config, job.num_blocks, dtype, job.kv_dtype, buffer)
    runner = PartRunner(
        job.config, job.part, weights, memory, communicator, job.num_blocks, job.max_context, dtype, job.kv_dtype
    )
    return memory, runner
