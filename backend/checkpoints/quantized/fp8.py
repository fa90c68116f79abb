"""Reads checkpoints in eight-bit floats: ``fp8`` of vLLM's tools and of fine-grained scales, and ``fbgemm_fp8``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.checkpoints.module_tensors import ModuleTensors
from backend.checkpoints.quantized.float_weights import block_shape, fp8_linear
from backend.checkpoints.tensor_store import TensorStore
from backend.models.json_fields import Fields
from backend.quantized_weights.float_scheme import FloatLinear
from backend.quantized_weights.fp8_scheme import Fp8Linear


class Fp8Reader:
    """E4M3 times a scale for the weight, each row or each block. Scales of activations are left aside.

    Args:
        values: ``quantization_config``.
        source: where that is, for messages.

    Raises:
        ModelError: a field asks for what is not read here; names it.
    """

    def __init__(self, values: Mapping[str, Any], store: TensorStore, source: str) -> None:
        self._store = store
        self._block = None
        if values.get("weight_block_size") is not None:
            self._block = block_shape(values["weight_block_size"])
            if self._block is None:
                raise Fields(values, source).error("weight_block_size", "two positive integers")

    def linear(self, name: str, out_features: int, in_features: int) -> Fp8Linear | FloatLinear | None:
        """See `CheckpointReader.linear`: weight float8_e4m3fn, weight_scale or weight_scale_inv."""
        module = ModuleTensors(self._store, name, out_features, in_features)
        if module.is_plain:
            return None
        # The name with "inv" means the same: what a weight is multiplied with, the inverse of what it was.
        scale = "weight_scale_inv" if module.has("weight_scale_inv") else "weight_scale"
        return fp8_linear(module, scale, self._block)
