"""The formats ``fp8`` (of vLLM's tools, and with scales for blocks) and ``fbgemm_fp8``: reads eight-bit floats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from backend.checkpoints.module_tensors import ModuleTensors
from backend.checkpoints.tensor_store import TensorStore
from backend.models.json_fields import Fields
from backend.quantized_weights.float_scheme import FloatLinear, FloatScheme
from backend.quantized_weights.fp8_scheme import Fp8Linear, Fp8Scheme


class Fp8Reader:
    """E4M3 times a scale for the weight, each row or each block. Scales of activations are ignored."""

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
        # "inv" names the same scale: the inverse of the one that the weight was quantised with.
        scale = "weight_scale_inv" if module.has("weight_scale_inv") else "weight_scale"
        return fp8_linear(module, scale, self._block)


def fp8_linear(
    module: ModuleTensors,
    scale: str,
    block: tuple[int, int] | None = None,
    scaled: Literal["row", "tensor"] | None = None,
) -> Fp8Linear | FloatLinear:
    """weight float8_e4m3fn [out, in] times its scales.

    A weight with a scale for each block of rows and columns is widened to bfloat16, and so rounded once.

    Args:
        scale: name of the scales.
        block: rows and columns that share a scale; None: a row or the whole weight does.
        scaled: which of these does; None: the shape of the scales decides.

    Raises:
        ModelError: a tensor is missing, of another shape or dtype, or holds NaN.
    """
    codes = module.take("weight", (torch.float8_e4m3fn,), module.shape)
    if bool((codes.view(torch.uint8) & 127 == 127).any()):
        raise module.error("weight", "holds a value that is not a number")
    if block is None:
        of_rows: tuple[tuple[int, ...], ...] = ((module.out_features, 1), (module.out_features,))
        of_all: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
        shapes = {"row": of_rows, "tensor": of_all, None: (*of_rows, *of_all)}[scaled]
        scales = module.scales(scale, *shapes).float()
        scaled = scaled or ("row" if scales.shape == of_rows[0] or scales.numel() > 1 else "tensor")
        return Fp8Linear(Fp8Scheme(scaled), codes, scales.reshape(-1, 1).contiguous())
    rows, columns = block
    scales = module.scales(scale, (-(-module.out_features // rows), -(-module.in_features // columns))).float()
    each = scales.repeat_interleave(rows, 0)[: module.out_features].repeat_interleave(columns, 1)
    return FloatLinear(FloatScheme(), (codes.float() * each[:, : module.in_features]).to(torch.bfloat16))


def block_shape(block: object) -> tuple[int, int] | None:
    """Rows and columns from a config's value; None if it is no pair of positive integers."""
    if not isinstance(block, list | tuple) or len(block) != 2:
        return None
    rows, columns = block
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in block):
        return None
    return rows, columns
