"""Products with quantised weights in torch on a CPU: the fastest correct kernel for each number of rows.

Which kernel is the fastest depends on the CPU and the shape, and some are missing or wrong in some builds of torch. So
each is checked and timed once for each scheme and shape.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from backend.quantized_weights.int_scheme import IntLinear
from backend.quantized_weights.quantized_linear import QuantizedLinear, reference, row_scales

_ROWS = (1, 4, 16, 64)
"""Numbers of rows that are timed; others use the result of the next smaller one."""
_MAX_RELATIVE_ERROR = 0.01
"""Largest relative error of a correct kernel: some round activations to bfloat16."""
_TIMES = 3


@dataclass(slots=True)
class KernelTable:
    """The fastest kernels for each scheme and shape, timed with the first weight that has them."""

    _chosen: dict[tuple[str, tuple[int, int]], tuple[str, ...]] = field(default_factory=dict)

    def choose(self, linear: QuantizedLinear) -> tuple[str, ...]:
        """The name of a kernel for each number of rows in ``_ROWS``."""
        key = (linear.scheme.name, linear.shape)
        if key not in self._chosen:
            self._chosen[key] = _fastest_kernels(linear)
        return self._chosen[key]


class QuantizedMatmul:
    """A quantised weight with the kernels that the table chose for it."""

    def __init__(self, linear: QuantizedLinear, table: KernelTable) -> None:
        names = table.choose(linear)
        makers = kernel_factories(linear)
        products = {name: makers[name]() for name in set(names)}
        self._by_rows = [products[name] for name in names]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [T, in] to [T, out], in their dtype."""
        return self._by_rows[max(0, bisect.bisect_right(_ROWS, len(x)) - 1)](x)


def _fastest_kernels(linear: QuantizedLinear) -> tuple[str, ...]:
    correct = _correct_kernels(linear)
    seconds = [{name: _seconds(product, rows, linear.shape[1]) for name, product in correct.items()} for rows in _ROWS]
    if linear.scheme.activation_bits == 16:
        return tuple(min(of_rows, key=of_rows.__getitem__) for of_rows in seconds)
    # With quantised activations a row's result must not depend on the number of rows, so one kernel serves all.
    least = min(correct, key=lambda name: sum(of_rows[name] / min(of_rows.values()) for of_rows in seconds))
    return (least,) * len(_ROWS)


def _correct_kernels(linear: QuantizedLinear) -> dict[str, Matmul]:
    """The kernels whose result is right here. An operator may be missing in a build, or wrong on a CPU."""
    x = torch.randn(5, linear.shape[1], generator=torch.Generator().manual_seed(0))
    expected = reference(linear, x)
    correct: dict[str, Matmul] = {}
    for name, make in kernel_factories(linear).items():
        try:
            product = make()
            got = product(x).double()
        except (RuntimeError, AttributeError):  # the operator refuses this shape, or there is none
            if name == DEQUANTIZE:
                raise
            continue
        error = (got - expected).norm() / expected.norm().clamp(min=1e-30)
        if name == DEQUANTIZE or float(error) <= _MAX_RELATIVE_ERROR:
            correct[name] = product
    return correct


def _seconds(product: Matmul, rows: int, inputs: int) -> float:
    x = torch.randn(rows, inputs)
    taken = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        product(x)
        taken.append(time.perf_counter() - began)
    return min(taken)


Matmul = Callable[[torch.Tensor], torch.Tensor]
"""Rows [T, in] to [T, out], in their dtype."""


_INT8_MULTIPLE = 32
"""torch's operator needs a multiple of so many inputs: for others it reads out of bounds and may crash."""

DEQUANTIZE = "dequantize"
"""The kernel that every weight has: it dequantises the weight for each product."""


def kernel_factories(linear: QuantizedLinear) -> dict[str, Callable[[], Matmul]]:
    """Factories of the kernels that support this weight, by name."""
    found: dict[str, Callable[[], Matmul]] = {DEQUANTIZE: lambda: linear.matmul}
    if not isinstance(linear, IntLinear):
        return found
    scheme = linear.scheme
    if scheme.bits == 8 and scheme.zero == "middle":
        if scheme.activation_bits < 16 and scheme.group_size is None:
            found["onednn"] = lambda: OneDnnInt8(linear)
        elif scheme.activation_bits == 16 and (scheme.group_size or linear.shape[1]) % _INT8_MULTIPLE == 0:
            found["int8pack"] = lambda: Int8Matmul(linear)
    if scheme.bits == 4 and scheme.group_size is not None:
        found["int4pack"] = lambda: Int4Matmul(linear)
    return found


class OneDnnInt8:
    """oneDNN's integers: rows as uint8 around 128, each with its scale, and exact sums.

    The operator takes one scale for all rows, so it gets 1, and each row is multiplied with its own scale afterwards:
    its result does not depend on the other rows. Without VNNI instructions it adds pairs of products in 16 bits, which
    overflow.
    """

    def __init__(self, linear: IntLinear) -> None:
        self._order = None if linear.order is None else linear.order.long()
        signed = (linear.codes.to(torch.int16) - linear.scheme.middle).to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(signed, None)
        self._scales = linear.scales.squeeze(1).contiguous()
        self._zeros = torch.zeros(len(signed), dtype=torch.int64)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Matmul`."""
        if self._order is not None:
            x = x[:, self._order]
        scales = row_scales(x)
        rows = (torch.round(x.float() / scales) + 128).to(torch.uint8)
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            *(rows, 1.0, 128, self._weight, self._scales, self._zeros),
            *(None, 1.0, 0, torch.float32, "none", [], ""),
        )
        return (y * scales).to(x.dtype)


class Int8Matmul:
    """torch's product with int8 weights and activations in bfloat16, for each group of inputs, summed up as floats."""

    def __init__(self, linear: IntLinear) -> None:
        self._order = None if linear.order is None else linear.order.long()
        signed = (linear.codes.to(torch.int16) - linear.scheme.middle).to(torch.int8)
        weights = signed.chunk(linear.scales.shape[1], dim=1)
        scales = linear.scales.to(torch.bfloat16).unbind(1)
        self._groups = [(weight.contiguous(), of.contiguous()) for weight, of in zip(weights, scales, strict=True)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Matmul`."""
        rows = (x if self._order is None else x[:, self._order]).to(torch.bfloat16)
        product = torch.ops.aten._weight_int8pack_mm
        parts = zip(rows.chunk(len(self._groups), dim=1), self._groups, strict=True)
        total: torch.Tensor = sum(product(part.contiguous(), *group).float() for part, group in parts)
        return total.to(x.dtype)


class Int4Matmul:
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
        """See `Matmul`."""
        rows = (x if self._order is None else x[:, self._order]).to(torch.bfloat16).contiguous()
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self._weight, self._group_size, self._numbers
        )
        return y.to(x.dtype)
