"""Reference counts and contents of KV blocks, and the prefix cache that finds blocks by content.

A full block has a key (`prefix_store.identity.keys`): a hash over the key of the block before it and its own tokens, as
in vLLM's automatic prefix caching. Equal keys mean equal keys and values, so sequences that begin alike hold the same
blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Content:
    """Content of a block: tokens after those of its parent, computed."""

    key: bytes
    parent: int | None
    token_ids: list[int]
    children: set[int] = field(default_factory=set)
    """Blocks whose contents follow this one."""


@dataclass(frozen=True, slots=True)
class Match:
    """Blocks that hold the beginning of a sequence."""

    blocks: list[int]
    last: _Content | None
    """What the last of them contained."""


class BlockPool:
    """Allocates blocks with reference counts, and finds blocks by their content.

    blank ──allocate──► held (count ≥ 1) ──register──► held, shared by content
      ▲                  │ last release                  │ last release
      └──────────────────┘            reuse ◄── cached (count 0, content kept, least recently used first)

    Invariants: every block is blank, cached or held. A block with content has a parent with content (or none at all):
    a sequence is released from its end, and a block whose parent is evicted, because windows release beginnings, loses
    its content with it. So a chain never has holes. A key may collide: tokens and parents are compared as well.

    One thread uses it.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, expected at least 1")
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._empty = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._contents: list[_Content | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without a reference, the cached ones included, which are evicted when blocks are needed."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """Takes ``count`` blocks, each with one reference; None, and no change, if there are not as many."""
        if count > self.num_free:
            return None
        blocks = [self._empty.popleft() if self._empty else self._evict() for _ in range(count)]
        for block in blocks:
            self._counts[block] = 1
        return blocks

    def acquire(self, block: int) -> None:
        """Adds a reference to a held block, or the first one to a cached block."""
        if self._counts[block] == 0:
            if block not in self._cached:
                raise ValueError(f"block {block} is free and cannot be shared")
            del self._cached[block]
        self._counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drops one reference of each block; blocks without a reference become free, the last one first."""
        for block in reversed(blocks):
            if not self._counts[block]:
                raise ValueError(f"block {block} is already free")
            self._counts[block] -= 1
            if not self._counts[block]:
                if self._contents[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None

    def ref_count(self, block: int) -> int:
        """References to this block."""
        return self._counts[block]

    def find(self, key: bytes) -> int | None:
        """The block with this key. Any thread may call this; the result is a hint that ``match`` verifies."""
        return self._by_key.get(key)

    def match(
        self, keys: Sequence[bytes], token_ids: Sequence[int], block_size: int, before: Match | None = None
    ) -> Match:
        """Blocks that hold the longest known beginning of a sequence. Changes nothing.

        Args:
            keys: of the sequence's first full blocks.
            token_ids: the sequence; at least ``len(keys) * block_size`` tokens.
            before: an earlier match of this sequence; the part of it that is still valid is not looked up again.
        """
        found: list[int] = []
        # A content goes when its parent's goes, so where the last one is still there all of the chain is.
        if before is not None and before.blocks and self._contents[before.blocks[-1]] is before.last:
            found = before.blocks[: len(keys)]
        for index in range(len(found), len(keys)):
            block = self._by_key.get(keys[index])
            tokens = list(token_ids[index * block_size : (index + 1) * block_size])
            parent = found[-1] if found else None
            if block is None or not self._contains(block, parent, tokens):
                break
            found.append(block)
        return Match(found, self._contents[found[-1]] if found else None)

    def register(self, block: int, key: bytes, parent: int | None, token_ids: list[int]) -> int | None:
        """Records the content of a held block, now that it is computed, so that others can find it.

        Args:
            parent: the block before it in the sequence that holds both; None: it is the first.

        Returns:
            The block that holds this content from now on. If another one held it before, that one, with the
            reference that ``block`` had; None, and no change, if the content cannot be shared (its parent has no
            content, or another content has the same key).
        """
        if parent is not None and self._contents[parent] is None:
            return None
        other = self._by_key.get(key)
        if other is None:
            if self._contents[block] is not None:
                return None
            self._contents[block] = _Content(key, parent, list(token_ids))
            self._by_key[key] = block
            before = None if parent is None else self._contents[parent]
            if before is not None:
                before.children.add(block)
            return block
        if other == block or not self._contains(other, parent, token_ids):
            return block if other == block else None
        self.acquire(other)
        self.release([block])
        return other

    def forget(self, blocks: list[int]) -> None:
        """Removes the contents of these blocks, and of all blocks that follow them, from the cache."""
        for block in blocks:
            self._drop_content(block)

    def forget_keys(self, keys: Sequence[bytes]) -> None:
        """The same for the blocks that have these keys, as far as there are any."""
        self.forget([block for block in map(self.find, keys) if block is not None])

    def problems(self, holders: Counter[int]) -> list[str]:
        """Violated invariants, in sentences; empty if there are none.

        Args:
            holders: how often each block stands in the block table of a sequence.
        """
        found = []
        empty, cached = set(self._empty), set(self._cached)
        if len(empty) != len(self._empty) or empty & cached:
            found.append("a block is free twice")
        for block, count in enumerate(self._counts):
            content = self._contents[block]
            if count != holders[block]:
                found.append(f"block {block} counts {count} references, sequences hold it {holders[block]} times")
            if (count == 0) != (block in empty or block in cached):
                found.append(f"block {block} is both held and free, or neither")
            if block in empty and content is not None:
                found.append(f"block {block} is blank and has a content")
            if block in cached and content is None:
                found.append(f"block {block} is cached without a content")
            if content is None:
                continue
            if self._by_key.get(content.key) != block:
                found.append(f"block {block} is not found by its key")
            if content.parent is not None and self._contents[content.parent] is None:
                found.append(f"block {block} follows block {content.parent}, which has no content")
        if len(self._by_key) != sum(content is not None for content in self._contents):
            found.append("there are more keys than contents")
        return found

    def _contains(self, block: int, parent: int | None, token_ids: list[int]) -> bool:
        content = self._contents[block]
        return content is not None and content.parent == parent and content.token_ids == token_ids

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._drop_content(block)
        return block

    def _drop_content(self, block: int) -> None:
        """Removes the content of a block, and of the blocks that follow it."""
        content = self._contents[block]
        before = None if content is None or content.parent is None else self._contents[content.parent]
        if before is not None:
            before.children.discard(block)
        lost = [block]
        while lost:
            block = lost.pop()
            content, self._contents[block] = self._contents[block], None
            if content is not None:
                del self._by_key[content.key]
                lost += content.children
            if block in self._cached:
                del self._cached[block]
                self._empty.append(block)
