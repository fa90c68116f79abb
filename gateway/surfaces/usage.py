"""What an answer's usage says of what is billed and of the upstream's own prompt cache, in each form of API.

| who | read | written |
|---|---|---|
| OpenAI, Gemini, vLLM, SGLang | `prompt_tokens_details.cached_tokens` | `prompt_tokens_details.cache_write_tokens` |
| Responses | `input_tokens_details.cached_tokens` | `input_tokens_details.cache_write_tokens` |
| Messages, and proxies to it | `cache_read_input_tokens` | `cache_creation_input_tokens` |
| DeepSeek | `prompt_cache_hit_tokens` | |
| Moonshot | `cached_tokens` | |
"""

from typing import Any, NamedTuple

from gateway.costs.usage import TokenUsage

_DETAILS = ("prompt_tokens_details", "input_tokens_details")
_READ = ("cache_read_input_tokens", "prompt_cache_hit_tokens", "cached_tokens")
_WRITTEN = ("cache_creation_input_tokens",)
_MAX_TOKENS = 2**53
_EXCLUSIVE = {"cache_read_input_tokens", "cache_creation_input_tokens"}
_USAGE_ELSEWHERE = ("meta_info",)
_TOTALS = (
    ("prompt_tokens", "completion_tokens"),
    ("input_tokens", "output_tokens"),
    ("prompt_eval_count", "eval_count"),
    ("total_tokens", ""),
)
"""Names of the tokens of the prompt and of the completion, by form of API."""


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


def token_usage(answer: Any) -> TokenUsage | None:
    """What an answer in any form says that it is billed for; None if it says nothing, or nothing that can be."""
    if not isinstance(answer, dict):
        return None
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        usage = next((answer[name] for name in _USAGE_ELSEWHERE if isinstance(answer.get(name), dict)), answer)
    names = next((pair for pair in _TOTALS if any(name in usage for name in pair)), None)
    if names is None:
        return None
    prompt, completion = (_first([usage], (name,)) for name in names)
    read, written = prompt_cache_tokens(usage) or (0, 0)
    if names[0] == "input_tokens" and not _EXCLUSIVE.isdisjoint(usage):
        prompt += read + written  # Messages counts apart what its prompt cache reads and writes
    of_prompt = _inner(usage, "prompt_tokens_details", "input_tokens_details", "input_token_details")
    of_completion = _inner(usage, "completion_tokens_details", "output_tokens_details")
    reasoning = _first(of_completion, ("reasoning_tokens",))
    if reasoning and _first([usage], ("total_tokens",)) == prompt + completion + reasoning:
        completion += reasoning  # some upstreams count it apart, and bill it
    if read + written > prompt:
        return None
    return TokenUsage(
        prompt=prompt,
        completion=completion,
        read=read,
        written=written,
        written_1h=min(written, _first(_inner(usage, "cache_creation"), ("ephemeral_1h_input_tokens",))),
        prompt_audio=_first(of_prompt, ("audio_tokens",)),
        completion_audio=_first(of_completion, ("audio_tokens",)),
        reasoning=reasoning,
        tier=next((tier for holder in (answer, usage) if isinstance(tier := holder.get("service_tier"), str)), ""),
    )


def _inner(usage: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    return [usage[name] for name in names if isinstance(usage.get(name), dict)]


def _first(groups: list[dict[str, Any]], names: tuple[str, ...]) -> int:
    found = _counts(groups, names) if groups else None
    return found[0] if found else 0


def _counts(groups: list[dict[str, Any]], names: tuple[str, ...]) -> list[int]:
    return [
        value
        for group in groups
        for name in names
        if type(value := group.get(name)) is int and 0 <= value <= _MAX_TOKENS
    ]
