"""Reads what compressed-tensors writes: integers in words or bytes, and eight-bit floats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.checkpoints.module_tensors import ModuleTensors
from backend.checkpoints.quantized.compressed_tensors_group import WeightGroup
from backend.checkpoints.quantized.targets import Targets
from backend.checkpoints.tensor_store import TensorStore
from backend.models.json_fields import Fields
from backend.quantized_weights.quantized_linear import QuantizedLinear


class CompressedTensorsReader:
    """Groups of modules, by name, pattern or class, each with its own scheme.

    Args:
        values: ``quantization_config``.
        source: where that is, for messages.

    Raises:
        ModelError: a field asks for what is not read here; names it.
    """

    def __init__(self, values: Mapping[str, Any], store: TensorStore, source: str) -> None:
        fields = Fields(values, source)
        self._store = store
        self._source = source
        sparsity = values.get("sparsity_config")
        if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense"):
            raise fields.error("sparsity_config", "absent: weights must not be sparse")
        transforms = values.get("transform_config")
        if transforms and transforms != {"config_groups": {}}:
            raise fields.error("transform_config", "absent: rows must be multiplied as they are")
        groups = values.get("config_groups")
        if not isinstance(groups, dict) or not groups or not all(isinstance(of, dict) for of in groups.values()):
            raise fields.error("config_groups", "an object of objects")
        self._groups = [
            WeightGroup(Fields(of, f"{source}: config_groups.{name}"), values.get("format"))
            for name, of in groups.items()
            if of.get("weights") is not None  # else of rows alone, or of keys and values
        ]
        self._ignored = Targets(fields, "ignore")

    def linear(self, name: str, out_features: int, in_features: int) -> QuantizedLinear | None:
        """See `CheckpointReader.linear`."""
        module = ModuleTensors(self._store, name, out_features, in_features)
        group = None if self._ignored.match(name) else self._group(name)
        if module.is_plain and not module.has("weight_scale"):
            if group is not None:
                raise module.error("weight", f"is plain, and {self._source} says that it is {group.form}")
            return None
        if group is None:
            raise module.error("weight", f"is not plain, and {self._source} names no group for it")
        return group.read(module)

    def _group(self, name: str) -> WeightGroup | None:
        """The one that names the module most closely: by its name, by a pattern, by its class."""
        ranks = {group: group.targets.match(name) for group in self._groups}
        return max((group for group in self._groups if ranks[group]), key=lambda group: ranks[group], default=None)
