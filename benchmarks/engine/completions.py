"""A streamed completion as its reader sees it: when each piece of text came."""

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec

from benchmarks.harness.processes import CannotMeasure

_DEADLINE = 300.0


@dataclass(frozen=True, slots=True)
class Completion:
    """Times are monotonic, in seconds."""

    asked: float
    prompt_tokens: int
    tokens: int
    pieces: tuple[float, ...]
    """When each piece of text came. A piece is a token, or a few where the server was quicker than its stream."""

    @property
    def first(self) -> float:
        return self.pieces[0]

    @property
    def last(self) -> float:
        return self.pieces[-1]

    @property
    def gaps(self) -> list[float]:
        """Between one piece and the next."""
        return [later - earlier for earlier, later in pairwise(self.pieces)]

    def tokens_between(self, begin: float, end: float) -> float:
        """Tokens that came after `begin` and until `end`, where all pieces count for as many tokens."""
        within = sum(begin < at <= end for at in self.pieces)
        return within * self.tokens / len(self.pieces)


async def complete(session: aiohttp.ClientSession, url: str, model: str, prompt: str, tokens: int) -> Completion:
    """Streams exactly `tokens` tokens from `POST /v1/completions`, greedily. Raises CannotMeasure."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    pieces: list[float] = []
    usage: dict[str, int] = {}
    asked = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=_DEADLINE)
    async with session.post(f"{url}/v1/completions", json=body, timeout=timeout) as response:
        if response.status != 200:
            raise CannotMeasure(f"{url} answers with status {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                event = msgspec.json.decode(line[6:])
                usage = event.get("usage") or usage
                if event["choices"] and event["choices"][0]["text"]:
                    pieces.append(time.monotonic())
    if not pieces or usage.get("completion_tokens") != tokens:
        raise CannotMeasure(f"{url} was asked for {tokens} tokens and streamed {usage.get('completion_tokens')}.")
    return Completion(asked, usage["prompt_tokens"], tokens, tuple(pieces))
