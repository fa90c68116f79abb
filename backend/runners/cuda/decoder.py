"""The llama-family decoder on a device: cuBLAS for most dense products, Triton kernels for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from backend.engine.model_runner import BLOCK_SIZE
from backend.kernels.add_rms_norm import add_rms_norm
from backend.kernels.fp8_gemm import supports_fp8_gemm
from backend.kernels.paged_decode import AttentionShape, paged_decode
from backend.kernels.paged_prefill import paged_prefill, prefill_tile_rows
from backend.kernels.quantized_matmul import QuantizedMatmul
from backend.kernels.quantized_weight import DeviceWeight, concatenate, on_device
from backend.kernels.rotary_write import rotary_write
from backend.kernels.silu_mul import silu_mul
from backend.model_loader.weights import LayerWeights, Linear, ModelWeights
from backend.models.config import ModelConfig
from backend.models.rope import rotations
from backend.quantized_weights.float_scheme import FloatLinear
from backend.runners.cuda.device_step import DeviceStep
from backend.runners.cuda.skinny_gemm import SkinnyGemmTable
from backend.runners.errors import RunnerUnavailable
from backend.runners.torch.exchange import Exchange, NoExchange

MergedLinears = tuple[Linear | QuantizedMatmul, ...]
"""Matrices with the same input, whose outputs are concatenated; a single one if all parts have the same format."""

_PROGRAMS_PER_PROCESSOR = 4
"""Decode programs for each multiprocessor, to keep enough loads in flight."""
_MAX_SPLITS = 32


def check_model(config: ModelConfig) -> None:
    """Checks that the kernels support this model.

    Raises:
        RunnerUnavailable: names every unsupported feature.
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
        raise RunnerUnavailable(f"the CUDA kernels do not support {', '.join(missing)}")


class CudaDecoder:
    """Weights and KV memory on one device.

    The KV memory is [layers, 2, blocks, kv heads, BLOCK_SIZE, head_dim]: the part of a head in a block is contiguous.
    ``allocate`` makes it after the weights, so that its size can depend on the memory that is left.

    Args:
        exchange: joins the parts of layers, where ``weights`` are a part of the model that others have more of.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
        exchange: Exchange = NoExchange(),  # noqa: B008 - has no state
    ) -> None:
        check_model(config)
        self.config = config
        self.exchange = exchange
        self.dtype = dtype
        self.device = device
        self._embedding = weights.embedding.to(device, dtype)
        tied = weights.head is weights.embedding
        head = Linear(self._embedding if tied else weights.head, None)
        self._head: MergedLinears = (head,) if tied else _merge_linears((head,), dtype, device)
        self._norm = weights.norm.to(device, torch.float32)
        tables = {config.rope(index) for index in range(config.num_layers)}
        angles = {rope: rotations(rope, config.head_dim, max_context).to(device) for rope in tables if rope is not None}
        self._layers = [
            _Layer(config, index, layer, angles[rope], dtype, device, exchange)
            for index, layer in enumerate(weights.layers)
            if (rope := config.rope(index)) is not None
        ]
        self.tile_rows = prefill_tile_rows(self._layers[0].shape, dtype)
        self.memory = torch.empty(0)
        self.product = SkinnyGemmTable()
        self._processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        )

    def linears(self) -> list[Linear]:
        """Every dense matrix that a step multiplies with."""
        layers = [layer.qkv + layer.output + layer.gate_up + layer.down for layer in self._layers]
        parts = [part for merged in (self._head, *layers) for part in merged if isinstance(part, Linear)]
        return [part for part in parts if part.weight.shape[0]]  # a part of a model may have no rows of the head

    def move_kv(self, moves: Sequence[tuple[int, int]]) -> None:
        """See ``ModelRunner.move_kv``."""
        for source, target in moves:
            (block, place), (to_block, to_place) = divmod(source, BLOCK_SIZE), divmod(target, BLOCK_SIZE)
            self.memory[:, :, to_block, :, to_place] = self.memory[:, :, block, :, place]

    def allocate(self, num_blocks: int) -> None:
        """Makes the KV memory."""
        c = self.config
        shape = (c.num_layers, 2, num_blocks, c.num_kv_heads, BLOCK_SIZE, c.head_dim)
        self.memory = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def __call__(
        self, step: DeviceStep, wait: Callable[[int], None] | None = None, received: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits float32 [R, vocab_size] and hidden states float32 [E, hidden_size] of the rows that the step names.

        Args:
            wait: called with each layer's number before its keys and values are used.
            received: as in `layers`.
        """
        residual, delta = self._layer_outputs(step, wait, received)
        logits = self._multiply(self._last_norm(residual, delta, step.logits_rows), self._head)
        return logits.float(), self._last_norm(residual, delta, step.hidden_rows).float()

    def layers(self, step: DeviceStep, received: torch.Tensor | None) -> torch.Tensor:
        """What leaves the last layer, [T, hidden_size].

        Args:
            received: what enters the first layer, [T, hidden_size], which is changed; None: the tokens' embeddings.
        """
        residual, delta = self._layer_outputs(step, None, received)
        return residual + delta

    def _layer_outputs(
        self, step: DeviceStep, wait: Callable[[int], None] | None, received: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two addends of what leaves the last layer."""
        residual = self.exchange.lookup(self._embedding, step.token_ids) if received is None else received
        delta: torch.Tensor | None = None
        add = self.exchange.sum
        splits = self._splits(step.decode_rows.shape[0])
        for index, layer in enumerate(self._layers):
            keys, values = self.memory[index]
            normed = add_rms_norm(residual, delta, layer.input_norm, layer.eps)
            qkv = self._multiply(normed, layer.qkv)
            if wait is not None:
                wait(index)
            mixed = layer.attend(qkv, step, keys, values, splits)
            delta = add(layer.project_output(mixed, partial(self._multiply, merged=layer.output)))
            normed = add_rms_norm(residual, delta, layer.mlp_norm, layer.eps)
            inner = silu_mul(self._multiply(normed, layer.gate_up))
            delta = add(layer.project_down(inner, partial(self._multiply, merged=layer.down)))
        assert delta is not None  # noqa: S101 - a part has at least one layer
        return residual, delta

    def _multiply(self, x: torch.Tensor, merged: MergedLinears) -> torch.Tensor:
        """[T, in] to [T, out]."""
        if not x.shape[0]:
            return x.new_empty(0, sum(_outputs(part) for part in merged))
        done = [self.product(x, part) if isinstance(part, Linear) else part(x) for part in merged]
        return done[0] if len(done) == 1 else torch.cat(done, dim=1)

    def _last_norm(self, residual: torch.Tensor, delta: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if not rows.shape[0]:
            return residual[:0]
        some, more = residual.index_select(0, rows), delta.index_select(0, rows)
        return add_rms_norm(some, more, self._norm, self.config.rms_norm_eps)

    def _splits(self, rows: int) -> int:
        """Splits of each context, so that few sequences still fill the device: a power of two."""
        wanted = _PROGRAMS_PER_PROCESSOR * self._processors // max(1, rows * self.config.num_kv_heads)
        return min(_MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1)) if wanted else 1


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
        exchange: Exchange,
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
        self.output = _merge_linears((weights.output,), dtype, device)
        self.down = _merge_linears((weights.down,), dtype, device)
        self.project_output = exchange.projection(weights.output)
        self.project_down = exchange.projection(weights.down)
        self._rope = rope
        self.qkv = _merge_linears((weights.query, weights.key, weights.value), dtype, device)
        self.gate_up = _merge_linears((weights.gate, weights.up), dtype, device)
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
        paged_prefill(qkv, keys, values, where, step.tiles, shape, mixed, step.tree)
        if step.decode_rows.shape[0]:
            mixed[step.decode_rows] = paged_decode(qkv, keys, values, where, step.decode_rows, shape, splits)
        return mixed


def _merge_linears(parts: Sequence[Linear], dtype: torch.dtype, device: torch.device) -> MergedLinears:
    """Merges consecutive parts of the same format, dense or quantised, into one matrix.

    Raises:
        CannotQuantize: the kernels do not compute with a part's scheme.
    """
    merged: list[Linear | QuantizedMatmul] = []
    for part in parts:
        product = _on_device(part, dtype, device)
        joined = _merge(merged[-1], product) if merged else None
        if joined is None:
            merged.append(product)
        else:
            merged[-1] = joined
    return tuple(merged)


def _on_device(part: Linear, dtype: torch.dtype, device: torch.device) -> Linear | QuantizedMatmul:
    bias = None if part.bias is None else part.bias.to(device, dtype)
    if isinstance(part.weight, torch.Tensor | FloatLinear):
        return Linear(part.dense.to(device, dtype), bias)
    weight = on_device(part.weight, device)
    return QuantizedMatmul(weight, bias, scaled=weight.form == "fp8" and supports_fp8_gemm(device))


def _merge(one: Linear | QuantizedMatmul, other: Linear | QuantizedMatmul) -> Linear | QuantizedMatmul | None:
    """Both as one matrix; None: their formats differ."""
    if (one.bias is None) != (other.bias is None):
        return None
    bias = None if one.bias is None or other.bias is None else torch.cat((one.bias, other.bias))
    if isinstance(one.weight, DeviceWeight) and isinstance(other.weight, DeviceWeight):
        weight = concatenate((one.weight, other.weight))
        return None if weight is None else QuantizedMatmul(weight, bias, one.scaled)
    if isinstance(one, Linear) and isinstance(other, Linear):
        return Linear(torch.cat((one.dense, other.dense)), bias)
    return None


def _outputs(part: Linear | QuantizedMatmul) -> int:
    return part.weight.outputs if isinstance(part, QuantizedMatmul) else part.weight.shape[0]
