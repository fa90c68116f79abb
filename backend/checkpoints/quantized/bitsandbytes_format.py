"""What bitsandbytes' files hold of a weight in NF4, and what the config says of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from backend.quantized_weights.nf4_scheme import LEVELS, SCALES_PER_BLOCK, Nf4Linear

STATE = "weight.quant_state.bitsandbytes__nf4"
"""Name of the tensor whose bytes are a JSON object."""


def nf4_tensors(linear: Nf4Linear, dtype: str) -> dict[str, torch.Tensor]:
    """A weight bit for bit, by the end of the tensors' names.

    weight uint8 [out * in / 2, 1], weight.absmax [blocks] (uint8 where scales have scales), weight.quant_map [16],
    weight.nested_absmax [blocks / 256], weight.nested_quant_map [256], and the state: JSON in uint8.

    Args:
        dtype: what the weight is widened to, such as ``bfloat16``.
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
        double: whether the scales of any weight are in eight bits themselves.
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
    """Between the order of `nibbles` and bitsandbytes', which has the first of two in the high half."""
    return codes >> 4 | codes << 4
