"""The warm-up steps leave nothing behind but a runner that has run every part once."""

from __future__ import annotations

import pytest

from backend.engine.engine import Engine
from backend.engine.model_runner import StepInput, StepOutput
from backend.runners.fused.runner import FusedRunner
from backend.runners.warm_up import warm_up
from tests.backend.conftest import built_library
from tests.backend.engine.test_engine_faults import Around
from tests.backend.tiny_model import CONFIG, CONTEXT, EngineClient, alone, fused, token_bytes, weights


class Watched(Around):
    """Records the highest position that was computed."""

    highest = -1

    def run(self, step: StepInput) -> StepOutput:
        self.highest = max(self.highest, int(step.positions.max()))
        return self._runner.run(step)


@pytest.mark.parametrize("max_context", [2, 3, 4, 8, 16, 34, CONTEXT])
def test_the_warm_up_stays_within_the_longest_context(max_context: int) -> None:
    """The warm-up computes no position beyond the longest context."""
    runner = Watched(FusedRunner(built_library(), CONFIG, weights(), 20, max_context, threads=1))
    warm_up(runner, token_bytes(), max_context)
    assert 0 <= runner.highest < max_context


@pytest.mark.parametrize("num_blocks", [1, 3, 20])
def test_answers_after_the_warm_up_are_the_same(num_blocks: int) -> None:
    """Answers after the warm-up are the same as without it, however few blocks there are."""
    runner = fused(num_blocks)
    warm_up(runner, token_bytes(), CONTEXT)
    client = EngineClient(Engine(runner, None, None))
    client.submit(0, [20, 21], 12)
    client.run()
    assert client.completions[0].content == alone(fused(num_blocks), [20, 21], 12).content


def test_the_runner_sets_the_default_batch_and_step() -> None:
    """The engine's default batch and step size are the runner's, unless they are given."""
    runner = fused(4)
    assert Engine(runner, None, None).stats().max_batch == runner.max_batch
    assert Engine(runner, 3, None).stats().max_batch == 3
    prompt = [20 + index for index in range(60)]
    for step_tokens, computed in ((None, 60), (17, 17)):
        client = EngineClient(Engine(runner, 1, step_tokens))
        client.submit(0, prompt, 1)
        client.step()
        assert client.engine.stats().computed_rows == computed
