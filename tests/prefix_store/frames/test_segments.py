"""Blocks in pieces of an engine's memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_store.frames.segments import buffer, gather, scatter


@given(sizes=st.lists(st.integers(0, 50), max_size=8), seed=st.integers(0, 99))
def test_pieces_of_any_size_go_out_and_come_back(sizes: list[int], seed: int) -> None:
    """Bytes are in the order of the segments, whatever their sizes."""
    data = np.random.default_rng(seed).integers(0, 256, sum(sizes), dtype=np.uint8)
    pieces = [memoryview(bytearray(size)) for size in sizes]
    scatter(data, pieces)
    assert b"".join(bytes(piece) for piece in pieces) == data.tobytes()
    back = np.zeros_like(data)
    gather(pieces, back)
    assert (back == data).all()


def test_a_view_with_gaps_is_one_segment() -> None:
    """Of memory [layers, 2, blocks, numbers] one block is filled, and nothing beside it."""
    memory = np.zeros((3, 2, 4, 5), np.float16)
    scatter(np.arange(60, dtype=np.uint8), [memory[:, :, 2]])
    assert memory[:, :, 2].tobytes() == bytes(range(60))
    assert not memory[:, :, [0, 1, 3]].any()


def test_segments_of_another_size_are_refused() -> None:
    """The error comes before anything is written."""
    target = np.zeros(5, np.uint8)
    with pytest.raises(ValueError, match="segments have 5 bytes together, expected 6"):
        scatter(np.ones(6, np.uint8), [target])
    assert not target.any()


@pytest.mark.parametrize("size", [1, 4_096, 368_769, 2_097_281])
def test_memory_for_a_frame_begins_at_a_cache_line(size: int) -> None:
    """Copies are faster there on some processors."""
    memory = buffer(size)
    assert memory.nbytes == size
    assert memory.ctypes.data % 64 == 0
    memory[:] = 7
