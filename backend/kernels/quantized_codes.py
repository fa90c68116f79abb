"""Converts codes in a word to floats with as few instructions as possible: a kernel does this for every weight.

A code becomes the lowest mantissa bits of a float whose exponent gives these bits integer values; then the value of the
exponent is subtracted. That is one logical operation and one subtraction, both exact; a conversion instruction has a
quarter of their rate or less. The logical operation is a single instruction only with at most one immediate operand:
therefore the exponent is an argument of the kernels, ``ONES``.
"""

import triton
import triton.language as tl

ONES = 150 << 23
"""The bits of 2 ** 23, a float with mantissa steps of 1."""


@triton.jit
def plane_values(
    words: tl.tensor, levels: tl.tensor, ones: tl.tensor, PLANE: tl.constexpr, FORM: tl.constexpr
) -> tl.tensor:
    """The values of one plane of a `DeviceWeight`: float32 in the shape of ``words``."""
    if FORM == "int4":
        # Not by 20: a compiler would then extract the next code as a bit field, which takes two operations.
        values = _distances(words >> (16 if PLANE >= 5 else 0), ones, 4 * (PLANE if PLANE < 5 else PLANE - 4), 4)
    elif FORM == "int8":
        values = _distances(words >> (16 if PLANE >= 2 else 0), ones, 8 * (PLANE % 2), 8)
    elif FORM == "fp8":
        # Sign, and seven bits that become the last of the exponent and the first of the mantissa. The exponents of the
        # two formats have biases of 7 and 127.
        high = words << (24 - 8 * PLANE)
        bits = (high & -2147483648) | ((high >> 4) & 0x07F00000)
        values = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    else:
        # Sixteen bits wide, so that no compiler pipelines these loads.
        values = tl.load(levels + ((words >> (4 * PLANE)) & 15)).to(tl.float32)
    return values


@triton.jit
def _distances(words: tl.tensor, ones: tl.tensor, AT: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Codes of ``BITS`` bits, from bit ``AT`` up, minus their middle."""
    code: tl.constexpr = ((1 << BITS) - 1) << AT
    added: tl.constexpr = (1 << (23 - AT)) + (1 << (BITS - 1))
    return ((words & code) | (ones - (AT << 23))).to(tl.float32, bitcast=True) - added


@triton.jit
def offsets_of(offsets: tl.tensor, scale: tl.tensor, MIDDLE: tl.constexpr, OFFSET: tl.constexpr) -> tl.tensor:
    """What is added to ``scale * distance``, by the stored offsets."""
    return offsets * scale if OFFSET == "zeros" else offsets + scale * MIDDLE
