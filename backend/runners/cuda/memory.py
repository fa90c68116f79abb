"""How much of a device's memory is for keys and values."""

from __future__ import annotations

from backend.errors import ModelError
from backend.runners.errors import RunnerUnavailable

_SHARE = 0.9
"""Of what is free beside weights and activations; the rest is for recorded steps and what the driver keeps."""


def blocks_that_fit(free: int, block_bytes: int, asked: int | None) -> int:
    """KV blocks for the engine. One more is allocated, which fills up recorded batches (``DecodeGraphs``).

    Args:
        free: bytes of the device that neither weights nor activations need.
        asked: bytes that the blocks are to take, as ``--kv-memory`` says; None: most of what is free.

    Raises:
        RunnerUnavailable: the device has no room for blocks.
        ModelError: it has room, but not for what is asked; or what is asked holds no block.
    """
    room = int(max(0, free) * _SHARE)
    fitting = room // block_bytes - 1
    if fitting < 1:
        raise RunnerUnavailable(
            f"the device has {max(0, free)} bytes left beside weights and activations, expected at least "
            f"{int(2 * block_bytes / _SHARE) + 1} for one KV block of {block_bytes}"
        )
    if asked is None:
        return fitting
    if asked < block_bytes:
        raise ModelError(f"--kv-memory: {asked} bytes hold no KV block, expected at least {block_bytes}")
    if asked // block_bytes > fitting:
        raise ModelError(
            f"--kv-memory: {asked} bytes do not fit the device beside weights, activations and recorded steps, "
            f"expected at most {fitting * block_bytes}"
        )
    return asked // block_bytes
