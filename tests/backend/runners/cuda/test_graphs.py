"""Padding rows of a recorded batch size write to no block of a sequence."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from backend.kernels.paged_decode import PagedRows
from backend.runners.cuda.decoder import CudaDecoder
from backend.runners.cuda.device_step import DeviceStep, Staging, device_step
from backend.runners.cuda.graphs import bucket_sizes, is_pure_decode, padded_rows
from tests.backend.runners.cuda.random_model import CONFIG, STEPS, random_weights
from tests.backend.runners.cuda.references import relative_error

SPARE = 8


def test_padding_rows_write_to_the_spare_block_alone() -> None:
    """Padding rows write to the spare block alone, and the step's own rows keep their logits."""
    device = torch.device("cpu")
    decoder = CudaDecoder(CONFIG, random_weights(CONFIG), 64, torch.float32, device)
    decoder.allocate(SPARE + 1)
    staging = Staging(device)
    with torch.inference_mode():
        decoder.memory.normal_(generator=torch.Generator().manual_seed(1))
        memory = decoder.memory.clone()
        wanted, _ = decoder(device_step(STEPS[3], staging, decoder.tile_rows))
        after = decoder.memory.clone()
        decoder.memory.copy_(memory)

        size, rows = 5, len(STEPS[3].token_ids)
        packed, tables = (torch.from_numpy(array) for array in padded_rows(STEPS[3], size, SPARE))
        order = torch.arange(size, dtype=torch.int32)
        where = PagedRows(tables, order, packed[1])
        no_tiles = torch.empty(0, 2, dtype=torch.int32)
        logits, _ = decoder(DeviceStep(packed[0], packed[2], where, order, no_tiles, order, order[:0]))
    assert rows < size
    assert relative_error(logits[:rows], wanted) < 1e-5
    assert relative_error(decoder.memory[:, :, :SPARE], after[:, :, :SPARE]) < 1e-5
    changed = (decoder.memory != memory).any(dim=(0, 1, 3, 4, 5))
    written = {int(slot) // 16 for slot in STEPS[3].slot_mapping}
    assert {int(block) for block in changed.nonzero().flatten()} == written | {SPARE}


@pytest.mark.parametrize("largest", [1, 3, 20, 32, 100, 256])
def test_recorded_batch_sizes_cover_every_batch(largest: int) -> None:
    """The recorded batch sizes reach the largest batch, and each is at most twice the one before."""
    sizes = bucket_sizes(largest)
    assert sizes[0] == 1
    assert sizes[-1] == largest
    assert all(after <= 2 * before for before, after in pairwise(sizes))


def test_pure_decode_steps_are_replayed() -> None:
    """A step is replayed if each sequence has one row and only logits are needed."""
    assert [is_pure_decode(step) for step in STEPS] == [False, False, False, True, True]
