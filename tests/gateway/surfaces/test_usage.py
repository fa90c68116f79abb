"""What an answer in each form of API says that it is billed for."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.costs.usage import TokenUsage
from gateway.surfaces.usage import token_usage


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        ({"usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}}, TokenUsage(7, 3)),
        ({"usage": {"prompt_tokens": 7, "total_tokens": 7}}, TokenUsage(7)),
        ({"usage": {"total_tokens": 7}}, TokenUsage(7)),
        (
            {
                "service_tier": "flex",
                "usage": {
                    "prompt_tokens": 2000,
                    "completion_tokens": 30,
                    "total_tokens": 2030,
                    "prompt_tokens_details": {"cached_tokens": 1024, "cache_write_tokens": 512, "audio_tokens": 9},
                    "completion_tokens_details": {"reasoning_tokens": 20, "audio_tokens": 4},
                },
            },
            TokenUsage(2000, 30, 1024, 512, prompt_audio=9, completion_audio=4, reasoning=20, tier="flex"),
        ),
        (
            {
                "usage": {
                    "input_tokens": 5,
                    "output_tokens": 3,
                    "cache_read_input_tokens": 100,
                    "cache_creation_input_tokens": 50,
                    "cache_creation": {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 30},
                    "service_tier": "standard",
                }
            },
            TokenUsage(155, 3, 100, 50, 30, tier="standard"),
        ),
        (
            {
                "service_tier": "default",
                "usage": {
                    "input_tokens": 50,
                    "output_tokens": 9,
                    "total_tokens": 59,
                    "input_tokens_details": {"cached_tokens": 40},
                    "output_tokens_details": {"reasoning_tokens": 6},
                },
            },
            TokenUsage(50, 9, 40, reasoning=6, tier="default"),
        ),
        ({"prompt_eval_count": 12, "eval_count": 4, "done": True}, TokenUsage(12, 4)),
        (
            {"text": "x", "meta_info": {"prompt_tokens": 12, "completion_tokens": 4, "cached_tokens": 8}},
            TokenUsage(12, 4, 8),
        ),
        (
            {
                "usage": {
                    "prompt_tokens": 12,
                    "completion_tokens": 4,
                    "prompt_cache_hit_tokens": 8,
                    "prompt_cache_miss_tokens": 4,
                }
            },
            TokenUsage(12, 4, 8),
        ),
        (
            {
                "usage": {
                    "type": "tokens",
                    "input_tokens": 14,
                    "output_tokens": 45,
                    "input_token_details": {"audio_tokens": 14},
                }
            },
            TokenUsage(14, 45, prompt_audio=14),
        ),
    ],
)
def test_each_form_says_what_it_is_billed_for(answer: dict[str, Any], usage: TokenUsage) -> None:
    """All tokens of prompt and completion, and the parts that have a price of their own."""
    assert token_usage(answer) == usage


def test_reasoning_that_is_counted_apart_is_part_of_the_completion() -> None:
    """Where the total is the sum of all three, the upstream bills them apart."""
    counts = {"prompt_tokens": 10, "completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 20}}
    assert token_usage({"usage": counts | {"total_tokens": 35}}) == TokenUsage(10, 25, reasoning=20)
    assert token_usage({"usage": counts | {"completion_tokens": 25, "total_tokens": 35}}) == TokenUsage(
        10, 25, reasoning=20
    )


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"usage": None},
        {"usage": {}},
        {"usage": {"type": "duration", "seconds": 3}},
        {"usage": {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 11}}},
    ],
)
def test_what_cannot_be_billed_has_no_usage(answer: Any) -> None:
    """An answer that says nothing, or nothing that can be, has no usage; it is not 0."""
    assert token_usage(answer) is None


scalars = st.none() | st.booleans() | st.integers(-10, 2**60) | st.floats() | st.text(max_size=3)
_NAMES = """
    usage prompt_tokens completion_tokens input_tokens output_tokens total_tokens cached_tokens meta_info service_tier
    prompt_tokens_details input_tokens_details completion_tokens_details reasoning_tokens audio_tokens eval_count
    cache_read_input_tokens cache_creation_input_tokens cache_creation ephemeral_1h_input_tokens
"""
names = st.sampled_from(_NAMES.split())
objects = st.recursive(scalars, lambda inner: st.dictionaries(names, inner, max_size=8), max_leaves=30)


@given(st.dictionaries(names, objects, max_size=6))
@settings(max_examples=300, deadline=None)
def test_parts_are_never_more_than_the_whole(answer: dict[str, Any]) -> None:
    """Whatever an upstream says, what was read and written is a part of the prompt, and no count is negative."""
    usage = token_usage(answer)
    if usage is not None:
        assert 0 <= usage.written_1h <= usage.written
        assert 0 <= usage.read + usage.written <= usage.prompt
        assert min(usage.completion, usage.prompt_audio, usage.completion_audio, usage.reasoning) >= 0
