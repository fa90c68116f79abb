"""Chains of blocks with distinct contents, in memory as an engine has it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from prefix_store.codecs.codec import Codec
from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.codecs.registry import PLAIN
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Bytes, Segments
from prefix_store.tiers.tier import Tier

Make = Callable[..., Awaitable[Tier]]
"""Makes the tier of a test: ``make(codec, removed, policy)``; all arguments are optional."""

CAPACITY = 64
"""Frames in it; a disk keeps an eighth of them free for writes ahead."""

LAYERS, TOKENS, HEADS, DIMENSIONS = 3, 4, 2, 8
LAYOUT = BlockLayout("float16", (LAYERS, 2, HEADS, TOKENS, DIMENSIONS), "lphtd")
NAMESPACE = xxhash.xxh3_128_digest(b"a model")


def format_of(codec: Codec = PLAIN) -> FrameFormat:
    return FrameFormat(LAYOUT, codec)


def chain(name: str, length: int, root: Sequence[BlockId] = ()) -> list[BlockId]:
    """A chain, the same for the same arguments; `root` is its prefix."""
    blocks = list(root)
    for number in range(len(blocks), length):
        parent = blocks[-1].key if blocks else NAMESPACE
        tokens = xxhash.xxh3_128_digest(f"{name} {number}".encode())
        blocks.append(BlockId(NAMESPACE, xxhash.xxh3_128_digest(parent + tokens), parent, tokens))
    return blocks


def content(block: BlockId) -> Bytes:
    """A block's contents, float16 numbers as bytes, derived from its key."""
    seed = int.from_bytes(block.key[:8], "little")
    numbers = np.random.default_rng(seed).standard_normal(LAYOUT.nbytes // 2).astype(np.float16)
    return numbers.view(np.uint8)


@dataclass
class Memory:
    """KV memory [layers, 2, blocks, bytes]: a block's numbers are in 2 · layers pieces."""

    blocks: int
    bytes: Bytes = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = np.full((LAYERS, 2, self.blocks, LAYOUT.nbytes // LAYERS // 2), 0xEE, np.uint8)

    def segments(self, block: int) -> Segments:
        return [self.bytes[:, :, block]]

    def fill(self, chain: Sequence[BlockId]) -> list[Segments]:
        """Puts the contents of a chain into the first blocks."""
        for number, block in enumerate(chain):
            self.bytes[:, :, number] = content(block).reshape(LAYERS, 2, -1)
        return [self.segments(number) for number in range(len(chain))]

    def all(self, count: int) -> list[Segments]:
        return [self.segments(number) for number in range(count)]

    def holds(self, block: int, what: BlockId) -> bool:
        return bool((self.bytes[:, :, block].ravel() == content(what)).all())

    def is_untouched(self, block: int) -> bool:
        return bool((self.bytes[:, :, block] == 0xEE).all())
