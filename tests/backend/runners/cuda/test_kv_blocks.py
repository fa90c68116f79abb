"""KV blocks of a device, tested on the CPU with torch's copies and simulated streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch

from backend.engine.model_runner import BLOCK_SIZE, StepInput
from backend.runners.cuda.kv_blocks import CudaIncoming, CudaKvBlocks, CudaOutgoing
from backend.runners.cuda.runner import CudaRunner
from backend.runners.cuda.streams import DeviceStreams, device_streams
from prefix_store.frames.segments import gather, scatter
from tests.backend.runners.cuda.random_model import CONFIG, random_weights, step_of
from tests.backend.runners.cuda.simulated_streams import SimulatedDevice, host_stream, use_streams

LAYERS, BLOCKS = 3, 10
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Frame = npt.NDArray[np.uint8]


def kv_memory(dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """KV memory like a decoder's, filled with random bit patterns, NaN among them."""
    words = torch.from_numpy(np.random.default_rng(1).integers(-(2**63), 2**63 - 1, (LAYERS, 2, BLOCKS, 2, 16, 16)))
    return words.view(dtype)


def frame_of(memory: torch.Tensor, block: int) -> Frame:
    """Bytes of a block in the order of its layout."""
    return memory[:, :, block].contiguous().view(torch.uint8).flatten().numpy().copy()


def noise(kv: CudaKvBlocks, seed: int) -> Frame:
    return np.random.default_rng(seed).integers(0, 256, kv.layout.nbytes, dtype=np.uint8)


def read(outgoing: CudaOutgoing) -> list[Frame]:
    """The bytes that an I/O thread reads."""
    frames = []
    for segments in outgoing.ready():
        data = np.empty(sum(np.asarray(segment).nbytes for segment in segments), np.uint8)
        gather(segments, data)
        frames.append(data)
    return frames


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_carried_bit_by_bit(dtype: torch.dtype) -> None:
    """Blocks are copied bit for bit to other places of another memory, and other blocks stay untouched."""
    device = torch.device("cpu")
    source, target = kv_memory(dtype), torch.zeros_like(kv_memory(dtype))
    ours, theirs = (CudaKvBlocks(memory, 2**20, device_streams(device)) for memory in (source, target))
    assert ours.layout == theirs.layout
    assert ours.layout.nbytes == frame_of(source, 0).nbytes
    pairs = {7: 2, 0: 9, 4: 5}
    outgoing, incoming = ours.outgoing(list(pairs)), theirs.incoming(list(pairs.values()))
    assert outgoing is not None
    assert incoming is not None
    for frame, into in zip(read(outgoing), incoming.segments, strict=True):
        scatter(frame, into)
    incoming.arrived(2)
    incoming.close()
    outgoing.close()
    for number, (our, their) in enumerate(pairs.items()):
        assert np.array_equal(frame_of(target, their), frame_of(source, our)) == (number < 2)
    assert not target[:, :, [0, 1, 3, 4, 5, 6, 7, 8]].view(torch.uint8).any(), "5 did not arrive"


@dataclass
class World:
    """An engine's state: which blocks are being restored or copied, and what each must contain."""

    kv: CudaKvBlocks
    memory: torch.Tensor
    device: SimulatedDevice
    chance: np.random.Generator
    expected: dict[int, Frame] = field(default_factory=dict)
    arriving: list[tuple[CudaIncoming, list[int]]] = field(default_factory=list)
    leaving: list[tuple[CudaOutgoing, list[int], list[Frame]]] = field(default_factory=list)
    refused: int = 0
    steps_that_waited: int = 0

    def __post_init__(self) -> None:
        self.expected = {block: frame_of(self.memory, block) for block in range(BLOCKS)}

    def some(self, blocks: set[int], most: int) -> list[int]:
        count = int(self.chance.integers(1, most + 1))
        return [int(block) for block in self.chance.permutation(sorted(blocks))[:count]]

    def untouched(self) -> set[int]:
        return set(range(BLOCKS)) - {block for _, blocks in self.arriving for block in blocks}

    def read_by_nobody(self) -> set[int]:
        return self.untouched() - {block for _, blocks, _ in self.leaving for block in blocks}

    def begin_to_fill(self) -> None:
        if not self.read_by_nobody():
            return
        blocks = self.some(self.read_by_nobody(), 4)
        if (incoming := self.kv.incoming(blocks)) is None:
            self.refused += 1
        else:
            self.arriving.append((incoming, blocks))

    def fill(self) -> None:
        """Restores all blocks of a request, some, or none, as when it is given up."""
        if not self.arriving:
            return
        incoming, blocks = self.arriving.pop(int(self.chance.integers(len(self.arriving))))
        count = int(self.chance.integers(len(blocks) + 1))
        for block, segments in list(zip(blocks, incoming.segments, strict=True))[:count]:
            frame = noise(self.kv, int(self.chance.integers(2**31)))
            scatter(frame, segments)
            self.expected[block] = frame
        if count or self.chance.random() < 0.5:
            incoming.arrived(count)
        incoming.close()

    def begin_to_copy_out(self) -> None:
        if not self.untouched():
            return
        blocks = self.some(self.untouched(), 4)
        if (outgoing := self.kv.outgoing(blocks)) is None:
            self.refused += 1
        else:
            self.leaving.append((outgoing, blocks, [self.expected[block] for block in blocks]))

    def copy_out(self) -> None:
        """Checks the copied bytes, or gives the copy up."""
        if not self.leaving:
            return
        outgoing, _, frames = self.leaving.pop(int(self.chance.integers(len(self.leaving))))
        if self.chance.random() < 0.7:
            for got, expected in zip(read(outgoing), frames, strict=True):
                assert np.array_equal(got, expected)
        outgoing.close()

    def step(self) -> None:
        """Reads all settled blocks in each layer, and writes to others."""
        compute, wait = self.device.streams.compute, self.kv.layer_wait()
        self.steps_that_waited += wait is not None
        written = self.some(self.read_by_nobody(), 3) if self.read_by_nobody() else []
        before = {block: self.expected[block] for block in self.untouched()}
        for block in written:
            self.expected[block] = noise(self.kv, int(self.chance.integers(2**31)))
        for layer in range(LAYERS):
            if wait is not None:
                wait(layer)
            for block, frame in before.items():
                compute.submit(partial(self.look, layer, block, frame))
            for block in written:
                compute.submit(partial(self.write, layer, block, self.expected[block]))

    def look(self, layer: int, block: int, frame: Frame) -> None:
        assert np.array_equal(frame_of(self.memory, block).reshape(LAYERS, -1)[layer], frame.reshape(LAYERS, -1)[layer])

    def write(self, layer: int, block: int, frame: Frame) -> None:
        part = torch.from_numpy(frame.reshape(LAYERS, -1)[layer].copy())
        self.memory[layer, :, block] = part.view(self.memory.dtype).view(self.memory[layer, :, block].shape)


@pytest.mark.parametrize("seed", range(20))
def test_steps_read_right_blocks_beside_random_copies(seed: int) -> None:
    """A step reads and writes the right blocks while restores and copies overlap at random and are given up."""
    device, memory = SimulatedDevice(seed), kv_memory()
    kv = CudaKvBlocks(memory, 6 * LAYERS * 2 * 2 * 16 * 64 * 2, device.streams)
    world = World(kv, memory, device, np.random.default_rng(seed))
    assert kv.most_at_once == 6
    actions: list[Callable[[], None]] = [
        *(world.begin_to_fill, world.fill, world.begin_to_copy_out, world.copy_out),
        *(world.step, world.step),
    ]
    for _ in range(250):
        actions[int(world.chance.integers(len(actions)))]()
        device.get_on(12)
    world.step()
    device.until(device.streams.compute.record_event())
    for incoming, _ in world.arriving:
        incoming.close()
    for outgoing, _, _ in world.leaving:
        outgoing.close()
    device.until(device.streams.device_to_host.record_event())
    assert world.refused > 0
    assert world.steps_that_waited > 0
    for free in (kv.incoming, kv.outgoing):
        assert free(list(range(6))) is not None, "all of the staging memory came back"


def runner_with(streams: DeviceStreams) -> tuple[CudaRunner, CudaKvBlocks]:
    """A runner on the CPU with these streams; every call gives the same model."""
    runner = CudaRunner(CONFIG, random_weights(CONFIG), 12, 128, 4, torch.float32, "cpu")
    return runner, use_streams(runner, streams)


PREFIX, OTHER = [3, 8, 5], [1, 9]
"""Blocks of a prompt's first 48 tokens, and of somebody else who is decoding."""
TABLE = [*PREFIX, 7]


def prefilled() -> tuple[CudaRunner, list[Frame]]:
    """A runner that has computed both, and the frames of the prefix."""
    runner, kv = runner_with(device_streams(torch.device("cpu")))
    runner.run(step_of([(TABLE, 0, 3 * BLOCK_SIZE), (OTHER, 0, 20)]))
    outgoing = kv.outgoing(PREFIX)
    assert outgoing is not None
    return runner, read(outgoing)


def last_step() -> StepInput:
    """What follows on the prefix, and a token of the other."""
    return step_of([(TABLE, 3 * BLOCK_SIZE, 5), (OTHER, 20, 1)])


def test_each_layer_waits_for_its_own_blocks_only() -> None:
    """Each layer waits for its own part of restored blocks, and the logits are bitwise those on computed blocks."""
    computed, frames = prefilled()
    wanted = computed.run(last_step()).logits
    device = SimulatedDevice(0)
    runner, kv = runner_with(device.beside(host_stream()))
    runner.run(step_of([(OTHER, 0, 20)]))
    memory = runner.decoder.memory
    incoming = kv.incoming(PREFIX)
    assert incoming is not None
    for frame, into in zip(frames, incoming.segments, strict=True):
        scatter(frame, into)
    runner.run(step_of([(OTHER, 20, 1)]))
    incoming.arrived(len(PREFIX))
    incoming.close()
    assert not memory[:, :, PREFIX].any(), "the engine's thread waited for the copies"

    seen: list[list[bool]] = []
    wait = kv.layer_wait()
    assert wait is not None

    def layer_wait() -> Callable[[int], None]:
        return note

    def note(layer: int) -> None:
        wait(layer)
        there = computed.decoder.memory[:, :, PREFIX]
        seen.append([torch.equal(memory[each][:, PREFIX], there[each]) for each in range(CONFIG.num_layers)])

    kv.layer_wait = layer_wait  # type: ignore[method-assign]
    got = runner.run(last_step()).logits
    assert seen == [[True, False], [True, True]]
    assert torch.equal(got, wanted)
    del kv.layer_wait
    assert kv.layer_wait() is None, "later steps wait for nothing"


def test_a_step_is_replayed_unless_blocks_are_arriving() -> None:
    """A recorded step is replayed unless restored blocks still arrive, as recordings contain no waits."""
    device = SimulatedDevice(0)
    runner, kv = runner_with(device.beside(host_stream()))
    replayed: list[int] = []

    class Recordings:
        """Of one batch size; a replay gives zeros."""

        def run(self, step: StepInput) -> torch.Tensor:
            replayed.append(len(step.token_ids))
            return torch.zeros(len(step.token_ids), CONFIG.vocab_size)

        def size_for(self, rows: int) -> int:
            return rows

    # Recordings need a device; `record` makes them where there is one.
    runner._graphs = Recordings()  # type: ignore[assignment]
    decode = step_of([(PREFIX, 2 * BLOCK_SIZE, 1)])
    runner.run(decode)
    assert replayed == [1]
    for ends in (False, True):
        incoming = kv.incoming(PREFIX[:2])
        assert incoming is not None
        runner.run(decode)
        replays = len(replayed)
        incoming.arrived(2)
        incoming.close()
        if ends:  # before the step begins
            device.until(device.streams.host_to_device.record_event())
        runner.run(decode)
        assert len(replayed) == replays + ends
        runner.run(decode)
        assert len(replayed) == replays + 1 + ends
    assert len(replayed) == 6


def test_a_step_that_fails_leaves_the_waits_to_the_next_one() -> None:
    """After a step that runs out of memory, the next step waits for the restored blocks."""
    computed, frames = prefilled()
    wanted = computed.run(last_step()).logits
    runner, kv = runner_with(SimulatedDevice(0).beside(host_stream()))
    runner.run(step_of([(OTHER, 0, 20)]))
    incoming = kv.incoming(PREFIX)
    assert incoming is not None
    for frame, into in zip(frames, incoming.segments, strict=True):
        scatter(frame, into)
    incoming.arrived(len(PREFIX))
    incoming.close()
    product, calls = runner.decoder.product, 0

    def short_of_memory(*arguments: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("no memory")
        return product(*arguments)  # type: ignore[arg-type]

    runner.decoder.product = short_of_memory  # type: ignore[assignment]
    with pytest.raises(torch.OutOfMemoryError):
        runner.run(last_step())
    runner.decoder.product = product
    assert torch.equal(runner.run(last_step()).logits, wanted)


def test_a_device_whose_copies_are_wrong_serves_without_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device whose copies are wrong offers no KV blocks, logs why once, and still computes."""
    working = CudaRunner(CONFIG, random_weights(CONFIG), 12, 128, 4, torch.float32, "cpu")
    assert working.kv_blocks is not None
    assert working.kv_blocks is working.kv_blocks
    host = host_stream()

    class Idle:
        """Does nothing, and says that it is done."""

        record_event, wait_event = host.record_event, host.wait_event

        def submit(self, work: Callable[[], None]) -> None:
            pass

    monkeypatch.setattr("backend.runners.cuda.runner.device_streams", lambda device: DeviceStreams(host, Idle(), host))
    broken = CudaRunner(CONFIG, random_weights(CONFIG), 12, 128, 4, torch.float32, "cpu")
    assert broken.kv_blocks is None
    assert broken.kv_blocks is None
    assert [record.getMessage() for record in caplog.records] == [
        "KV blocks cannot be kept beyond the device: a KV block that was copied to the device and back is not the same"
    ]
    assert broken.run(step_of([(OTHER, 0, 20)])).logits.isfinite().all()


def test_staging_memory_is_bounded_and_released() -> None:
    """Staging memory is bounded separately for each direction, and free again after the copies."""
    device = SimulatedDevice(3)
    kv = CudaKvBlocks(kv_memory(), 4 * LAYERS * 2 * 2 * 16 * 64 * 2, device.streams)
    incoming = kv.incoming([0, 1, 2])
    assert incoming is not None
    assert kv.incoming([3, 4]) is None
    outgoing = kv.outgoing([3, 4, 5, 6])
    assert outgoing is not None
    assert kv.outgoing([7]) is None
    incoming.arrived(3)
    incoming.close()
    assert kv.incoming([3, 4]) is None, "the copies are still under way"
    device.until(device.streams.host_to_device.record_event())
    assert kv.incoming([3, 4]) is not None
    outgoing.close()
    assert kv.outgoing([7]) is not None


def test_one_step_waits_for_all_arrivals_and_the_next_for_none() -> None:
    """The first step after arrivals waits for all of them, and the next one for none."""
    device, memory = SimulatedDevice(4), kv_memory()
    kv = CudaKvBlocks(memory, 2**20, device.streams)
    frames = {block: noise(kv, block) for block in (4, 6, 2)}
    for blocks in ([4, 6], [2]):
        incoming = kv.incoming(blocks)
        assert incoming is not None
        for block, into in zip(blocks, incoming.segments, strict=True):
            scatter(frames[block], into)
        incoming.arrived(len(blocks))
        incoming.close()
    wait = kv.layer_wait()
    assert wait is not None
    for layer in range(LAYERS):
        assert kv.layer_wait() is not None
        wait(layer)
    assert kv.layer_wait() is None
    assert not any(np.array_equal(frame_of(memory, block), frame) for block, frame in frames.items())
    device.until(device.streams.compute.record_event())
    assert all(np.array_equal(frame_of(memory, block), frame) for block, frame in frames.items())
