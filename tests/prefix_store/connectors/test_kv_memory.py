"""An engine's blocks as bytes: the same for every layout and every kind of memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prefix_store.connectors.kv_memory import DeviceMemory, HostMemory, KvMemory, kv_memory, largest_error
from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Bytes, Segments, gather, scatter
from prefix_store.tiers.cancellation import CancelToken

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 7, 2, 4, 6
SHAPE = (BLOCKS, HEADS, TOKENS, CONTENT)
Tensors = dict[str, torch.Tensor]


def _named(tensors: list[torch.Tensor]) -> Tensors:
    return {f"layer {number}": tensor for number, tensor in enumerate(tensors)}


def apart() -> Tensors:
    """Each layer in a storage of its own."""
    return _named([torch.zeros(SHAPE) for _ in range(LAYERS)])


def one_storage() -> Tensors:
    """One layer after the other."""
    return _named(list(torch.zeros(LAYERS, *SHAPE)))


def block_by_block() -> Tensors:
    """All layers of a block side by side."""
    return _named(list(torch.zeros(BLOCKS, LAYERS, HEADS, TOKENS, CONTENT).unbind(1)))


def tokens_before_heads() -> Tensors:
    """As most attention kernels want it."""
    return _named(list(torch.zeros(LAYERS, BLOCKS, TOKENS, HEADS, CONTENT).transpose(2, 3)))


def backwards() -> Tensors:
    """The last layer first."""
    return _named(list(torch.zeros(LAYERS, *SHAPE))[::-1])


def at_unequal_distances() -> Tensors:
    """In one storage, but not evenly."""
    storage = torch.zeros(6, *SHAPE)
    return _named([storage[0], storage[1], storage[4]])


def one_layer() -> Tensors:
    """A model of one layer."""
    return _named([torch.zeros(SHAPE)])


LAYOUTS = [apart, one_storage, block_by_block, tokens_before_heads, backwards, at_unequal_distances, one_layer]


def _device(caches: Tensors, layout: BlockLayout) -> DeviceMemory:
    return DeviceMemory([cache.view(torch.int32) for cache in caches.values()], layout)


def _bytes(memory: KvMemory, segments: Segments) -> Bytes:
    data = np.empty(memory.layout.nbytes, np.uint8)
    gather(segments, data)
    return data


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_blocks_bytes_are_its_numbers_in_one_order(make: Callable[[], Tensors]) -> None:
    """Layer, KV head, token, content; the same from the host's memory and by way of staging memory."""
    caches = make()
    for number, cache in enumerate(caches.values()):
        cache.copy_(torch.arange(cache.numel()).reshape(SHAPE) + 1000.0 * number)
    memory = kv_memory(caches, BLOCKS)
    assert isinstance(memory, HostMemory)
    assert memory.layout == BlockLayout("float32", (len(caches), HEADS, TOKENS, CONTENT))
    device = _device(caches, memory.layout)
    places = [5, 0, 2]
    for kind in (memory, device):
        for place, segments in zip(places, kind.outgoing(places).ready(), strict=True):
            expected = torch.stack([cache[place] for cache in caches.values()]).numpy()
            assert _bytes(kind, segments).tobytes() == expected.tobytes()
        kind.fence()


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize("make", LAYOUTS)
def test_blocks_are_put_where_they_belong(make: Callable[[], Tensors], is_on_host: bool) -> None:
    """Those that came, and no others."""
    caches = make()
    memory = kv_memory(caches, BLOCKS)
    kind = memory if is_on_host else _device(caches, memory.layout)
    assert kind.is_on_host == is_on_host
    incoming = kind.incoming([5, 0, 2])
    numbers = np.arange(2 * memory.layout.nbytes // 4, dtype=np.float32).reshape(2, *memory.layout.shape) + 1
    for data, segments in zip(numbers, incoming.segments, strict=False):
        scatter(data.reshape(-1).view(np.uint8), segments)
    incoming.finish(0)
    incoming.finish(2)
    for number, cache in enumerate(caches.values()):
        assert np.array_equal(cache[5].numpy(), numbers[0, number])
        assert np.array_equal(cache[0].numpy(), numbers[1, number])
        assert not cache[[1, 2, 3, 4, 6]].any()


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Notes what is copied to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.targets: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.targets.append(args[0])
        return func(*args, **(kwargs or {}))


def test_each_copy_from_a_device_is_to_contiguous_memory() -> None:
    """The engine's thread would wait for another one: torch makes it by way of memory that is not pinned."""
    caches = one_storage()
    memory = _device(caches, BlockLayout("float32", (LAYERS, HEADS, TOKENS, CONTENT)))
    with _Copies() as copies:
        memory.outgoing([5, 0, 2])
    assert [target.is_contiguous() for target in copies.targets] == [True] * LAYERS


def test_layers_at_equal_distances_are_copied_in_one_call() -> None:
    """A block is then one strided view."""
    counts = {make: len(kv_memory(make(), BLOCKS).outgoing([1]).ready()[0]) for make in LAYOUTS}
    assert counts == {
        apart: 3,
        one_storage: 1,
        block_by_block: 1,
        tokens_before_heads: 1,
        backwards: 3,
        at_unequal_distances: 3,
        one_layer: 1,
    }


@pytest.mark.parametrize(
    ("dtype", "size"), [("float16", 2), ("bfloat16", 2), ("float32", 4), ("uint8", 1), ("float8_e4m3fn", 1)]
)
def test_every_dtype_of_a_frame_is_taken(dtype: str, size: int) -> None:
    """The bytes are the tensor's own."""
    cache = torch.arange(BLOCKS * HEADS * TOKENS * CONTENT).reshape(SHAPE).to(getattr(torch, dtype))
    memory = kv_memory({"layer": cache}, BLOCKS)
    assert memory.layout.dtype == dtype
    assert memory.layout.nbytes == HEADS * TOKENS * CONTENT * size
    data = _bytes(memory, memory.outgoing([3]).ready()[0])
    assert data.tobytes() == cache[3].contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ({"a": torch.zeros(7, 2, 4)}, "layer a has the shape (7, 2, 4), expected [blocks, heads, tokens, content]"),
        ({"a": torch.zeros(6, 2, 4, 6)}, "expected [blocks, heads, tokens, content] with 7 blocks"),
        ({"a": torch.zeros(SHAPE), "b": torch.zeros(7, 2, 4, 8)}, "layer b is (7, 2, 4, 8) torch.float32"),
        ({"a": torch.zeros(SHAPE), "b": torch.zeros(SHAPE, dtype=torch.float16)}, "expected the same for all layers"),
        ({"a": torch.zeros(SHAPE), "b": torch.zeros(SHAPE, device="meta")}, "layer b is (7, 2, 4, 6) torch.float32 on"),
        ({"a": torch.zeros(SHAPE, dtype=torch.float64)}, "is of float64, expected one of float16, bfloat16"),
    ],
)
def test_a_cache_that_cannot_be_stored_is_refused(caches: Tensors, message: str) -> None:
    """The message names the layer and what would be right."""
    with pytest.raises(ValueError, match=r"KV cache") as raised:
        kv_memory(caches, BLOCKS)
    assert message in str(raised.value)


def _error(stored: torch.Tensor, computed: torch.Tensor, cancel: CancelToken | None = None) -> float | None:
    dtype = str(stored.dtype).removeprefix("torch.")
    layout = BlockLayout(dtype, tuple(stored.shape[1:]))
    rows = np.frombuffer(bytearray(stored.numpy().tobytes()), np.uint8).reshape(len(stored), layout.nbytes)
    return largest_error(layout, rows, [[block.numpy()] for block in computed], cancel or CancelToken())


def test_the_largest_error_is_relative_to_a_blocks_largest_number() -> None:
    """Of all blocks; a difference from nothing but zeros counts as it is."""
    computed = torch.tensor([[1.0, -4.0], [0.0, 0.0]])
    assert _error(computed, computed) == 0.0
    assert _error(computed + torch.tensor([[1.0, 0.0], [0.0, 0.0]]), computed) == 0.25
    assert _error(computed + torch.tensor([[1.0, 0.0], [0.0, 0.5]]), computed) == 0.5


def test_what_is_no_number_differs_from_everything() -> None:
    """An infinite error, not one that compares as smaller than any."""
    computed = torch.tensor([[1.0, -4.0]])
    assert _error(torch.tensor([[float("nan"), -4.0]]), computed) == float("inf")


def test_nothing_can_be_said_of_blocks_that_are_not_there() -> None:
    """Nor of 8-bit numbers, nor of blocks that were taken back."""
    computed = torch.tensor([[1.0, -4.0]])
    cancelled = CancelToken()
    cancelled.set()
    assert _error(computed[:0], computed) is None
    assert _error(computed, computed, cancelled) is None
    assert _error(torch.ones(1, 2, dtype=torch.uint8), torch.ones(1, 2, dtype=torch.uint8)) is None
