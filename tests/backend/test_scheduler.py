"""The scheduler keeps its budget, loses nothing, and always gets to the end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from backend.block_pool import BlockPool
from backend.detokenizer import Detokenizer
from backend.model import ServedModel
from backend.runner import BLOCK_SIZE
from backend.scheduler import Scheduler
from backend.sequence import SamplingParams, Sequence

NUM_BLOCKS = 12


def make(model: ServedModel, number: int, prompt: int, answer: int) -> Sequence:
    params = SamplingParams(max_tokens=answer)
    return Sequence(number, [5] * prompt, params, Detokenizer(model.text.token_bytes), 0)


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


@settings(deadline=None, max_examples=150)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 60)), min_size=1, max_size=10),
    max_batch=st.integers(1, 5),
    step_tokens=st.integers(1, 64),
    data=st.data(),
)
def test_every_sequence_ends_and_every_block_comes_back(
    shapes: list[tuple[int, int]], max_batch: int, step_tokens: int, data: st.DataObject, model: ServedModel
) -> None:
    """With too few blocks for all, preemption and admission still bring every sequence to its last token."""
    pool = BlockPool(NUM_BLOCKS)
    scheduler = Scheduler(pool, max_batch, step_tokens)
    wanted = {number: answer for number, (_, answer) in enumerate(shapes)}
    for number, (prompt, answer) in enumerate(shapes):
        scheduler.add(make(model, number, prompt, answer))
    finished: set[int] = set()
    for _ in range(5000):
        if not scheduler.running and not scheduler.waiting:
            break
        chunks = scheduler.schedule()
        assert chunks, "there is work, so a step must do some of it"
        assert sum(chunk.count for chunk in chunks) <= max(step_tokens, max_batch)
        assert len(scheduler.running) <= max_batch
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            assert chunk.start == sequence.num_computed
            assert 1 <= chunk.count <= sequence.num_tokens - chunk.start
            assert len(sequence.blocks) >= blocks_of(chunk.start + chunk.count)
            assert all(pool.references(block) == 1 for block in sequence.blocks)
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.count
            if not chunk.reaches_end:
                continue
            sequence.append(7)
            if sequence.num_generated == wanted[sequence.id] or data.draw(st.integers(0, 30)) == 0:
                scheduler.remove(sequence)
                finished.add(sequence.id)
    assert finished == set(wanted)
    assert pool.num_free == NUM_BLOCKS


def test_decoding_goes_on_while_a_long_prompt_is_computed(model: ServedModel) -> None:
    """A prompt longer than a step's budget is cut into chunks, and running sequences get a token in each step."""
    scheduler = Scheduler(BlockPool(100), max_batch=4, step_tokens=32)
    first, second = make(model, 0, 10, 50), make(model, 1, 100, 5)
    scheduler.add(first)
    for chunk in scheduler.schedule():
        chunk.sequence.num_computed += chunk.count
        chunk.sequence.append(7)
    scheduler.add(second)
    starts = []
    while second.num_computed < 100:
        for chunk in scheduler.schedule():
            chunk.sequence.num_computed += chunk.count
            if chunk.sequence is first:
                assert chunk.count == 1
                first.append(7)
            else:
                starts.append(chunk.start)
    assert starts == [0, 31, 62, 93]


def test_the_oldest_is_never_preempted(model: ServedModel) -> None:
    """When blocks run out the youngest starts again; the oldest keeps what it has."""
    scheduler = Scheduler(BlockPool(4), max_batch=2, step_tokens=64)
    old, young = make(model, 0, 16, 40), make(model, 1, 16, 40)
    for sequence in (old, young):
        scheduler.add(sequence)
    while scheduler.num_preemptions == 0:
        for chunk in scheduler.schedule():
            chunk.sequence.num_computed += chunk.count
            chunk.sequence.append(7)
    assert scheduler.running == [old]
    assert list(scheduler.waiting) == [young]
    assert (young.num_computed, young.blocks) == (0, [])
    assert young.num_generated > 0, "what it has generated stays"
