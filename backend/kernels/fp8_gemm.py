"""GEMM of FP8 weights and activations rounded to FP8, at twice the rate of 16-bit products.

Needs matrix units for FP8 (compute capability 8.9). Each row of activations has its own scale, so its result does not
depend on the other rows. Rounding to three bits of mantissa changes a product by about 3 % of its norm.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from backend.kernels.quantized_weight import DeviceWeight

_CAPABILITY = (8, 9)
_MULTIPLE = 16
"""`torch._scaled_mm` needs outputs in multiples of it."""
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_COLUMNS = 2048
_MAX_RELATIVE_ERROR = 0.06
"""Largest relative error of a correct product; rounding alone gives 0.026 on random numbers."""


@triton.jit
def _round_rows(
    x: tl.tensor,
    rounded: tl.tensor,
    scales: tl.tensor,
    inputs: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    PLANES: tl.constexpr,
    SPAN: tl.constexpr,
    COLUMNS: tl.constexpr,
    FP8_MAX: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    most = tl.full([COLUMNS], 0.0, tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        v = tl.load(x + row * stride + column, mask=column < inputs, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(v))
    highest = tl.max(most, 0)
    scale = tl.where(highest > 0, highest / FP8_MAX, 1.0)
    tl.store(scales + row, scale)
    for start in range(0, width, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        # In the order of a weight's bytes: a word has one byte of each plane.
        column = at // (PLANES * SPAN) * (PLANES * SPAN) + at % PLANES * SPAN + at % (PLANES * SPAN) // PLANES
        v = tl.load(x + row * stride + column, mask=column < inputs, other=0.0).to(tl.float32)
        nearest = tl.minimum(tl.maximum(v / scale, -FP8_MAX), FP8_MAX).to(tl.float8e4nv)
        tl.store(rounded + row * width + at, nearest, mask=at < width)


def round_rows(x: torch.Tensor, weight: DeviceWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R, in] as float8_e4m3fn [R, bytes of a row of the weight], in the order of these bytes, and scales [R, 1].

    Rows of x are contiguous, scales float32.
    """
    rows, width = x.shape[0], 4 * weight.words.shape[1]
    rounded = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    _round_rows[(rows,)](
        x,
        rounded,
        scales,
        weight.inputs,
        width,
        x.stride(0),
        PLANES=weight.planes,
        SPAN=weight.span,
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(width)),
        FP8_MAX=_FP8_MAX,
        num_warps=8,
    )
    return rounded, scales


def fp8_gemm(x: torch.Tensor, weight: DeviceWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias`` with rows of x rounded, each with its scale.

    Args:
        x: bfloat16 [R, in], each row contiguous.
        weight: of form ``fp8``, outputs in multiples of 16.
        bias: [out] or None.

    Returns:
        bfloat16 [R, out].
    """
    rounded, scales = round_rows(x, weight)
    product = torch._scaled_mm(
        rounded,
        weight.words.view(torch.float8_e4m3fn).T,
        scale_a=scales,
        scale_b=weight.scales,
        out_dtype=torch.bfloat16,
    )
    return product if bias is None else product + bias


@cache
def supports_fp8_gemm(device: torch.device) -> bool:
    """Whether `fp8_gemm` works and is correct on a device, tested with random numbers."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY:
        return False
    from backend.kernels.quantized_gemm import quantized_gemm
    from backend.kernels.quantized_weight import on_device
    from backend.quantized_weights.fp8_scheme import Fp8Scheme

    random = torch.Generator().manual_seed(0)
    weight = on_device(Fp8Scheme().pack(torch.randn(256, 640, generator=random)), device)
    x = torch.randn(64, 640, generator=random).to(device, torch.bfloat16)
    expected = quantized_gemm(x, weight, None).float()
    try:
        got = fp8_gemm(x, weight, None).float()
    except RuntimeError:  # torch raises it if it has no such product
        return False
    return bool((got - expected).norm() <= _MAX_RELATIVE_ERROR * expected.norm())
