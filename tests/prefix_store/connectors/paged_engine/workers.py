"""The workers of the simulated paged engine: KV blocks in real tensors, the real worker's side, a real store."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import xxhash

from prefix_store.connectors.kv_memory import DeviceMemory, KvMemory, kv_memory
from prefix_store.connectors.store_thread import StoreThread
from prefix_store.connectors.transfers import PartNames, StepPlan, StepReport
from prefix_store.connectors.worker import WorkerSide
from prefix_store.frames.layout import BlockLayout
from prefix_store.store.config import StoreConfig
from prefix_store.store.open_store import OpenStore, open_store
from prefix_store.store.owners import DISK
from prefix_store.tiers.disk.disk_tier import DiskTier
from tests.prefix_store.connectors.paged_engine.toy_model import BLOCK, CONTENT, HEADS, LAYERS, Sequence

Memory = Literal["layers", "one", "device"]
"""Tensors of layers in storages of their own, or in one, or such that are copied by way of staging memory."""

_POISON = -1.0
"""In blocks that hold nothing."""
_LAYOUT = BlockLayout("float32", (LAYERS, HEADS, BLOCK, CONTENT))


@dataclass
class Step:
    """What the scheduler sends to the workers."""

    plan: StepPlan
    number: int
    scheduled: dict[str, int]
    """Tokens by request."""
    starts: dict[str, int]
    """Computed tokens before this step."""
    tables: dict[str, list[int]]
    """Blocks by request."""
    fresh: dict[str, list[int]]
    """All tokens of requests that the workers do not know, or not any more."""
    sampled: set[str]
    """Requests whose next token is wanted."""
    new_blocks: set[int]
    """Taken to be filled: what was in them is void."""
    taken: set[int]
    """Free until the last step."""
    freed: dict[int, bool]
    """Free since the last step, and whether what is in them may be used again."""


@dataclass
class Output:
    """What the workers answer."""

    tokens: dict[str, int] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    report: StepReport = field(default_factory=StepReport)


class Rank:
    """One worker.

    Args:
        config: of its store.
        num_blocks: of the engine.
        seed: of the model that the store knows.
    """

    def __init__(self, rank: int, config: StoreConfig, num_blocks: int, seed: int, memory: Memory) -> None:
        self.rank = rank
        shape = (num_blocks, HEADS, BLOCK, CONTENT)
        whole = torch.full((LAYERS, *shape), _POISON)
        tensors = list(whole) if memory == "one" else [layer.clone() for layer in whole]
        self._caches = [tensor.numpy() for tensor in tensors]
        self._snapshots: dict[int, bytes] = {}
        namespace = xxhash.xxh3_128_digest(f"{rank} {seed}".encode())
        self.thread: StoreThread[OpenStore] = StoreThread(lambda: open_store(config, namespace, _LAYOUT))
        self.names = PartNames(namespace)
        self.memory: KvMemory = (
            DeviceMemory([tensor.view(torch.int32) for tensor in tensors], _LAYOUT)
            if memory == "device"
            else kv_memory({str(number): tensor for number, tensor in enumerate(tensors)}, num_blocks)
        )
        assert self.memory.layout == _LAYOUT
        self.side = WorkerSide(self.memory, num_blocks, self.thread, self.names)
        self.freeze(range(num_blocks))
        self._await_disk()

    def execute(self, step: Step, sequences: dict[str, Sequence]) -> Output:
        """One step, in vLLM's order. Raises AssertionError for a wrong number in a block that is read."""
        side, plan = self.side, pickle.loads(pickle.dumps(step.plan))  # noqa: S301  # as between processes
        side.before_step(plan)
        self._take(step)
        side.begin(plan)
        for request_id, count in step.scheduled.items():
            self._write(step.tables[request_id], step.starts[request_id], count, sequences[request_id])
        for request_id, count in step.scheduled.items():
            self.check(step.tables[request_id], step.starts[request_id] + count, sequences[request_id], request_id)
        side.load(plan)
        side.save(plan)
        sent, received = side.collect(plan.is_idle)
        return Output({}, sent, received, side.failed_blocks(), side.report())

    def check(self, table: list[int], until: int, sequence: Sequence, name: str) -> None:
        """Compares the blocks of the first tokens with what is computed."""
        blocks = table[: -(-until // BLOCK)]
        held = np.stack([cache[blocks].swapaxes(1, 2).reshape(-1, HEADS, CONTENT) for cache in self._caches], axis=1)
        wrong = np.nonzero((held[:until] != sequence.numbers(until, self.rank)).any(axis=(1, 2, 3)))[0]
        assert not len(wrong), f"request {name}, rank {self.rank}: numbers of tokens {wrong.tolist()} are wrong"

    def overwrite(self, blocks: Iterable[int], value: float) -> None:
        """Puts a number everywhere into blocks."""
        for cache in self._caches:
            cache[list(blocks)] = value

    def _await_disk(self) -> None:
        """A disk is opened in the background, and counts as empty until then."""
        disk = self.thread.value.store.tiers.get(DISK)
        is_listed = threading.Event()

        async def listed() -> None:
            assert isinstance(disk, DiskTier)
            await disk.listed()
            is_listed.set()

        if disk is not None:
            self.thread.begin(listed())
            assert is_listed.wait(10)

    def kill_thread(self) -> None:
        """Ends the store's thread, as a fault of its event loop would."""
        self.thread.begin(_cancel_all())

    def freeze(self, blocks: Iterable[int]) -> None:
        """Notes what free blocks hold: nobody writes them now."""
        self._snapshots.update((block, self._content(block)) for block in blocks)

    def check_free_blocks(self, blocks: Iterable[int] | None = None) -> None:
        """Raises AssertionError for a block, of all free ones, that was written while it was free."""
        for block in list(self._snapshots) if blocks is None else blocks:
            is_same = self._snapshots[block] == self._content(block)
            assert is_same, f"rank {self.rank}: block {block} was written while it was free"

    def _take(self, step: Step) -> None:
        """Follows what the scheduler did with blocks."""
        self.check_free_blocks(step.taken)
        for block in step.taken:
            del self._snapshots[block]
        self.overwrite(step.new_blocks, _POISON)
        self.overwrite([block for block, is_kept in step.freed.items() if not is_kept], _POISON)
        self.freeze(step.freed)

    def _content(self, block: int) -> bytes:
        return b"".join(cache[block].tobytes() for cache in self._caches)

    def _write(self, table: list[int], start: int, count: int, sequence: Sequence) -> None:
        numbers = sequence.numbers(start + count, self.rank)
        places = np.arange(start, start + count)
        blocks = np.asarray(table)[places // BLOCK]
        for layer, cache in enumerate(self._caches):
            cache[blocks, :, places % BLOCK] = numbers[start:, layer]


async def _cancel_all() -> None:
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            task.cancel()


class Workers:
    """All of them, and what vLLM's executor makes of their outputs.

    Args:
        seed: of the model that the store knows.
    """

    def __init__(self, ranks: Iterable[Rank], seed: int) -> None:
        self.ranks = list(ranks)
        self._seed = seed
        self._sequences: dict[str, Sequence] = {}
        self._counts: dict[str, Counter[str]] = {"sent": Counter(), "received": Counter()}

    def execute(self, step: Step) -> Output:
        """One step of all workers."""
        for request_id, tokens in step.fresh.items():
            self._sequences[request_id] = Sequence(self._seed, tokens)
        outputs = [rank.execute(step, self._sequences) for rank in self.ranks]
        merged = Output(report=outputs[0].report)
        for output in outputs:
            merged.failed_blocks |= output.failed_blocks
        for output in outputs[1:]:
            merged.report = merged.report.and_of(output.report)
        merged.sent = self._of_all("sent", [output.sent for output in outputs])
        merged.received = self._of_all("received", [output.received for output in outputs])
        for request_id in step.sampled:
            sequence = self._sequences[request_id]
            merged.tokens[request_id] = sequence.next_token()
            sequence.tokens.append(merged.tokens[request_id])
        return merged

    def _of_all(self, kind: str, ended: list[set[str]]) -> set[str]:
        """Requests that the last worker has reported."""
        counts = self._counts[kind]
        for request_ids in ended:
            counts.update(request_ids)
        whole = {request_id for request_id, count in counts.items() if count == len(self.ranks)}
        assert all(count <= len(self.ranks) for count in counts.values()), f"{kind} twice: {counts}"
        for request_id in whole:
            del counts[request_id]
        return whole
