"""An engine's paged KV cache as blocks of bytes: on the host read and written in place, on a device by way of the host.

A block's bytes are its numbers in the order layer, KV head, token, content, whatever their order in memory is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from prefix_store.frames.layout import DTYPES, BlockLayout
from prefix_store.frames.segments import Bytes, Segments, buffer, gather
from prefix_store.tiers.cancellation import Cancelled, CancelToken

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Outgoing(Protocol):
    """Blocks on their way to the store."""

    def ready(self) -> Sequence[Segments]:
        """Their bytes on the host; waits until they are there. Any thread."""


class Incoming(Protocol):
    """Blocks on their way to the engine."""

    segments: Sequence[Segments]
    """To be filled."""

    def finish(self, blocks: int) -> None:
        """Has the first ``blocks`` of them in the engine's memory when it returns. Any thread."""


class KvMemory(Protocol):
    """The blocks of one worker."""

    layout: BlockLayout
    is_on_host: bool

    def outgoing(self, block_ids: Sequence[int]) -> Outgoing:
        """Begins to take blocks out, as the work that the engine's thread has queued until now leaves them."""

    def incoming(self, block_ids: Sequence[int]) -> Incoming:
        """Prepares to put blocks in."""

    def fence(self) -> None:
        """What the engine's thread queues from now on may overwrite blocks that are being taken out."""


def kv_memory(caches: Mapping[str, torch.Tensor], num_blocks: int) -> KvMemory:
    """The KV memory of an engine.

    Args:
        caches: by layer, in order: [blocks, KV heads, tokens, content] each.

    Raises:
        ValueError: a cache has another shape or dtype than the first, or a dtype that is not stored.
    """
    (name, first), *others = caches.items()
    if first.dim() != 4 or first.shape[0] != num_blocks:
        raise ValueError(
            f"the KV cache of layer {name} has the shape {tuple(first.shape)}, "
            f"expected [blocks, heads, tokens, content] with {num_blocks} blocks; if the attention kernels "
            "split blocks of this size, choose a smaller --block-size"
        )
    for other, cache in others:
        if cache.shape != first.shape or cache.dtype != first.dtype or cache.device != first.device:
            raise ValueError(
                f"the KV cache of layer {other} is {tuple(cache.shape)} {cache.dtype} on {cache.device}, that of layer "
                f"{name} {tuple(first.shape)} {first.dtype} on {first.device}; expected the same for all layers"
            )
    dtype = str(first.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"the KV cache is of {dtype}, expected one of {', '.join(DTYPES)}")
    layout = BlockLayout(dtype, (len(caches), *first.shape[1:]))
    tensors = [cache.view(_AS_INTEGERS[cache.element_size()]) for cache in caches.values()]
    return HostMemory(tensors, layout) if first.device.type == "cpu" else DeviceMemory(tensors, layout)


class HostMemory:
    """Blocks in the host's memory. Nothing is copied: the store reads and writes them where they are."""

    is_on_host = True

    def __init__(self, tensors: Sequence[torch.Tensor], layout: BlockLayout) -> None:
        self.layout = layout
        whole = _as_one(tensors)
        self._arrays = [tensor.numpy() for tensor in tensors] if whole is None else [whole.numpy()]
        self._is_whole = whole is not None

    def outgoing(self, block_ids: Sequence[int]) -> _HostBlocks:
        return _HostBlocks([self._segments(block) for block in block_ids])

    def incoming(self, block_ids: Sequence[int]) -> _HostBlocks:
        return _HostBlocks([self._segments(block) for block in block_ids])

    def fence(self) -> None:
        """The caller has cancelled who reads them."""

    def _segments(self, block: int) -> list[np.ndarray[Any, Any]]:
        return [array[:, block] if self._is_whole else array[block] for array in self._arrays]


class _HostBlocks:
    def __init__(self, segments: Sequence[Segments]) -> None:
        self.segments = segments

    def ready(self) -> Sequence[Segments]:
        return self.segments

    def finish(self, blocks: int) -> None:
        """They have been written in place."""


class DeviceMemory:
    """Blocks in a device's memory, copied by way of pinned memory of the host, on a stream beside the engine's."""

    is_on_host = False

    def __init__(self, tensors: Sequence[torch.Tensor], layout: BlockLayout) -> None:
        self.layout = layout
        self._tensors = tensors
        self._device = tensors[0].device
        self._has_streams = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._has_streams else None  # type: ignore[no-untyped-call]

    def outgoing(self, block_ids: Sequence[int]) -> _DeviceBlocks:
        staging = self._staging(len(block_ids))
        done = None
        with self._side_stream():
            places = self._places(block_ids)
            for copied, tensor in zip(staging, self._tensors, strict=True):
                copied.copy_(tensor.index_select(0, places), non_blocking=True)
            if self._has_streams:
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record()
        return _DeviceBlocks(self, staging, block_ids, done)

    def incoming(self, block_ids: Sequence[int]) -> _DeviceBlocks:
        return _DeviceBlocks(self, self._staging(len(block_ids)), block_ids, None)

    def fence(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def put(self, staging: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Copies the first blocks in, and waits for that."""
        with self._side_stream():
            places = self._places(block_ids)
            for copied, tensor in zip(staging, self._tensors, strict=True):
                tensor.index_copy_(0, places, copied[: len(block_ids)].to(self._device, non_blocking=True))
        if self._stream is not None:
            self._stream.synchronize()

    # The engine's thread begins copies and must not wait for them: what is not contiguous and pinned is waited for, and
    # with it all that the engine has queued.

    def _places(self, block_ids: Sequence[int]) -> torch.Tensor:
        places = torch.tensor(block_ids, pin_memory=self._has_streams)
        return places.to(self._device, non_blocking=True)

    def _staging(self, blocks: int) -> torch.Tensor:
        shape = (len(self._tensors), blocks, *self._tensors[0].shape[1:])
        return torch.empty(shape, dtype=self._tensors[0].dtype, pin_memory=self._has_streams)

    @contextlib.contextmanager
    def _side_stream(self) -> Any:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield


class _DeviceBlocks:
    def __init__(
        self, memory: DeviceMemory, staging: torch.Tensor, block_ids: Sequence[int], done: torch.cuda.Event | None
    ) -> None:
        self._memory = memory
        self._staging = staging
        self._block_ids = block_ids
        self._done = done
        self.segments: Sequence[Segments] = [[block] for block in staging.numpy().swapaxes(0, 1)]

    def ready(self) -> Sequence[Segments]:
        if self._done is not None:
            self._done.synchronize()
        return self.segments

    def finish(self, blocks: int) -> None:
        if blocks:
            self._memory.put(self._staging, self._block_ids[:blocks])


def _as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Layers at equal distances in one storage as one tensor [layers, blocks, …]: a block is copied in one call."""
    first = tensors[0]
    starts = [tensor.storage_offset() for tensor in tensors]
    distance = starts[1] - starts[0] if len(tensors) > 1 else 0
    storage = first.untyped_storage().data_ptr()
    if distance < 0 or any(
        tensor.untyped_storage().data_ptr() != storage
        or tensor.stride() != first.stride()
        or start != starts[0] + place * distance
        for place, (tensor, start) in enumerate(zip(tensors, starts, strict=True))
    ):
        return None
    return torch.as_strided(first, (len(tensors), *first.shape), (distance, *first.stride()), starts[0])


def largest_error(
    layout: BlockLayout, stored: Bytes, computed: Sequence[Segments], cancel: CancelToken
) -> float | None:
    """The largest difference between stored and computed blocks, relative to the block's largest number.

    ``stored`` has a row for each block. None: there is nothing to compare, the numbers are of 8 bits, or the blocks
    were taken back.
    """
    dtype = getattr(torch, layout.dtype)
    if not len(stored) or not dtype.is_floating_point:
        return None
    largest, copy = 0.0, buffer(layout.nbytes)
    for one, segments in zip(stored, computed, strict=False):
        try:
            with cancel:
                gather(segments, copy)
        except Cancelled:
            return None
        kept, exact = (torch.from_numpy(data).view(dtype).float() for data in (one, copy))
        scale = float(exact.abs().max())
        error = float((kept - exact).abs().max()) / scale if scale else float(kept.abs().max())
        largest = max(largest, error if error == error else float("inf"))
    return largest
