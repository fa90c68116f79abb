"""Converts quantised blocks of GGUF files to the layout of `IntLinear`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from backend.quantized_weights.int_scheme import IntLinear, IntScheme, pack_nibbles

_BLOCK = 32
_SUPER_BLOCK = 256
_K_SCALES = 12
"""Bytes of the eight scales and eight minima, six bits each, of a Q4_K super-block."""
Bytes = npt.NDArray[np.uint8]


def blocks_linear(kind: str, blocks: Bytes) -> IntLinear:
    """A weight [out, in].

    Args:
        kind: ggml's name of the type, one of `KINDS`.
        blocks: uint8 [out, bytes of a row].
    """
    return _READERS[kind](torch.from_numpy(np.array(blocks)))


def _q4_0(rows: torch.Tensor) -> IntLinear:
    """Each block: a half float, which may be negative, and 32 codes: ``scale * (code - 8)``."""
    blocks = rows.view(len(rows), -1, 2 + _BLOCK // 2)
    return IntLinear(IntScheme(4, _BLOCK), _codes(blocks[:, :, 2:]), _halves(blocks, 0))


def _q4_1(rows: torch.Tensor) -> IntLinear:
    """Each block: two half floats and 32 codes: ``scale * code + minimum``."""
    blocks = rows.view(len(rows), -1, 4 + _BLOCK // 2)
    codes, scales, minima = _codes(blocks[:, :, 4:]), _halves(blocks, 0), _halves(blocks, 2)
    return IntLinear(IntScheme(4, _BLOCK, "minimum"), codes, scales, minima=minima)


def _q8_0(rows: torch.Tensor) -> IntLinear:
    """Each block: a half float and 32 signed numbers: ``scale * number``."""
    blocks = rows.view(len(rows), -1, 2 + _BLOCK)
    # Flipping the highest bit adds 128 to a signed byte.
    return IntLinear(IntScheme(8, _BLOCK), (blocks[:, :, 2:] ^ 128).flatten(1), _halves(blocks, 0))


def _q4_k(rows: torch.Tensor) -> IntLinear:
    """Each super-block of eight blocks: two half floats, which multiply scales and minima of six bits, and codes.

    ``scale * code - minimum``. The products are rounded to half floats: a relative error of at most 1 / 2,048.
    """
    blocks = rows.view(len(rows), -1, 4 + _K_SCALES + _SUPER_BLOCK // 2)
    of_scales, of_minima = (_halves(blocks, at).float().unsqueeze(-1) for at in (0, 2))
    # The first four scales and minima are the low six bits of a byte each; the high two of those bytes belong to the
    # last four, whose low four bits are nibbles of the last bytes.
    first, second, low = blocks[:, :, 4 : 4 + _K_SCALES].chunk(3, dim=-1)
    scales = torch.cat((first & 63, low & 15 | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 63, low >> 4 | second >> 6 << 4), dim=-1)
    # Two blocks share 32 bytes, the first in the low nibbles.
    pairs = blocks[:, :, 4 + _K_SCALES :].unflatten(-1, (-1, _BLOCK))  # type: ignore[no-untyped-call] # see torch
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(1)
    return IntLinear(
        IntScheme(4, _BLOCK, "minimum"),
        pack_nibbles(codes),
        (of_scales * scales).flatten(1).to(torch.float16),
        minima=-(of_minima * minima).flatten(1).to(torch.float16),
    )


def _codes(nibbles: torch.Tensor) -> torch.Tensor:
    """Repacks blocks with their first half in the low nibbles and their second half in the high ones."""
    return pack_nibbles(torch.cat((nibbles & 15, nibbles >> 4), dim=-1).flatten(1))


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The half float at a byte of each block: float16 [out, groups]."""
    pair = blocks[:, :, at : at + 2].clone(memory_format=torch.contiguous_format)
    return pair.view(torch.float16).squeeze(-1)


_READERS: Mapping[str, Callable[[torch.Tensor], IntLinear]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
}
KINDS = frozenset(_READERS)
"""Names of the types that `IntScheme` supports; the other K-quants have two, three, five or six bits."""
