"""A fault of one sequence ends that sequence alone, with a reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from backend.engine.config import Batching, BatchingMode
from backend.engine.engine import Engine
from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, StepInput, StepOutput
from backend.engine.sequence import FinishReason
from tests.backend.tiny_model import POISON, EngineClient, alone, fused, reference

PROMPTS = [[*range(20, 60), 11 + number] for number in range(3)]


def reason(client: EngineClient, number: int) -> FinishReason | None:
    last = client.completions[number].last
    return None if last is None else last.finish_reason


@pytest.mark.parametrize("make", [fused, reference])
@pytest.mark.parametrize("poisoned_at", [0, 25, 39])
def test_nan_logits_fail_one_sequence(
    make: Callable[[int], ModelRunner], poisoned_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """NaN logits fail their sequence alone; others in its batch, and later ones on its blocks, are not affected."""
    runner = make(12)
    expected = [alone(make(12), prompt).text for prompt in PROMPTS]
    client = EngineClient(Engine(runner, max_batch=4, step_tokens=20))
    bad = [*range(20, 60), 15]
    bad[poisoned_at] = POISON
    client.submit(0, PROMPTS[0])
    client.submit(9, bad, priority=-1)
    client.submit(1, PROMPTS[1])
    client.run()
    assert reason(client, 9) is FinishReason.FAILED
    assert client.completions[9].text == ""
    assert client.completions[9].last is not None
    assert client.completions[9].last.error == "the model produced values that are not numbers for this request"
    assert [client.completions[number].text for number in (0, 1)] == expected[:2]
    assert client.engine.stats().non_finite == 1
    assert "one sequence is ended" in caplog.text
    # All blocks are used anew, those with bad numbers in them too.
    for number in range(10, 16):
        client.submit(number, PROMPTS[2], tenant=str(number))
    client.run()
    assert {client.completions[number].text for number in range(10, 16)} == {expected[2]}


def test_blocks_with_nan_values_are_never_shared() -> None:
    """A prompt whose first block has NaN values shares no block, neither while it runs nor afterwards."""
    client = EngineClient(Engine(fused(20), max_batch=2, step_tokens=16))
    bad = [POISON, *range(20, 70)]
    client.submit(0, bad)
    client.step()
    assert reason(client, 0) is FinishReason.FAILED, "after its first chunk, though that gives no token"
    assert client.engine.stats().cached_blocks == 0
    again = client.submit(1, bad)
    client.run()
    assert again.num_cached == 0


class Around:
    """A runner that forwards everything but its steps to another runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.config = runner.config
        self.name = runner.name
        self.num_blocks = runner.num_blocks
        self.max_batch = runner.max_batch
        self.step_tokens = runner.step_tokens
        self.deterministic = runner.deterministic
        self.kernels = runner.kernels
        self.kv_blocks = runner.kv_blocks
        self.weights_precision = runner.weights_precision
        self.kv_precision = runner.kv_precision
        self.kv_bytes_per_token = runner.kv_bytes_per_token

    def move_kv(self, moves: Sequence[tuple[int, int]]) -> None:
        self._runner.move_kv(moves)


class Failing(Around):
    """A runner that sets one logit of the first row to some value while it ``fails``."""

    def __init__(self, runner: ModelRunner, value: float = torch.nan) -> None:
        super().__init__(runner)
        self._value = value
        self.fails = False

    def run(self, step: StepInput) -> StepOutput:
        result = self._runner.run(step)
        if self.fails:
            result.logits[0, 7] = self._value
        return result


def test_a_sequence_that_fails_late_withdraws_its_shared_blocks() -> None:
    """Blocks of a sequence that fails late are no longer found, and a sequence that already shares them goes on."""
    runner = Failing(fused(20))
    client = EngineClient(Engine(runner, max_batch=2, step_tokens=64))
    client.submit(0, PROMPTS[0], 30)
    client.step()
    holder = client.submit(1, PROMPTS[1], 30, ignore_eos=True)
    client.step()
    assert holder.num_cached == 2 * BLOCK_SIZE
    runner.fails = True
    client.step()
    runner.fails = False
    assert reason(client, 0) is FinishReason.FAILED
    client.run()
    assert client.completions[1].text == alone(fused(20), PROMPTS[1], 30, ignore_eos=True).text
    assert client.engine.stats().cached_blocks == 0
    again = client.submit(2, PROMPTS[1])
    client.run()
    assert again.num_cached == 0


@pytest.mark.parametrize(
    ("value", "ends"),
    [(torch.inf, FinishReason.FAILED), (torch.nan, FinishReason.FAILED), (-torch.inf, FinishReason.LENGTH)],
)
def test_one_nan_or_infinite_logit_fails_the_sequence(value: float, ends: FinishReason) -> None:
    """One NaN or plus infinity among the logits fails the sequence; minus infinity is a token that is never drawn."""
    runner = Failing(fused(20), value)
    client = EngineClient(Engine(runner, max_batch=2, step_tokens=64))
    client.submit(0, PROMPTS[0])
    runner.fails = True
    client.step()
    runner.fails = False
    client.run()
    assert reason(client, 0) is ends


def test_a_pooled_prompt_with_nan_values_fails() -> None:
    """A pooled prompt with NaN values fails instead of returning an embedding of NaN."""
    client = EngineClient(Engine(fused(20), max_batch=2, step_tokens=16))
    client.submit(0, [*range(20, 40), POISON], 0, pooled=True)
    client.submit(1, PROMPTS[1], 0, pooled=True)
    client.run()
    assert (reason(client, 0), reason(client, 1)) == (FinishReason.FAILED, FinishReason.STOP)


class Narrow(Around):
    """A runner whose device has memory for ``rows`` tokens a step."""

    def __init__(self, runner: ModelRunner, rows: int, error: Exception) -> None:
        super().__init__(runner)
        self._rows = rows
        self._error = error

    def run(self, step: StepInput) -> StepOutput:
        if len(step.token_ids) > self._rows:
            raise self._error
        return self._runner.run(step)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    ],
)
def test_out_of_memory_ends_the_youngest(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """A step without memory sheds the youngest sequences, and the older ones generate the same text as alone."""
    expected = [alone(fused(20), [20 + number], 30, ignore_eos=True).text for number in range(2)]
    client = EngineClient(Engine(Narrow(fused(20), 2, error), max_batch=4, step_tokens=8))
    for number in range(4):
        client.submit(number, [20 + number], 30, ignore_eos=True)
    client.run()
    assert [reason(client, number) for number in range(4)] == [FinishReason.LENGTH] * 2 + [FinishReason.SHED] * 2
    assert [client.completions[number].text for number in range(2)] == expected
    assert client.engine.stats().out_of_memory == 2
    assert "2 of them are ended" in caplog.text


def test_out_of_memory_spares_the_urgent() -> None:
    """A step without memory sheds the less urgent sequences first, even if the urgent one arrived last."""
    client = EngineClient(Engine(Narrow(fused(20), 2, MemoryError()), max_batch=4, step_tokens=8))
    for number, priority in enumerate((1, 1, 0)):
        client.submit(number, [20 + number], priority=priority, ignore_eos=True)
    client.run()
    assert [reason(client, number) for number in range(3)] == [FinishReason.SHED] * 2 + [FinishReason.LENGTH]


def test_a_single_sequence_that_never_fits_is_shed() -> None:
    """The engine sheds a sequence whose step does not fit alone, and goes on with the next one."""
    client = EngineClient(Engine(Narrow(fused(20), 2, MemoryError()), max_batch=4, step_tokens=8))
    client.submit(0, [20, 21, 22, 23])
    client.run()
    assert reason(client, 0) is FinishReason.SHED
    client.submit(1, [20])
    client.run()
    assert reason(client, 1) is FinishReason.LENGTH


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    """The engine raises every other error of a step instead of shedding sequences."""
    client = EngineClient(Engine(Narrow(fused(20), 0, RuntimeError("the device is gone")), max_batch=4, step_tokens=8))
    client.submit(0, [20])
    with pytest.raises(RuntimeError, match="the device is gone"):
        client.step()


def test_deadlines_end_waiting_and_running_sequences() -> None:
    """A deadline ends a waiting or running sequence with a message that says which, and its blocks are free at once."""
    client = EngineClient(Engine(fused(20), max_batch=1, step_tokens=32))
    client.submit(0, [20], 200, ignore_eos=True, deadline=time.monotonic() + 3600)
    waiting = client.submit(1, [21], deadline=time.monotonic() - 1)
    client.step()
    assert reason(client, 1) is FinishReason.EXPIRED
    assert client.completions[1].last is not None
    assert client.completions[1].last.error == "the request's deadline passed while it waited"
    assert waiting.blocks == []
    running = client.completions[0].sequence
    running.deadline = time.monotonic()
    generated = running.num_generated
    client.step()
    assert generated >= 1
    assert client.completions[0].last is not None
    assert client.completions[0].last.error == f"the request's deadline passed after {generated} generated tokens"
    assert client.engine.pool.num_free == 20
    assert client.engine.stats().deadline_exceeded == 2


def test_seconds_until_work_follows_batches_and_deadlines() -> None:
    """`seconds_until_work` is the time until a batch opens or a deadline passes, and None without work."""
    engine = Engine(fused(20), 4, 32, Batching(BatchingMode.DYNAMIC, max_wait=1000.0))
    client = EngineClient(engine)
    assert engine.seconds_until_work() is None
    client.submit(0, [20])
    assert client.step() == []
    pause = engine.seconds_until_work()
    assert pause is not None
    assert 900 < pause <= 1000
    client.completions[0].sequence.deadline = time.monotonic() + 100
    pause = engine.seconds_until_work()
    assert pause is not None
    assert 90 < pause <= 100
    client.completions[0].sequence.deadline = time.monotonic() - 5
    assert engine.seconds_until_work() == 0.0
    client.completions[0].sequence.deadline = None
    for number in range(1, 4):
        client.submit(number, [20 + number])
    assert engine.seconds_until_work() == 0.0
    client.run()


def test_the_integrity_check_reports_problems_and_repairs_none() -> None:
    """The integrity check reports lost blocks, unscheduled sequences and wrong block tables, and changes nothing."""
    engine = Engine(fused(20), 4, 32)
    client = EngineClient(engine)
    for number, prompt in enumerate(PROMPTS):
        client.submit(number, prompt, 50, ignore_eos=True)
    for _ in range(4):
        client.step()
    first, second, _ = engine.scheduler.running
    assert engine.problems() == []
    lost = first.blocks.pop()
    assert engine.problems() == [
        f"block {lost} counts 1 references, sequences hold it 0 times",
        f"sequence 0 has 2 blocks for {first.num_tokens} tokens, {first.num_computed} of them computed",
    ]
    assert len(engine.problems()) == 2, "nothing was repaired"
    first.blocks.append(lost)
    engine.scheduler.running.remove(second)
    assert "the scheduler and the engine do not know the same sequences" in engine.problems()
    engine.scheduler.waiting.append(second)
    assert f"sequence {second.id} waits and holds blocks" in engine.problems()
    assert "the scheduler and the engine do not know the same sequences" not in engine.problems()
    # No public call loses a sequence's state alone.
    del engine._states[second.id]
    assert "the scheduler and the engine do not know the same sequences" in engine.problems()


@pytest.mark.parametrize("fault", ["a block twice", "more shared than computed", "more computed than there is"])
def test_the_integrity_check_reports_a_wrong_block_table(fault: str) -> None:
    """The integrity check reports each kind of inconsistent block table with the sequence's number."""
    engine = Engine(fused(20), 4, 32)
    client = EngineClient(engine)
    sequence = client.submit(0, PROMPTS[0], 50, ignore_eos=True)
    for _ in range(3):
        client.step()
    if fault == "a block twice":
        sequence.blocks[1] = sequence.blocks[0]
    elif fault == "more shared than computed":
        sequence.num_registered = 3
    else:
        sequence.num_computed = sequence.num_tokens + 1
    found = [problem for problem in engine.problems() if problem.startswith("sequence 0 has 3 blocks for ")]
    assert len(found) == 1


def test_an_answer_of_no_tokens_ends_after_its_prompt() -> None:
    """A sequence with `max_tokens=0` ends with `length` after the last chunk of its prompt and generates nothing."""
    client = EngineClient(Engine(fused(20), max_batch=2, step_tokens=16))
    nothing = client.submit(0, PROMPTS[0], 0)
    client.step()
    assert client.completions[0].last is None
    client.run()
    assert reason(client, 0) is FinishReason.LENGTH
    assert (nothing.num_generated, client.completions[0].text) == (0, "")


def test_prompt_logprobs_come_once_over_chunks_and_preemptions() -> None:
    """Prompt logprobs come whole with the first output, however the prompt was cut into chunks or preempted."""
    whole = alone(fused(20), PROMPTS[0], 3, prompt_logprobs=0)
    expected = whole.sequence.prompt_logprobs
    assert whole.content == alone(fused(20), PROMPTS[0], 3).content
    client = EngineClient(Engine(fused(20), max_batch=1, step_tokens=16))
    cut = client.submit(0, PROMPTS[0], 3, prompt_logprobs=0)
    client.step()
    client.step()
    assert 0 < len(cut.prompt_logprobs) < len(expected)
    client.submit(1, [20], 1, priority=-1)
    client.step()
    assert cut.num_computed == 0, "it has made room"
    reports = []
    while client.engine.has_work:
        reports += [output.prompt_logprobs for output in client.step()]
    assert reports == [expected, [], []]
    assert client.completions[0].content == whole.content
    stats = client.engine.stats()
    assert (stats.computed_rows, stats.first_time_rows) == (43 + 1 + 32, 43 + 1), "two chunks were computed again"


def test_a_prompt_is_scored_as_the_answer_was() -> None:
    """An answer's tokens get the same log-probabilities as part of a prompt as when they were generated."""
    completion = alone(fused(20), PROMPTS[0], 5, ignore_eos=True)
    again = alone(fused(20), completion.sequence.tokens, 1, prompt_logprobs=2)
    scored = again.sequence.prompt_logprobs[-5:]
    assert len(completion.logprobs) == 5
    assert [replace(entry, rank=0) for entry in scored] == completion.logprobs
    assert [entry.rank for entry in scored] == [1] * 5, "it was greedy"


def test_every_row_of_prompt_logprobs_is_checked_for_nan() -> None:
    """With prompt logprobs a NaN in any row fails the sequence, and not only one in the last row."""
    runner = Failing(fused(20))
    runner.fails = True
    client = EngineClient(Engine(runner, max_batch=1, step_tokens=64))
    client.submit(0, PROMPTS[0], 3, prompt_logprobs=0)
    client.step()
    assert reason(client, 0) is FinishReason.FAILED


def test_embeddings_are_means_of_the_prompt_however_it_is_cut() -> None:
    """An embedding is the mean of the prompt's hidden states, bit for bit the same in chunks and after a preemption."""
    whole = alone(fused(20), PROMPTS[0], 0, pooled=True).last
    assert whole is not None
    assert whole.embedding is not None
    runner = fused(20)
    step = runner.run(
        StepInput(
            token_ids=torch.tensor(PROMPTS[0], dtype=torch.int32).numpy(),
            positions=torch.arange(41, dtype=torch.int32).numpy(),
            slot_mapping=torch.arange(41).numpy(),
            query_starts=torch.tensor([0, 41], dtype=torch.int32).numpy(),
            block_tables=torch.arange(3, dtype=torch.int32)[None].numpy(),
            logits_rows=torch.empty(0, dtype=torch.int32).numpy(),
            hidden_rows=torch.arange(41, dtype=torch.int32).numpy(),
        )
    )
    torch.testing.assert_close(torch.from_numpy(whole.embedding), step.hidden.double().mean(dim=0).float())
    client = EngineClient(Engine(fused(20), max_batch=3, step_tokens=7))
    client.submit(1, PROMPTS[1], 60, ignore_eos=True)
    while not client.completions[1].sequence.num_generated:
        client.step()
    pooled = client.submit(0, PROMPTS[0], 0, pooled=True)
    for _ in range(3):
        client.step()
    assert 0 < pooled.num_computed < pooled.num_prompt
    for number in (2, 3):
        client.submit(number, [20 + number], 3, priority=-1)
    client.step()
    assert pooled.num_computed == 0, "it has made room"
    client.run()
    cut = client.completions[0].last
    assert cut is not None
    assert cut.embedding is not None
    assert cut.finish_reason is FinishReason.STOP
    assert cut.embedding.tobytes() == whole.embedding.tobytes()
    assert cut.cached_tokens == 0, "the states of computed blocks are not kept"


def test_cached_tokens_are_whole_blocks_without_the_last_token() -> None:
    """`cached_tokens` counts the whole cached blocks of the prompt, and never its last token."""
    client = EngineClient(Engine(fused(20), max_batch=3, step_tokens=64))
    client.submit(0, PROMPTS[0])
    client.run()
    client.submit(1, PROMPTS[1])
    client.submit(2, PROMPTS[1], logprobs=0, prompt_logprobs=0, answer=1)
    client.run()
    cached = [c.last and c.last.cached_tokens for c in client.completions.values()]
    assert cached == [0, 2 * BLOCK_SIZE, 0]
    assert [len(c.sequence.prompt_logprobs) for c in client.completions.values()] == [
        0,
        0,
        len(PROMPTS[1]),
    ]


def test_fragmentation_is_the_unused_rest_of_last_blocks() -> None:
    """Fragmentation is the share of unused slots; a shared block counts once and has none."""
    client = EngineClient(Engine(fused(20), max_batch=3, step_tokens=64))
    assert client.engine.stats().fragmentation == 0.0
    client.submit(0, [*range(20, 50)], 50, ignore_eos=True)
    client.submit(1, [*range(20, 50)], 50, ignore_eos=True)
    client.step()
    client.step()
    stats = client.engine.stats()
    held = 2 * BLOCK_SIZE + BLOCK_SIZE
    assert stats.held_blocks * BLOCK_SIZE == held
    unused = sum(len(s.blocks) * BLOCK_SIZE - s.num_tokens for s in client.engine.scheduler.running)
    assert stats.fragmentation == unused / held


def test_a_sequence_that_fills_the_memory_exactly_is_taken() -> None:
    """A sequence that fills the KV memory exactly is taken, and one that needs a token more is refused."""
    client = EngineClient(Engine(fused(4), max_batch=1, step_tokens=64))
    with pytest.raises(ValueError, match="up to 65 tokens does not fit 4 KV blocks"):
        client.submit(0, [20], 4 * BLOCK_SIZE)
    client.submit(1, [20], 4 * BLOCK_SIZE - 1, ignore_eos=True)
    client.run()
    assert reason(client, 1) is FinishReason.LENGTH
