"""What ``--quantization`` means: in which schemes the weights of a model are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from backend.quantization.errors import CannotQuantize
from backend.quantization.fp8_scheme import Fp8Scheme
from backend.quantization.int_scheme import IntScheme
from backend.quantization.names import WITH_A_TEXT
from backend.quantization.nf4_scheme import Nf4Scheme
from backend.quantization.quantized_linear import Scheme
from backend.quantization.rounding import rounded
from backend.quantization.summary import RoundingError, Summary, summarise
from backend.weights import ModelWeights

ROUNDINGS: Mapping[str, tuple[Scheme, Scheme]] = {
    "int8": (IntScheme(8), IntScheme(8)),
    "int4": (IntScheme(4, 32, "minimum"), IntScheme(8)),
    "fp8": (Fp8Scheme(), Fp8Scheme()),
    "nf4": (Nf4Scheme(), IntScheme(8)),
}
"""Rounding to the nearest by the name that it is asked for with: of the layers, and of the head, where four bits would
cost most."""


_HEAD = IntScheme(8)
"""Beside layers that were quantised with a look at a text."""


def quantised(weights: ModelWeights, name: str) -> tuple[ModelWeights, Summary | None]:
    """A model's weights as they are served, and what that is; None: they are floats.

    Args:
        name: of ``ROUNDINGS``; of ``names.WITH_A_TEXT``, of which these are the layers; or ``none``: as they are in the
            model's files.

    Raises:
        CannotQuantize: a weight does not fit, or they are quantised already.
    """
    found = summarise(weights)
    if name == "none":
        return weights, found
    if name in WITH_A_TEXT:
        head = weights.head if not isinstance(weights.head, torch.Tensor) else _HEAD.pack(weights.head)
        packed = replace(weights, head=head)
        return packed, summarise(packed)
    if found is not None:
        schemes = ", ".join(scheme for scheme in found.schemes if scheme != "float")
        raise CannotQuantize(
            f"--quantization {name}: the model's files are quantised already ({schemes}); expected none"
        )
    error = RoundingError()
    try:
        packed = rounded(weights, *ROUNDINGS[name], error)
    except CannotQuantize as refusal:
        raise CannotQuantize(f"--quantization {name}: {refusal}") from refusal
    return packed, summarise(packed, error.relative)
