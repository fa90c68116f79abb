"""Applies ``--quantization``: chooses the schemes of a model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from backend.model_loader.linears import Weight
from backend.model_loader.weights import ModelWeights, SchemeOf
from backend.quantization.methods.fitting import fitting
from backend.quantization.selection.rounding import rounded
from backend.quantization.selection.summary import RoundingError, Summary, summarise
from backend.quantized_weights.float_scheme import FloatScheme
from backend.quantized_weights.fp8_scheme import Fp8Scheme
from backend.quantized_weights.int_scheme import IntScheme
from backend.quantized_weights.names import CALIBRATED_QUANTIZATIONS, Quantization
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import CannotQuantize, Scheme

_HEAD = IntScheme(8, 64)
"""Four bits would lose most in the head, as would one scale for all inputs, or FP8: its weights vary as widely as the
embedding's, and many models tie the two."""
ROUNDINGS: Mapping[str, tuple[Scheme, Scheme]] = {
    "int8": (IntScheme(8), _HEAD),
    "int4": (IntScheme(4, 32, "minimum"), _HEAD),
    "fp8": (Fp8Scheme(), _HEAD),
    "nf4": (Nf4Scheme(), _HEAD),
}
"""Schemes of round-to-nearest by ``--quantization`` name: of the layers, and of the head."""


def quantised(weights: ModelWeights, name: str) -> tuple[ModelWeights, Summary | None]:
    """A model's weights as served, and their summary; None: they are floats.

    Args:
        name: one of ``ROUNDINGS``; one of ``CALIBRATED_QUANTIZATIONS``, if the layers are its result; or ``none``:
            as in the model's files.

    Raises:
        CannotQuantize: a weight does not fit, or they are quantised already.
    """
    found = summarise(weights)
    if name == "none":
        return weights, found
    if name in CALIBRATED_QUANTIZATIONS:
        head = weights.head
        packed = replace(weights, head=_fitting(_HEAD, head).pack(head)) if isinstance(head, torch.Tensor) else weights
        return packed, summarise(packed)
    if found is not None:
        schemes = ", ".join(scheme for scheme in found.schemes if scheme != "float")
        raise CannotQuantize(
            f"--quantization {name}: the model's files are quantised already ({schemes}); expected none"
        )
    error = RoundingError()
    try:
        layers, head_scheme = ROUNDINGS[name]
        packed = rounded(weights, layers, _fitting(head_scheme, weights.head), error)
    except CannotQuantize as refusal:
        raise CannotQuantize(f"--quantization {name}: {refusal}") from refusal
    return packed, summarise(packed, error.relative)


def scheme_of(name: Quantization) -> SchemeOf | None:
    """How `quantised` rounds each weight, for those who read the weights themselves; None: it rounds none.

    Args:
        name: as there.
    """
    if name == "none":
        return None
    layers, head = ROUNDINGS.get(name, (None, _HEAD))

    def scheme(layer: str, outputs: int, inputs: int) -> Scheme | None:
        return fitting(head, outputs, inputs, FloatScheme())[0] if layer == "lm_head" else layers

    return scheme


def _fitting(scheme: Scheme, head: Weight) -> Scheme:
    """The scheme of a head, in smaller groups where its own do not divide the inputs."""
    outputs, inputs = head.shape
    return fitting(scheme, outputs, inputs, FloatScheme())[0]
