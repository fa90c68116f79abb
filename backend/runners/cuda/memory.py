"""How much of a device's memory is for keys and values."""

from __future__ import annotations

from backend.errors import ModelError
from backend.runners.errors import RunnerUnavailable

_SHARE = 0.9
"""Of what is free beside weights and activations; the rest is for recorded steps and what the driver keeps."""


def blocks_that_fit(free: int, block_bytes: int, asked: int | None, model_block_bytes: int) -> int:
    """KV blocks for the engine. One more is allocated, which fills up recorded batches (``DecodeGraphs``).

    Args:
        free: bytes of the device that neither weights nor activations need.
        block_bytes: of what this device has of a block.
        asked: bytes that whole blocks are to take, as ``--kv-memory`` says; None: most of what is free.
        model_block_bytes: of a whole block, of which other devices may have parts.

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
    if asked < model_block_bytes:
        raise ModelError(f"--kv-memory: {asked} bytes hold no KV block, expected at least {model_block_bytes}")
    if asked // model_block_bytes > fitting:
        raise ModelError(
            f"--kv-memory: {asked} bytes do not fit the device beside weights, activations and recorded steps, "
            f"expected at most {fitting * model_block_bytes}"
        )
    return asked // model_block_bytes
