"""The reference runner: the llama-family decoder in plain torch. Every other runner is compared with it."""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional

from backend.config import ModelConfig
from backend.rope import rope_table
from backend.runner import BLOCK_SIZE, StepInput, StepOutput
from backend.weights import LayerWeights, Linear, ModelWeights


class _Layer:
    """Weights of one layer with the projections that share an input fused."""

    def __init__(self, weights: LayerWeights, dtype: torch.dtype) -> None:
        self.input_norm = weights.input_norm.to(dtype)
        self.post_attention_norm = weights.post_attention_norm.to(dtype)
        self.query_norm = None if weights.query_norm is None else weights.query_norm.to(dtype)
        self.key_norm = None if weights.key_norm is None else weights.key_norm.to(dtype)
        self.qkv = _fuse((weights.query, weights.key, weights.value), dtype)
        self.output = _fuse((weights.output,), dtype)
        self.gate_up = _fuse((weights.gate, weights.up), dtype)
        self.down = _fuse((weights.down,), dtype)


class TorchRunner:
    """Runs steps with torch operations.

    Its matrix products may round differently for different numbers of rows, so ``deterministic`` is False.

    Args:
        num_blocks: KV blocks to own; memory is ``num_blocks * block_bytes(config, dtype)``.
        max_context: positions the rotary table covers.
        dtype: of weights, activations and KV.
    """

    deterministic = False

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        num_blocks: int,
        max_context: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = config
        self.name = f"torch-{str(dtype).removeprefix('torch.')}"
        self.num_blocks = num_blocks
        self._dtype = dtype
        self._embedding = weights.embedding.to(dtype)
        self._head = self._embedding if weights.head is weights.embedding else weights.head.to(dtype)
        self._norm = weights.norm.to(dtype)
        self._layers = [_Layer(layer, dtype) for layer in weights.layers]
        self._rope = rope_table(config, max_context)
        shape = (config.num_layers, num_blocks * BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype)
        self._values = torch.zeros(shape, dtype=dtype)

    @staticmethod
    def block_bytes(config: ModelConfig, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of one KV block over all layers."""
        return 2 * config.num_layers * BLOCK_SIZE * config.num_kv_heads * config.head_dim * dtype.itemsize

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput:
        """See ``ModelRunner.run``."""
        attention = _Attention(step, self.config)
        cosines_sines = self._rope[torch.from_numpy(step.positions).long()].unsqueeze(1)
        cosines, sines = cosines_sines.to(self._dtype).chunk(2, dim=-1)
        hidden = self._embedding[torch.from_numpy(step.token_ids).long()]
        for index, layer in enumerate(self._layers):
            normed = self._rms_norm(hidden, layer.input_norm)
            query, key, value = self._split_heads(functional.linear(normed, layer.qkv.weight, layer.qkv.bias))
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = self._rms_norm(query, layer.query_norm), self._rms_norm(key, layer.key_norm)
            query, key = _rotate(query, cosines, sines), _rotate(key, cosines, sines)
            self._keys[index].index_copy_(0, attention.slots, key)
            self._values[index].index_copy_(0, attention.slots, value)
            mixed = attention(query, self._keys[index], self._values[index])
            hidden = hidden + functional.linear(mixed.flatten(1), layer.output.weight, layer.output.bias)
            normed = self._rms_norm(hidden, layer.post_attention_norm)
            gate, up = functional.linear(normed, layer.gate_up.weight, layer.gate_up.bias).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down.weight, layer.down.bias)
        wanted = self._rms_norm(hidden[torch.from_numpy(step.logits_rows).long()], self._norm)
        states = self._rms_norm(hidden[torch.from_numpy(step.hidden_rows).long()], self._norm)
        return StepOutput(functional.linear(wanted, self._head).float(), states.float())

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # The mean is taken in float32 whatever the dtype, as the models were trained.
        return functional.rms_norm(x.float(), (x.shape[-1],), None, self.config.rms_norm_eps).to(x.dtype) * weight

    def _split_heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self.config
        heads = qkv.view(qkv.shape[0], -1, c.head_dim)
        query, key, value = torch.split(heads, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        return query, key, value


class _Attention:
    """Causal attention of one step's rows over the paged KV memory; index tensors are made once a step."""

    def __init__(self, step: StepInput, config: ModelConfig) -> None:
        self.slots = torch.from_numpy(step.slot_mapping)
        self._grouped = config.num_kv_heads != config.num_heads
        starts = step.query_starts.tolist()
        tables = torch.from_numpy(step.block_tables).long()
        context = int(step.positions.max()) + 1
        offsets = torch.arange(context)
        every_slot = tables[:, offsets // BLOCK_SIZE] * BLOCK_SIZE + offsets % BLOCK_SIZE  # [S, context]
        positions = torch.from_numpy(step.positions).long()
        self._decode = len(starts) - 1 == len(positions)
        if self._decode:
            visible = offsets <= positions.unsqueeze(1)
            self._groups = [(slice(None), every_slot, visible[:, None, None, :])]
        else:
            self._groups = [
                self._group(slice(first, last), every_slot[index], positions[first:last])
                for index, (first, last) in enumerate(itertools.pairwise(starts))
            ]

    @staticmethod
    def _group(rows: slice, slots: torch.Tensor, positions: torch.Tensor) -> tuple[slice, torch.Tensor, torch.Tensor]:
        length = int(positions[-1]) + 1
        visible = torch.arange(length) <= positions.unsqueeze(1)
        return rows, slots[:length], visible

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """query [T, heads, head_dim]; keys, values [slots, kv heads, head_dim]; returns [T, heads, head_dim]."""
        parts = []
        for rows, slots, visible in self._groups:
            # Rows that are one sequence attend together; rows of different sequences are a batch.
            q = query[rows].unsqueeze(2) if self._decode else query[rows].transpose(0, 1).unsqueeze(0)
            k, v = keys[slots], values[slots]
            if not self._decode:
                k, v = k.unsqueeze(0), v.unsqueeze(0)
            mixed = functional.scaled_dot_product_attention(
                q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible, enable_gqa=self._grouped
            )
            parts.append(mixed.squeeze(2) if self._decode else mixed.squeeze(0).transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def _fuse(parts: tuple[Linear, ...], dtype: torch.dtype) -> Linear:
    weight = torch.cat([part.weight.to(dtype) for part in parts])
    biases = [part.bias.to(dtype) for part in parts if part.bias is not None]
    return Linear(weight, torch.cat(biases) if biases else None)
