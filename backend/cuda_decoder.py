"""The llama-family decoder on a device: cuBLAS for most matrix products, Triton for everything between them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from backend.config import ModelConfig
from backend.cuda_choice import CudaUnavailable
from backend.cuda_step import DeviceStep
from backend.few_rows import FewRows
from backend.kernels.add_rms_norm import add_rms_norm
from backend.kernels.paged_decode import AttentionShape, paged_decode
from backend.kernels.paged_prefill import paged_prefill, prefill_tile_rows
from backend.kernels.rotary_write import rotary_write
from backend.kernels.silu_mul import silu_mul
from backend.rope import rotations
from backend.runner import BLOCK_SIZE
from backend.weights import LayerWeights, Linear, ModelWeights, dense

_PROGRAMS_PER_PROCESSOR = 4
"""Decode programs that one multiprocessor should have, to keep enough loads in flight."""
_MOST_SPLITS = 32


def check_model(config: ModelConfig) -> None:
    """Says whether the kernels cover this model.

    Raises:
        CudaUnavailable: names what they do not cover.
    """
    lacking = {
        f"{config.activation} activation": config.activation != "silu",
        "layers without rotary embedding": None in config.ropes,
        "softcapped logits": config.logit_softcap is not None,
        "scaled embeddings": config.embedding_scale != 1.0,
        "norms on the outputs of attention and MLP": config.output_norms,
        "a mixture of experts": config.experts is not None,
        f"a head_dim of {config.head_dim}": config.head_dim not in (64, 80, 96, 128, 256),
    }
    if missing := [name for name, needed in lacking.items() if needed]:
        raise CudaUnavailable(f"the CUDA kernels do not do {', '.join(missing)}")


class CudaDecoder:
    """Weights and KV memory on one device.

    The KV memory is [layers, 2, blocks, kv heads, BLOCK_SIZE, head_dim]: a head's part of a block is one stretch of
    memory. It is made by ``allocate``, after the weights, so that its size can follow from what is left.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, max_context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        check_model(config)
        self.config = config
        self.dtype = dtype
        self.device = device
        self._embedding = weights.embedding.to(device, dtype)
        tied = weights.head is weights.embedding
        self._head = Linear(self._embedding if tied else dense(weights.head).to(device, dtype), None)
        self._norm = weights.norm.to(device, torch.float32)
        tables = {config.rope(index) for index in range(config.num_layers)}
        angles = {rope: rotations(rope, config.head_dim, max_context).to(device) for rope in tables if rope is not None}
        self._layers = [
            _Layer(config, index, layer, angles[rope], dtype, device)
            for index, layer in enumerate(weights.layers)
            if (rope := config.rope(index)) is not None
        ]
        self.tile_rows = prefill_tile_rows(self._layers[0].shape, dtype)
        self.memory = torch.empty(0)
        self.product = FewRows()
        self._processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        )

    def linears(self) -> list[Linear]:
        """Every matrix that a step multiplies with."""
        layers = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in self._layers]
        return [self._head, *(linear for each in layers for linear in each)]

    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers."""
        c = self.config
        return 2 * c.num_layers * BLOCK_SIZE * c.num_kv_heads * c.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """Makes the KV memory."""
        c = self.config
        shape = (c.num_layers, 2, num_blocks, c.num_kv_heads, BLOCK_SIZE, c.head_dim)
        self.memory = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def __call__(
        self, step: DeviceStep, wait: Callable[[int], None] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits float32 [R, vocab_size] and hidden states float32 [E, hidden_size] of the rows that want them.

        Args:
            wait: called with each layer's number before its keys and values are touched.
        """
        residual = functional.embedding(step.token_ids, self._embedding)
        delta: torch.Tensor | None = None
        splits = self._splits(step.decode_rows.shape[0])
        for index, layer in enumerate(self._layers):
            keys, values = self.memory[index]
            normed = add_rms_norm(residual, delta, layer.input_norm, layer.eps)
            qkv = self.product(normed, layer.qkv)
            if wait is not None:
                wait(index)
            mixed = layer.attend(qkv, step, keys, values, splits)
            delta = self.product(mixed, layer.output)
            normed = add_rms_norm(residual, delta, layer.mlp_norm, layer.eps)
            delta = self.product(silu_mul(self.product(normed, layer.gate_up)), layer.down)
        logits = self.product(self._last_norm(residual, delta, step.logits_rows), self._head)
        return logits.float(), self._last_norm(residual, delta, step.hidden_rows).float()

    def _last_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        if not rows.shape[0]:
            return residual[:0]
        some = None if delta is None else delta.index_select(0, rows)
        return add_rms_norm(residual.index_select(0, rows), some, self._norm, self.config.rms_norm_eps)

    def _splits(self, rows: int) -> int:
        """Programs for each context, so that few sequences still fill the device: a power of two."""
        wanted = _PROGRAMS_PER_PROCESSOR * self._processors // max(1, rows * self.config.num_kv_heads)
        return min(_MOST_SPLITS, 1 << max(0, wanted.bit_length() - 1)) if wanted else 1


class _Layer:
    """One layer's weights on the device, with the projections that share an input fused."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: LayerWeights,
        rope: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.eps = config.rms_norm_eps
        self.shape = AttentionShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_scale or config.head_dim**-0.5,
            config.window(index) or 0,
            config.attention_softcap or 0.0,
        )
        self.input_norm = weights.input_norm.to(device, torch.float32)
        self.mlp_norm = weights.post_attention_norm.to(device, torch.float32)
        self.output = _fused((weights.output,), dtype, device)
        self.down = _fused((weights.down,), dtype, device)
        self._rope = rope
        self.qkv = _fused((weights.query, weights.key, weights.value), dtype, device)
        self.gate_up = _fused((weights.gate, weights.up), dtype, device)
        self._head_norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if weights.query_norm is not None and weights.key_norm is not None:
            self._head_norms = (weights.query_norm.to(device, dtype), weights.key_norm.to(device, dtype))

    def attend(
        self, qkv: torch.Tensor, step: DeviceStep, keys: torch.Tensor, values: torch.Tensor, splits: int
    ) -> torch.Tensor:
        """Writes the rows' keys and values and attends; [T, heads * head_dim]."""
        where, shape = step.where, self.shape
        rotary_write(qkv, self._rope, where.positions, step.slots, self._head_norms, self.eps, keys, values)
        if not step.tiles.shape[0]:
            return paged_decode(qkv, keys, values, where, step.decode_rows, shape, splits)
        mixed = torch.empty(qkv.shape[0], shape.num_heads * shape.head_dim, dtype=qkv.dtype, device=qkv.device)
        paged_prefill(qkv, keys, values, where, step.tiles, shape, mixed)
        if step.decode_rows.shape[0]:
            mixed[step.decode_rows] = paged_decode(qkv, keys, values, where, step.decode_rows, shape, splits)
        return mixed


def _fused(parts: tuple[Linear, ...], dtype: torch.dtype, device: torch.device) -> Linear:
    weights = [part.dense.to(device, dtype) for part in parts]
    biases = [part.bias.to(device, dtype) for part in parts if part.bias is not None]
    return Linear(
        weights[0] if len(weights) == 1 else torch.cat(weights),
        torch.cat(biases) if biases else None,
    )
