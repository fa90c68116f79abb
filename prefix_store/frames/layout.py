"""The order of a KV block's numbers in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Position = code in a frame's header: append only.
DTYPES = ("float16", "bfloat16", "float32", "int8", "uint8", "float8_e4m3fn")
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}
MAX_AXES = 5
_AXES = frozenset("plhtd")


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The C-contiguous order of a block's numbers, independent of an engine's memory segments.

    Args:
        dtype: one of `DTYPES`.
        shape: at most five sizes, each at least 1.
        axes: what each size counts, a letter each: (p)art, which is keys and then values; (l)ayer; kv (h)ead; (t)oken;
            (d)imension of a head. Empty if unknown; such a block is stored by the plain codec or not at all.
        keys_transposed: within a key vector's head, dimensions come before tokens; the last two axes are then "td".

    Raises:
        ValueError: it is not valid.
    """

    dtype: str
    shape: tuple[int, ...]
    axes: str = ""
    keys_transposed: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if not 1 <= len(self.shape) <= MAX_AXES or not all(0 < size < 2**32 for size in self.shape):
            raise ValueError(f"shape is {self.shape}, expected one to {MAX_AXES} sizes of at least 1")
        if not self.axes:
            if self.keys_transposed:
                raise ValueError("keys_transposed is true, but axes does not say where keys are")
            return
        if set(self.axes) != _AXES or len(self.axes) != len(_AXES) or len(self.shape) != len(_AXES):
            raise ValueError(f"axes is {self.axes!r} for {len(self.shape)} sizes, expected p, l, h, t and d once each")
        if self.size("p") != 2:
            raise ValueError(f"axis p has size {self.size('p')}, expected 2: keys and values")
        if self.keys_transposed and not self.axes.endswith("td"):
            raise ValueError(f"axes is {self.axes!r}, expected 'td' as the last two where keys are transposed")

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def size(self, axis: str) -> int:
        """The size of an axis, by its letter."""
        return self.shape[self.axes.index(axis)]
