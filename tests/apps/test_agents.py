"""Coding agents with an empty home: only the base URL, the key and the model are Keepgate's."""

from pathlib import Path

import msgspec
import pytest

from tests.apps.running import clients, run
from tests.apps.upstream import FORECAST, AppUpstream
from tests.gateway.conftest import Stage

pytestmark = pytest.mark.timeout(400)

# Nothing but its requests to the model leaves it.
QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "IS_SANDBOX": "1"}
CODEX_SETTINGS = """
model = "mock"
model_provider = "keepgate"

[model_providers.keepgate]
name = "Keepgate"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "KEY"
"""


def installed(pattern: str) -> str:
    """The path of the one program of the npm packages that matches."""
    [found] = (clients() / "npm" / "node_modules").glob(pattern)
    return str(found)


def check_tool_call(upstream: AppUpstream, tool: str) -> None:
    """The last request had the call and what the command printed."""
    call, result = upstream.received[-1].fields["messages"][-2:]
    assert call["tool_calls"][0]["function"]["name"] == tool
    assert result["role"] == "tool"
    assert "sunny" in result["content"]


async def test_claude_code_runs_a_command_and_answers(stage: Stage, upstream: AppUpstream, tmp_path: Path) -> None:
    """It asks by Messages with its two dozen tools, runs what it is told to, and hands over what that printed."""
    gateway = await stage.gateway(upstream)
    variables = {"ANTHROPIC_BASE_URL": str(gateway.gateway.url), "ANTHROPIC_AUTH_TOKEN": "sk-app", **QUIET}
    words = ["-p", "What is the weather?", "--model", "mock", "--output-format", "json"]
    command = installed("@anthropic-ai/claude-code-*/claude")
    told = await run([command, *words, "--dangerously-skip-permissions"], tmp_path, variables)
    assert msgspec.json.decode(told)["result"] == FORECAST
    check_tool_call(upstream, "Bash")


async def test_codex_runs_a_command_and_answers(stage: Stage, upstream: AppUpstream, tmp_path: Path) -> None:
    """The same by Responses, streamed."""
    gateway = await stage.gateway(upstream)
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(CODEX_SETTINGS.format(url=gateway.gateway.url))
    words = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command = installed("@openai/codex-*/vendor/*/bin/codex")
    told = await run([command, *words, "What is the weather?"], tmp_path, {"KEY": "sk-app"})
    assert told.strip() == FORECAST
    check_tool_call(upstream, "exec_command")
