"""The share of a device's memory for KV blocks, and the messages when it is too small."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.errors import ModelError
from backend.runners.cuda.memory import blocks_that_fit
from backend.runners.errors import RunnerUnavailable


@given(free=st.integers(0, 2**38), block_bytes=st.integers(1, 2**24), share=st.floats(0, 1))
def test_blocks_leave_a_tenth_of_the_memory_free(free: int, block_bytes: int, share: float) -> None:
    """The blocks and the spare one leave a tenth of the memory free, and a requested size is met or refused.

    It is the size of whole blocks, of which the device may have a third each.
    """
    try:
        fitting = blocks_that_fit(free, block_bytes, None, 3 * block_bytes)
    except RunnerUnavailable:
        assert int(free * 0.9) < 2 * block_bytes
        return
    assert (fitting + 1) * block_bytes <= free * 0.9 < (fitting + 3) * block_bytes
    asked = max(block_bytes, int(share * fitting * block_bytes))
    assert blocks_that_fit(free, block_bytes, asked, block_bytes) == asked // block_bytes
    with pytest.raises(ModelError, match=f"expected at most {fitting * block_bytes}"):
        blocks_that_fit(free, block_bytes, (fitting + 1) * block_bytes, block_bytes)
    assert blocks_that_fit(free, block_bytes, 3 * asked, 3 * block_bytes) == asked // block_bytes
    with pytest.raises(ModelError, match=f"expected at most {fitting * 3 * block_bytes}"):
        blocks_that_fit(free, block_bytes, (fitting + 1) * 3 * block_bytes, 3 * block_bytes)


@pytest.mark.parametrize(
    ("free", "asked", "kind", "sentence"),
    [
        (1000, None, RunnerUnavailable, "the device has 1000 bytes left .*, expected at least 2223 for one KV block"),
        (-5, None, RunnerUnavailable, "the device has 0 bytes left"),
        (10**6, 999, ModelError, "--kv-memory: 999 bytes hold no KV block, expected at least 1000"),
        (10**4, 10**5, ModelError, "--kv-memory: 100000 bytes do not fit the device .*, expected at most 8000"),
    ],
)
def test_too_little_memory_is_refused_with_the_limit(
    free: int, asked: int | None, kind: type[Exception], sentence: str
) -> None:
    """Too little memory is refused with the option, its value and what would be right."""
    with pytest.raises(kind, match=sentence):
        blocks_that_fit(free, 1000, asked, 1000)
