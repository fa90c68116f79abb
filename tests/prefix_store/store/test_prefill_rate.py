"""The cost of computing a block is learned from steps."""

from prefix_store.store.prefill_rate import PrefillRate


def test_decode_steps_give_no_prefill_rate() -> None:
    """Steps with mostly decode rows give no prefill rate."""
    rate = PrefillRate(16)
    rate.note(rows=40, prompt_rows=0, seconds=0.01)
    rate.note(rows=300, prompt_rows=100, seconds=0.01)
    assert rate.block_seconds is None


def test_decode_steps_do_not_change_the_prefill_rate() -> None:
    """Slow decode steps do not change the prefill rate that a prompt gave."""
    rate = PrefillRate(16)
    rate.note(rows=1_000, prompt_rows=1_000, seconds=0.01)
    for _ in range(100):
        rate.note(rows=40, prompt_rows=0, seconds=0.01)
    assert rate.block_seconds == 0.01 / 1_000 * 16


def test_the_prefill_rate_follows_a_slower_engine() -> None:
    """The prefill rate follows a slower engine within some steps."""
    rate = PrefillRate(16)
    rate.note(rows=128, prompt_rows=128, seconds=0.05)
    for _ in range(30):
        rate.note(rows=130, prompt_rows=128, seconds=0.1)
    assert rate.block_seconds is not None
    assert abs(rate.block_seconds - 0.1 / 130 * 16) < 0.001
