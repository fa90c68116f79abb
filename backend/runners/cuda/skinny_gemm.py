"""Which products with few rows use the skinny GEMM kernel and not cuBLAS: those in which it is faster here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from backend.kernels.skinny_gemm import MAX_ROWS, skinny_gemm
from backend.model_loader.weights import Linear

_ROWS = (1, 2, MAX_ROWS)
"""Of these the sizes of recorded batches are."""
_MAX_RELATIVE_ERROR = 0.02
"""Largest relative error to cuBLAS; both round to bfloat16 once."""
_MAX_TIME_RATIO = 0.97
"""The kernel is used if its time is below this share of cuBLAS' time; more would be noise."""
_ROUNDS = 7

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class SkinnyGemmTable:
    """Dense products, with the kernel that is the fastest for their shape.

    Args:
        shapes: (rows, outputs, inputs) of the products that the skinny GEMM kernel computes.
    """

    def __init__(self, shapes: frozenset[tuple[int, int, int]] = frozenset()) -> None:
        self.shapes = shapes

    def __call__(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """[T, inputs] to [T, outputs]."""
        if (x.shape[0], *linear.weight.shape) in self.shapes:
            return skinny_gemm(x, linear.dense, linear.bias)
        return functional.linear(x, linear.dense, linear.bias)

    @classmethod
    def measure(cls, linears: Sequence[Linear]) -> SkinnyGemmTable:
        """Times both on a CUDA device, over all matrices of a shape in turn, so that none is cached."""
        by_shape: dict[tuple[int, int], list[Linear]] = {}
        for linear in linears:
            outputs, inputs = linear.weight.shape
            by_shape.setdefault((outputs, inputs), []).append(linear)
        return cls(
            frozenset(
                (rows, *shape)
                for shape, group in by_shape.items()
                for rows in _ROWS
                if _is_faster(group, rows, shape[1])
            )
        )


def _is_faster(group: list[Linear], rows: int, inputs: int) -> bool:
    first = group[0].dense
    x = torch.randn(rows, inputs, device=first.device).to(first.dtype)
    expected = functional.linear(x, first, group[0].bias).float()
    error = (skinny_gemm(x, first, group[0].bias).float() - expected).norm() / expected.norm()
    if not float(error) <= _MAX_RELATIVE_ERROR:
        return False
    return _milliseconds(skinny_gemm, x, group) < _MAX_TIME_RATIO * _milliseconds(functional.linear, x, group)


def _milliseconds(product: Product, x: torch.Tensor, group: list[Linear]) -> float:
    """Median time for all matrices, from a recording: one by one, launching them would take longer than they do."""
    cuda: Any = torch.cuda  # its events have no types
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        for linear in group:
            product(x, linear.dense, linear.bias)
    times = []
    for _ in range(_ROUNDS):
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times))
