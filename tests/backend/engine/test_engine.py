"""Sequences join and leave the batch at any step, and no sequence's output depends on the others."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from backend.engine.engine import Engine
from backend.engine.output_processor import Output
from backend.engine.sequence import FinishReason, SamplingParams, Sequence
from backend.model import ServedModel
from backend.model_loader.weights import ModelWeights
from backend.models.config import ModelConfig
from backend.runners.fused.runner import FusedRunner
from backend.text.detokenizer import Detokenizer
from tests.backend.conftest import built_library

PROMPTS = [
    "The capital of France is",
    "def add(a, b):\n    return",
    "Once upon a time there was a lighthouse keeper who",
    "1, 2, 3, 4,",
    "Water boils at",
]


class Conversation:
    """Feeds one engine and keeps its outputs."""

    def __init__(self, engine: Engine, model: ServedModel) -> None:
        self.engine = engine
        self.model = model
        self.text: dict[int, str] = {}
        self.last: dict[int, Output] = {}

    def submit(self, number: int, prompt: str, **params: Any) -> Sequence:
        ids = self.model.tokenizer.fast.encode(prompt).ids
        sampling = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **params})
        sequence = Sequence(number, ids, sampling, Detokenizer(self.model.tokenizer.token_bytes), number)
        self.engine.add(sequence)
        self.text[number] = ""
        return sequence

    def step(self) -> list[Output]:
        outputs = self.engine.step()
        for output in outputs:
            self.text[output.sequence_id] += output.text
            self.last[output.sequence_id] = output
        return outputs

    def run(self) -> None:
        while self.engine.has_work:
            self.step()


def alone(model: ServedModel, prompt: str, number: int = 0, **params: Any) -> str:
    conversation = Conversation(Engine(model.runner, max_batch=4, step_tokens=128), model)
    conversation.submit(number, prompt, **params)
    conversation.run()
    return conversation.text[number]


@pytest.fixture(scope="module")
def shallow(model: ServedModel, config: ModelConfig, weights: ModelWeights) -> ServedModel:
    """The real model's first three layers with room for six blocks: two or three short sequences, quickly computed."""
    config = dataclasses.replace(config, num_layers=3)
    weights = dataclasses.replace(weights, layers=weights.layers[:3])
    runner = FusedRunner(built_library(), config, weights, num_blocks=6, max_context=96, threads=2)
    return dataclasses.replace(model, config=config, runner=runner)


def test_joining_and_leaving_changes_no_other_output(model: ServedModel) -> None:
    """Greedy and seeded sequences that start at different steps generate the same text as alone."""
    assert model.runner.deterministic
    settings = [{}, {"temperature": 0.9}, {"temperature": 1.2, "top_p": 0.9}, {"presence_penalty": 1.0}, {}]
    expected = [alone(model, p, n, **s) for n, (p, s) in enumerate(zip(PROMPTS, settings, strict=True))]
    conversation = Conversation(Engine(model.runner, max_batch=4, step_tokens=7), model)
    for number, (prompt, params) in enumerate(zip(PROMPTS, settings, strict=True)):
        conversation.submit(number, prompt, **params)
        conversation.step()
        conversation.step()
    conversation.run()
    assert [conversation.text[number] for number in range(len(PROMPTS))] == expected
    assert conversation.engine.pool.num_free == model.runner.num_blocks


def test_preemption_changes_no_output(shallow: ServedModel) -> None:
    """Preempted sequences continue where they were, so each one generates the same text as alone."""
    expected = [alone(shallow, p, n, max_tokens=40, temperature=0.7) for n, p in enumerate(PROMPTS[:3])]
    conversation = Conversation(Engine(shallow.runner, max_batch=3, step_tokens=64), shallow)
    for number, prompt in enumerate(PROMPTS[:3]):
        conversation.submit(number, prompt, max_tokens=40, temperature=0.7)
    conversation.run()
    assert conversation.engine.stats().preemptions > 0
    assert [conversation.text[number] for number in range(3)] == expected
    assert conversation.engine.pool.num_free == 6


def test_random_requests_with_random_aborts_end_with_every_block_free(shallow: ServedModel) -> None:
    """Random requests and aborts lose neither a block nor a sequence."""
    rng = random.Random(7)  # noqa: S311 - a fixed sequence of events
    conversation = Conversation(Engine(shallow.runner, max_batch=3, step_tokens=16), shallow)
    engine, started, aborted = conversation.engine, 0, set()
    while started < 25 or engine.has_work:
        if started < 25 and rng.random() < 0.5:
            prompt = " ".join(rng.choices(PROMPTS, k=rng.randint(1, 3)))
            conversation.submit(started, prompt, max_tokens=rng.randint(1, 40), ignore_eos=rng.random() < 0.5)
            started += 1
        if started and rng.random() < 0.15:
            number = rng.randrange(started)
            if number not in conversation.last or conversation.last[number].finish_reason is None:
                aborted.add(number)
            engine.abort(number)
        if engine.has_work:
            conversation.step()
        held = {b for s in engine.scheduler.running for b in s.blocks}
        assert engine.pool.num_free == 6 - len(held)
    assert engine.pool.num_free == 6
    finished = {n for n, output in conversation.last.items() if output.finish_reason is not None}
    assert finished | aborted == set(range(25))
    assert not finished & aborted


def test_finish_reasons(model: ServedModel) -> None:
    """The finish reason is `length` at the limit and `stop` at a stop string or an end token that is not ignored."""
    conversation = Conversation(Engine(model.runner, max_batch=8, step_tokens=128), model)
    chat = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
    conversation.submit(0, PROMPTS[3], max_tokens=5)
    ended = conversation.submit(1, chat, max_tokens=200)
    conversation.submit(2, chat, max_tokens=60, ignore_eos=True)
    conversation.submit(3, PROMPTS[3], max_tokens=50, stop=(" 8",))
    conversation.run()
    reasons = [conversation.last[n].finish_reason for n in range(4)]
    assert reasons == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]
    assert ended.tokens[-1] in model.config.eos_token_ids
    assert conversation.last[1].num_generated == ended.num_generated < 60
    assert conversation.last[2].num_generated == 60
    assert conversation.text[3].endswith(" 7,")


def test_a_stop_string_over_token_borders(model: ServedModel) -> None:
    """A stop string may begin and end in the middle of tokens, and no part of it is ever sent."""
    full = alone(model, PROMPTS[2], max_tokens=30)
    for start, end in ((9, 14), (20, 31), (3, 5)):
        stop = full[start:end]
        conversation = Conversation(Engine(model.runner, max_batch=1, step_tokens=128), model)
        conversation.submit(0, PROMPTS[2], max_tokens=30, stop=(stop,))
        while conversation.engine.has_work:
            conversation.step()
            assert full.startswith(conversation.text[0])
        assert conversation.text[0] == full[: full.index(stop)]
        assert conversation.last[0].finish_reason is FinishReason.STOP


def test_logprobs_belong_to_the_text_they_come_with(model: ServedModel) -> None:
    """Text held back for a stop string is sent with the logprobs of its tokens, once and in order."""
    conversation = Conversation(Engine(model.runner, max_batch=2, step_tokens=128), model)
    sequence = conversation.submit(0, PROMPTS[3], logprobs=2, stop=("5, 6, 7, 8, x",))
    entries, texts = [], []
    while conversation.engine.has_work:
        for output in conversation.step():
            entries += output.logprobs
            texts.append((output.text, len(output.logprobs)))
    assert [entry.token_id for entry in entries] == sequence.tokens[sequence.num_prompt :]
    assert any(count > 1 for _, count in texts), "held back together, sent together"
    assert all(count == 0 for text, count in texts if not text)
    assert all(len(entry.top) == 2 and entry.top[0][0] == entry.token_id for entry in entries)


def test_a_sequence_that_can_never_fit_is_refused(shallow: ServedModel) -> None:
    """The engine refuses a sequence that can never fit the KV memory at once instead of queueing it."""
    conversation = Conversation(Engine(shallow.runner, max_batch=2, step_tokens=64), shallow)
    with pytest.raises(ValueError, match="does not fit"):
        conversation.submit(0, PROMPTS[0], max_tokens=96)
    assert not conversation.engine.has_work
