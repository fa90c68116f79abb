"""The first steps leave nothing behind but a runner that has done everything once."""

from __future__ import annotations

import pytest

from backend.engine import Engine
from backend.warm_up import warm_up
from tests.backend.tiny_model import Talk, alone, fused, token_bytes


@pytest.mark.parametrize("num_blocks", [1, 3, 20])
def test_answers_are_what_they_are_without(num_blocks: int) -> None:
    """However little memory there is, and though the blocks have been written."""
    runner = fused(num_blocks)
    warm_up(runner, token_bytes())
    talk = Talk(Engine(runner, None, None))
    talk.say(0, [20, 21], 12)
    talk.run()
    assert talk.said[0].content == alone(fused(num_blocks), [20, 21], 12).content


def test_the_runner_says_how_much_suits_it() -> None:
    """Unless the one who runs the engine does."""
    runner = fused(4)
    assert Engine(runner, None, None).stats().max_batch == runner.max_batch
    assert Engine(runner, 3, None).stats().max_batch == 3
    prompt = [20 + index for index in range(60)]
    for step_tokens, computed in ((None, 60), (17, 17)):
        talk = Talk(Engine(runner, 1, step_tokens))
        talk.say(0, prompt, 1)
        talk.step()
        assert talk.engine.stats().computed_rows == computed
