"""What goes wrong for one sequence ends that sequence, with a reason, and nobody else's."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from backend.engine.batching import Batching, BatchingMode
from backend.engine.engine import Engine
from backend.engine.runner import BLOCK_SIZE, ModelRunner, StepInput, StepOutput
from backend.engine.sequence import FinishReason
from tests.backend.tiny_model import POISON, Talk, alone, fused, reference

PROMPTS = [[*range(20, 60), 11 + number] for number in range(3)]


def reason(talk: Talk, number: int) -> FinishReason | None:
    last = talk.said[number].last
    return None if last is None else last.finish_reason


@pytest.mark.parametrize("make", [fused, reference])
@pytest.mark.parametrize("poisoned_at", [0, 25, 39])
def test_numbers_that_are_none_end_one_answer(
    make: Callable[[int], ModelRunner], poisoned_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The others in its batch, and those that get its blocks later, say what they say alone."""
    runner = make(12)
    wanted = [alone(make(12), prompt).text for prompt in PROMPTS]
    talk = Talk(Engine(runner, max_batch=4, step_tokens=20))
    bad = [*range(20, 60), 15]
    bad[poisoned_at] = POISON
    talk.say(0, PROMPTS[0])
    talk.say(9, bad, priority=-1)
    talk.say(1, PROMPTS[1])
    talk.run()
    assert reason(talk, 9) is FinishReason.FAILED
    assert talk.said[9].text == ""
    assert talk.said[9].last is not None
    assert talk.said[9].last.error == "the model produced values that are not numbers for this request"
    assert [talk.said[number].text for number in (0, 1)] == wanted[:2]
    assert talk.engine.stats().poisoned == 1
    assert "one sequence is ended" in caplog.text
    # All blocks are used anew, those with bad numbers in them too.
    for number in range(10, 16):
        talk.say(number, PROMPTS[2], tenant=str(number))
    talk.run()
    assert {talk.said[number].text for number in range(10, 16)} == {wanted[2]}


def test_blocks_with_bad_numbers_are_never_found() -> None:
    """A prompt that is poisoned in its first block shares none, neither while it runs nor afterwards."""
    talk = Talk(Engine(fused(20), max_batch=2, step_tokens=16))
    bad = [POISON, *range(20, 70)]
    talk.say(0, bad)
    talk.step()
    assert reason(talk, 0) is FinishReason.FAILED, "after its first chunk, though that gives no token"
    assert talk.engine.stats().cached_blocks == 0
    again = talk.say(1, bad)
    talk.run()
    assert again.num_cached == 0


class Around:
    """A runner that is another one in all but its steps."""

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


class Failing(Around):
    """A runner of which one row's logits have some value while it ``fails``."""

    def __init__(self, runner: ModelRunner, value: float = torch.nan) -> None:
        super().__init__(runner)
        self._value = value
        self.fails = False

    def run(self, step: StepInput) -> StepOutput:
        result = self._runner.run(step)
        if self.fails:
            result.logits[0, 7] = self._value
        return result


def test_an_answer_that_goes_wrong_late_takes_its_blocks_back() -> None:
    """What it had shared before is not to be trusted either; whoever holds it goes on."""
    runner = Failing(fused(20))
    talk = Talk(Engine(runner, max_batch=2, step_tokens=64))
    talk.say(0, PROMPTS[0], 30)
    talk.step()
    holder = talk.say(1, PROMPTS[1], 30, ignore_eos=True)
    talk.step()
    assert holder.num_cached == 2 * BLOCK_SIZE
    runner.fails = True
    talk.step()
    runner.fails = False
    assert reason(talk, 0) is FinishReason.FAILED
    talk.run()
    assert talk.said[1].text == alone(fused(20), PROMPTS[1], 30, ignore_eos=True).text
    assert talk.engine.stats().cached_blocks == 0
    again = talk.say(2, PROMPTS[1])
    talk.run()
    assert again.num_cached == 0


@pytest.mark.parametrize(
    ("value", "ends"),
    [(torch.inf, FinishReason.FAILED), (torch.nan, FinishReason.FAILED), (-torch.inf, FinishReason.LENGTH)],
)
def test_one_bad_logit_is_enough(value: float, ends: FinishReason) -> None:
    """Except minus infinity, which is a token that never comes."""
    runner = Failing(fused(20), value)
    talk = Talk(Engine(runner, max_batch=2, step_tokens=64))
    talk.say(0, PROMPTS[0])
    runner.fails = True
    talk.step()
    runner.fails = False
    talk.run()
    assert reason(talk, 0) is ends


def test_a_pooled_prompt_with_bad_numbers_fails() -> None:
    """Instead of an embedding that is not a number."""
    talk = Talk(Engine(fused(20), max_batch=2, step_tokens=16))
    talk.say(0, [*range(20, 40), POISON], 0, pooled=True)
    talk.say(1, PROMPTS[1], 0, pooled=True)
    talk.run()
    assert (reason(talk, 0), reason(talk, 1)) == (FinishReason.FAILED, FinishReason.STOP)


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
    """The older ones go on and say what they say alone."""
    wanted = [alone(fused(20), [20 + number], 30, ignore_eos=True).text for number in range(2)]
    talk = Talk(Engine(Narrow(fused(20), 2, error), max_batch=4, step_tokens=8))
    for number in range(4):
        talk.say(number, [20 + number], 30, ignore_eos=True)
    talk.run()
    assert [reason(talk, number) for number in range(4)] == [FinishReason.LENGTH] * 2 + [FinishReason.SHED] * 2
    assert [talk.said[number].text for number in range(2)] == wanted
    assert talk.engine.stats().shed == 2
    assert "2 of them are ended" in caplog.text


def test_out_of_memory_spares_the_urgent() -> None:
    """Though it came last."""
    talk = Talk(Engine(Narrow(fused(20), 2, MemoryError()), max_batch=4, step_tokens=8))
    for number, priority in enumerate((1, 1, 0)):
        talk.say(number, [20 + number], priority=priority, ignore_eos=True)
    talk.run()
    assert [reason(talk, number) for number in range(3)] == [FinishReason.SHED] * 2 + [FinishReason.LENGTH]


def test_a_step_that_never_fits_ends_too() -> None:
    """With one sequence left there is nobody else to end, and the engine takes the next one."""
    talk = Talk(Engine(Narrow(fused(20), 2, MemoryError()), max_batch=4, step_tokens=8))
    talk.say(0, [20, 21, 22, 23])
    talk.run()
    assert reason(talk, 0) is FinishReason.SHED
    talk.say(1, [20])
    talk.run()
    assert reason(talk, 1) is FinishReason.LENGTH


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    """They concern the whole step, and whoever drives the engine decides."""
    talk = Talk(Engine(Narrow(fused(20), 0, RuntimeError("the device is gone")), max_batch=4, step_tokens=8))
    talk.say(0, [20])
    with pytest.raises(RuntimeError, match="the device is gone"):
        talk.step()


def test_deadlines_end_those_who_wait_and_those_who_run() -> None:
    """With a sentence that says which; the blocks are free at once."""
    talk = Talk(Engine(fused(20), max_batch=1, step_tokens=32))
    talk.say(0, [20], 200, ignore_eos=True, deadline=time.monotonic() + 3600)
    waiting = talk.say(1, [21], deadline=time.monotonic() - 1)
    talk.step()
    assert reason(talk, 1) is FinishReason.EXPIRED
    assert talk.said[1].last is not None
    assert talk.said[1].last.error == "the request's deadline passed while it waited"
    assert waiting.blocks == []
    running = talk.said[0].sequence
    running.deadline = time.monotonic()
    generated = running.num_generated
    talk.step()
    assert generated >= 1
    assert talk.said[0].last is not None
    assert talk.said[0].last.error == f"the request's deadline passed after {generated} generated tokens"
    assert talk.engine.pool.num_free == 20
    assert talk.engine.stats().expired == 2


def test_the_engine_says_when_there_is_something_to_do() -> None:
    """So that who drives it can sleep: until a batch opens, or until a deadline."""
    engine = Engine(fused(20), 4, 32, Batching(BatchingMode.DYNAMIC, max_wait=1000.0))
    talk = Talk(engine)
    assert engine.pause() is None
    talk.say(0, [20])
    assert talk.step() == []
    pause = engine.pause()
    assert pause is not None
    assert 900 < pause <= 1000
    talk.said[0].sequence.deadline = time.monotonic() + 100
    pause = engine.pause()
    assert pause is not None
    assert 90 < pause <= 100
    talk.said[0].sequence.deadline = time.monotonic() - 5
    assert engine.pause() == 0.0
    talk.said[0].sequence.deadline = None
    for number in range(1, 4):
        talk.say(number, [20 + number])
    assert engine.pause() == 0.0
    talk.run()


def test_the_integrity_check_sees_what_is_wrong() -> None:
    """Lost blocks, sequences that nobody schedules, and tables that say too much; and it changes nothing."""
    engine = Engine(fused(20), 4, 32)
    talk = Talk(engine)
    for number, prompt in enumerate(PROMPTS):
        talk.say(number, prompt, 50, ignore_eos=True)
    for _ in range(4):
        talk.step()
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
    del engine._notes[second.id]
    assert "the scheduler and the engine do not know the same sequences" in engine.problems()


@pytest.mark.parametrize("fault", ["a block twice", "more shared than computed", "more computed than there is"])
def test_the_integrity_check_looks_at_each_table(fault: str) -> None:
    """Each way in which a sequence's own notes can be wrong is found with the sequence's number."""
    engine = Engine(fused(20), 4, 32)
    talk = Talk(engine)
    sequence = talk.say(0, PROMPTS[0], 50, ignore_eos=True)
    for _ in range(3):
        talk.step()
    if fault == "a block twice":
        sequence.blocks[1] = sequence.blocks[0]
    elif fault == "more shared than computed":
        sequence.num_registered = 3
    else:
        sequence.num_computed = sequence.num_tokens + 1
    found = [problem for problem in engine.problems() if problem.startswith("sequence 0 has 3 blocks for ")]
    assert len(found) == 1


def test_an_answer_of_no_tokens_ends_after_its_prompt() -> None:
    """However many chunks that takes; nothing is chosen, and the reason is its length."""
    talk = Talk(Engine(fused(20), max_batch=2, step_tokens=16))
    nothing = talk.say(0, PROMPTS[0], 0)
    talk.step()
    assert talk.said[0].last is None
    talk.run()
    assert reason(talk, 0) is FinishReason.LENGTH
    assert (nothing.num_generated, talk.said[0].text) == (0, "")


def test_log_probabilities_of_a_prompt_come_once_however_it_is_cut() -> None:
    """In chunks, and after a preemption in their midst: with the first output, the same as of the whole."""
    whole = alone(fused(20), PROMPTS[0], 3, prompt_logprobs=True)
    wanted = whole.sequence.prompt_logprobs
    assert whole.content == alone(fused(20), PROMPTS[0], 3).content
    talk = Talk(Engine(fused(20), max_batch=1, step_tokens=16))
    cut = talk.say(0, PROMPTS[0], 3, prompt_logprobs=True)
    talk.step()
    talk.step()
    assert 0 < len(cut.prompt_logprobs) < len(wanted)
    talk.say(1, [20], 1, priority=-1)
    talk.step()
    assert cut.num_computed == 0, "it has made room"
    reports = []
    while talk.engine.has_work:
        reports += [output.prompt_logprobs for output in talk.step()]
    assert reports == [wanted, [], []]
    assert talk.said[0].content == whole.content
    stats = talk.engine.stats()
    assert (stats.computed_rows, stats.useful_rows) == (43 + 1 + 32, 43 + 1), "two chunks were computed again"


def test_a_prompt_is_scored_as_the_answer_was() -> None:
    """The log-probabilities of an answer's tokens, when it comes back as a prompt, are those it was given with."""
    said = alone(fused(20), PROMPTS[0], 5, ignore_eos=True)
    again = alone(fused(20), said.sequence.tokens, 1, prompt_logprobs=True)
    assert len(said.logprobs) == 5
    assert again.sequence.prompt_logprobs[-5:] == said.logprobs


def test_each_row_of_a_prompt_with_log_probabilities_is_checked() -> None:
    """Not only the last one, of which a token is chosen."""
    runner = Failing(fused(20))
    runner.fails = True
    talk = Talk(Engine(runner, max_batch=1, step_tokens=64))
    talk.say(0, PROMPTS[0], 3, prompt_logprobs=True)
    talk.step()
    assert reason(talk, 0) is FinishReason.FAILED


def test_embeddings_are_means_of_the_prompt_however_it_is_cut() -> None:
    """Bit for bit, beside others, in chunks, and after a preemption."""
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
    talk = Talk(Engine(fused(20), max_batch=3, step_tokens=7))
    talk.say(1, PROMPTS[1], 60, ignore_eos=True)
    while not talk.said[1].sequence.num_generated:
        talk.step()
    pooled = talk.say(0, PROMPTS[0], 0, pooled=True)
    for _ in range(3):
        talk.step()
    assert 0 < pooled.num_computed < pooled.num_prompt
    for number in (2, 3):
        talk.say(number, [20 + number], 3, priority=-1)
    talk.step()
    assert pooled.num_computed == 0, "it has made room"
    talk.run()
    cut = talk.said[0].last
    assert cut is not None
    assert cut.embedding is not None
    assert cut.finish_reason is FinishReason.STOP
    assert cut.embedding.tobytes() == whole.embedding.tobytes()
    assert cut.cached_tokens == 0, "the states of computed blocks are not kept"


def test_usage_says_what_was_there_already() -> None:
    """Whole blocks of the prompt, and never its last token."""
    talk = Talk(Engine(fused(20), max_batch=3, step_tokens=64))
    talk.say(0, PROMPTS[0])
    talk.run()
    talk.say(1, PROMPTS[1])
    talk.say(2, PROMPTS[1], logprobs=0, prompt_logprobs=True, answer=1)
    talk.run()
    cached = [said.last and said.last.cached_tokens for said in talk.said.values()]
    assert cached == [0, 2 * BLOCK_SIZE, 0]
    assert [len(said.sequence.prompt_logprobs) for said in talk.said.values()] == [0, 0, len(PROMPTS[1])]


def test_fragmentation_is_the_unused_rest_of_last_blocks() -> None:
    """Shared blocks count once, and hold no unused slot."""
    talk = Talk(Engine(fused(20), max_batch=3, step_tokens=64))
    assert talk.engine.stats().fragmentation == 0.0
    talk.say(0, [*range(20, 50)], 50, ignore_eos=True)
    talk.say(1, [*range(20, 50)], 50, ignore_eos=True)
    talk.step()
    talk.step()
    stats = talk.engine.stats()
    held = 2 * BLOCK_SIZE + BLOCK_SIZE
    assert stats.held_blocks * BLOCK_SIZE == held
    unused = sum(len(s.blocks) * BLOCK_SIZE - s.num_tokens for s in talk.engine.scheduler.running)
    assert stats.fragmentation == unused / held


def test_what_fits_to_the_last_token_is_taken() -> None:
    """One more token needs one more block than there is, and is refused at once."""
    talk = Talk(Engine(fused(4), max_batch=1, step_tokens=64))
    with pytest.raises(ValueError, match="up to 65 tokens does not fit 4 KV blocks"):
        talk.say(0, [20], 4 * BLOCK_SIZE)
    talk.say(1, [20], 4 * BLOCK_SIZE - 1, ignore_eos=True)
    talk.run()
    assert reason(talk, 1) is FinishReason.LENGTH
