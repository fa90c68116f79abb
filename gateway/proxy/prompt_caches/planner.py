"""What of a request is marked for the prompt cache of the upstream that may get it.

| kind of upstream | which | mark |
|---|---|---|
| `anthropic` | api.anthropic.com | breakpoints in bodies of Messages |
| `openai` | api.openai.com, Azure | a `prompt_cache_key` in bodies of chat completions and responses |
| `cache-control` | openrouter.ai | breakpoints in bodies of Messages and in content parts of chat completions |
| `none` | all others | |

A client that marks its prompts itself is not interfered with. A mark changes no answer, and is not part of the key.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from yarl import URL

from gateway.errors import NoUpstream
from gateway.proxy.prompt_caches.keys import CacheKeys
from gateway.proxy.prompt_caches.prefixes import PrefixStatistics
from gateway.proxy.prompt_caches.prompt import read_prompt
from gateway.routing.router import Router
from gateway.settings.cache import PromptCacheSettings
from gateway.upstreams.upstream import Attempt

MIN_TOKENS = 1024
"""Shorter prefixes are not cached."""
BREAKPOINT, KEY = "cache_control", "prompt_cache_key"
_MARKS: Mapping[tuple[str, str], str] = {
    ("anthropic", "messages"): BREAKPOINT,
    ("cache-control", "messages"): BREAKPOINT,
    ("cache-control", "chat.completions"): BREAKPOINT,
    ("openai", "chat.completions"): KEY,
    ("openai", "responses"): KEY,
}
_KNOWN = {"api.anthropic.com": "anthropic", "api.openai.com": "openai", "openrouter.ai": "cache-control"}
_AZURE = ".openai.azure.com"


class PromptCachePlanner:
    """Marks the bodies of requests, from what it has seen of earlier ones. One serves all requests of a process."""

    def __init__(
        self, settings: PromptCacheSettings, router: Router, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kinds = {name: kind for name, _, kind in (item.rpartition("=") for item in settings.kinds)}
        self._router = router
        self._statistics = PrefixStatistics(clock)
        self._keys = CacheKeys(clock)

    def marked(self, attempts: Sequence[Attempt], namespace: str, model: str) -> list[Attempt]:
        """The attempts, where it pays with a marked one before one that is not, for upstreams that refuse the mark."""
        made: list[Attempt] = []
        tried: set[str] = set()
        for attempt in attempts:
            mark = "" if attempt.family in tried else self._mark(attempt, model)
            if mark and attempt.body is not None:
                tried.add(attempt.family)
                body = self._marked_body(attempt.family, attempt.body, mark, namespace, model)
                if body is not None:
                    made.append(replace(attempt, body=body, marks=(*attempt.marks, mark)))
            made.append(attempt)
        return made

    def _mark(self, attempt: Attempt, model: str) -> str:
        """The mark that every upstream understands which may get this attempt; "" for none."""
        try:
            candidates = self._router.candidates(model)
        except NoUpstream:
            return ""
        urls = [upstream.url for upstream in candidates if attempt.needs not in upstream.lacks]
        marks = {_MARKS.get((self._kind(url), attempt.family), "") for url in urls}
        return marks.pop() if len(marks) == 1 else ""

    def _kind(self, url: str) -> str:
        base = URL(url)
        host = base.host or ""
        for name in (f"{host}:{base.port}", host):
            if name in self._kinds:
                return self._kinds[name]
        return "openai" if host.endswith(_AZURE) else _KNOWN.get(host, "none")

    def _marked_body(self, family: str, body: bytes, mark: str, namespace: str, model: str) -> bytes | None:
        prompt = read_prompt(family, model, body)
        if prompt is None or prompt.prefixes[-1].tokens < MIN_TOKENS:
            return None
        if mark == KEY:
            return None if prompt.has_key else prompt.with_key(self._keys.key(namespace, *prompt.opening))
        if prompt.has_breakpoints():
            return None
        first = next(n for n, prefix in enumerate(prompt.prefixes) if prefix.tokens >= MIN_TOKENS)
        digests = [prefix.digest for prefix in prompt.prefixes[first:]]
        ends = self._statistics.see(namespace, digests, max(0, prompt.head - first))
        marked = prompt.with_breakpoints([first + end for end in ends])
        return None if len(marked) == len(body) else marked
