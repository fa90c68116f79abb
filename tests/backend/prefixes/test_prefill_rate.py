"""What computing a block costs, as it is learned from steps."""

from backend.engine.model_runner import BLOCK_SIZE
from backend.prefixes.prefill_rate import PrefillRate


def test_nothing_is_known_before_a_prompt() -> None:
    """Steps of answers say nothing about it, however many there are in one."""
    rate = PrefillRate()
    rate.note(rows=40, prompt_rows=0, seconds=0.01)
    rate.note(rows=300, prompt_rows=100, seconds=0.01)
    assert rate.block_seconds is None


def test_answers_do_not_make_prompts_look_slow() -> None:
    """Forty answers that take 10 ms a step are not forty tokens of a prompt."""
    rate = PrefillRate()
    rate.note(rows=1_000, prompt_rows=1_000, seconds=0.01)
    for _ in range(100):
        rate.note(rows=40, prompt_rows=0, seconds=0.01)
    assert rate.block_seconds == 0.01 / 1_000 * BLOCK_SIZE


def test_it_follows_what_the_engine_does_now() -> None:
    """A core that is taken away shows within some steps."""
    rate = PrefillRate()
    rate.note(rows=128, prompt_rows=128, seconds=0.05)
    for _ in range(30):
        rate.note(rows=130, prompt_rows=128, seconds=0.1)
    assert rate.block_seconds is not None
    assert abs(rate.block_seconds - 0.1 / 130 * BLOCK_SIZE) < 0.001
