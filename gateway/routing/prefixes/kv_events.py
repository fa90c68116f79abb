"""KV cache events of vLLM and SGLang: which blocks of tokens an engine holds.

A message on the ZeroMQ PUB socket has three frames: topic, sequence number (8 bytes, big-endian), and a batch in
msgpack. A batch is [timestamp, events, …] and an event an array that begins with its name; newer versions of vLLM send
maps with these keys, and the name as `type`:

- BlockStored: block_hashes, parent_block_hash, token_ids (of all these blocks), block_size, lora_id, medium, lora_name,
  extra_keys, group_idx
- BlockRemoved: block_hashes, medium, group_idx
- AllBlocksCleared

(docs.vllm.ai, "KV Events Subscriber".) An engine's hashes are integers or bytes and mean nothing elsewhere; here a
block is the hash of all tokens up to its end, as its parents lead to it.
"""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

_MAX_BLOCKS = 2_000_000
_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_decode = msgspec.msgpack.Decoder().decode

Key = tuple[int | bytes, str | None]
"""A block of the engine: its hash, and the medium where it is."""


class BadEvents(ValueError):
    """A message that is none of KV cache events."""


class EngineBlocks:
    """The blocks that one engine holds, from its events. Bounded: what is stored beyond is not known."""

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._chains: dict[Key, int] = {}
        self._held: Counter[int] = Counter()
        self._block_size = 0
        self.is_whole = False
        """Whether all events are known: of the engine's start, or since it has dropped all blocks."""

    def __len__(self) -> int:
        return len(self._chains)

    def lose(self) -> None:
        """Forgets all blocks, because events were missed."""
        self.is_whole = False
        self._clear()

    def _clear(self) -> None:
        self._chains.clear()
        self._held.clear()

    def apply(self, batch: bytes) -> None:
        """Takes a batch of events. Raises BadEvents; the events before the fault are taken."""
        for name, event in _events(batch):
            try:
                if name == "BlockStored":
                    self._store(event)
                elif name == "BlockRemoved":
                    self._remove(event)
                elif name == "AllBlocksCleared":
                    self._clear()
                    self.is_whole = True
            except (TypeError, ValueError, KeyError, OverflowError) as error:
                raise BadEvents(f"{name}: {error}") from error

    def leading(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of a prompt it holds."""
        size, chain = self._block_size, 0
        if not size:
            return 0
        for start in range(0, len(tokens) - size + 1, size):
            chain = _chained(chain, tokens[start : start + size])
            if chain not in self._held:
                return start
        return len(tokens) - len(tokens) % size

    def _store(self, event: Mapping[str, Any]) -> None:
        # Blocks of an adapter, of images or of a salted cache are not those of the tokens alone; of a model with
        # several kinds of layers one kind tells enough.
        if event.get("lora_id") is not None or event.get("lora_name") or any(event.get("extra_keys") or ()):
            return
        if event.get("group_idx"):
            return
        medium, size, tokens = event.get("medium"), event["block_size"], event["token_ids"]
        parent = event["parent_block_hash"]
        chain = 0 if parent is None else self._chain_of(parent)
        if chain is None:
            return  # stored before the events that are known
        if size < 1 or len(tokens) < size * len(event["block_hashes"]):
            raise ValueError(f"{len(tokens)} tokens for {len(event['block_hashes'])} blocks of {size}")
        if self._block_size not in (0, size):
            self.lose()
        self._block_size = size
        for number, block in enumerate(event["block_hashes"]):
            chain = _chained(chain, tokens[number * size : (number + 1) * size])
            if (block, medium) not in self._chains and len(self._chains) < self._max_blocks:
                self._chains[block, medium] = chain
                self._held[chain] += 1

    def _remove(self, event: Mapping[str, Any]) -> None:
        if event.get("group_idx"):
            return
        for block in event["block_hashes"]:
            chain = self._chains.pop((block, event.get("medium")), None)
            if chain is not None:
                self._held[chain] -= 1
                if not self._held[chain]:
                    del self._held[chain]

    def _chain_of(self, block: int | bytes) -> int | None:
        for medium in (None, "GPU", "CPU"):
            if (chain := self._chains.get((block, medium))) is not None:
                return chain
        return None


def _chained(chain: int, tokens: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(array("q", tokens).tobytes(), seed=chain)


def _events(batch: bytes) -> list[tuple[str, Mapping[str, Any]]]:
    """The name and the fields of each event."""
    try:
        decoded = _decode(batch)
        events = decoded["events"] if isinstance(decoded, dict) else decoded[1]
        return [_event(event) for event in events]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError) as error:
        raise BadEvents(f"no batch of events: {error}") from error


def _event(event: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(event, dict):
        return event["type"], event
    name, *values = event
    return name, dict(zip(_FIELDS.get(name, ()), values, strict=False))
