"""What a usage costs at a price, and what the same request would cost again."""

from typing import NamedTuple

from gateway.costs.price import Price
from gateway.costs.usage import TokenUsage

_MILLION = 1e6


class PromptCaching(NamedTuple):
    """How a provider's prompt cache reads a prompt that comes again.

    An automatic one reads prompts of at least `smallest` tokens, in whole steps. Every one reads what it has read or
    written before.
    """

    is_automatic: bool
    smallest: int = 0
    step: int = 1

    def read_again(self, usage: TokenUsage) -> int:
        """The most prompt tokens that it would read if the same request came again at once."""
        known = usage.read + usage.written
        if not self.is_automatic or usage.prompt < self.smallest:
            return known
        return max(known, usage.prompt - usage.prompt % self.step)


_ANY = PromptCaching(is_automatic=True)
_BY_PROVIDER = {
    # developers.openai.com/api/docs/guides/prompt-caching: from 1,024 tokens, in steps of 128.
    "openai": PromptCaching(is_automatic=True, smallest=1024, step=128),
    # platform.claude.com/docs/en/build-with-claude/prompt-caching: what lies before a breakpoint, and nothing else.
    "anthropic": PromptCaching(is_automatic=False),
    # ai.google.dev/gemini-api/docs/caching: implicit; the smallest prompt of any model is 1,024 tokens.
    "gemini": PromptCaching(is_automatic=True, smallest=1024),
}
"""Of DeepSeek (api-docs.deepseek.com/guides/kv_cache), Groq (console.groq.com/docs/prompt-caching) and all others the
whole prompt is taken to be read: they name no smallest size, or one that differs by model."""


def prompt_caching(provider: str) -> PromptCaching:
    """The rule of a provider; of an unknown one that it reads the whole prompt, wherever that has a price."""
    return _BY_PROVIDER.get(provider, _ANY)


def cost_of(usage: TokenUsage, price: Price) -> float:
    """US dollars for the request; `price` is the one that holds for it (`Price.at`)."""
    return _bill(usage, price, usage.read, usage.written, usage.written_1h)


def repeat_cost_of(usage: TokenUsage, price: Price, caching: PromptCaching) -> float:
    """The least that the same request would have cost again: never more than `cost_of`.

    What the upstream's prompt cache would have read costs as read, and nothing would have been written.
    """
    return min(cost_of(usage, price), _bill(usage, price, caching.read_again(usage), 0, 0))


def similar_cost(repeat_cost: float, prompt: int, completion: int, asked: int) -> float:
    """What an answer of `completion` tokens to another prompt, of `asked` tokens, would have cost: never more than
    `repeat_cost`, that of the answer's own prompt.

    It is scaled by tokens. An answer's token costs at least as much as a prompt's, so that is never too much.
    """
    return repeat_cost * min(1.0, (asked + completion) / max(1, prompt + completion))


def estimated_tokens(text_bytes: int) -> int:
    """A low estimate of the tokens of a text in UTF-8: English has four to five bytes in a token, others fewer."""
    return text_bytes // 5


def money(dollars: float) -> str:
    """A plain decimal without exponent, to the nano-dollar: "0.00125"."""
    return f"{dollars:.9f}".rstrip("0").rstrip(".")


def _bill(usage: TokenUsage, price: Price, read: int, written: int, written_1h: int) -> float:
    computed = usage.prompt - read - written
    audio = min(usage.prompt_audio, computed)
    spoken = min(usage.completion_audio, usage.completion)
    reasoned = min(usage.reasoning, usage.completion - spoken)
    dollars = (
        (computed - audio) * price.input
        + audio * _or(price.audio_input, price.input)
        + read * _or(price.cached_input, price.input)
        + (written - written_1h) * _or(price.cache_write, price.input)
        + written_1h * _or(price.cache_write_1h, _or(price.cache_write, price.input))
        + (usage.completion - spoken - reasoned) * price.output
        + spoken * _or(price.audio_output, price.output)
        + reasoned * _or(price.reasoning, price.output)
    )
    return dollars / _MILLION


def _or(price: float | None, otherwise: float) -> float:
    return otherwise if price is None else price
