"""Clients as their users have them: only the base URL and the key are Keepgate's."""

from typing import Any

import pytest

from tests.apps.running import program, run_program
from tests.apps.upstream import FORECAST, AppUpstream
from tests.gateway.conftest import Stage

CHATS = {"chat": "Say hello.", "stream": "Say goodbye.", "tools": FORECAST}
ALL = {**CHATS, "structured": {"capital": True}}
"""What each client finds out of AppUpstream, whatever surface it speaks."""
NATIVELY = {"structured_natively": {"capital": True}}
EMBEDDINGS = {"embeddings": 2}
CONCURRENT = {"concurrent": ["One.", "Two."]}
PROMPTS = {"generate": "Once upon a time", "generate_stream": "Then"}
LLAMA_INDEX = {**ALL, "tools": "Sunny in Paris.", "completion": "Once upon a time"}
"""It returns the tool's own result."""


def case(name: str, file: str, expected: dict[str, Any], via: str | None = None, environment: str = "") -> Any:
    """One client: its program, the environment that has it, and what the program tells."""
    return pytest.param(file, environment or ("npm" if file.endswith(".mjs") else "python"), via, expected, id=name)


CASES = [
    # Chat completions.
    case("openai", "openai_chat.py", {**ALL, **EMBEDDINGS, "models": ["mock"]}),
    case("langchain-openai", "langchain_models.py", {**ALL, **EMBEDDINGS, **CONCURRENT}, "openai"),
    case("litellm", "litellm_client.py", ALL, "openai"),
    case("openai-agents chat", "openai_agents.py", ALL, "chat"),
    case("pydantic-ai chat", "pydantic_agents.py", {**ALL, **NATIVELY}, "chat"),
    case("smolagents", "smol_agents.py", CHATS),
    case("llm", "llm_command.py", {**ALL, "structured": '{"capital": true}'}),
    case("llama-index", "llama_index_models.py", LLAMA_INDEX, environment="python-openai2"),
    case(
        "instructor",
        "instructor_client.py",
        {"structured": {"capital": True}, **NATIVELY},
        environment="python-openai2",
    ),
    case("aider", "aider_command.py", {"edit": "print('hello')\n"}, environment="python-openai2"),
    case("npm openai", "openai_chat.mjs", {**ALL, **EMBEDDINGS}),
    case("ai, openai-compatible", "ai_sdk.mjs", ALL, "openai-compatible"),
    case("ai, openai's chat", "ai_sdk.mjs", ALL, "openai-chat"),
    # Responses.
    case("openai responses", "openai_responses.py", {**ALL, "conversation": "Say goodbye."}),
    case("langchain-openai responses", "langchain_models.py", {**ALL, **CONCURRENT}, "openai-responses"),
    case("openai-agents", "openai_agents.py", ALL, "responses"),
    case("pydantic-ai responses", "pydantic_agents.py", {**ALL, **NATIVELY}, "responses"),
    case("npm openai responses", "openai_responses.mjs", ALL),
    case("ai, openai", "ai_sdk.mjs", ALL, "openai"),
    # Messages.
    case("anthropic", "anthropic_sdk.py", {**ALL, "models": ["mock"]}),
    case("langchain-anthropic", "langchain_models.py", {**ALL, **CONCURRENT}, "anthropic"),
    case("litellm anthropic", "litellm_client.py", ALL, "anthropic"),
    case("pydantic-ai anthropic", "pydantic_agents.py", ALL, "anthropic"),
    case("npm @anthropic-ai/sdk", "anthropic_sdk.mjs", CHATS),
    case("ai, anthropic", "ai_sdk.mjs", ALL, "anthropic"),
    # Ollama.
    case("ollama", "ollama_sdk.py", {**ALL, **EMBEDDINGS, **PROMPTS, "models": ["mock"]}),
    case("langchain-ollama", "langchain_models.py", {**ALL, **CONCURRENT}, "ollama"),
    case("litellm ollama", "litellm_client.py", ALL, "ollama_chat"),
    case("npm ollama", "ollama_sdk.mjs", {**ALL, **EMBEDDINGS, "models": ["mock"]}),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("file", "environment", "via", "expected"), CASES)
async def test_a_client_works_and_its_repeated_calls_are_hits(
    stage: Stage, upstream: AppUpstream, file: str, environment: str, via: str | None, expected: dict[str, Any]
) -> None:
    """Chat, stream, tools and structured output, as far as the client has them; made again, nothing is computed."""
    gateway = await stage.gateway(upstream)
    command = program(file, environment)
    arguments = {"url": str(gateway.gateway.url), "key": "sk-app", "model": "mock", "via": via, "only": list(expected)}
    assert await run_program(command, **arguments) == expected
    computed = len(upstream.received)
    assert computed > 0
    assert await run_program(command, **arguments) == expected
    assert [request.fields for request in upstream.received[computed:]] == []
