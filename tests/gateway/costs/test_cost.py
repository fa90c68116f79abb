"""What a usage costs, and what the same request would have cost again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.costs.cost import (
    PromptCaching,
    cost_of,
    estimated_tokens,
    money,
    prompt_caching,
    repeat_cost_of,
    similar_cost,
)
from gateway.costs.price import Price
from gateway.costs.usage import TokenUsage

quick = settings(max_examples=200, deadline=None)
dollars = st.floats(0, 1000)
optional = st.none() | dollars
prices = st.builds(
    Price,
    input=dollars,
    output=dollars,
    cached_input=optional,
    cache_write=optional,
    cache_write_1h=optional,
    audio_input=optional,
    audio_output=optional,
    reasoning=optional,
)
providers = st.sampled_from(["openai", "anthropic", "gemini", "deepseek", ""])


@st.composite
def usages(draw: st.DrawFn) -> TokenUsage:
    prompt, completion = draw(st.integers(0, 100_000)), draw(st.integers(0, 100_000))
    read = draw(st.integers(0, prompt))
    written = draw(st.integers(0, prompt - read))
    return TokenUsage(
        prompt=prompt,
        completion=completion,
        read=read,
        written=written,
        written_1h=draw(st.integers(0, written)),
        prompt_audio=draw(st.integers(0, prompt)),
        completion_audio=draw(st.integers(0, completion)),
        reasoning=draw(st.integers(0, completion)),
    )


@given(usages(), prices, providers)
@quick
def test_a_repetition_never_costs_more(usage: TokenUsage, price: Price, provider: str) -> None:
    """0 <= what it would cost again <= what it cost, whatever the prices."""
    assert 0 <= repeat_cost_of(usage, price, prompt_caching(provider)) <= cost_of(usage, price)


@given(usages(), prices, providers, st.integers(0, 200_000))
@quick
def test_a_similar_request_never_costs_more_than_the_stored_one(
    usage: TokenUsage, price: Price, provider: str, asked: int
) -> None:
    """A semantic hit saves at most what the entry's own request would cost again."""
    repeat = repeat_cost_of(usage, price, prompt_caching(provider))
    assert 0 <= similar_cost(repeat, usage.prompt, usage.completion, asked) <= repeat


@given(usages(), providers)
@quick
def test_a_prompt_cache_reads_no_more_than_the_prompt(usage: TokenUsage, provider: str) -> None:
    """What is read again is at least what was read or written, and at most the prompt."""
    assert usage.read + usage.written <= prompt_caching(provider).read_again(usage) <= usage.prompt


@pytest.mark.parametrize(
    ("usage", "dollars"),
    [
        (TokenUsage(1000, 500), 3e-3 + 7.5e-3),
        (TokenUsage(1000, 0, read=400), 600 * 3e-6 + 400 * 0.3e-6),
        (TokenUsage(1000, 0, written=400), 600 * 3e-6 + 400 * 3.75e-6),
        (TokenUsage(1000, 0, written=400, written_1h=100), 600 * 3e-6 + 300 * 3.75e-6 + 100 * 6e-6),
        (
            TokenUsage(1000, 100, prompt_audio=200, completion_audio=50),
            800 * 3e-6 + 200 * 40e-6 + 50 * 15e-6 + 50 * 80e-6,
        ),
        (TokenUsage(0, 100, reasoning=60), 40 * 15e-6 + 60 * 5e-6),
    ],
)
def test_each_part_has_its_price(usage: TokenUsage, dollars: float) -> None:
    """Every part of a usage is billed once, at its own price."""
    price = Price(
        input=3,
        output=15,
        cached_input=0.3,
        cache_write=3.75,
        cache_write_1h=6,
        audio_input=40,
        audio_output=80,
        reasoning=5,
    )
    assert cost_of(usage, price) == pytest.approx(dollars)


def test_parts_without_a_price_cost_as_the_whole() -> None:
    """Without further prices every token of the prompt costs as input, every one of the completion as output."""
    usage = TokenUsage(1000, 100, read=10, written=20, written_1h=5, prompt_audio=7, completion_audio=8, reasoning=9)
    assert cost_of(usage, Price(input=3, output=15)) == pytest.approx(1000 * 3e-6 + 100 * 15e-6)


@pytest.mark.parametrize(("prompt", "read"), [(1023, 0), (1024, 1024), (1151, 1024), (1152, 1152), (5000, 4992)])
def test_openai_reads_steps_of_128_from_1024_on(prompt: int, read: int) -> None:
    """OpenAI's automatic prompt cache reads whole steps of prompts that are long enough."""
    assert prompt_caching("openai").read_again(TokenUsage(prompt)) == read


def test_what_was_read_is_read_again() -> None:
    """Also where it was no whole step: the first answer proves that it can be."""
    assert prompt_caching("openai").read_again(TokenUsage(1100, read=1000, written=90)) == 1090


def test_anthropic_reads_what_was_written() -> None:
    """Explicit breakpoints: what the first request wrote or read, the second reads; the rest is input again."""
    usage = TokenUsage(10_000, 100, read=2000, written=3000)
    price = Price(input=3, output=15, cached_input=0.3, cache_write=3.75)
    expected = 5000 * 0.3e-6 + 5000 * 3e-6 + 100 * 15e-6
    assert repeat_cost_of(usage, price, prompt_caching("anthropic")) == pytest.approx(expected)
    assert repeat_cost_of(TokenUsage(10_000, 100), price, prompt_caching("anthropic")) == pytest.approx(0.0315)


def test_an_unknown_provider_is_taken_to_read_the_whole_prompt() -> None:
    """The most cautious rule: the saving is never too high."""
    price = Price(input=3, output=15, cached_input=0.3)
    assert repeat_cost_of(TokenUsage(100, 0), price, prompt_caching("")) == pytest.approx(100 * 0.3e-6)
    assert PromptCaching(is_automatic=True).read_again(TokenUsage(7)) == 7


def test_a_shorter_question_saves_less() -> None:
    """The saving of a semantic hit goes down with the prompt that was asked."""
    assert similar_cost(1.0, 800, 200, 300) == pytest.approx(0.5)
    assert similar_cost(1.0, 800, 200, 5000) == 1.0
    assert estimated_tokens(4999) == 999


@pytest.mark.parametrize(
    ("dollars", "text"),
    [(0, "0"), (1e-9, "0.000000001"), (2e-8, "0.00000002"), (0.00125, "0.00125"), (1234.5, "1234.5"), (100, "100")],
)
def test_money_is_a_plain_decimal(dollars: float, text: str) -> None:
    """A header has no exponent and no useless zeros."""
    assert money(dollars) == text
