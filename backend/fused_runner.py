"""The runner around ``fused_step.cpp``: packs weights into its layout and calls it once a step."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from backend.config import ModelConfig
from backend.fused_build import FusedUnavailable
from backend.rope import rope_table
from backend.runner import BLOCK_SIZE, StepInput, StepOutput
from backend.weights import LayerWeights, Linear, ModelWeights

_INT32, _INT64, _FLOAT, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

_HALF_MAX = torch.finfo(torch.float16).max


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, _INT32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")),
        ("max_context", _INT32),
        ("blocks", _INT64),
        ("eps", _FLOAT),
    )


class _PackedLinear(ctypes.Structure):
    _fields_ = (("panels", _POINTER), ("bias", _POINTER), ("in_", _INT32), ("out", _INT32))


class _PackedLayer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "post_attention_norm", "query_norm", "key_norm")),
        *((name, _PackedLinear) for name in ("qkv", "output", "gate_up", "down")),
    )


class FusedRunner:
    """Runs a step as one call: half-float weights and KV, float sums, bitwise the same for any batch.

    Half floats keep 11 bits of mantissa, so weights released in bfloat16 lose nothing (values below 6e-5 excepted,
    which lose at most 3e-8) and float32 ones less than in bfloat16.

    Raises:
        FusedUnavailable: the model's shape is not one that the kernels cover.
    """

    deterministic = True

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        weights: ModelWeights,
        num_blocks: int,
        max_context: int,
        threads: int,
    ) -> None:
        check_shape(config)
        self.config = config
        self.name = "fused-float16"
        self.num_blocks = num_blocks
        self._library = library
        self._threads = threads
        self._lanes: int = library.fused_lanes()
        # Everything the library points to stays referenced here.
        self._kept: list[torch.Tensor] = []
        self._kv = torch.zeros(num_blocks * self.block_bytes(config) // 2, dtype=torch.float16)
        self._logits = torch.empty(0)
        self._model = self._create(weights, max_context)

    @staticmethod
    def block_bytes(config: ModelConfig) -> int:
        """Bytes of one KV block over all layers."""
        return 2 * config.num_layers * BLOCK_SIZE * config.num_kv_heads * config.head_dim * torch.float16.itemsize

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._library.fused_destroy(_POINTER(self._model))

    def run(self, step: StepInput) -> StepOutput:
        """See ``ModelRunner.run``."""
        rows, wanted = len(step.token_ids), len(step.logits_rows)
        counts = np.diff(step.query_starts)
        row_sequence = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        size = wanted * self.config.vocab_size
        if self._logits.numel() < size:
            self._logits = torch.empty(size)
        hidden = torch.empty(len(step.hidden_rows), self.config.hidden_size)
        arrays = (step.token_ids, step.positions, step.slot_mapping, row_sequence, step.block_tables)
        self._library.fused_step(
            _POINTER(self._model),
            _INT32(rows),
            *(_POINTER(array.ctypes.data) for array in arrays),
            _INT32(step.block_tables.shape[1]),
            _INT32(wanted),
            _POINTER(step.logits_rows.ctypes.data),
            _POINTER(self._logits.data_ptr()),
            _INT32(len(step.hidden_rows)),
            _POINTER(step.hidden_rows.ctypes.data),
            _POINTER(hidden.data_ptr()),
            _INT32(self._threads),
        )
        return StepOutput(self._logits[:size].view(wanted, self.config.vocab_size), hidden)

    def _create(self, weights: ModelWeights, max_context: int) -> int:
        c = self.config
        shape = _Shape(
            c.num_layers,
            c.hidden_size,
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            c.intermediate_size,
            c.vocab_size,
            max_context,
            self.num_blocks,
            c.rms_norm_eps,
        )
        layers = (_PackedLayer * c.num_layers)(*(self._layer(layer) for layer in weights.layers))
        head = self._linear(weights.head, None)
        create = self._library.fused_create
        create.restype = _POINTER
        handle: int = create(
            ctypes.byref(shape),
            layers,
            ctypes.byref(head),
            self._keep(weights.embedding.to(torch.float16)),
            self._keep(weights.norm.float()),
            self._keep(rope_table(c, max_context)),
            _POINTER(self._kv.data_ptr()),
        )
        return handle

    def _layer(self, layer: LayerWeights) -> _PackedLayer:
        qkv = (layer.query, layer.key, layer.value)
        return _PackedLayer(
            self._keep(layer.input_norm.float()),
            self._keep(layer.post_attention_norm.float()),
            self._keep(None if layer.query_norm is None else layer.query_norm.float()),
            self._keep(None if layer.key_norm is None else layer.key_norm.float()),
            self._linear(torch.cat([part.weight for part in qkv]), _concatenated(qkv)),
            self._linear(layer.output.weight, layer.output.bias),
            self._gate_up(layer.gate, layer.up),
            self._linear(layer.down.weight, layer.down.bias),
        )

    def _gate_up(self, gate: Linear, up: Linear) -> _PackedLinear:
        """Interleaves gate and up by lanes, so that SiLU and product happen while both are in registers."""
        weight = torch.stack([_in_groups(gate.weight, self._lanes), _in_groups(up.weight, self._lanes)], dim=1)
        bias = None
        if gate.bias is not None and up.bias is not None:
            bias = torch.stack([_in_groups(gate.bias, self._lanes), _in_groups(up.bias, self._lanes)], dim=1).flatten()
        return self._linear(weight.flatten(0, 2), bias)

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> _PackedLinear:
        """Lays a [out, in] weight out in panels [out / panel][in][panel], padded with zeros at the end."""
        panel = 2 * self._lanes
        low, high = torch.aminmax(weight)
        if not -_HALF_MAX <= float(low) <= float(high) <= _HALF_MAX:
            raise FusedUnavailable("a weight is beyond the range of half floats")
        panels = _in_groups(weight.to(torch.float16), panel).transpose(1, 2).contiguous()
        padded_bias = None if bias is None else _in_groups(bias.float(), panel).contiguous()
        return _PackedLinear(self._keep(panels), self._keep(padded_bias), weight.shape[1], weight.shape[0])

    def _keep(self, tensor: torch.Tensor | None) -> ctypes.c_void_p:
        if tensor is None:
            return _POINTER(None)
        contiguous = tensor.contiguous()
        self._kept.append(contiguous)
        return _POINTER(contiguous.data_ptr())


def check_shape(config: ModelConfig) -> None:
    """Says whether the kernels cover this model.

    Raises:
        FusedUnavailable: a size is not a multiple of what the vectors need.
    """
    for field, multiple in (("hidden_size", 16), ("head_dim", 64)):
        if (value := getattr(config, field)) % multiple:
            raise FusedUnavailable(f"{field} is {value}, not a multiple of {multiple}")


def _in_groups(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, ...] to [ceil(rows / size), size, ...], the last group padded with zeros."""
    missing = -tensor.shape[0] % size
    if missing:
        tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
    return tensor.view(-1, size, *tensor.shape[1:])


def _concatenated(parts: tuple[Linear, ...]) -> torch.Tensor | None:
    biases = [part.bias for part in parts if part.bias is not None]
    return torch.cat(biases) if biases else None
