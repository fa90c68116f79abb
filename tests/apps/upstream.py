"""The scripted upstream of these tests, which calls tools and fills in schemas."""

from typing import Any

import msgspec
from aiohttp import web

from gateway.upstreams.mock import MockUpstream, Reply

FORECAST = "It is sunny."
COMMAND = "echo sunny"
VALUES = {
    "city": "Paris",
    "capital": True,
    "command": COMMAND,
    "cmd": COMMAND,
    "answer": FORECAST,
    "description": "Look",
}
"""The value of each parameter that a tool may have."""
FILE = "hello.py\n```\nprint('hello')\n```\n"


class AppUpstream(MockUpstream):
    """Answers with the last user message, but for what the programs ask of tools, schemas and files.

    A question for the weather, or a choice that requires it, is answered with a call; the tool's result with FORECAST.
    """

    async def _reply(self, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        self.replies = [_scripted(fields)]
        return await super()._reply(request, fields)


def _scripted(fields: dict[str, Any]) -> Reply:
    messages: list[dict[str, Any]] = fields.get("messages") or []
    asked = next((str(message.get("content")) for message in reversed(messages) if message["role"] == "user"), "")
    if messages and messages[-1]["role"] == "tool":
        return Reply(text=FORECAST)
    tools = {tool["function"]["name"]: tool["function"] for tool in fields.get("tools") or ()}
    if tools and (name := _wanted(list(tools), fields.get("tool_choice"), asked)):
        return Reply(message={"content": None, "tool_calls": [_call(tools[name])]}, finish_reason="tool_calls")
    if "Which city" in asked:
        return Reply(text='{"capital": true}')
    if "hello.py" in asked:
        return Reply(text=FILE)
    return Reply()


def _wanted(names: list[str], choice: Any, asked: str) -> str | None:
    """The tool to call, if any: the one that is chosen, smolagents' way to end, Claude Code's shell, or the first."""
    if isinstance(choice, dict):
        return str(choice["function"]["name"])
    if "Sunny in" in asked:
        return "final_answer" if "final_answer" in names else None
    if choice == "required" or (choice != "none" and ("weather" in asked or "Which city" in asked)):
        return "Bash" if "Bash" in names else names[0]
    return None


def _call(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = tool["parameters"].get("properties", {})
    arguments = {name: VALUES[name] for name in parameters if name in VALUES}
    function = {"name": tool["name"], "arguments": msgspec.json.encode(arguments).decode()}
    return {"id": f"call_{tool['name']}", "type": "function", "function": function}
