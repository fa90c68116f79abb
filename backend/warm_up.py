"""First steps on a new runner: memory is touched and kernels are chosen before a request has to wait for it."""

from __future__ import annotations

import numpy as np

from backend.runner import BLOCK_SIZE, ModelRunner, StepInput


def warm_up(runner: ModelRunner) -> None:
    """Runs a short prefill and a decode on the first blocks; what they hold is never read again."""
    prompt = min(2 * BLOCK_SIZE, runner.num_blocks * BLOCK_SIZE - 1)
    runner.run(single_sequence_step(np.zeros(prompt, dtype=np.int32), 0))
    runner.run(single_sequence_step(np.zeros(1, dtype=np.int32), prompt))


def single_sequence_step(token_ids: np.typing.NDArray[np.int32], start: int) -> StepInput:
    """A step of one sequence that owns the first blocks; logits of every row are wanted."""
    count = len(token_ids)
    positions = np.arange(start, start + count)
    return StepInput(
        token_ids=token_ids,
        positions=positions.astype(np.int32),
        slot_mapping=positions.astype(np.int64),
        query_starts=np.array([0, count], dtype=np.int32),
        block_tables=np.arange((start + count - 1) // BLOCK_SIZE + 1, dtype=np.int32)[None],
        logits_rows=np.arange(count, dtype=np.int32),
    )
