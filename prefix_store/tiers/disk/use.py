"""An access as journals know it."""

from __future__ import annotations

from typing import NamedTuple


class Use(NamedTuple):
    """The number that an access has in this process, and the tokens of its answer, None: not known yet."""

    number: int
    output_length: int | None
