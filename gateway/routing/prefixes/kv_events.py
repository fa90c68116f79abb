"""KV cache events of vLLM and SGLang: which blocks of tokens an engine holds.

A message on the ZeroMQ PUB socket has three frames: topic, sequence number (8 bytes, big-endian), and a batch in
msgpack. A batch is [timestamp, events, …] and an event an array that begins with its name; newer versions send
maps with these keys, and the name as `type`:

- BlockStored: block_hashes, parent_block_hash, token_ids (of all these blocks), block_size, lora_id, medium, lora_name,
  extra_keys (one entry a block), group_idx, kv_cache_spec_kind; of SGLang also cache_salt, in maps only
- BlockRemoved: block_hashes, medium, group_idx
- AllBlocksCleared

(docs.vllm.ai, "KV Events Subscriber".) An engine's hashes are integers or bytes and mean nothing elsewhere; here a
block is the hash of all tokens up to its end, as its parents lead to it, and of the salt of the request, which vLLM
tells in the extra keys of the first block. Blocks that vLLM moves to another medium may
come without tokens, and those of layers with a sliding window with more tokens than they are of.
"""

import asyncio
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
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
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")
_TOKEN_BYTES = array("q").itemsize
_decode = msgspec.msgpack.Decoder().decode

Place = tuple[str | None, int]
"""The medium where a block is, and the group of layers that it is of."""


class BadEvents(ValueError):
    """A message that is none of KV cache events."""


HeldBlock = tuple[tuple[int | bytes, Place], int]
"""An engine's number of a block with its place, and its number here."""


class BlocksState(msgspec.Struct, array_like=True, frozen=True):
    """What is known of an engine's blocks together."""

    is_whole: bool
    sizes: list[int]
    adapters: list[str]


class EngineBlocks:
    """The blocks that one engine holds, from its events. Bounded: what is stored beyond is not known."""

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._chains: dict[tuple[int | bytes, Place], int] = {}
        self._held: Counter[int] = Counter()
        self._media: set[str | None] = set()
        self._sizes: set[int] = set()
        self.adapters: set[str] = set()
        """Names of models whose blocks are not known: LoRA adapters."""
        self.is_whole = False
        """Whether all events are known: of the engine's start, or since it has dropped all blocks."""

    def __len__(self) -> int:
        return len(self._chains)

    def lose(self) -> None:
        """Forgets all blocks, because events were missed."""
        self.is_whole = False
        self._clear()
        self._media.clear()
        self._sizes.clear()

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

    def state(self, most: int) -> tuple[BlocksState, list[HeldBlock]]:
        """What is known now, of `most` blocks at most."""
        blocks = list(islice(self._chains.items(), most))  # parents come before their children
        is_whole = self.is_whole and len(blocks) == len(self._chains)
        return BlocksState(is_whole, sorted(self._sizes), sorted(self.adapters)), blocks

    async def restore(self, state: BlocksState, parts: Iterable[Sequence[HeldBlock]]) -> None:
        """Know these blocks, and no others; other work goes on after each part."""
        self.lose()
        self._sizes.update(state.sizes)
        self.adapters.update(state.adapters)
        for part in parts:
            for (block, place), chain in part:
                self._keep(block, place, chain)
            await asyncio.sleep(0)
        self.is_whole = state.is_whole

    def leading(self, tokens: Sequence[int], salt: str | None = None) -> float:
        """How many leading tokens of a prompt it holds, for requests with this salt."""
        data, start = array("q", tokens).tobytes(), _start(salt)
        return max((self._leading(start, data, size) for size in self._sizes), default=0)

    def _leading(self, start: int, data: bytes, size: int) -> int:
        count = 0
        for chain in _chains(start, data, size):
            if chain not in self._held:
                break
            count += size
        return count

    def _store(self, event: Mapping[str, Any]) -> None:
        hashes, size, tokens = event["block_hashes"], event["block_size"], event["token_ids"]
        group = event.get("group_idx") or 0
        place = event.get("medium"), group
        if not tokens:  # copied to this medium
            for block in hashes:
                if (known := self._chain_of(block, group)) is not None:
                    self._keep(block, place, known)
            return
        # Blocks of an adapter are not those of the tokens alone.
        if adapter := event.get("lora_name"):
            self.adapters.add(adapter)
        if adapter or event.get("lora_id") is not None:
            return
        # Of a model with several kinds of layers the one that sees all tokens tells enough; where none is named, the
        # first group stands for it.
        kind = event.get("kv_cache_spec_kind")
        if kind not in _FULL_ATTENTION if kind else group:
            return
        parent = event["parent_block_hash"]
        extra_keys = list(event.get("extra_keys") or (None,) * len(hashes))
        salt = event.get("cache_salt")
        if parent is None and extra_keys and _is_salt(extra_keys[0]):
            (salt,), extra_keys[0] = extra_keys[0], None
        start = _start(salt) if parent is None else self._chain_of(parent, group)
        if start is None:
            return  # stored before the events that are known
        if size < 1 or len(tokens) < size * len(hashes):
            raise ValueError(f"{len(tokens)} tokens for {len(hashes)} blocks of {size}")
        if len(tokens) > size * len(hashes):
            return  # some blocks are left out, and which is not said
        if isinstance(tokens[0], list):  # with the next token each, for EAGLE
            tokens = [token for token, _ in tokens]
        self._sizes.add(size)
        chains = _chains(start, array("q", tokens).tobytes(), size)
        for block, extra, chain in zip(hashes, extra_keys, chains, strict=False):
            if extra:
                return  # with an image it and those after it are not of the tokens alone
            self._keep(block, place, chain)

    def _keep(self, block: int | bytes, place: Place, chain: int) -> None:
        if (block, place) not in self._chains and len(self._chains) < self._max_blocks:
            self._chains[block, place] = chain
            self._held[chain] += 1
            self._media.add(place[0])

    def _remove(self, event: Mapping[str, Any]) -> None:
        place = event.get("medium"), event.get("group_idx") or 0
        for block in event["block_hashes"]:
            chain = self._chains.pop((block, place), None)
            if chain is not None:
                self._held[chain] -= 1
                if not self._held[chain]:
                    del self._held[chain]

    def _chain_of(self, block: int | bytes, group: int) -> int | None:
        chains = (self._chains.get((block, (medium, group))) for medium in self._media)
        return next((chain for chain in chains if chain is not None), None)


def _is_salt(keys: Any) -> bool:
    """Whether the extra keys of a first block, which is of no adapter, are a salt alone."""
    return isinstance(keys, list) and len(keys) == 1 and isinstance(keys[0], str)


def _start(salt: str | None) -> int:
    """The number of what comes before the first block."""
    return xxhash.xxh3_64_intdigest(salt.encode("utf-8", "surrogatepass")) if salt else 0


def _chains(chain: int, data: bytes, size: int) -> Iterator[int]:
    """The number of each whole block of `size` tokens, after the block `chain`."""
    length = size * _TOKEN_BYTES
    for start in range(0, len(data) - length + 1, length):
        chain = xxhash.xxh3_64_intdigest(data[start : start + length], seed=chain)
        yield chain


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
