"""Rounds every weight of a model to nearest, without calibration."""

from __future__ import annotations

from dataclasses import replace

import torch

from backend.model_loader.linears import Weight, map_linears
from backend.model_loader.weights import ModelWeights
from backend.quantization.selection.summary import RoundingError
from backend.quantized_weights.quantized_linear import CannotQuantize, QuantizedLinear, Scheme


def rounded(
    weights: ModelWeights, scheme: Scheme, head: Scheme | None = None, error: RoundingError | None = None
) -> ModelWeights:
    """A model with its linear layers in a scheme. Quantised weights, the embedding and norms stay as they are.

    Args:
        head: scheme of the head; None: it stays as it is.
        error: sums up the loss; None: not measured, which is faster.

    Raises:
        CannotQuantize: a weight does not fit; names it.
    """

    def pack(name: str, weight: Weight, into: Scheme) -> QuantizedLinear:
        if not isinstance(weight, torch.Tensor):
            return weight
        try:
            packed = into.pack(weight)
        except CannotQuantize as refusal:
            raise CannotQuantize(f"{name}: {refusal}") from refusal
        if error is not None:
            error.note(weight, packed)
        return packed

    packed = map_linears(weights, lambda name, weight: pack(name, weight, scheme))
    return packed if head is None else replace(packed, head=pack("lm_head", packed.head, head))
