"""KV blocks of a device: filled and read through pinned memory, layer by layer, beside the steps.

inward     │ layer 0 │ layer 1 │ layer 2 │ …          from the host, then into the blocks
compute         steps │ layer 0 │ layer 1 │ …         the next step; each layer waits for its own keys and values
outward    │ layer 0 │ layer 1 │ …                    out of the blocks, then to the host
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from backend.kernels.transfer import to_device
from backend.runners.cuda.kv_staging import StagedBlocks, StagingMemory
from backend.runners.cuda.streams import DeviceQueue, Mark, Queues
from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Segments, gather, scatter

_WORD = torch.int64
"""Numbers are moved as words of 8 bytes, whatever they are: fewer and wider accesses, and no bit ever changes."""


class CudaKvBlocks:
    """See ``KvBlocks``. Each direction has staging memory of its own, so copying out never keeps anything from coming
    in.

    Args:
        memory: [layers, 2, blocks, kv heads, BLOCK_SIZE, head_dim], contiguous, on the device.
        staging_bytes: host memory for each direction; it holds one block at least.
        queues: of the device.

    Raises:
        MemoryError: the host does not pin so much memory.
        torch.OutOfMemoryError: the device has no room for one layer of so many blocks, twice.
    """

    def __init__(self, memory: torch.Tensor, staging_bytes: int, queues: Queues) -> None:
        layers, parts, blocks, heads, tokens, dimensions = memory.shape
        dtype = str(memory.dtype).removeprefix("torch.")
        self.layout = BlockLayout(dtype, (layers, parts, heads, tokens, dimensions), "lphtd")
        self.most_at_once = min(blocks, max(1, staging_bytes // self.layout.nbytes))
        self._compute = queues.compute
        self._inward = _Way(memory, self.most_at_once, queues.inward)
        self._outward = _Way(memory, self.most_at_once, queues.outward)
        self._arriving: list[Mark] = []
        """A mark for each layer of what arrived last, as long as no step has waited for all of them. What arrived
        earlier is before them in the queue."""

    def incoming(self, blocks: Sequence[int]) -> CudaIncoming | None:
        """See ``KvBlocks.incoming``."""
        staged = self._inward.staging.take(len(blocks))
        if staged is None:
            return None
        # Steps that were run before this may still read and write the blocks, for those who had them; later ones do
        # not. So the copies need not wait for whatever is being computed when the bytes are there.
        return CudaIncoming(staged, partial(self._put, blocks, staged, self._compute.mark()))

    def outgoing(self, blocks: Sequence[int]) -> CudaOutgoing | None:
        """See ``KvBlocks.outgoing``."""
        staged = self._outward.staging.take(len(blocks))
        if staged is None:
            return None
        self._outward.queue.after(self._compute.mark())
        if self._arriving:
            self._outward.queue.after(self._arriving[-1])
        return CudaOutgoing(staged, self._outward.take(blocks, staged)[-1])

    def waits(self) -> Callable[[int], None] | None:
        """What the next step calls with the number of each layer, in order, before it touches keys and values of it.

        None: nothing is arriving. A recording has no waits in it, so a step is not replayed where there are any.
        """
        if self._arriving and self._arriving[-1].passed():
            self._arriving = []
        return self._wait if self._arriving else None

    def check(self, block: int) -> None:
        """Sends noise to a block that nobody owns, and back.

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

    def _put(self, blocks: Sequence[int], staged: StagedBlocks, since: Mark, count: int) -> Mark:
        self._inward.queue.after(since)
        self._arriving = self._inward.put(blocks[:count], staged)
        return self._arriving[-1]

    def _wait(self, layer: int) -> None:
        self._compute.after(self._arriving[layer])
        if layer == len(self._arriving) - 1:
            self._arriving = []


class CudaIncoming:
    """See ``Incoming``.

    Args:
        put: queues the copies of so many blocks and gives the mark behind them.
    """

    def __init__(self, staged: StagedBlocks, put: Callable[[int], Mark]) -> None:
        self.segments = staged.segments
        self._staged = staged
        self._put = put
        self._copied: Mark | None = None

    def arrived(self, count: int) -> None:
        """See ``Incoming.arrived``."""
        if count:
            self._copied = self._put(count)

    def close(self) -> None:
        """See ``Incoming.close``."""
        self._staged.give_back(self._copied)


class CudaOutgoing:
    """See ``Outgoing``.

    Args:
        copied: the mark behind the copies.
    """

    def __init__(self, staged: StagedBlocks, copied: Mark) -> None:
        self._staged = staged
        self._copied = copied

    def ready(self) -> Sequence[Segments]:
        """See ``Outgoing.ready``."""
        self._copied.wait()
        return self._staged.segments

    def close(self) -> None:
        """See ``Outgoing.close``."""
        # Copies that nobody waited for may still be under way. They are before the next ones into the same memory.
        self._staged.give_back(None)


class _Way:
    """One direction: its queue, its staging memory, and a place on the device for one layer of so many blocks."""

    def __init__(self, memory: torch.Tensor, capacity: int, queue: DeviceQueue) -> None:
        layers, parts, blocks = memory.shape[:3]
        self.queue = queue
        self._memory = memory.view(_WORD).view(layers, parts, blocks, -1).transpose(1, 2)
        words = self._memory.shape[-1]
        self._landing = torch.empty(capacity, parts, words, dtype=_WORD, device=memory.device)
        self.staging = StagingMemory(layers, parts * words, capacity, pinned=memory.is_cuda)

    def put(self, blocks: Sequence[int], staged: StagedBlocks) -> list[Mark]:
        """Queues copies into the leading blocks that were staged; a mark behind each layer."""
        transfer = _Transfer(blocks, self._memory, self._landing, staged)
        return self._by_layers(transfer, transfer.put)

    def take(self, blocks: Sequence[int], staged: StagedBlocks) -> list[Mark]:
        """Queues copies out of the blocks; a mark behind each layer."""
        transfer = _Transfer(blocks, self._memory, self._landing, staged)
        return self._by_layers(transfer, transfer.take)

    def _by_layers(self, transfer: _Transfer, copy: Callable[[int], None]) -> list[Mark]:
        self.queue.submit(transfer.begin)
        marks = []
        for layer in range(self._memory.shape[0]):
            self.queue.submit(partial(copy, layer))
            marks.append(self.queue.mark())
        return marks


class _Transfer:
    """Some blocks between staging and KV memory [layers, blocks, 2, words]; its methods run in a queue, in order.

    The blocks lie scattered there, so they go through ``landing`` [most blocks, 2, words]: one copy of one stretch
    between host and device, and one kernel on the device.
    """

    def __init__(
        self, blocks: Sequence[int], memory: torch.Tensor, landing: torch.Tensor, staged: StagedBlocks
    ) -> None:
        self._blocks = np.array(blocks, dtype=np.int64)
        self._memory = memory
        self._landing = landing[: len(blocks)]
        self._staged = staged.words[:, : len(blocks)].view(len(staged.words), *self._landing.shape)
        self._places = torch.empty(0)

    @torch.inference_mode()
    def begin(self) -> None:
        """Tells the device which blocks."""
        self._places = to_device(self._blocks, self._landing.device)

    @torch.inference_mode()
    def put(self, layer: int) -> None:
        """Fills a layer of the blocks."""
        self._landing.copy_(self._staged[layer], non_blocking=True)
        self._memory[layer].index_copy_(0, self._places, self._landing)

    @torch.inference_mode()
    def take(self, layer: int) -> None:
        """Reads a layer of the blocks."""
        torch.index_select(self._memory[layer], 0, self._places, out=self._landing)
        self._staged[layer].copy_(self._landing, non_blocking=True)
