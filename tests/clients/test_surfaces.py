"""Each surface by its official client: the programs of `make test-clients` that need no client but those of .venv."""

import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.apps.running import PROGRAMS, run_program
from tests.apps.upstream import FORECAST, AppUpstream
from tests.clients.node import install, npm_cache, program
from tests.gateway.conftest import Stage

ALL = {"chat": "Say hello.", "stream": "Say goodbye.", "tools": FORECAST, "structured": {"capital": True}}
PROMPTS = {"generate": "Once upon a time", "generate_stream": "Then"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("openai_chat.py", {**ALL, "embeddings": 2, "models": ["mock"]}),
    ("openai_responses.py", {**ALL, "conversation": "Say goodbye."}),
    ("anthropic_sdk.py", {**ALL, "models": ["mock"]}),
    ("ollama_sdk.py", {**ALL, **PROMPTS, "embeddings": 2, "models": ["mock"]}),
    ("openai_chat.mjs", {**ALL, "embeddings": 2}),
    ("openai_responses.mjs", ALL),
]


@pytest.fixture
async def upstream() -> AsyncIterator[AppUpstream]:
    scripted = AppUpstream()
    async with scripted.serving():
        yield scripted


@pytest.mark.parametrize(("file", "expected"), CASES, ids=[file for file, _ in CASES])
async def test_a_surface_works_and_repeated_calls_are_hits(
    stage: Stage, upstream: AppUpstream, file: str, expected: dict[str, Any]
) -> None:
    """Chat, stream, tools and structured output through the client's own types; made again, nothing is computed."""
    gateway = await stage.gateway(upstream)
    path = str(PROGRAMS / file)
    command = [program("node"), path, str(install(npm_cache()))] if file.endswith(".mjs") else [sys.executable, path]
    arguments = {"url": gateway.gateway.url, "key": "sk-app", "model": "mock", "only": list(expected)}
    assert await run_program(command, **arguments) == expected
    computed = len(upstream.received)
    assert computed > 0
    assert await run_program(command, **arguments) == expected
    assert [request.fields for request in upstream.received[computed:]] == []
