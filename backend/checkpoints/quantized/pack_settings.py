"""Fields of ``quantization_config`` that mean the same to the tools of GPTQ and of AWQ."""

from __future__ import annotations

from typing import Literal, cast

from backend.models.json_fields import Fields


def packed_bits(fields: Fields, name: str) -> Literal[4, 8]:
    """Bits of a code. Raises ModelError where they are neither 4 nor 8."""
    if (bits := fields.count(name)) not in (4, 8):
        raise fields.error(name, "4 or 8")
    return cast(Literal[4, 8], bits)


def packed_group_size(fields: Fields, name: str) -> int | None:
    """Inputs that share a scale; None where all do, which is written as -1. Raises ModelError for other numbers."""
    size = fields.values.get(name)
    if isinstance(size, bool) or not isinstance(size, int) or (size != -1 and size < 1):
        raise fields.error(name, "a positive integer, or -1")
    return None if size == -1 else size
