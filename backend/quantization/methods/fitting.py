"""Finds a scheme that fits a weight's shape if the requested one does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from backend.quantization.calibration.decoder_layer import Group
from backend.quantized_weights.float_scheme import FloatScheme
from backend.quantized_weights.int_scheme import IntScheme
from backend.quantized_weights.quantized_linear import CannotQuantize, Scheme

Schemes = Callable[[int, Group, int, int], tuple[Scheme, str | None]]
"""(layer, group, outputs, inputs) to a matrix's scheme, and the reason in words if it is not the requested one."""

_GROUP_SIZES = (128, 64, 32)


def fitting(scheme: Scheme, out_features: int, in_features: int, left: FloatScheme) -> tuple[Scheme, str | None]:
    """The scheme, or the nearest to it that a weight of this shape can have.

    Groups that do not divide the inputs become the next smaller of 128, 64 and 32 that do, or one for each output.

    Args:
        left: scheme of a weight that cannot be quantised.

    Returns:
        The scheme, and in words why it is another one, else None.
    """
    asked = scheme
    if isinstance(scheme, IntScheme) and scheme.group_size is not None and in_features % scheme.group_size:
        smaller = (size for size in _GROUP_SIZES if size < scheme.group_size and in_features % size == 0)
        scheme = replace(scheme, group_size=next(smaller, None))
    try:
        scheme.check(out_features, in_features)
    except CannotQuantize as error:
        return left, f"left in {left.name}: {error}"
    if scheme == asked:
        return scheme, None
    return scheme, f"{scheme.name} in place of {asked.name}, whose groups do not divide {in_features} inputs"
