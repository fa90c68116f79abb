"""The runner for a CUDA device: Triton kernels over paged KV, and recorded graphs where every row decodes."""

from __future__ import annotations

import torch

from backend.config import ModelConfig
from backend.cuda_choice import CudaUnavailable
from backend.cuda_decoder import CudaDecoder
from backend.cuda_graphs import DecodeGraphs, is_pure_decode
from backend.cuda_step import Staging, device_step
from backend.runner import BLOCK_SIZE, StepInput, StepOutput
from backend.weights import ModelWeights

_SHARE_OF_FREE_MEMORY = 0.9
"""For KV blocks; the rest is for activations and recordings."""


class CudaRunner:
    """Runs a step on one device; ``run`` returns while the device still computes.

    cuBLAS chooses its kernels by the number of rows, and contexts are split by it, so ``deterministic`` is False.

    Args:
        num_blocks: KV blocks to own; None: as many as the device's free memory holds.
        max_context: positions the rotary table covers.
        max_batch: the most sequences of a step in which all decode; larger ones are computed without a recording.
        dtype: of weights, activations and KV.
        device: where to compute. On "cpu" the kernels must be interpreted, and nothing is recorded.

    Raises:
        CudaUnavailable: the kernels do not cover the model, or no block fits.
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
    ) -> None:
        self.config = config
        self.name = f"{device}-{str(dtype).removeprefix('torch.')}"
        self.weights_precision = self.kv_precision = str(dtype).removeprefix("torch.")
        self.kv_bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        where = torch.device(device)
        max_blocks = -(-max_context // BLOCK_SIZE)
        with torch.inference_mode():
            self._decoder = CudaDecoder(config, weights, max_context, dtype, where)
            self.num_blocks = num_blocks or self._blocks_that_fit(max_batch * max_blocks)
            # One more, which the engine does not know: see DecodeGraphs.
            self._decoder.allocate(self.num_blocks + 1)
            self._staging = Staging(where)
            self._no_hidden = torch.empty(0, config.hidden_size, device=where)
            self._graphs: DecodeGraphs | None = None
            if where.type == "cuda":
                self._graphs = DecodeGraphs(self._decoder, self._staging, max_batch, max_blocks, self.num_blocks)

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput:
        """See ``ModelRunner.run``; the tensors stay on the device."""
        if self._graphs is not None and is_pure_decode(step) and (logits := self._graphs.run(step)) is not None:
            rows = len(step.token_ids)
            padding = (self._graphs.size_for(rows) or rows) - rows
            return StepOutput(logits, self._no_hidden, unfinished=True, padding_rows=padding)
        logits, hidden = self._decoder(device_step(step, self._staging, self._decoder.tile_rows))
        return StepOutput(logits, hidden, unfinished=True)

    def _blocks_that_fit(self, useful: int) -> int:
        if self._decoder.device.type != "cuda":
            return useful
        free, _ = torch.cuda.mem_get_info(self._decoder.device)
        block_bytes = self._decoder.block_bytes()
        held = int(free * _SHARE_OF_FREE_MEMORY) // block_bytes - 1
        if held < 1:
            raise CudaUnavailable(
                f"the device has {free} bytes left beside the weights, and a KV block has {block_bytes}"
            )
        return min(useful, held)
