"""The format of bitsandbytes: reads and writes NF4 (arXiv 2305.14314), reads LLM.int8 (arXiv 2208.07339)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from backend.checkpoints.module_tensors import ModuleTensors
from backend.checkpoints.quantized.integer_weights import int_linear
from backend.checkpoints.tensor_store import TensorStore
from backend.models.json_fields import Fields
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.nf4_scheme import LEVELS, SCALES_PER_BLOCK, BlockScales, Nf4Linear, Nf4Scheme
from backend.quantized_weights.quantized_linear import MAX_SCALE, CannotQuantize


class BitsAndBytesReader:
    """Four bits that index quantiles, or int8 with a scale for each output."""

    def __init__(self, values: Mapping[str, Any], store: TensorStore, source: str) -> None:
        fields = Fields(values, source)
        self._store = store
        self._eight_bits = fields.flag("load_in_8bit")
        if self._eight_bits == fields.flag("load_in_4bit"):
            raise fields.error("load_in_4bit", "that either it or load_in_8bit is true")
        if not self._eight_bits:
            if values.get("bnb_4bit_quant_type", "fp4") != "nf4":
                raise fields.error("bnb_4bit_quant_type", "nf4")
            if values.get("bnb_4bit_quant_storage", "uint8") not in ("uint8", None):
                raise fields.error("bnb_4bit_quant_storage", "uint8")

    def linear(self, name: str, out_features: int, in_features: int) -> Nf4Linear | IntLinear | None:
        """See `CheckpointReader.linear`."""
        module = ModuleTensors(self._store, name, out_features, in_features)
        if module.is_plain:
            return None
        return _int8(module) if self._eight_bits else _nf4(module)


def _int8(module: ModuleTensors) -> IntLinear:
    """weight int8 [out, in] times SCB [out] / 127."""
    if module.has("weight_format") and (layout := int(module.take("weight_format", (torch.uint8,), ()))) != 0:
        raise module.error("weight_format", f"is {layout}, expected 0: row after row")
    codes = module.take("weight", (torch.int8,), module.shape)
    scales = module.scales("SCB", (module.out_features,)).float() / 127
    return int_linear(module, IntScheme(8), (codes.to(torch.int16) + 128).to(torch.uint8), scales.unsqueeze(1))


def _nf4(module: ModuleTensors) -> Nf4Linear:
    """See `nf4_tensors`."""
    state = _state(module)
    scheme = Nf4Scheme(state.count("blocksize"), double="nested_blocksize" in state.values)
    try:
        scheme.check(*module.shape)
    except CannotQuantize as error:
        raise CannotQuantize(f"{module.store.directory}: {module.name}: {error}") from error
    if state.values.get("shape") != list(module.shape):
        raise state.error("shape", f"{list(module.shape)}")
    weights = module.out_features * module.in_features
    codes = swap_nibbles(module.take("weight", (torch.uint8,), (weights // 2, 1), (1, weights // 2)))
    if not torch.allclose(module.scales("weight.quant_map", (16,)).float(), torch.tensor(LEVELS), rtol=0, atol=1e-6):
        raise module.error("weight.quant_map", "holds other levels than those of NF4")
    packed = codes.view(module.out_features, -1)
    return Nf4Linear(scheme, packed, _block_scales(module, state, weights // scheme.block_size))


def _state(module: ModuleTensors) -> Fields:
    """The JSON object that describes a weight's format."""
    tensor = module.raw(STATE)
    if tensor.dtype != torch.uint8 or tensor.ndim != 1:
        raise module.error(STATE, f"is {tensor.dtype} {list(tensor.shape)}, expected bytes")
    try:
        values = json.loads(bytes(tensor.tolist()))
    except (ValueError, RecursionError) as error:
        raise module.error(STATE, f"holds no JSON ({error})") from error
    if not isinstance(values, dict) or values.get("quant_type") != "nf4":
        raise module.error(STATE, "holds no state of NF4")
    return Fields(values, f"{module.store.path(f'{module.name}.{STATE}')}: tensor {module.name}.{STATE}")


def _block_scales(module: ModuleTensors, state: Fields, blocks: int) -> BlockScales:
    if "nested_blocksize" not in state.values:
        return BlockScales(module.scales("weight.absmax", (blocks,)).float())
    if state.count("nested_blocksize") != SCALES_PER_BLOCK:
        raise state.error("nested_blocksize", f"{SCALES_PER_BLOCK}")
    offset = state.values.get("nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not abs(offset) <= MAX_SCALE:
        raise state.error("nested_offset", f"a number no further from zero than {MAX_SCALE:g}")
    return BlockScales(
        module.take("weight.absmax", (torch.uint8,), (blocks,)),
        module.scales("weight.nested_quant_map", (256,), most=1).float(),
        module.scales("weight.nested_absmax", (-(-blocks // SCALES_PER_BLOCK),)).float(),
        float(offset),
    )


STATE = "weight.quant_state.bitsandbytes__nf4"
"""Name of the tensor whose bytes are a JSON object."""


def nf4_tensors(linear: Nf4Linear, dtype: str) -> dict[str, torch.Tensor]:
    """A weight, bit for bit, by the suffix of tensor names.

    weight uint8 [out * in / 2, 1], weight.absmax [blocks] (uint8 if scales have scales), weight.quant_map [16],
    weight.nested_absmax [blocks / 256], weight.nested_quant_map [256], and the state: JSON in uint8.

    Args:
        dtype: of the dequantised weight, such as ``bfloat16``.
    """
    scales = linear.scales
    tensors = {
        "weight": swap_nibbles(linear.codes).view(-1, 1),
        "weight.absmax": scales.codes,
        "weight.quant_map": torch.tensor(LEVELS, dtype=torch.float32),
    }
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": linear.scheme.block_size,
        "dtype": dtype,
        "shape": list(linear.shape),
    }
    if scales.of_scales is not None and scales.table is not None:
        tensors |= {"weight.nested_absmax": scales.of_scales, "weight.nested_quant_map": scales.table}
        nested = {"nested_blocksize": SCALES_PER_BLOCK, "nested_dtype": "float32", "nested_offset": scales.offset}
        state |= nested
    tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors


def nf4_config(double: bool, dtype: str, left_alone: Sequence[str]) -> dict[str, Any]:
    """``quantization_config``.

    Args:
        double: whether the scales of any weight are in eight bits.
        dtype: of the activations, such as ``bfloat16``.
        left_alone: names of modules that are plain.
    """
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(left_alone),
    }


def swap_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Swaps `pack_nibbles`' order and bitsandbytes', which has the first code in the high nibble."""
    return codes >> 4 | codes << 4
