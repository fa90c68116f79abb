"""The first steps leave nothing behind but a runner that has done everything once."""

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
    """Remembers the highest position that was computed."""

    highest = -1

    def run(self, step: StepInput) -> StepOutput:
        self.highest = max(self.highest, int(step.positions.max()))
        return self._runner.run(step)


@pytest.mark.parametrize("max_context", [2, 3, 4, 8, 16, 34, CONTEXT])
def test_no_position_is_computed_that_the_runner_has_no_room_for(max_context: int) -> None:
    """Its tables and buffers end there."""
    runner = Watched(FusedRunner(built_library(), CONFIG, weights(), 20, max_context, threads=1))
    warm_up(runner, token_bytes(), max_context)
    assert 0 <= runner.highest < max_context


@pytest.mark.parametrize("num_blocks", [1, 3, 20])
def test_answers_are_what_they_are_without(num_blocks: int) -> None:
    """However little memory there is, and though the blocks have been written."""
    runner = fused(num_blocks)
    warm_up(runner, token_bytes(), CONTEXT)
    client = EngineClient(Engine(runner, None, None))
    client.submit(0, [20, 21], 12)
    client.run()
    assert client.completions[0].content == alone(fused(num_blocks), [20, 21], 12).content


def test_the_runner_says_how_much_suits_it() -> None:
    """Unless the one who runs the engine does."""
    runner = fused(4)
    assert Engine(runner, None, None).stats().max_batch == runner.max_batch
    assert Engine(runner, 3, None).stats().max_batch == 3
    prompt = [20 + index for index in range(60)]
    for step_tokens, computed in ((None, 60), (17, 17)):
        client = EngineClient(Engine(runner, 1, step_tokens))
        client.submit(0, prompt, 1)
        client.step()
        assert client.engine.stats().computed_rows == computed
