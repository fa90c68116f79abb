"""Clients against `keepgate serve` as it comes: the in-repo engine on the real model."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.apps.running import program, run_program
from tests.gateway.processes.serving import Serving, serving

MODEL = "SmolLM2-135M-Instruct"
# The gateway's start takes seconds: the tests of this module share one, and so its event loop.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

# What the model says is its own; where it must call a tool, only a client that can require the call is asked.
FREE = ["chat", "stream", "structured"]
FORCED = [*FREE, "tools"]
CASES = [
    pytest.param("openai_chat.py", "python", None, [*FORCED, "embeddings"], id="openai"),
    pytest.param("openai_responses.py", "python", None, [*FORCED, "conversation"], id="openai responses"),
    pytest.param("anthropic_sdk.py", "python", None, [*FORCED, "count_tokens"], id="anthropic"),
    pytest.param("ollama_sdk.py", "python", None, [*FREE, "generate", "embeddings", "models"], id="ollama"),
    pytest.param("langchain_models.py", "python", "openai", FREE, id="langchain-openai"),
    pytest.param("litellm_client.py", "python", "openai", FREE, id="litellm"),
    pytest.param("openai_agents.py", "python", "responses", FREE, id="openai-agents"),
    pytest.param("pydantic_agents.py", "python", "chat", [*FREE, "structured_natively"], id="pydantic-ai"),
    pytest.param("instructor_client.py", "python-openai2", None, ["structured"], id="instructor"),
    pytest.param("ai_sdk.mjs", "npm", "openai-compatible", FREE, id="ai"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with serving(tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.mark.parametrize(("file", "environment", "via", "checks"), CASES)
async def test_the_model_answers_and_repeated_calls_are_hits(
    gateway: Serving, file: str, environment: str, via: str | None, checks: list[str]
) -> None:
    """Every check brings something, a structured one what the schema allows, and the second time the same."""
    command = program(file, environment)
    key = f"sk-{file}-{via}"  # a tenant of its own, which finds nothing of the others in the cache
    arguments = {"url": gateway.url, "key": key, "model": MODEL, "via": via, "only": checks}
    first = await run_program(command, **arguments)
    assert set(first) == set(checks)
    assert all(first.values()), first
    computed = (await gateway.stats())["layers"]["exact"]["misses"]
    assert await run_program(command, **arguments) == first
    assert (await gateway.stats())["layers"]["exact"]["misses"] == computed
