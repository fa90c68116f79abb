"""Parts of quantised weights: some of the outputs, or some of the inputs where whole groups of them share a scale."""

from __future__ import annotations

from dataclasses import replace

import torch

from backend.quantized_weights.float_scheme import FloatLinear, FloatScheme
from backend.quantized_weights.fp8_scheme import Fp8Linear, Fp8Scheme
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.nf4_scheme import BlockScales, Nf4Linear
from backend.quantized_weights.quantized_linear import QuantizedLinear, Scheme


def rounds_outputs_alone(scheme: Scheme) -> bool:
    """Whether ``pack`` rounds an output the same way whatever the other outputs are."""
    return isinstance(scheme, FloatScheme | IntScheme) or (isinstance(scheme, Fp8Scheme) and scheme.scaled == "row")


def some_outputs(linear: QuantizedLinear, outputs: range) -> QuantizedLinear:
    """Some rows of a weight [out, in], bit for bit; owns its memory."""
    own = slice(outputs.start, outputs.stop)
    match linear:
        case FloatLinear():
            return FloatLinear(linear.scheme, linear.weight[own].clone())
        case IntLinear():
            return replace(
                linear,
                codes=linear.codes[own].clone(),
                scales=linear.scales[own].clone(),
                zeros=None if linear.zeros is None else linear.zeros[own].clone(),
                minima=None if linear.minima is None else linear.minima[own].clone(),
            )
        case Fp8Linear():
            scales = linear.scales if len(linear.scales) == 1 else linear.scales[own].clone()
            return Fp8Linear(linear.scheme, linear.codes[own].clone(), scales)
        case Nf4Linear():
            blocks = linear.shape[1] // linear.scheme.block_size
            scales = linear.scales.unpack()[own.start * blocks : own.stop * blocks].clone()
            return _nf4(linear, linear.codes[own].clone(), scales)
    raise TypeError(f"expected a weight in a known scheme, not {linear.scheme.name}")


def some_inputs(linear: QuantizedLinear, inputs: range, unit: int) -> QuantizedLinear | None:
    """Some columns of a weight [out, in], bit for bit; owns its memory.

    None: its product is no sum of products with parts. Activations are rounded with a scale for all inputs, or the
    columns are in another order than the inputs (act-order), or an end of a part may lie within a group.

    Args:
        unit: every part of the weight begins and ends at a multiple of it, so that all parts have the same answer.
    """
    scheme, own = linear.scheme, slice(inputs.start, inputs.stop)
    if scheme.activation_bits < 16:
        return None
    match linear:
        case FloatLinear():
            return FloatLinear(linear.scheme, linear.weight[:, own].clone())
        case IntLinear():
            size = linear.scheme.group_size
            of_codes = 2 if linear.scheme.bits == 4 else 1
            if linear.order is not None or unit % (size or 1) or unit % of_codes:
                return None
            groups = slice(None) if size is None else slice(own.start // size, own.stop // size)
            return replace(
                linear,
                codes=linear.codes[:, own.start // of_codes : own.stop // of_codes].clone(),
                scales=linear.scales[:, groups].clone(),
                zeros=None if linear.zeros is None else linear.zeros[:, groups].clone(),
                minima=None if linear.minima is None else linear.minima[:, groups].clone(),
            )
        case Fp8Linear():
            return Fp8Linear(linear.scheme, linear.codes[:, own].clone(), linear.scales)
        case Nf4Linear():
            size = linear.scheme.block_size
            if unit % size:
                return None
            scales = linear.scales.unpack().view(linear.shape[0], -1)[:, own.start // size : own.stop // size]
            return _nf4(linear, linear.codes[:, own.start // 2 : own.stop // 2].clone(), scales.flatten())
    raise TypeError(f"expected a weight in a known scheme, not {scheme.name}")


def _nf4(whole: Nf4Linear, codes: torch.Tensor, scales: torch.Tensor) -> Nf4Linear:
    """With the scales of blocks as floats: those in eight bits have a scale for each 256, which ends amid a row."""
    return Nf4Linear(whole.scheme, codes, BlockScales(scales))
