"""The CPU runner around ``step/``: packs weights into its layout and makes one C++ call for each step."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
import xxhash

from backend.engine.kv_blocks import HostKvBlocks, KvBlocks
from backend.engine.model_runner import BLOCK_SIZE, CPU_BATCH, CPU_STEP_TOKENS, StepInput, StepOutput
from backend.model_loader.weights import LayerWeights, Linear, ModelWeights
from backend.models.config import ModelConfig
from backend.models.rope import rope_table
from backend.runners.errors import RunnerUnavailable
from backend.runners.fused.build import source_digest
from backend.runners.fused.huge_pages import Arena, zeros
from backend.runners.fused.layout import (
    FloatPrecision,
    Kernels,
    KVPrecision,
    Panels,
    pack_panels,
    pad_to_groups,
    shared_order,
)
from backend.runners.fused.thread_count import ThreadCount
from prefix_store.frames.layout import BlockLayout

_INT32, _INT64, _FLOAT, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

# Of fused_step(): the model, then counts, each with the arrays that have so many entries, then the threads.
_STEP_ARGUMENTS = (
    _POINTER,
    *(_INT32, _POINTER, _POINTER, _POINTER),
    *(_INT32, _POINTER),
    *(_POINTER, _INT32),
    *(_POINTER, _POINTER),
    *(_INT32, _POINTER, _POINTER),
    *(_INT32, _POINTER, _POINTER),
    _INT32,
)

_NAMED = {("int4-min-g32", "int8-g64"): "int4", ("int8", "int8-g64"): "int8"}
"""Short names, by the scheme of all layers and that of the head."""
_MAX_PARTS = 3


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, _INT32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")),
        ("max_context", _INT32),
        ("blocks", _INT64),
        ("eps", _FLOAT),
        ("kv_is_bytes", _INT32),
    )


class _PackedPart(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("panels", "scales", "bias")),
        *((name, _INT32) for name in ("out", "format", "group", "stride")),
    )


class _PackedLinear(ctypes.Structure):
    _fields_ = (("parts", _PackedPart * _MAX_PARTS), ("order", _POINTER), ("count", _INT32), ("in_", _INT32))


class _PackedLayer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "post_attention_norm", "query_norm", "key_norm")),
        *((name, _PackedLinear) for name in ("qkv", "output", "gate_up", "down")),
    )


class FusedRunner:
    """Runs a step as one call: half-float KV, float sums, bitwise the same for any batch.

    Half floats keep 11 bits of mantissa, so weights released in bfloat16 lose nothing (except values below 6e-5,
    which lose at most 3e-8) and float32 ones less than in bfloat16. Where the processor multiplies bfloat16, weights
    released in it stay so, and activations are rounded to it. Quantised weights stay quantised, each matrix in
    the layout of its own scheme (`layout.pack_panels`); norms, biases and the embedding are floats.

    Args:
        floats: precision of weights that are not quantised.
        kv_precision: of keys and values. With ``int8`` each token has a scale for each head.

    Raises:
        RunnerUnavailable: the model's shape is not one that the kernels cover, or a weight is beyond half floats.
    """

    deterministic = True
    max_batch, step_tokens = CPU_BATCH, CPU_STEP_TOKENS

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        weights: ModelWeights,
        num_blocks: int,
        max_context: int,
        threads: int,
        kv_precision: KVPrecision = "float16",
        floats: FloatPrecision = "auto",
    ) -> None:
        check_shape(config)
        self.config = config
        self.kv_precision: str = kv_precision
        self.kv_bytes_per_token = self.block_bytes(config, kv_precision) // BLOCK_SIZE
        self.num_blocks = num_blocks
        self._library = library
        library.fused_step.argtypes = _STEP_ARGUMENTS
        self._threads = ThreadCount(threads)
        self._floats = floats
        self._kernels = Kernels.of(library)
        # The number of lanes decides the order of summation, the instructions decide how rows are rounded.
        self.kernels = f"fused step {source_digest()} in {self._kernels.lanes} lanes, {self._kernels.instructions}"
        # The library keeps pointers into this memory.
        self._arena = Arena()
        self._kv_precision = kv_precision
        self._kv = zeros(num_blocks * self.block_bytes(config, kv_precision))
        self.kv_blocks = self._blocks()
        self._logits = torch.empty(0)
        self._precisions: list[str] = []
        self.weight_bytes: dict[str, int] = {}
        """Bytes of the layers' matrices and the head, scales included, by the format they are stored in."""
        self._model = self._create(weights, max_context)
        self.weights_precision = _precision_name(self._precisions[:-1], self._precisions[-1])
        self.name = f"fused-{self.weights_precision}" + ("" if kv_precision == "float16" else f"-kv-{kv_precision}")

    @staticmethod
    def block_bytes(config: ModelConfig, kv_precision: KVPrecision = "float16") -> int:
        """Bytes of one KV block over all layers."""
        token = 2 * config.head_dim if kv_precision == "float16" else config.head_dim + torch.float32.itemsize
        return 2 * config.num_layers * BLOCK_SIZE * config.num_kv_heads * token

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._library.fused_destroy(_POINTER(self._model))

    def run(self, step: StepInput) -> StepOutput:
        """See ``ModelRunner.run``."""
        rows, wanted = len(step.token_ids), len(step.logits_rows)
        size = wanted * self.config.vocab_size
        if self._logits.numel() < size:
            self._logits = torch.empty(size)
        hidden = torch.empty(len(step.hidden_rows), self.config.hidden_size)
        threads, began = self._threads.threads(rows), time.perf_counter()
        failed = self._library.fused_step(
            self._model,
            rows,
            step.token_ids.ctypes.data,
            step.positions.ctypes.data,
            step.slot_mapping.ctypes.data,
            *(step.block_tables.shape[0], step.query_starts.ctypes.data),
            *(step.block_tables.ctypes.data, step.block_tables.shape[1]),
            *((None, None) if step.tree is None else (step.tree.seen.ctypes.data, step.tree.masks.ctypes.data)),
            *(wanted, step.logits_rows.ctypes.data, self._logits.data_ptr()),
            *(len(step.hidden_rows), step.hidden_rows.ctypes.data, hidden.data_ptr()),
            threads,
        )
        if failed:
            raise MemoryError(f"no memory for a step of {rows} tokens")
        self._threads.record(rows, threads, time.perf_counter() - began)
        return StepOutput(self._logits[:size].view(wanted, self.config.vocab_size), hidden)

    def move_kv(self, moves: Sequence[tuple[int, int]]) -> None:
        """See ``ModelRunner.move_kv``."""
        c, number = self.config, np.float16 if self._kv_precision == "float16" else np.uint8
        # [layers, blocks, KV heads, numbers of a head]; see step/attention.h.
        memory = self._kv.numpy().reshape(c.num_layers, self.num_blocks, c.num_kv_heads, -1)
        numbers = memory[..., : 2 * BLOCK_SIZE * c.head_dim * np.dtype(number).itemsize].view(number)
        keys, values = np.split(numbers, 2, axis=-1)
        keys = keys.reshape(*keys.shape[:-1], c.head_dim, BLOCK_SIZE)
        values = values.reshape(*values.shape[:-1], BLOCK_SIZE, c.head_dim)
        scales = memory[..., 2 * BLOCK_SIZE * c.head_dim :].view(np.float32) if number is np.uint8 else None
        for source, target in moves:
            (block, place), (to_block, to_place) = divmod(source, BLOCK_SIZE), divmod(target, BLOCK_SIZE)
            keys[:, to_block, :, :, to_place] = keys[:, block, :, :, place]
            values[:, to_block, :, to_place] = values[:, block, :, place]
            if scales is not None:
                scales[:, to_block, :, to_place::BLOCK_SIZE] = scales[:, block, :, place::BLOCK_SIZE]

    def _blocks(self) -> KvBlocks:
        c = self.config
        memory = self._kv.numpy().reshape(c.num_layers, self.num_blocks, -1)
        if self._kv_precision == "int8":  # with scales between the values
            return HostKvBlocks(BlockLayout("uint8", (memory[:, 0].size,)), [memory], block_axis=1)
        shape = (c.num_layers, c.num_kv_heads, 2, BLOCK_SIZE, c.head_dim)
        layout = BlockLayout("float16", shape, "lhptd", keys_transposed=True)
        return HostKvBlocks(layout, [memory.view(np.float16)], block_axis=1)

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
            int(self._kv_precision == "int8"),
        )
        layers = (_PackedLayer * c.num_layers)(*(self._layer_struct(layer) for layer in weights.layers))
        head = self._linear_struct(Linear(weights.head, None))
        create = self._library.fused_create
        create.restype = _POINTER
        handle: int = create(
            ctypes.byref(shape),
            layers,
            ctypes.byref(head),
            self._to_arena(weights.embedding.to(torch.float16)),
            self._to_arena(weights.norm.float()),
            self._to_arena(rope_table(c, max_context)),
            _POINTER(self._kv.data_ptr()),
        )
        return handle

    def _layer_struct(self, layer: LayerWeights) -> _PackedLayer:
        return _PackedLayer(
            self._to_arena(layer.input_norm.float()),
            self._to_arena(layer.post_attention_norm.float()),
            self._to_arena(None if layer.query_norm is None else layer.query_norm.float()),
            self._to_arena(None if layer.key_norm is None else layer.key_norm.float()),
            self._linear_struct(layer.query, layer.key, layer.value),
            self._linear_struct(layer.output),
            self._linear_struct(layer.gate, layer.up, interleaved=True),
            self._linear_struct(layer.down),
        )

    def _linear_struct(self, *parts: Linear, interleaved: bool = False) -> _PackedLinear:
        """Packs matrices that multiply the same rows; ``interleaved``: their panels in turn, as one stream."""
        order = shared_order([part.weight for part in parts])
        packed_panels = [self._pack_part(part, order) for part in parts]
        panels = [part.panels.flatten(1).view(torch.uint8) for part in packed_panels]
        widths = [part.shape[1] for part in panels]
        if interleaved:
            first = self._arena.copy(torch.cat(panels, dim=1))
            addresses, strides = (
                [first + before for before in accumulate(widths[:-1], initial=0)],
                [sum(widths)] * len(parts),
            )
        else:
            addresses, strides = [self._arena.copy(part) for part in panels], widths
        packed = map(self._part_struct, parts, packed_panels, addresses, strides)
        return _PackedLinear(
            (_PackedPart * _MAX_PARTS)(*packed), self._to_arena(order), len(parts), parts[0].weight.shape[1]
        )

    def _pack_part(self, part: Linear, order: torch.Tensor | None) -> Panels:
        packed_panels = pack_panels(part.weight, self._kernels, order, self._floats)
        self._precisions.append(packed_panels.stored_as)
        self.weight_bytes[packed_panels.stored_as] = (
            self.weight_bytes.get(packed_panels.stored_as, 0) + packed_panels.nbytes
        )
        return packed_panels

    def _part_struct(self, part: Linear, packed_panels: Panels, address: int, stride: int) -> _PackedPart:
        bias = None if part.bias is None else pad_to_groups(part.bias.float(), 2 * self._kernels.lanes).contiguous()
        return _PackedPart(
            _POINTER(address),
            self._to_arena(packed_panels.scales),
            self._to_arena(bias),
            part.weight.shape[0],
            packed_panels.format,
            packed_panels.group,
            stride,
        )

    def _to_arena(self, tensor: torch.Tensor | None) -> ctypes.c_void_p:
        return _POINTER(None if tensor is None else self._arena.copy(tensor))


def check_shape(config: ModelConfig) -> None:
    """Checks that the kernels support the shape of this model.

    Raises:
        RunnerUnavailable: the model has a feature that Llama does not have, or a size is not a multiple of the vector
            width.
    """
    if features := config.features_beyond_llama():
        raise RunnerUnavailable(f"the fused step does not support {', '.join(features)}")
    for field, multiple in (("hidden_size", 16), ("head_dim", 64)):
        if (value := getattr(config, field)) % multiple:
            raise RunnerUnavailable(f"{field} is {value}, not a multiple of {multiple}")


def _precision_name(layers: Sequence[str], head: str) -> str:
    """A name for the schemes of all matrices; models with different schemes never share one."""
    kinds = set(layers)
    kind = "+".join(kinds)
    if (kind, head) in _NAMED:
        return _NAMED[kind, head]
    digest = xxhash.xxh3_64_hexdigest("\n".join(layers).encode())[:8]
    name = kind if len(kinds) == 1 else f"mixed-{digest}"
    return name if name == head and name not in _NAMED.values() else f"{name}-head-{head}"
