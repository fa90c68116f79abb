"""Claude Code, which speaks Messages, with an empty home: only the base URL and the token are Keepgate's."""

from pathlib import Path

import msgspec
import pytest

from tests.apps.running import clients, run
from tests.apps.upstream import FORECAST, AppUpstream
from tests.gateway.conftest import Stage

# Nothing but its requests to the model leaves it.
QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "IS_SANDBOX": "1"}


@pytest.mark.timeout(400)
async def test_an_agent_calls_its_tool_and_answers(stage: Stage, upstream: AppUpstream, tmp_path: Path) -> None:
    """It asks with its two dozen tools, runs the command that it is told to, and hands over what that printed."""
    gateway = await stage.gateway(upstream)
    [command] = (clients() / "npm" / "node_modules" / "@anthropic-ai").glob("claude-code-*/claude")
    variables = {"ANTHROPIC_BASE_URL": str(gateway.gateway.url), "ANTHROPIC_AUTH_TOKEN": "sk-app", **QUIET}
    words = ["-p", "What is the weather?", "--model", "mock", "--output-format", "json"]
    told = await run([str(command), *words, "--dangerously-skip-permissions"], tmp_path, variables)
    assert msgspec.json.decode(told)["result"] == FORECAST
    messages = upstream.received[-1].fields["messages"]
    assert [message["role"] for message in messages[-2:]] == ["assistant", "tool"]
    assert messages[-2]["tool_calls"][0]["function"]["name"] == "Bash"
    assert messages[-1]["content"] == "sunny"
