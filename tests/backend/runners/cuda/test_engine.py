"""The engine with the CUDA runner passes tokens from step to step on the device."""

from __future__ import annotations

import json

import torch

from backend.engine.engine import Engine
from backend.engine.model_runner import ModelRunner, StepInput, StepOutput
from backend.engine.sequence import SamplingParams, Sequence
from backend.runners.cuda.runner import CudaRunner
from backend.runners.torch.runner import TorchRunner
from backend.text.detokenizer import Detokenizer, TokenBytes
from tests.backend.runners.cuda.random_model import CONFIG, random_weights

NO_TEXT = json.dumps({"model": {"vocab": {}}, "decoder": {"type": "ByteLevel"}, "added_tokens": []})
ASKS = [([5, 6, 7], 5), (list(range(20, 38)), 3), ([90], 4)]
"""Prompts, and lengths of their answers; one crosses a block's border."""


class Watched(CudaRunner):
    """Notes of each step whether the host knew its tokens."""

    ahead: list[bool]

    def run(self, step: StepInput) -> StepOutput:
        self.ahead.append(step.device_tokens is not None)
        return super().run(step)


def answers(runner: ModelRunner) -> list[list[int]]:
    """Greedy tokens of every ask, all of them in one batch."""
    engine = Engine(runner, 3, 64)
    table = TokenBytes(NO_TEXT, CONFIG.vocab_size)
    sequences = []
    for index, (prompt, length) in enumerate(ASKS):
        params = SamplingParams(max_tokens=length, temperature=0.0)
        sequences.append(Sequence(index, prompt, params, Detokenizer(table), index))
        engine.add(sequences[-1])
    while engine.has_work:
        engine.step()
        assert engine.problems() == []
    assert engine.pool.num_free == runner.num_blocks
    return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]


def test_answers_match_the_reference() -> None:
    """Answers match the reference runner's, and all steps but the first are launched before their tokens are known."""
    weights = random_weights(CONFIG)
    runner = Watched(CONFIG, weights, 6, 64, 4, torch.float32, "cpu")
    runner.ahead = []
    got = answers(runner)
    assert got == answers(TorchRunner(CONFIG, weights, 6, 64))
    assert [len(tokens) for tokens in got] == [5, 3, 4]
    assert runner.ahead == [False, True, True, True, True]
