"""The scheduler keeps its budget, loses no block, starves no sequence, and ends every sequence."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.block_pool import BlockPool
from backend.engine.config import Batching, BatchingMode
from backend.engine.model_runner import BLOCK_SIZE
from backend.engine.scheduler import Chunk, Scheduler
from backend.engine.sequence import SamplingParams, Sequence
from backend.text.detokenizer import Detokenizer
from tests.backend.tiny_model import token_bytes

NUM_BLOCKS = 12


class Maker:
    """Makes sequences; ``family`` chooses the token that a prompt repeats, so that prompts begin alike or not."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, prompt: int, answer: int = 50, priority: int = 0, family: int | None = None) -> Sequence:
        self._number += 1
        token = 1000 + self._number if family is None else family
        params = SamplingParams(max_tokens=answer)
        return Sequence(self._number, [token] * prompt, params, Detokenizer(token_bytes()), 0, priority=priority)


@pytest.fixture
def make() -> Maker:
    return Maker()


def step(scheduler: Scheduler, now: float = 0.0) -> list[Chunk]:
    """Schedules one step; sequences that reach their end get a token, and are removed with their last one."""
    chunks = scheduler.schedule(now)
    take_over(scheduler, chunks)
    return chunks


def take_over(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        ended = chunk.reaches_end
        scheduler.mark_computed(chunk)
        if ended:
            chunk.sequence.append(7)
            if chunk.sequence.num_generated == chunk.sequence.params.max_tokens:
                scheduler.remove(chunk.sequence)


def counts(chunks: list[Chunk]) -> dict[int, int]:
    return {chunk.sequence.id: chunk.count for chunk in chunks}


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


MODES = st.sampled_from([Batching(), Batching(BatchingMode.STATIC), Batching(BatchingMode.DYNAMIC, 0.5)])


@settings(deadline=None, max_examples=100)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 120), st.integers(1, 60), st.integers(0, 2), st.integers(1, 2)),
        min_size=1,
        max_size=10,
    ),
    max_batch=st.integers(1, 5),
    step_tokens=st.integers(1, 64),
    batching=MODES,
    shares=st.booleans(),
    window=st.sampled_from([None, None, 1, 16, 40]),
    data=st.data(),
)
def test_every_sequence_ends_and_every_block_comes_back(
    shapes: list[tuple[int, int, int, int]],
    max_batch: int,
    step_tokens: int,
    batching: Batching,
    shares: bool,
    window: int | None,
    data: st.DataObject,
) -> None:
    """Preemption and admission end every sequence and free every block, though there are too few blocks for all."""
    make = Maker()
    pool = BlockPool(NUM_BLOCKS)
    scheduler = Scheduler(pool, max_batch, step_tokens, batching, shares, window)
    left = set()
    for prompt, answer, priority, family in shapes:
        sequence = make(prompt, answer, priority, family)
        left.add(sequence.id)
        scheduler.add(sequence)
    for now in range(5000):
        if not left:
            break
        chunks = scheduler.schedule(float(now))
        assert chunks or now == 0, "there is work, so a step must do some of it"
        assert sum(chunk.count for chunk in chunks) <= max(step_tokens, max_batch)
        assert len(scheduler.running) <= max_batch
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            assert chunk.start == sequence.num_computed
            assert 1 <= chunk.count <= sequence.num_tokens - chunk.start
            assert sequence.room >= chunk.start + chunk.count
            assert sequence.first_block * BLOCK_SIZE <= max(0, chunk.start + 1 - (window or 10**6))
            # What is about to be written belongs to nobody else.
            first, end = chunk.start // BLOCK_SIZE, blocks_of(chunk.start + chunk.count)
            written = sequence.blocks[first - sequence.first_block : end - sequence.first_block]
            assert all(pool.ref_count(block) == 1 for block in written)
        for chunk in chunks:
            sequence, ended = chunk.sequence, chunk.reaches_end
            scheduler.mark_computed(chunk)
            if not ended:
                continue
            sequence.append(7)
            if sequence.num_generated == sequence.params.max_tokens or data.draw(st.integers(0, 30)) == 0:
                scheduler.remove(sequence)
                left.discard(sequence.id)
        assert pool.problems(Counter(b for s in scheduler.running for b in s.blocks)) == []
    assert not left
    assert pool.num_free == NUM_BLOCKS


def test_decoding_goes_on_while_a_long_prompt_is_computed(make: Maker) -> None:
    """A prompt longer than a step's budget is cut into chunks, and running sequences get a token in each step."""
    scheduler = Scheduler(BlockPool(100), max_batch=4, step_tokens=32)
    first, second = make(10), make(100, 5)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)
    starts = []
    while second.num_computed < 100:
        chunks = step(scheduler)
        assert counts(chunks)[first.id] == 1
        starts += [chunk.start for chunk in chunks if chunk.sequence is second]
    assert starts == [0, 31, 62, 93]


def test_a_budget_below_the_batch_is_the_batch(make: Maker) -> None:
    """With a budget below the batch each running sequence gets a token, and a prompt still advances."""
    scheduler = Scheduler(BlockPool(20), max_batch=3, step_tokens=1)
    first, second, prompt = make(1), make(1), make(20)
    for sequence in (first, second, prompt):
        scheduler.add(sequence)
    step(scheduler)
    assert counts(step(scheduler)) == {first.id: 1, second.id: 1, prompt.id: 1}


def test_short_prompts_do_not_starve_behind_a_stream_of_long_ones(make: Maker) -> None:
    """A short prompt is computed in the step in which it arrives, though each step brings another long prompt."""
    scheduler = Scheduler(BlockPool(10_000), max_batch=64, step_tokens=64)
    for number in range(20):
        scheduler.add(make(1000))
        if number % 4 == 3:
            short = make(20)
            scheduler.add(short)
            step(scheduler)
            assert short.num_generated == 1
        else:
            step(scheduler)


def test_a_long_prompt_does_not_starve_behind_a_stream_of_short_ones(make: Maker) -> None:
    """The first prompt gets at least half of the budget that decoding leaves, however many short ones arrive."""
    scheduler = Scheduler(BlockPool(10_000), max_batch=64, step_tokens=64)
    long = make(1000)
    scheduler.add(long)
    steps = 0
    while not long.num_generated:
        for _ in range(4):
            scheduler.add(make(30, answer=1))
        chunks = counts(step(scheduler))
        assert chunks[long.id] >= min(32, 1000 - long.num_computed)
        steps += 1
    assert steps <= 1000 // 32 + 1


def test_the_rest_of_a_budget_goes_to_the_more_urgent(make: Maker) -> None:
    """The rest of a step's budget goes to the more urgent prompt, not to a shorter one."""
    scheduler = Scheduler(BlockPool(100), max_batch=4, step_tokens=64)
    first, second, short = make(200), make(60), make(20, priority=5)
    for sequence in (first, second, short):
        scheduler.add(sequence)
    assert counts(step(scheduler)) == {first.id: 32, second.id: 32}


def test_half_of_an_odd_budget_is_rounded_up(make: Maker) -> None:
    """The first prompt's half of an odd budget is rounded up."""
    scheduler = Scheduler(BlockPool(100), max_batch=3, step_tokens=3)
    first, short = make(200), make(20)
    scheduler.add(first)
    scheduler.add(short)
    assert counts(step(scheduler)) == {first.id: 2, short.id: 1}


def test_equal_prompts_are_computed_one_after_the_other(make: Maker) -> None:
    """Prompts of equal length are computed one after the other, as sharing a step would delay both."""
    scheduler = Scheduler(BlockPool(100), max_batch=4, step_tokens=64)
    first, second = make(64), make(64)
    scheduler.add(first)
    scheduler.add(second)
    assert counts(step(scheduler)) == {first.id: 64}


def test_the_oldest_is_never_preempted(make: Maker) -> None:
    """When blocks run out the youngest sequence is preempted, with its tokens, and the oldest keeps its blocks."""
    scheduler = Scheduler(BlockPool(4), max_batch=2, step_tokens=64)
    old, young = make(16, 40), make(16, 40)
    scheduler.add(old)
    scheduler.add(young)
    while scheduler.num_preemptions == 0:
        step(scheduler)
    assert scheduler.running == [old]
    assert scheduler.waiting == [young]
    assert (young.num_computed, young.blocks) == (0, [])
    assert young.num_generated > 0, "what it has generated stays"


def test_preemption_goes_on_until_there_is_room(make: Maker) -> None:
    """Preemption continues while the preempted sequences only held shared blocks, which free nothing."""
    scheduler = Scheduler(BlockPool(13), 6, 256, Batching(BatchingMode.STATIC))
    older = [make(20) for _ in range(4)]
    for sequence in (*older, make(20, family=3), make(20, family=3)):
        scheduler.add(sequence)
    while older[0].num_tokens <= 2 * BLOCK_SIZE:
        assert len(step(scheduler)) == 6
    chunks = step(scheduler)
    assert scheduler.running == older
    assert scheduler.num_preemptions == 2
    assert all(chunk.sequence.room > chunk.start for chunk in chunks)


def test_a_preempted_sequence_finds_its_blocks_again(make: Maker) -> None:
    """A preempted sequence whose blocks are still cached computes its last block only, and keeps its start time."""
    scheduler = Scheduler(BlockPool(8), max_batch=1, step_tokens=64)
    common, urgent = make(40, 5), make(10, 1, priority=-1)
    scheduler.add(common)
    step(scheduler, 1.0)
    scheduler.add(urgent)
    step(scheduler, 2.0)
    assert scheduler.num_preemptions == 1
    assert urgent.num_generated == 1
    (chunk,) = step(scheduler, 3.0)
    assert (chunk.sequence, chunk.start) == (common, 2 * BLOCK_SIZE)
    assert (common.started_at, common.num_cached) == (1.0, 0), "what it finds of its own is no prefix hit"
    assert (scheduler.prefix_cache_hits, scheduler.prefix_cache_queries) == (32, 40 + 10 + 41)


def test_prefixes_are_not_shared_where_that_is_switched_off(make: Maker) -> None:
    """With prefix sharing off each sequence computes its whole prompt, beside an equal one and after it."""
    pool = BlockPool(20)
    scheduler = Scheduler(pool, max_batch=2, step_tokens=128, shares_prefixes=False)
    for _ in range(3):
        scheduler.add(make(40, 1, family=3))
    assert [chunk.count for chunk in step(scheduler) + step(scheduler)] == [40] * 3
    assert pool.num_cached == 0


def test_smaller_priorities_go_first(make: Maker) -> None:
    """A smaller priority goes first in the queue, in the budget and for memory, and preempts larger ones."""
    scheduler = Scheduler(BlockPool(8), max_batch=2, step_tokens=32)
    later, sooner, first = make(16, priority=5), make(16, priority=1), make(16, priority=0)
    for sequence in (later, sooner, first):
        scheduler.add(sequence)
    step(scheduler)
    assert scheduler.running == [first, sooner]
    large = make(80, priority=-1)
    scheduler.add(large)
    assert counts(step(scheduler)) == {first.id: 1, large.id: 31}
    assert scheduler.running == [large, first]
    assert scheduler.waiting == [sooner, later]


def test_no_sequence_passes_one_that_does_not_fit_yet(make: Maker) -> None:
    """Small sequences wait behind a large one that does not fit yet, and the large one joins first."""
    scheduler = Scheduler(BlockPool(10), max_batch=4, step_tokens=128)
    first, large, small = make(60, 3), make(100, 3), make(10, 3)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(large)
    scheduler.add(small)
    step(scheduler)
    assert scheduler.running == [first]
    assert scheduler.waiting == [large, small]
    while first in scheduler.running:
        step(scheduler)
    step(scheduler)
    assert scheduler.running == [large, small]


@pytest.mark.parametrize(("blocks", "joins"), [(4, False), (5, True)])
def test_admission_leaves_one_block_for_running_sequences(make: Maker, blocks: int, joins: bool) -> None:
    """A sequence joins only if one block stays free for those that run, as it would soon be preempted otherwise."""
    scheduler = Scheduler(BlockPool(blocks), max_batch=2, step_tokens=64)
    scheduler.add(make(20))
    step(scheduler)
    second = make(20)
    scheduler.add(second)
    step(scheduler)
    assert (second in scheduler.running) == joins


def test_a_sequence_that_is_alone_may_take_the_last_block(make: Maker) -> None:
    """A sequence that runs alone may take the last block."""
    scheduler = Scheduler(BlockPool(4), max_batch=2, step_tokens=64)
    scheduler.add(make(64))
    assert len(step(scheduler)) == 1


def test_a_sequence_that_would_not_fit_preempts_none(make: Maker) -> None:
    """An urgent sequence that would not fit even after preemption waits and preempts none."""
    scheduler = Scheduler(BlockPool(8), max_batch=4, step_tokens=128)
    for priority in (-5, 5):
        scheduler.add(make(40, priority=priority))
    step(scheduler)
    scheduler.add(make(100, priority=0))
    step(scheduler)
    assert scheduler.num_preemptions == 0
    assert len(scheduler.running) == 2


def test_shared_blocks_do_not_count_as_room_by_preemption(make: Maker) -> None:
    """A sequence is not preempted when most of its blocks are shared and its own would not suffice."""
    scheduler = Scheduler(BlockPool(8), max_batch=4, step_tokens=128)
    for priority in (-5, 5):
        scheduler.add(make(40, priority=priority, family=3))
        step(scheduler)
    assert [sequence.num_cached for sequence in scheduler.running] == [0, 2 * BLOCK_SIZE]
    scheduler.add(make(80, priority=0))
    step(scheduler)
    assert scheduler.num_preemptions == 0
    assert len(scheduler.running) == 2


def test_prompts_join_only_with_room_for_all_their_tokens(make: Maker) -> None:
    """Two long prompts that do not fit together are computed one after the other, not both in part."""
    scheduler = Scheduler(BlockPool(10), max_batch=4, step_tokens=16)
    scheduler.add(make(100, 1))
    scheduler.add(make(100, 1))
    while scheduler.running or scheduler.waiting:
        assert len({chunk.sequence.id for chunk in step(scheduler)}) == 1
    assert scheduler.num_preemptions == 0


def test_answers_to_one_prompt_compute_it_once(make: Maker) -> None:
    """Sequences with one prompt wait for the first one's blocks, share them, and compute only their last tokens."""
    pool = BlockPool(100)
    scheduler = Scheduler(pool, max_batch=8, step_tokens=64)
    answers = [make(200, 4, family=3) for _ in range(4)]
    other = make(20, 4)
    for sequence in (*answers, other):
        scheduler.add(sequence)
    computed: Counter[int] = Counter()
    while scheduler.waiting:
        computed.update(counts(step(scheduler)))
    computed.update(counts(step(scheduler)))
    shared = 200 // BLOCK_SIZE
    assert [computed[s.id] - s.num_generated + 1 for s in answers] == [200] + [200 - shared * BLOCK_SIZE] * 3
    assert [s.num_cached for s in answers] == [0] + [shared * BLOCK_SIZE] * 3
    assert other.num_generated > answers[0].num_generated, "nobody else waits for the first one"


def test_waiting_sequences_look_up_each_block_of_a_prompt_once(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that waits for another's prompt looks up each of its blocks once, however many steps that takes."""
    # The number of comparisons shows in no result, so the private method that compares is counted.
    looks: Counter[int] = Counter()
    look = BlockPool._contains

    def counted(self: BlockPool, block: int, parent: int | None, token_ids: list[int]) -> bool:
        looks[block] += 1
        return look(self, block, parent, token_ids)

    monkeypatch.setattr(BlockPool, "_contains", counted)
    scheduler = Scheduler(BlockPool(400), 8, BLOCK_SIZE)
    for _ in range(6):
        scheduler.add(make(64 * BLOCK_SIZE, family=3))
    while not scheduler.running or scheduler.running[0].num_computed < 60 * BLOCK_SIZE:
        step(scheduler)
    assert len(looks) >= 59
    assert set(looks.values()) == {5}


def test_an_urgent_sequence_follows_no_less_urgent_one(make: Maker) -> None:
    """An urgent sequence does not wait for the blocks of a less urgent one with the same prompt."""
    scheduler = Scheduler(BlockPool(100), max_batch=8, step_tokens=64)
    leader, urgent = make(200, 4, priority=5, family=3), make(200, 4, family=3)
    scheduler.add(leader)
    step(scheduler)
    scheduler.add(urgent)
    assert counts(step(scheduler))[urgent.id] == 64
    assert urgent.num_cached == 64


@pytest.mark.parametrize("length", [2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1])
def test_a_fully_cached_prompt_still_computes_its_last_token(make: Maker, length: int) -> None:
    """A fully cached prompt computes its last token again, whether or not it ends with a block."""
    scheduler = Scheduler(BlockPool(20), max_batch=2, step_tokens=64)
    scheduler.add(make(length, 1, family=3))
    step(scheduler)
    again = make(length, 1, family=3)
    scheduler.add(again)
    (chunk,) = step(scheduler)
    assert chunk.start == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert again.num_generated == 1


def test_a_second_turn_finds_what_was_generated(make: Maker) -> None:
    """The full blocks of an answer are shared like those of a prompt."""
    scheduler = Scheduler(BlockPool(20), max_batch=2, step_tokens=64)
    first = make(10, 30, family=3)
    scheduler.add(first)
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    second = make(0)
    second.tokens = [*first.tokens, 9, 9]
    second.num_prompt = len(second.tokens)
    scheduler.add(second)
    step(scheduler)
    assert second.num_cached == 2 * BLOCK_SIZE


def test_a_static_batch_ends_before_the_next_begins(make: Maker) -> None:
    """No sequence joins a static batch before it has ended, though there is room."""
    scheduler = Scheduler(BlockPool(100), 2, 64, Batching(BatchingMode.STATIC))
    sequences = [make(5, answer) for answer in (2, 6, 3)]
    for sequence in sequences:
        scheduler.add(sequence)
    seen = []
    while scheduler.running or scheduler.waiting:
        seen.append(sorted(counts(step(scheduler))))
    one, two, three = (sequence.id for sequence in sequences)
    assert seen == [[one, two]] * 2 + [[two]] * 4 + [[three]] * 3


def test_a_static_batch_begins_at_once(make: Maker) -> None:
    """A static batch begins with the sequences that are present and ignores `max_wait`."""
    scheduler = Scheduler(BlockPool(100), 3, 64, Batching(BatchingMode.STATIC, max_wait=2.0))
    scheduler.add(make(5, 2), now=10.0)
    assert len(step(scheduler, 10.0)) == 1


def test_a_dynamic_batch_waits_to_be_full_but_not_for_ever(make: Maker) -> None:
    """A dynamic batch begins when it is full or when its first sequence has waited for `max_wait`."""
    scheduler = Scheduler(BlockPool(100), 3, 64, Batching(BatchingMode.DYNAMIC, max_wait=2.0))
    assert scheduler.seconds_until_work(0.0) is None
    scheduler.add(make(5, 2), now=10.0)
    assert step(scheduler, 11.0) == []
    assert scheduler.seconds_until_work(11.0) == 1.0
    scheduler.add(make(5, 2), now=11.5)
    assert len(step(scheduler, 12.0)) == 2
    for _ in range(3):
        scheduler.add(make(5, 1), now=12.0)
    assert len(step(scheduler, 12.0)) == 2, "nobody joins"
    assert len(step(scheduler, 12.0)) == 3, "full at once"


def test_an_urgent_sequence_preempts_two_that_share_blocks(make: Maker) -> None:
    """An urgent sequence preempts two less urgent ones when the blocks that they share are free once both are gone."""
    scheduler = Scheduler(BlockPool(NUM_BLOCKS), max_batch=4, step_tokens=512)
    siblings = [make(130, priority=1, family=5), make(130, priority=1, family=5)]
    for sibling in siblings:
        scheduler.add(sibling)
    for _ in range(4):
        step(scheduler)
    assert set(siblings[0].blocks) & set(siblings[1].blocks)
    urgent = make(60)
    scheduler.add(urgent)
    step(scheduler)

    assert urgent in scheduler.running


def test_no_step_is_scheduled_ahead_of_a_sequence_that_may_join(make: Maker) -> None:
    """A waiting sequence that does not fit allows a step ahead, and one that fits forbids it."""
    scheduler = Scheduler(BlockPool(6), max_batch=4, step_tokens=64)
    scheduler.add(make(20))
    step(scheduler)
    scheduler.add(make(70))
    chunks = scheduler.schedule()
    assert len(scheduler.schedule_ahead(chunks)) == 1, "the large one cannot join before somebody has left"
    urgent = make(10, priority=-1)
    scheduler.add(urgent)
    assert scheduler.schedule_ahead(chunks) == []
    take_over(scheduler, chunks)
    step(scheduler)
    assert urgent in scheduler.running


def test_no_step_is_scheduled_ahead_of_one_that_waits_for_blocks(make: Maker) -> None:
    """No step is scheduled ahead while a sequence waits for blocks that the step under way fills."""
    scheduler = Scheduler(BlockPool(10), max_batch=4, step_tokens=64)
    leader, follower, large = make(40, family=3), make(40, family=3), make(200)
    for sequence in (leader, follower, large):
        scheduler.add(sequence)
    chunks = scheduler.schedule()
    assert counts(chunks) == {leader.id: 40}
    assert scheduler.schedule_ahead(chunks) == []
    take_over(scheduler, chunks)
    step(scheduler)
    assert follower in scheduler.running


def test_a_full_batch_schedules_ahead_unless_a_more_urgent_waits(make: Maker) -> None:
    """A full batch schedules ahead of a new sequence, unless that one is more urgent."""
    scheduler = Scheduler(BlockPool(20), max_batch=1, step_tokens=64)
    scheduler.add(make(20))
    chunks = scheduler.schedule()
    scheduler.add(make(10))
    assert len(scheduler.schedule_ahead(chunks)) == 1
    scheduler.add(make(10, priority=-1))
    assert scheduler.schedule_ahead(chunks) == []
