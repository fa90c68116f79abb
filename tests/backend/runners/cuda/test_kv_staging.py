"""Staging memory: pieces never overlap, and are free again when the device has copied them."""

from __future__ import annotations

import numpy as np
import torch

from backend.runners.cuda.kv_staging import StagedBlocks, StagingMemory
from prefix_store.frames.segments import gather, scatter

LAYERS, WORDS = 3, 4


class Switch:
    """An event that is complete when the test says so."""

    def __init__(self) -> None:
        self.on = False

    def query(self) -> bool:
        return self.on

    def synchronize(self) -> None:
        raise AssertionError("staging memory made its caller wait")


def staging(capacity: int) -> StagingMemory:
    return StagingMemory(LAYERS, WORDS, capacity, pinned=False)


def test_one_layer_of_all_staged_blocks_is_contiguous() -> None:
    """One layer of all staged blocks is contiguous, and a block's segments are its layers in order."""
    staged = staging(5).take(3)
    assert staged is not None
    frames = np.random.default_rng(0).integers(0, 256, (3, LAYERS * WORDS * 8), dtype=np.uint8)
    for frame, segments in zip(frames, staged.segments, strict=True):
        scatter(frame, segments)
    for layer in range(LAYERS):
        stretch = staged.words[layer]
        assert stretch.is_contiguous()
        wanted = frames.reshape(3, LAYERS, -1)[:, layer].tobytes()
        assert stretch.numpy().tobytes() == wanted
        assert staged.words[layer, :2].is_contiguous(), "nor are the first of them in pieces"
    back = np.empty_like(frames[0])
    gather(staged.segments[1], back)
    assert np.array_equal(back, frames[1])


def test_a_piece_that_does_not_fit_is_refused_until_there_is_room() -> None:
    """A piece is refused until there is enough contiguous room between or behind other pieces."""
    memory = staging(6)
    first, second, third = (memory.take(2) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert memory.take(1) is None
    first.release(None)
    third.release(None)
    assert memory.take(3) is None, "two and two, apart"
    assert memory.take(2) is not None
    second.release(None)
    again = memory.take(4)
    assert again is not None
    assert (again.start, again.end) == (2, 6)
    assert memory.take(7) is None


def test_a_piece_is_not_reused_before_its_copy_is_complete() -> None:
    """A released piece is not reused before the device has copied it."""
    memory, copied = staging(2), Switch()
    piece = memory.take(2)
    assert piece is not None
    piece.release(copied)
    assert memory.take(1) is None
    copied.on = True
    assert memory.take(2) is not None


def test_pieces_never_overlap() -> None:
    """Pieces never overlap in random use, and none is refused that fits."""
    chance = np.random.default_rng(0)
    memory = staging(12)
    held: list[tuple[StagedBlocks, Switch]] = []
    refused = 0
    for _ in range(3000):
        if held and chance.random() < 0.5:
            piece, copied = held.pop(int(chance.integers(len(held))))
            piece.release(copied)
            copied.on = True
            continue
        count = int(chance.integers(1, 7))
        taken = {place for piece, _ in held for place in range(piece.start, piece.end)}
        fits = any(taken.isdisjoint(range(start, start + count)) for start in range(12 - count + 1))
        new = memory.take(count)
        assert (new is not None) == fits
        if new is None:
            refused += 1
            continue
        assert new.words.shape == (LAYERS, count, WORDS)
        assert taken.isdisjoint(range(new.start, new.end))
        new.words.fill_(new.start)
        held.append((new, Switch()))
        assert all(torch.all(piece.words == piece.start) for piece, _ in held)
    assert refused > 100
