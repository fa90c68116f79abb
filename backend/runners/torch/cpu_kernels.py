"""Ways in which torch multiplies with quantised weights on a CPU: none is the fastest always, or right everywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch

from backend.quantized_weights.int_scheme import IntLinear
from backend.quantized_weights.quantized_linear import QuantizedLinear, row_scales

Product = Callable[[torch.Tensor], torch.Tensor]
"""Rows [T, in] to [T, out], in their dtype."""


_INT8_MULTIPLE = 32
"""Inputs of a product that torch's operator reads: for others it reads beyond them, and the process may die."""

ALWAYS = "widened"
"""The way that every weight has: what its bits say as floats, made for each product anew."""


def ways(linear: QuantizedLinear) -> dict[str, Callable[[], Product]]:
    """What makes each product that this weight may be multiplied by."""
    found: dict[str, Callable[[], Product]] = {ALWAYS: lambda: linear.matmul}
    if not isinstance(linear, IntLinear):
        return found
    scheme = linear.scheme
    if scheme.bits == 8 and scheme.zero == "middle":
        if scheme.activation_bits < 16 and scheme.group_size is None:
            found["onednn"] = lambda: OneDnnProduct(linear)
        elif scheme.activation_bits == 16 and (scheme.group_size or linear.shape[1]) % _INT8_MULTIPLE == 0:
            found["int8pack"] = lambda: Int8Product(linear)
    if scheme.bits == 4 and scheme.group_size is not None:
        found["int4pack"] = lambda: Int4Product(linear)
    return found


class OneDnnProduct:
    """oneDNN's integers: rows as uint8 around 128, each with its scale, and exact sums.

    The operator knows one scale for all rows, so it is told 1 and the rows' own are multiplied in afterwards: what else
    is in the batch changes nothing. Without VNNI instructions it adds pairs of products in 16 bits, which overflow.
    """

    def __init__(self, linear: IntLinear) -> None:
        self._order = None if linear.order is None else linear.order.long()
        signed = (linear.codes.to(torch.int16) - linear.scheme.middle).to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(signed, None)
        self._scales = linear.scales.squeeze(1).contiguous()
        self._zeros = torch.zeros(len(signed), dtype=torch.int64)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Product`."""
        if self._order is not None:
            x = x[:, self._order]
        scales = row_scales(x)
        rows = (torch.round(x.float() / scales) + 128).to(torch.uint8)
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            *(rows, 1.0, 128, self._weight, self._scales, self._zeros),
            *(None, 1.0, 0, torch.float32, "none", [], ""),
        )
        return (y * scales).to(x.dtype)


class Int8Product:
    """torch's product with int8 weights and activations in bfloat16, for each group of inputs, summed up as floats."""

    def __init__(self, linear: IntLinear) -> None:
        self._order = None if linear.order is None else linear.order.long()
        signed = (linear.codes.to(torch.int16) - linear.scheme.middle).to(torch.int8)
        weights = signed.chunk(linear.scales.shape[1], dim=1)
        scales = linear.scales.to(torch.bfloat16).unbind(1)
        self._groups = [(weight.contiguous(), of.contiguous()) for weight, of in zip(weights, scales, strict=True)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Product`."""
        rows = (x if self._order is None else x[:, self._order]).to(torch.bfloat16)
        product = torch.ops.aten._weight_int8pack_mm
        parts = zip(rows.chunk(len(self._groups), dim=1), self._groups, strict=True)
        total: torch.Tensor = sum(product(part.contiguous(), *group).float() for part, group in parts)
        return total.to(x.dtype)


class Int4Product:
    """torch's product with weights of four bits in groups, whose activations are bfloat16."""

    def __init__(self, linear: IntLinear) -> None:
        self._order = None if linear.order is None else linear.order.long()
        self._group_size = linear.scheme.group_size
        grid = linear.grid
        # The operator's weight is scale * (code - 8) + zero.
        zeros = grid.offsets + linear.scheme.middle * grid.scales
        self._numbers = torch.stack([grid.scales, zeros], dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(linear.plain_codes().int(), 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Product`."""
        rows = (x if self._order is None else x[:, self._order]).to(torch.bfloat16).contiguous()
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self._weight, self._group_size, self._numbers
        )
        return y.to(x.dtype)
