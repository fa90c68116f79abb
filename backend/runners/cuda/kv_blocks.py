"""KV blocks of a device: copied through pinned memory, layer by layer, concurrently with the steps.

host_to_device   │ layer 0 │ layer 1 │ layer 2 │ …      to a buffer on the device, then into the blocks
compute               steps │ layer 0 │ layer 1 │ …     the next step; each layer waits for its own keys and values
device_to_host   │ layer 0 │ layer 1 │ …                from the blocks to a buffer, then to the host
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from backend.kernels.transfer import to_device
from backend.runners.cuda.kv_staging import StagedBlocks, StagingMemory
from backend.runners.cuda.streams import DeviceStreams, Event, Stream
from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Segments, gather, scatter

_WORD = torch.int64
"""Values of any dtype are copied as words of 8 bytes: fewer and wider accesses, and no bit ever changes."""


class CudaKvBlocks:
    """See ``KvBlocks``. Each direction has staging memory of its own, so offloading never blocks restoring.

    Args:
        memory: [layers, 2, blocks, kv heads, BLOCK_SIZE, head_dim], contiguous, on the device.
        staging_bytes: host memory for each direction; at least one block is allocated.
        streams: of the device.

    Raises:
        MemoryError: the host cannot pin so much memory.
        torch.OutOfMemoryError: the device has no room for one layer of so many blocks, twice.
    """

    def __init__(self, memory: torch.Tensor, staging_bytes: int, streams: DeviceStreams) -> None:
        layers, parts, blocks, heads, tokens, dimensions = memory.shape
        dtype = str(memory.dtype).removeprefix("torch.")
        self.layout = BlockLayout(dtype, (layers, parts, heads, tokens, dimensions), "lphtd")
        self.most_at_once = min(blocks, max(1, staging_bytes // self.layout.nbytes))
        self._compute = streams.compute
        self._host_to_device = _Direction(memory, self.most_at_once, streams.host_to_device)
        self._device_to_host = _Direction(memory, self.most_at_once, streams.device_to_host)
        self._layer_events: list[Event] = []
        """An event for each layer of the blocks restored last, until a step has waited for all of them. Blocks restored
        earlier precede them in the stream."""

    def incoming(self, blocks: Sequence[int]) -> CudaIncoming | None:
        """See ``KvBlocks.incoming``."""
        staged = self._host_to_device.staging.take(len(blocks))
        if staged is None:
            return None
        # Steps launched before this may still use the blocks for their previous owner; later steps do not. So the
        # copies wait for the former only, and not for what is being computed when the bytes have come.
        return CudaIncoming(staged, partial(self._put, blocks, staged, self._compute.record_event()))

    def outgoing(self, blocks: Sequence[int]) -> CudaOutgoing | None:
        """See ``KvBlocks.outgoing``."""
        staged = self._device_to_host.staging.take(len(blocks))
        if staged is None:
            return None
        self._device_to_host.stream.wait_event(self._compute.record_event())
        if self._layer_events:
            self._device_to_host.stream.wait_event(self._layer_events[-1])
        return CudaOutgoing(staged, self._device_to_host.take(blocks, staged)[-1])

    def layer_wait(self) -> Callable[[int], None] | None:
        """What the next step calls with each layer's number, in order, before it uses the layer's keys and values.

        None: no block is being restored. A CUDA graph has no such waits, so a step with any is not replayed.
        """
        if self._layer_events and self._layer_events[-1].query():
            self._layer_events = []
        return self._wait if self._layer_events else None

    def check(self, block: int) -> None:
        """Copies random bytes to a block that no sequence owns, and back.

        Raises:
            RuntimeError: the device has failed, or something else came back.
        """
        sent, got = np.random.default_rng(block).bytes(self.layout.nbytes), np.empty(self.layout.nbytes, np.uint8)
        incoming = self.incoming([block])
        if incoming is not None:
            scatter(np.frombuffer(sent, np.uint8), incoming.segments[0])
            incoming.arrived(1)
            incoming.close()
        outgoing = self.outgoing([block])
        if outgoing is not None:
            gather(outgoing.ready()[0], got)
            outgoing.close()
        if got.tobytes() != sent:
            raise RuntimeError("a KV block that was copied to the device and back is not the same")

    def _put(self, blocks: Sequence[int], staged: StagedBlocks, since: Event, count: int) -> Event:
        self._host_to_device.stream.wait_event(since)
        self._layer_events = self._host_to_device.put(blocks[:count], staged)
        return self._layer_events[-1]

    def _wait(self, layer: int) -> None:
        self._compute.wait_event(self._layer_events[layer])
        if layer == len(self._layer_events) - 1:
            self._layer_events = []


class CudaIncoming:
    """See ``Incoming``.

    Args:
        put: queues the copies of so many blocks; returns the event after them.
    """

    def __init__(self, staged: StagedBlocks, put: Callable[[int], Event]) -> None:
        self.segments = staged.segments
        self._staged = staged
        self._put = put
        self._copied: Event | None = None

    def arrived(self, count: int) -> None:
        """See ``Incoming.arrived``."""
        if count:
            self._copied = self._put(count)

    def close(self) -> None:
        """See ``Incoming.close``."""
        self._staged.release(self._copied)


class CudaOutgoing:
    """See ``Outgoing``.

    Args:
        copied: the event after the copies.
    """

    def __init__(self, staged: StagedBlocks, copied: Event) -> None:
        self._staged = staged
        self._copied = copied

    def ready(self) -> Sequence[Segments]:
        """See ``Outgoing.ready``."""
        self._copied.synchronize()
        return self._staged.segments

    def close(self) -> None:
        """See ``Outgoing.close``."""
        # Copies may still be running. They precede the next ones into the same memory in the stream.
        self._staged.release(None)


class _Direction:
    """One direction: its stream, its staging memory, and a buffer on the device for one layer of so many blocks."""

    def __init__(self, memory: torch.Tensor, capacity: int, stream: Stream) -> None:
        layers, parts, blocks = memory.shape[:3]
        self.stream = stream
        self._memory = memory.view(_WORD).view(layers, parts, blocks, -1).transpose(1, 2)
        words = self._memory.shape[-1]
        self._buffer = torch.empty(capacity, parts, words, dtype=_WORD, device=memory.device)
        self.staging = StagingMemory(layers, parts * words, capacity, pinned=memory.is_cuda)

    def put(self, blocks: Sequence[int], staged: StagedBlocks) -> list[Event]:
        """Queues copies of the staged bytes into the blocks; returns an event after each layer."""
        transfer = _Transfer(blocks, self._memory, self._buffer, staged)
        return self._by_layers(transfer, transfer.put)

    def take(self, blocks: Sequence[int], staged: StagedBlocks) -> list[Event]:
        """Queues copies out of the blocks; returns an event after each layer."""
        transfer = _Transfer(blocks, self._memory, self._buffer, staged)
        return self._by_layers(transfer, transfer.take)

    def _by_layers(self, transfer: _Transfer, copy: Callable[[int], None]) -> list[Event]:
        self.stream.submit(transfer.begin)
        events = []
        for layer in range(self._memory.shape[0]):
            self.stream.submit(partial(copy, layer))
            events.append(self.stream.record_event())
        return events


class _Transfer:
    """Some blocks between staging and KV memory [layers, blocks, 2, words]; its methods run in a stream, in order.

    The blocks are not contiguous there, so they go through ``buffer`` [blocks, 2, words]: one contiguous copy between
    host and device, and one gather or scatter kernel.
    """

    def __init__(self, blocks: Sequence[int], memory: torch.Tensor, buffer: torch.Tensor, staged: StagedBlocks) -> None:
        self._blocks = np.array(blocks, dtype=np.int64)
        self._memory = memory
        self._buffer = buffer[: len(blocks)]
        self._staged = staged.words[:, : len(blocks)].view(len(staged.words), *self._buffer.shape)
        self._places = torch.empty(0)

    @torch.inference_mode()
    def begin(self) -> None:
        """Copies the block numbers to the device."""
        self._places = to_device(self._blocks, self._buffer.device)

    @torch.inference_mode()
    def put(self, layer: int) -> None:
        """Scatters one layer into the blocks."""
        self._buffer.copy_(self._staged[layer], non_blocking=True)
        self._memory[layer].index_copy_(0, self._places, self._buffer)

    @torch.inference_mode()
    def take(self, layer: int) -> None:
        """Gathers one layer of the blocks."""
        torch.index_select(self._memory[layer], 0, self._places, out=self._buffer)
        self._staged[layer].copy_(self._buffer, non_blocking=True)
