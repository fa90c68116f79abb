"""The runner of rank 0: starts the other ranks, sends them each step, and computes its own part of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from backend.checkpoints.gguf.convert import Progress
from backend.engine.kv_blocks import KvBlocks
from backend.engine.model_runner import BLOCK_SIZE, CPU_BATCH, CPU_STEP_TOKENS, StepInput, StepOutput
from backend.errors import EngineLost
from backend.model_loader.weights import ModelWeights
from backend.models.config import ModelConfig
from backend.models.partition import ModelPart
from backend.runners.parallel import shared_exchange, shared_memory
from backend.runners.parallel.communicator import PeerLost
from backend.runners.parallel.messages import MoveKv, RankJob, SharedDescriptors
from backend.runners.parallel.parts import build_part, check_part, connect, shared_kv
from backend.runners.parallel.ranks import RankProcesses
from backend.runners.parallel.settings import ParallelSettings
from backend.runners.torch.runner import TorchRunner


class ParallelRunner:
    """Runs steps on several processes of this host, of which this is rank 0.

    Numbers are those of the torch runner, or on devices of the CUDA runner, but for the order in which sums are added
    up, so it has that runner's name. On a CPU the KV memory is one for all ranks and has the blocks of the whole model:
    they can be stored and restored here whatever the division. On devices each rank has those of its own part.

    An error in any rank ends the engine: the others are then amid a step that cannot be finished.

    Args:
        load: gives the weights of this rank, while the other ranks load theirs.

    Raises:
        EngineLost: a rank cannot start.
        OSError: there is not enough memory for the KV blocks, or no process can be started.
    """

    deterministic = False

    def __init__(
        self,
        config: ModelConfig,
        directory: Path,
        settings: ParallelSettings,
        load: Callable[[ModelPart], ModelWeights],
        progress: Progress = lambda sentence: None,
    ) -> None:
        self.config = config
        self.parts = settings.parts
        self._settings = settings
        block_bytes = TorchRunner.block_bytes(config, getattr(torch, settings.dtype), settings.kv_dtype)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keepgate-ranks-")))
            sizes: list[int] = []
            if settings.devices is None:
                stage_size = shared_exchange.size_of(settings.parts[0].tensor_ranks)
                sizes = [(settings.num_blocks or 0) * block_bytes, settings.parts[0].stages * stage_size]
            descriptors = []
            for size in sizes:
                descriptors.append(shared_memory.create(size))
                stack.callback(os.close, descriptors[-1])
            shared = SharedDescriptors(*descriptors) if descriptors else None
            jobs = [
                RankJob(directory, config, part, settings, folder / "rendezvous", shared) for part in settings.parts
            ]
            self.ranks = RankProcesses(jobs[1:], descriptors)
            stack.callback(self.ranks.close)
            torch.set_num_threads(settings.threads)
            weights = load(settings.parts[0])
            if settings.is_on_devices:
                check_part(jobs[0], weights)
            self.abouts: Sequence[object] = self.ranks.wait_loaded()
            """What the other ranks say of their weights."""
            try:
                self._communicator = self.ranks.connect(jobs[0].part.title, lambda: connect(jobs[0]))
                self.ranks.on_failure(lambda _: self._communicator.abort())
                stack.callback(self._communicator.close)
                self._part = build_part(jobs[0], weights, self._communicator, progress)
            except PeerLost as error:
                raise self.ranks.lost(str(error)) from error
            except Exception as error:
                # What is computed here of the operations of a lost rank is wrong, or cannot be recorded.
                if self.ranks.failure is None:
                    raise
                raise EngineLost(self.ranks.failure) from error
            self.ranks.wait_connected()
            self._open = stack.pop_all()
        one = self._part.runner
        self.name, self.kernels = one.name, one.kernels
        self.weights_precision, self.kv_precision = one.weights_precision, one.kv_precision
        self.num_blocks = one.num_blocks
        self.kv_bytes_per_token = block_bytes // BLOCK_SIZE
        self.max_batch, self.step_tokens = CPU_BATCH, CPU_STEP_TOKENS
        if settings.devices is not None:
            self.max_batch, self.step_tokens = settings.devices.max_batch, settings.devices.step_tokens
        self._memory = shared_kv(jobs[0])
        self.kv_blocks: KvBlocks | None = None if self._memory is None else self._memory.blocks

    def move_kv(self, moves: Sequence[tuple[int, int]]) -> None:
        """See ``ModelRunner.move_kv``. No rank is in a step."""
        if self._memory is not None:
            self._memory.move(moves)
            return
        self.ranks.broadcast(MoveKv(moves))
        self._part.move_kv(moves)

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
                    "device": self._settings.device_of(part.rank),
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
