"""Reads GPTQ checkpoints (arXiv 2210.17323): AutoGPTQ's format ``gptq`` and GPTQModel's ``gptq_v2``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from backend.checkpoints.module_tensors import ModuleTensors
from backend.checkpoints.quantized.integer_weights import (
    group_order,
    int_linear,
    packed_bits,
    packed_group_size,
    unpack_words,
    words_of,
)
from backend.checkpoints.quantized.targets import Pattern
from backend.checkpoints.tensor_store import TensorStore
from backend.models.json_fields import Fields
from backend.quantized_weights.int_scheme import IntLinear, IntScheme

# ``gptq`` stores the code of zero minus one. The one was subtracted from whole words, borrows included.
_ONES: Mapping[Literal[4, 8], int] = {4: 0x11111111, 8: 0x01010101}


class GptqReader:
    """``scale * (code - zero)``, four or eight bits, inputs optionally reordered (act-order)."""

    def __init__(self, values: Mapping[str, Any], store: TensorStore, source: str) -> None:
        fields = Fields(values, source)
        self._store = store
        self._values = values
        self._source = source
        self._settings = _Settings(fields)
        if values.get("rotation"):
            raise fields.error("rotation", "absent: rows must be multiplied as they are")
        # Settings of some modules, by pattern; a pattern that begins with "-:" names modules that are plain.
        dynamic = values.get("dynamic") or {}
        if not isinstance(dynamic, dict) or not all(isinstance(of, dict) for of in dynamic.values()):
            raise fields.error("dynamic", "an object of objects, by pattern")
        self._others = [
            (text.startswith("-:"), Pattern(text.removeprefix("-:").removeprefix("+:"), fields, "dynamic"), of)
            for text, of in dynamic.items()
        ]

    def linear(self, name: str, out_features: int, in_features: int) -> IntLinear | None:
        """See `CheckpointReader.linear`."""
        module = ModuleTensors(self._store, name, out_features, in_features)
        if not module.has("qweight") and module.is_plain:
            return None
        settings = self._settings_of(name)
        if settings is None:
            raise module.error("qweight", f"is of a module that {self._source} leaves alone in dynamic")
        return settings.read(module)

    def _settings_of(self, name: str) -> _Settings | None:
        for left_alone, pattern, values in self._others:
            if pattern.match(name):
                return None if left_alone else _Settings(Fields({**self._values, **values}, self._source))
        return self._settings


class _Settings:
    """A module's ``quantization_config``."""

    def __init__(self, fields: Fields) -> None:
        self._bits = packed_bits(fields, "bits")
        self._group_size = packed_group_size(fields, "group_size")
        self._symmetric = fields.flag("sym")
        form = fields.values.get("checkpoint_format") or fields.values.get("format") or "gptq"
        if form not in ("gptq", "gptq_v2"):
            raise fields.error(
                "checkpoint_format" if "checkpoint_format" in fields.values else "format", "gptq or gptq_v2"
            )
        self._less_one = form == "gptq"
        self._reordered = fields.flag("desc_act")
        if fields.values.get("pack_dtype", "int32") != "int32":
            raise fields.error("pack_dtype", "int32")

    def read(self, module: ModuleTensors) -> IntLinear:
        """qweight [in in words, out], qzeros [groups, out in words], scales [groups, out], g_idx [in]."""
        bits, (out_features, in_features) = self._bits, module.shape
        scheme = IntScheme(bits, self._group_size)
        if self._reordered and scheme.groups(in_features) > 1 and not module.has("g_idx"):
            raise module.error("g_idx", "is missing, though config.json says desc_act: no one knows the inputs' groups")
        order = group_order(module, "g_idx", scheme) if module.has("g_idx") else None
        groups = scheme.groups(in_features)
        words = module.take("qweight", (torch.int32,), (words_of(in_features, bits), out_features))
        codes = unpack_words(words.T, bits, in_features)
        kept_zeros = module.take("qzeros", (torch.int32,), (groups, words_of(out_features, bits)))
        zeros = unpack_words(kept_zeros + _ONES[bits] if self._less_one else kept_zeros, bits, out_features)
        if self._symmetric and not bool((zeros == scheme.middle).all()):
            raise module.error("qzeros", f"holds other zeros than {scheme.middle}, though config.json says sym")
        return int_linear(
            module,
            scheme,
            codes if order is None else codes[:, order.long()],
            module.scales("scales", (groups, out_features)).T,
            zeros.T,
            order=order,
        )
