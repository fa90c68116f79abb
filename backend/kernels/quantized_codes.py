"""Turns codes in a word into floats with as few instructions as possible: a kernel does this for every weight.

A code becomes the last bits of a float's mantissa, under an exponent that makes these bits count ones, and then the
value that the exponent added is subtracted. That is one logical operation and one subtraction, both exact; a conversion
instruction has a quarter of their rate or less. It is one operation only if no more than one of its operands is written
into the instruction: therefore the exponent is an argument of the kernels, ``ONES``.
"""

import triton
import triton.language as tl

ONES = 150 << 23
"""The bits of 2 ** 23, a float whose mantissa counts ones."""


@triton.jit
def plane_values(
    words: tl.tensor, levels: tl.tensor, ones: tl.tensor, PLANE: tl.constexpr, FORM: tl.constexpr
) -> tl.tensor:
    """The values of one plane of a `DeviceWeight`: float32 in the shape of ``words``."""
    if FORM == "int4":
        # Not by 20, after which the next code would be a field of its own to a compiler, which takes two operations.
        values = _distances(words >> (16 if PLANE >= 5 else 0), ones, 4 * (PLANE if PLANE < 5 else PLANE - 4), 4)
    elif FORM == "int8":
        values = _distances(words >> (16 if PLANE >= 2 else 0), ones, 8 * (PLANE % 2), 8)
    elif FORM == "fp8":
        # Sign, and seven bits that are the last of the exponent and the first of the mantissa. The exponents of the two
        # formats are biased by 7 and 127.
        high = words << (24 - 8 * PLANE)
        bits = (high & -2147483648) | ((high >> 4) & 0x07F00000)
        values = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    else:
        # Sixteen bits wide, so that no compiler takes these loads for some to do ahead.
        values = tl.load(levels + ((words >> (4 * PLANE)) & 15)).to(tl.float32)
    return values


@triton.jit
def _distances(words: tl.tensor, ones: tl.tensor, AT: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Of codes of ``BITS`` bits, the lowest of them bit ``AT``, from their middle."""
    code: tl.constexpr = ((1 << BITS) - 1) << AT
    added: tl.constexpr = (1 << (23 - AT)) + (1 << (BITS - 1))
    return ((words & code) | (ones - (AT << 23))).to(tl.float32, bitcast=True) - added


@triton.jit
def offsets_of(offsets: tl.tensor, scale: tl.tensor, MIDDLE: tl.constexpr, OFFSET: tl.constexpr) -> tl.tensor:
    """What is added to ``scale * distance``, from what is kept of it."""
    return offsets * scale if OFFSET == "zeros" else offsets + scale * MIDDLE
