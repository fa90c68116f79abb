"""What an answer's usage says of the upstream's own prompt cache, in every form in which upstreams say it.

| who | read | written |
|---|---|---|
| OpenAI, Gemini, vLLM, SGLang | `prompt_tokens_details.cached_tokens` | `prompt_tokens_details.cache_write_tokens` |
| Responses | `input_tokens_details.cached_tokens` | `input_tokens_details.cache_write_tokens` |
| Messages, and proxies to it | `cache_read_input_tokens` | `cache_creation_input_tokens` |
| DeepSeek | `prompt_cache_hit_tokens` | |
| Moonshot | `cached_tokens` | |
"""

from typing import Any, NamedTuple

_DETAILS = ("prompt_tokens_details", "input_tokens_details")
_READ = ("cache_read_input_tokens", "prompt_cache_hit_tokens", "cached_tokens")
_WRITTEN = ("cache_creation_input_tokens",)
_MAX_TOKENS = 2**53


class PromptCacheTokens(NamedTuple):
    """Tokens of a prompt that the upstream read from its prompt cache, and that it wrote there."""

    read: int
    written: int


def prompt_cache_tokens(usage: Any) -> PromptCacheTokens | None:
    """What a usage object of any form says; None if it says nothing that can be.

    Where it says the same under several names, the first that is not 0 counts.
    """
    if not isinstance(usage, dict):
        return None
    details = [usage[name] for name in _DETAILS if isinstance(usage.get(name), dict)]
    read = _counts(details, ("cached_tokens",)) + _counts([usage], _READ)
    written = _counts(details, ("cache_write_tokens",)) + _counts([usage], _WRITTEN)
    if not read and not written:
        return None
    return PromptCacheTokens(next(filter(None, read), 0), next(filter(None, written), 0))


def _counts(groups: list[dict[str, Any]], names: tuple[str, ...]) -> list[int]:
    values = [group.get(name) for group in groups for name in names]
    return [value for value in values if type(value) is int and 0 <= value <= _MAX_TOKENS]
