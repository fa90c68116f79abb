"""What of a model has been quantised while it is written, and so what its config is to say."""

from __future__ import annotations

import json
from typing import Any

import torch

from backend.checkpoints.quantized.bitsandbytes_format import nf4_config, nf4_tensors
from backend.checkpoints.quantized.compressed_tensors_format import compressed, compressed_config
from backend.quantized_weights.errors import CannotQuantize
from backend.quantized_weights.float_scheme import FloatLinear
from backend.quantized_weights.nf4_scheme import Nf4Linear
from backend.quantized_weights.quantized_linear import QuantizedLinear


class QuantizedModules:
    """Takes weights one after the other, each in the format that holds its scheme.

    Args:
        dtype: of the model's activations, as its config names it.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self.left_alone: list[str] = []
        """Names of linear layers that are plain; whoever writes one adds it."""
        self._groups: dict[str, tuple[dict[str, Any], list[str]]] = {}  # of compressed-tensors, by their JSON
        self._nf4: list[bool] = []  # of weights in NF4: whether their scales have scales

    def parts(self, module: str, linear: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The tensors of a module, by the end of their names. Raises CannotQuantize, which names it."""
        if isinstance(linear, FloatLinear):
            self.left_alone.append(module)
            return {"weight": linear.weight}
        if isinstance(linear, Nf4Linear):
            self._nf4.append(linear.scheme.double)
            parts = nf4_tensors(linear, self._dtype)
        else:
            try:
                of_module = compressed(linear)
            except CannotQuantize as error:
                raise CannotQuantize(f"{module}: {error}") from error
            self._groups.setdefault(json.dumps(of_module.group), (of_module.group, []))[1].append(module)
            parts = of_module.tensors
        if self._nf4 and self._groups:
            raise CannotQuantize(f"{module}: {linear.scheme.name} needs another format than the weights before it")
        return parts

    def config(self) -> dict[str, Any]:
        """The field of config.json; nothing where all is plain."""
        if self._nf4:
            return {"quantization_config": nf4_config(any(self._nf4), self._dtype, self.left_alone)}
        if self._groups:
            return {"quantization_config": compressed_config(list(self._groups.values()), self.left_alone)}
        return {}
