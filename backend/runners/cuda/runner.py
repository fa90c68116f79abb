"""The runner for a CUDA device: Triton kernels over a paged KV memory, and CUDA graphs for decode steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from triton.runtime.errors import TritonError

from backend.checkpoints.gguf.convert import Progress
from backend.engine.model_runner import BLOCK_SIZE, StepInput, StepOutput
from backend.model_loader.weights import ModelWeights
from backend.models.config import ModelConfig
from backend.runners.cuda.decoder import CudaDecoder
from backend.runners.cuda.device_step import Staging, device_step
from backend.runners.cuda.graphs import DecodeGraphs, is_pure_decode
from backend.runners.cuda.kv_blocks import CudaKvBlocks
from backend.runners.cuda.memory import blocks_that_fit
from backend.runners.cuda.skinny_gemm import SkinnyGemmTable
from backend.runners.cuda.streams import device_streams
from backend.runners.errors import RunnerUnavailable
from backend.runners.torch.exchange import Exchange, NoExchange
from backend.runners.warm_up import single_sequence_step

logger = logging.getLogger(__name__)

CUDA_BATCH = 256
"""Decoding reads every weight once a step, so throughput grows with the sequences that share the reading."""
CUDA_STEP_TOKENS = 2048
"""A device with 200 operations for each byte it reads (H200: 206) is busy with some 200 rows of 16-bit weights; ten
times as many leave launches and attention little of the time, and still take less than a tenth of a second with an
8B model."""
STAGING_BYTES = 512 * 2**20
"""4,096 tokens of an 8B model under way in each direction. A power of two, to which torch rounds pinned memory up."""


def block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one KV block over all layers."""
    return 2 * config.num_layers * BLOCK_SIZE * config.num_kv_heads * config.head_dim * dtype.itemsize


class CudaRunner:
    """Runs a step on one device; ``run`` returns while the device still computes.

    cuBLAS chooses its kernels by the number of rows, and contexts are split by it, so ``deterministic`` is False.

    Args:
        num_blocks: KV blocks to own; None: as many as ``kv_memory`` holds.
        max_context: positions the rotary table covers.
        max_batch: the most sequences of a recorded step; larger ones are computed without a recording.
        dtype: of weights, activations and KV.
        device: where to compute. On "cpu" the kernels must be interpreted, and nothing is recorded.
        kv_memory: bytes for KV blocks; None: most of what is free beside the weights and the largest step.
        step_tokens: rows of the largest step.
        staging_memory: bytes of host memory that restored blocks pass through, and as many for those copied out.
        exchange: joins the parts of layers, where ``weights`` are a part of the model that others have more of.
        model_block_bytes: of a KV block of the whole model, which ``kv_memory`` is for; None: of this part's.

    Raises:
        RunnerUnavailable: the kernels do not cover the model, or no block fits.
        ModelError: ``kv_memory`` is more than there is.
    """

    deterministic = False

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        num_blocks: int | None,
        max_context: int,
        max_batch: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
        *,
        kv_memory: int | None = None,
        step_tokens: int = CUDA_STEP_TOKENS,
        staging_memory: int = STAGING_BYTES,
        exchange: Exchange = NoExchange(),  # noqa: B008 - has no state
        model_block_bytes: int | None = None,
    ) -> None:
        self.config = config
        self._device = torch.device(device)
        self.name = f"{self._device.type}-{str(dtype).removeprefix('torch.')}"
        what = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
        self.kernels = f"torch {torch.__version__} on {what}"
        self.weights_precision = self.kv_precision = str(dtype).removeprefix("torch.")
        self.kv_bytes_per_token = block_bytes(config, dtype) // BLOCK_SIZE
        self.max_batch = max_batch
        self.step_tokens = step_tokens
        self._max_context = max_context
        self._graphs: DecodeGraphs | None = None
        self._staging_memory = staging_memory
        self._stages = True
        self._kv_blocks: CudaKvBlocks | None = None
        with torch.inference_mode():
            self.decoder = CudaDecoder(config, weights, max_context, dtype, self._device, exchange)
            self._staging = Staging(self._device)
            self._no_hidden = torch.empty(0, config.hidden_size, device=self._device)
            if num_blocks is None:
                own = block_bytes(config, dtype)
                fitting = blocks_that_fit(self._free_memory(), own, kv_memory, model_block_bytes or own)
                num_blocks = exchange.least(fitting)
            self.num_blocks = num_blocks
            # One more, which the engine does not know: see DecodeGraphs.
            self.decoder.allocate(num_blocks + 1)

    @property
    def kv_blocks(self) -> CudaKvBlocks | None:
        """See ``ModelRunner.kv_blocks``; None: they do not work here, which is logged.

        Allocated and tested at the first access, so a server without a prefix store pins no memory.
        """
        if self._kv_blocks is None and self._stages:
            try:
                with torch.inference_mode():
                    made = CudaKvBlocks(self.decoder.memory, self._staging_memory, device_streams(self._device))
                made.check(self.num_blocks)
                self._kv_blocks = made
            except (MemoryError, RuntimeError) as reason:  # a lack of the device's memory is a RuntimeError
                self._stages = False
                logger.warning("KV blocks cannot be kept beyond the device: %s", reason)
        return self._kv_blocks

    def record(self, progress: Progress) -> None:
        """Chooses kernels and records graphs for decoding on this device; what fails here is not used."""
        self.choose_products(progress)
        try:
            self.record_steps(progress)
        except RunnerUnavailable as reason:
            progress(f"launching decode steps kernel by kernel, which is slower in small batches: {reason}")

    @torch.inference_mode()
    def choose_products(self, progress: Progress) -> None:
        """Measures which kernels multiply few rows the fastest; on a CPU there is nothing to choose from."""
        if self._device.type != "cuda":
            return
        try:
            self.decoder.product = SkinnyGemmTable.measure(self.decoder.linears())
        except (TritonError, RuntimeError) as reason:
            progress(f"multiplying few rows with cuBLAS: {reason}")
            return
        count = len(self.decoder.product.shapes)
        progress(f"{count} kinds of products with few rows are faster in our kernel than in cuBLAS")

    @torch.inference_mode()
    def record_steps(self, progress: Progress) -> None:
        """Records decode steps; on a CPU nothing is recorded.

        Raises:
            RunnerUnavailable: they cannot be recorded.
        """
        if self._device.type != "cuda":
            return
        began, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
        max_blocks = -(-self._max_context // BLOCK_SIZE)
        progress(f"recording decode steps for batches of up to {self.max_batch}")
        try:
            self._graphs = DecodeGraphs(self.decoder, self._staging, self.max_batch, max_blocks, self.num_blocks)
        except (TritonError, RuntimeError) as error:  # a lack of memory is a RuntimeError too
            raise RunnerUnavailable(f"decode steps cannot be recorded: {error}") from error
        taken = (free - torch.cuda.mem_get_info(self._device)[0]) >> 20
        seconds = time.monotonic() - began
        progress(f"recorded decode steps for {len(self._graphs.sizes)} batch sizes in {seconds:.1f} s and {taken} MiB")

    @torch.inference_mode()
    def move_kv(self, moves: Sequence[tuple[int, int]]) -> None:
        """See ``ModelRunner.move_kv``."""
        self.decoder.move_kv(moves)

    def run(self, step: StepInput) -> StepOutput:
        """See ``ModelRunner.run``; the tensors stay on the device."""
        return self.outputs(step)

    @torch.inference_mode()
    def layers(self, step: StepInput, received: torch.Tensor | None = None) -> torch.Tensor:
        """What leaves the last layer, [T, hidden]; keys and values of all rows are written.

        Args:
            received: what enters the first layer, [T, hidden], which is changed; None: the embeddings of the tokens.
        """
        return self.decoder.layers(device_step(step, self._staging, self.decoder.tile_rows), received)

    @torch.inference_mode()
    def outputs(self, step: StepInput, received: torch.Tensor | None = None) -> StepOutput:
        """`layers`, and then logits and hidden states of the rows that the step names.

        While blocks are being restored, even a decode step is launched kernel by kernel: a replay could only begin
        when the last layer is there, while the launches overlap with the copies.
        """
        wait = None if self._kv_blocks is None else self._kv_blocks.layer_wait()
        replays = wait is None and received is None and self._graphs is not None and is_pure_decode(step)
        if replays and self._graphs is not None and (logits := self._graphs.run(step)) is not None:
            rows = len(step.token_ids)
            padding = (self._graphs.size_for(rows) or rows) - rows
            return StepOutput(logits, self._no_hidden, unfinished=True, padding_rows=padding)
        logits, hidden = self.decoder(device_step(step, self._staging, self.decoder.tile_rows), wait, received)
        return StepOutput(logits, hidden, unfinished=True)

    def _free_memory(self) -> int:
        """Bytes that are free beside the weights and the largest step, which is run to measure its memory.

        The step computes the logits of all rows, as log-probabilities of a prompt need them.
        """
        rows = min(self.step_tokens, self._max_context)
        self.decoder.allocate(-(-rows // BLOCK_SIZE))
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        hidden = torch.zeros(rows, self.config.hidden_size, dtype=self.decoder.dtype, device=self._device)
        self.outputs(single_sequence_step(np.zeros(rows, dtype=np.int32), 0), hidden)  # not every part embeds tokens
        del hidden
        torch.cuda.synchronize(self._device)
        needed = torch.cuda.max_memory_allocated(self._device) - before
        self.decoder.allocate(0)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return free - needed * self.step_tokens // rows
