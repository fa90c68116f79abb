"""KV blocks of a real device are copied beside its steps, and no step reads them too early or too late."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from backend.engine.model_runner import BLOCK_SIZE
from backend.runners.cuda.kv_blocks import CudaIncoming, CudaKvBlocks
from backend.runners.cuda.runner import STAGING_BYTES, CudaRunner
from backend.runners.cuda.streams import Event, Stream
from prefix_store.frames.segments import gather, scatter
from tests.backend.runners.cuda.random_model import CONFIG, random_weights, step_of
from tests.backend.runners.cuda.references import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LONG = 300_000_000
"""Cycles: more than a tenth of a second."""
PREFIX, OTHERS = [11, 3, 8, 30, 5], [[1, 9, 4], [40, 41, 42]]
TABLE = [*PREFIX, 7]
"""Blocks of a prompt, the first five of them full, and of others who are decoding."""
Frame = npt.NDArray[np.uint8]


def made(dtype: torch.dtype, staging_memory: int = STAGING_BYTES) -> tuple[CudaRunner, CudaKvBlocks]:
    """A runner with its decode steps recorded."""
    runner = CudaRunner(CONFIG, random_weights(CONFIG), 64, 256, 8, dtype, staging_memory=staging_memory)
    runner.record(lambda sentence: None)
    kv = runner.kv_blocks
    assert kv is not None, "a block has not survived the way to the device and back"
    return runner, kv


def sleep() -> None:
    """Keeps the stream busy that work is queued in now."""
    cuda: Any = torch.cuda
    cuda._sleep(LONG)  # torch has no public way to keep a stream busy for a time


def copies_of(kv: CudaKvBlocks) -> Any:
    """The side that copies to the device; private, as no caller but a test delays its stream."""
    return kv._host_to_device


def slow_copies(kv: CudaKvBlocks) -> None:
    """Delays later copies to the device."""
    copies_of(kv).stream.submit(sleep)


def copied(kv: CudaKvBlocks, blocks: Sequence[int]) -> list[Frame]:
    """The bytes of some blocks."""
    outgoing = kv.outgoing(blocks)
    assert outgoing is not None
    frames = []
    for segments in outgoing.ready():
        frames.append(np.empty(kv.layout.nbytes, np.uint8))
        gather(segments, frames[-1])
    outgoing.close()
    return frames


def filled(kv: CudaKvBlocks, blocks: Sequence[int], frames: Sequence[Frame]) -> CudaIncoming:
    """A restore whose bytes are all in host memory."""
    incoming = kv.incoming(blocks)
    assert incoming is not None
    for frame, into in zip(frames, incoming.segments, strict=True):
        scatter(frame, into)
    return incoming


def noise(kv: CudaKvBlocks, count: int) -> list[Frame]:
    """Frames of random bytes."""
    return [np.random.default_rng(seed).integers(0, 256, kv.layout.nbytes, dtype=np.uint8) for seed in range(count)]


def prefill_others(runner: CudaRunner) -> None:
    runner.run(step_of([(table, 0, 20 + row) for row, table in enumerate(OTHERS)]))


def decode_others(runner: CudaRunner, start: int, steps: int) -> list[torch.Tensor]:
    """Recorded steps, one token of each."""
    logits = []
    for count in range(start, start + steps):
        step = step_of([(table, 20 + row + count, 1) for row, table in enumerate(OTHERS)])
        logits.append(runner.run(step).logits.clone())
    return logits


def computed_prefix(runner: CudaRunner, kv: CudaKvBlocks) -> list[Frame]:
    """Computes the prompt's full blocks and copies them out."""
    runner.run(step_of([(TABLE, 0, 5 * BLOCK_SIZE)]))
    return copied(kv, PREFIX)


def prompt_ends(runner: CudaRunner) -> torch.Tensor:
    """The logits of three tokens that follow the prefix."""
    return runner.run(step_of([(TABLE, 5 * BLOCK_SIZE, 3)])).logits.clone()


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_copied_bit_for_bit(dtype: torch.dtype) -> None:
    """Blocks of any bit pattern are copied bit for bit to other places, and other blocks do not change."""
    runner, kv = made(dtype)
    memory = runner.decoder.memory
    with torch.inference_mode():
        memory.view(torch.int64).random_(-(2**63), 2**63 - 1)
        before = memory.view(torch.int64).clone()
        frames = copied(kv, [5, 60, 0])
        for frame, block in zip(frames, [5, 60, 0], strict=True):
            assert frame.tobytes() == memory[:, :, block].contiguous().view(torch.uint8).cpu().numpy().tobytes()
        incoming = filled(kv, [17, 2, 33], frames)
        incoming.arrived(2)
        incoming.close()
        wait = kv.layer_wait()
        for layer in range(CONFIG.num_layers):
            if wait is not None:
                wait(layer)
        before[:, :, [17, 2]] = before[:, :, [5, 60]]
        assert torch.equal(memory.view(torch.int64), before), "the third one had not arrived"


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_on_a_restored_prefix_are_bitwise_the_same(dtype: torch.dtype) -> None:
    """Logits on a restored prefix are bitwise those on a computed one, also in a step launched before the copies."""
    runner, kv = made(dtype)
    frames = computed_prefix(runner, kv)
    expected = prompt_ends(runner)
    with torch.inference_mode():
        runner.decoder.memory.zero_()
    incoming = filled(kv, PREFIX, frames)
    slow_copies(kv)
    incoming.arrived(len(PREFIX))
    incoming.close()
    got = prompt_ends(runner)
    cuda: Any = torch.cuda
    ended = cuda.Event()
    ended.record()
    assert not ended.query(), "the host waited for the copies"
    assert torch.equal(got, expected)


class LateLayers:
    """A stream in which each layer's copy comes long after that of the layer before."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.submit, self.wait_event = stream.submit, stream.wait_event

    def record_event(self) -> Event:
        event = self._stream.record_event()
        self._stream.submit(sleep)
        return event


def test_a_layer_is_computed_before_the_next_one_is_copied() -> None:
    """A step computes its first layer before the second layer's keys and values are copied."""
    runner, kv = made(torch.bfloat16)
    frames = computed_prefix(runner, kv)
    expected = prompt_ends(runner)
    with torch.inference_mode():
        runner.decoder.memory.zero_()
    copies_of(kv).stream = LateLayers(copies_of(kv).stream)
    incoming = filled(kv, PREFIX, frames)
    incoming.arrived(len(PREFIX))
    incoming.close()
    # Private: a caller waits for a layer's event, and never asks whether it is complete.
    first, second = kv._layer_events
    wait = kv.layer_wait()
    assert wait is not None
    cuda: Any = torch.cuda
    reached = cuda.Event()

    def note(layer: int) -> None:
        if layer == 1:
            reached.record()
        wait(layer)

    kv.layer_wait = lambda: note  # type: ignore[method-assign]
    got = prompt_ends(runner)
    reached.synchronize()
    assert first.query()
    assert not second.query()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_others_decode_while_a_prefix_is_restored(dtype: torch.dtype) -> None:
    """Other sequences get the same logits before, while and after a prefix is restored."""
    runner, kv = made(dtype)
    frames = computed_prefix(runner, kv)
    prefill_others(runner)

    def together() -> torch.Tensor:
        step = step_of([(TABLE, 5 * BLOCK_SIZE, 3), *((table, 24 + row, 1) for row, table in enumerate(OTHERS))])
        return runner.run(step).logits.clone()

    expected = [*decode_others(runner, 0, 4), together(), *decode_others(runner, 5, 3)]
    with torch.inference_mode():
        runner.decoder.memory.zero_()
    prefill_others(runner)
    incoming = filled(kv, PREFIX, frames)
    got = decode_others(runner, 0, 4)
    slow_copies(kv)
    incoming.arrived(len(PREFIX))
    incoming.close()
    got += [together(), *decode_others(runner, 5, 3)]
    for number, (ours, wanted) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(ours, wanted), f"step {number}"


def test_a_prompt_with_one_token_left_is_not_replayed_too_early() -> None:
    """A step of single tokens is not replayed from a recording while its prefix still arrives."""
    runner, kv = made(torch.float32)
    frames = computed_prefix(runner, kv)
    last = step_of([(TABLE, 5 * BLOCK_SIZE, 1)])
    expected = runner.run(last).logits.clone()
    with torch.inference_mode():
        runner.decoder.memory.zero_()
    incoming = filled(kv, PREFIX, frames)
    slow_copies(kv)
    incoming.arrived(len(PREFIX))
    incoming.close()
    assert relative_error(runner.run(last).logits.cpu(), expected.cpu()) < 1e-5
    assert torch.equal(runner.run(last).logits, expected), "replayed again, behind the step that waited"


def test_full_staging_memory_refuses_copies_until_it_is_free() -> None:
    """A restore or copy without staging memory is refused at once, and accepted when the device has finished."""
    block = CONFIG.num_layers * 2 * CONFIG.num_kv_heads * BLOCK_SIZE * CONFIG.head_dim * 2
    runner, kv = made(torch.bfloat16, 4 * block)
    assert kv.most_at_once == 4
    torch.cuda.synchronize()
    incoming = filled(kv, [5, 6, 7], frames := noise(kv, 3))
    assert kv.incoming([8, 9]) is None
    slow_copies(kv)
    incoming.arrived(3)
    incoming.close()
    assert kv.incoming([8, 9]) is None, "the device still copies from there"
    prefill_others(runner)
    torch.cuda.synchronize()
    again = kv.incoming([8, 9, 10, 11])
    assert again is not None
    again.close()
    outgoing = kv.outgoing([0, 1, 2, 3])
    assert outgoing is not None
    assert kv.outgoing([4]) is None
    outgoing.close()
    assert np.array_equal(copied(kv, [5, 6, 7]), frames)


@pytest.mark.parametrize("arrives", [False, True])
def test_a_restore_that_is_given_up_changes_no_logits(arrives: bool) -> None:
    """The blocks of a restore that is given up can be reused at once without a change of logits."""
    runner, kv = made(torch.bfloat16)
    steps = [step_of([(TABLE, 0, 70)]), step_of([(TABLE, 70, 1)])]
    expected = [runner.run(step).logits.clone() for step in steps]
    incoming = filled(kv, PREFIX, noise(kv, len(PREFIX)))
    slow_copies(kv)
    if arrives:
        incoming.arrived(len(PREFIX))
    incoming.close()
    for step, wanted in zip(steps, expected, strict=True):
        assert torch.equal(runner.run(step).logits, wanted)
    torch.cuda.synchronize()
    assert torch.equal(runner.run(steps[1]).logits, expected[1])


def test_blocks_are_copied_out_behind_the_steps() -> None:
    """Blocks are copied out after the steps before, beside the next step, without making the engine's thread wait."""
    runner, kv = made(torch.bfloat16)
    prefill_others(runner)
    expected = computed_prefix(runner, kv)
    with torch.inference_mode():
        runner.decoder.memory.zero_()
    torch.cuda.synchronize()
    cuda: Any = torch.cuda
    sleep()
    runner.run(step_of([(TABLE, 0, 5 * BLOCK_SIZE)]))
    computed = cuda.Event()
    computed.record()
    outgoing = kv.outgoing(PREFIX)
    assert outgoing is not None
    prefill_others(runner)
    assert not computed.query(), "the engine's thread waited"
    got: list[bytes] = []

    def read() -> None:
        for segments in outgoing.ready():
            frame = np.empty(kv.layout.nbytes, np.uint8)
            gather(segments, frame)
            got.append(frame.tobytes())

    reader = threading.Thread(target=read)
    reader.start()
    reader.join(timeout=30)
    outgoing.close()
    assert computed.query()
    assert got == [frame.tobytes() for frame in expected]
