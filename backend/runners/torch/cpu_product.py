"""The fastest right way to multiply with a quantised weight on this CPU, by the number of rows."""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass, field

import torch

from backend.quantized_weights.quantized_linear import QuantizedLinear, reference
from backend.runners.torch.cpu_kernels import ALWAYS, Product, ways

_ROWS = (1, 4, 16, 64)
"""Numbers of rows that are measured; others go by the next smaller one."""
_MOST_DISAGREEMENT = 0.01
"""Relative error up to which a way counts as right: some of them round activations to bfloat16."""
_TIMES = 3


@dataclass(slots=True)
class ProductTable:
    """Which way was the fastest, for each scheme and shape; measured with the first weight of its kind."""

    _chosen: dict[tuple[str, tuple[int, int]], tuple[str, ...]] = field(default_factory=dict)

    def choose(self, linear: QuantizedLinear) -> tuple[str, ...]:
        """The name of a way for each number of rows in ``_ROWS``."""
        key = (linear.scheme.name, linear.shape)
        if key not in self._chosen:
            self._chosen[key] = _measured(linear)
        return self._chosen[key]


class CpuProduct:
    """A weight with the products that its table names; what no number of rows needs is not kept."""

    def __init__(self, linear: QuantizedLinear, table: ProductTable) -> None:
        names = table.choose(linear)
        makers = ways(linear)
        products = {name: makers[name]() for name in set(names)}
        self._by_rows = [products[name] for name in names]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [T, in] to [T, out], in their dtype."""
        return self._by_rows[max(0, bisect.bisect_right(_ROWS, len(x)) - 1)](x)


def _measured(linear: QuantizedLinear) -> tuple[str, ...]:
    right = _right(linear)
    seconds = [{name: _seconds(product, rows, linear.shape[1]) for name, product in right.items()} for rows in _ROWS]
    if linear.scheme.activation_bits == 16:
        return tuple(min(of_rows, key=of_rows.__getitem__) for of_rows in seconds)
    # A row's result must not depend on how many others there are, and two ways differ in the last places.
    least = min(right, key=lambda name: sum(of_rows[name] / min(of_rows.values()) for of_rows in seconds))
    return (least,) * len(_ROWS)


def _right(linear: QuantizedLinear) -> dict[str, Product]:
    """The ways that give what the bits say here. An operator may be missing in a build, or wrong on a CPU."""
    x = torch.randn(5, linear.shape[1], generator=torch.Generator().manual_seed(0))
    expected = reference(linear, x)
    right: dict[str, Product] = {}
    for name, make in ways(linear).items():
        try:
            product = make()
            got = product(x).double()
        except (RuntimeError, AttributeError):  # the operator refuses this shape, or there is none
            if name == ALWAYS:
                raise
            continue
        error = (got - expected).norm() / expected.norm().clamp(min=1e-30)
        if name == ALWAYS or float(error) <= _MOST_DISAGREEMENT:
            right[name] = product
    return right


def _seconds(product: Product, rows: int, inputs: int) -> float:
    x = torch.randn(rows, inputs)
    taken = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        product(x)
        taken.append(time.perf_counter() - began)
    return min(taken)
