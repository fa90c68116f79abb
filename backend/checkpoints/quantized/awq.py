"""Reads AWQ checkpoints (arXiv 2306.00978) in AutoAWQ's layout ``gemm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from backend.checkpoints.module_tensors import ModuleTensors
from backend.checkpoints.quantized.integer_weights import check_shape, int_linear, packed_group_size, unpack_words
from backend.checkpoints.tensor_store import TensorStore
from backend.models.json_fields import Fields
from backend.quantized_weights.int_scheme import IntLinear, IntScheme

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of the code of each of eight outputs: the order that GPU kernels unpack."""


class AwqReader:
    """``scale * (code - zero)``, four bits, words along the outputs."""

    def __init__(self, values: Mapping[str, Any], store: TensorStore, source: str) -> None:
        fields = Fields(values, source)
        self._store = store
        # Older files have the names of the tool's own options.
        bits = "bits" if "bits" in values else "w_bit"
        if fields.count(bits) != 4:
            raise fields.error(bits, "4")
        size = "group_size" if "group_size" in values else "q_group_size"
        self._group_size = packed_group_size(fields, size)
        layout = next((name for name in ("version", "checkpoint_format", "format") if name in values), "version")
        if str(values.get(layout, "gemm")).lower() != "gemm":
            raise fields.error(layout, "gemm")

    def linear(self, name: str, out_features: int, in_features: int) -> IntLinear | None:
        """See `CheckpointReader.linear`: qweight [in, out in words], qzeros [groups, out in words], scales."""
        module = ModuleTensors(self._store, name, out_features, in_features)
        if not module.has("qweight") and module.is_plain:
            return None
        scheme = IntScheme(4, self._group_size)
        check_shape(module, scheme)
        if out_features % 8:
            raise module.error("qweight", f"cannot be of {out_features} outputs, expected a multiple of 8")
        groups, words = scheme.groups(in_features), out_features // 8
        codes = module.take("qweight", (torch.int32,), (in_features, words))
        zeros = module.take("qzeros", (torch.int32,), (groups, words))
        scales = module.scales("scales", (groups, out_features))
        return int_linear(module, scheme, _outputs(codes).T, scales.T, _outputs(zeros).T)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, out / 8] to codes uint8 [rows, out]."""
    places = unpack_words(words, 4, 8 * words.shape[1]).view(len(words), -1, 8)
    return places[:, :, _PLACES].flatten(1)
