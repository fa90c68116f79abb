"""Tools for models whose chat template has no place for them, or writes calls in an unknown format.

The system prompt then lists the tools and says how a call is written, earlier calls become text of the assistant, and
results of tools become messages of the user. Grammars and parser are those of the other formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.chat.tool_format import HERMES, LIST, ToolFormat

Message = dict[str, Any]

# The system prompt that the authors of SmolLM2 trained it with (model card of SmolLM2-1.7B-Instruct).
_SMOLLM2 = """\
You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tools}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. \
If no function call is needed, please make the tool calls an empty list '[]'.
<tool_call>[
{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}},
... (more tool calls as required)
]</tool_call>"""
_JSON = """\
You can call these functions, each described by a JSON schema of its parameters:
<tools>
{tools}
</tools>
To call one, write nothing but its name and its arguments as JSON, in this form:
<tool_call>
{{"name": "the name of the function", "arguments": {{"a parameter": "its value"}}}}
</tool_call>
The result comes back in a <tool_response>. When no function is needed, answer in plain text."""


@dataclass(frozen=True)
class GenericTools:
    """One way to describe tools in a system prompt."""

    tool_format: ToolFormat
    _instructions: str

    @classmethod
    def of_template(cls, source: str) -> GenericTools:
        """The way that suits a model, recognised by its chat template."""
        return cls(LIST, _SMOLLM2) if "named SmolLM" in source else cls(HERMES, _JSON)

    def applied(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
        """The conversation with its tools, calls and results as plain text, for any chat template.

        Args:
            messages: as `backend.chat.messages` makes them.
            tools: functions in OpenAI's form; None: only earlier calls and results are rewritten.
        """
        plain: list[Message] = []
        for message in messages:
            rewritten = self._rewritten(message)
            is_result = message["role"] == "tool"
            if is_result and plain and plain[-1].get("_results"):
                plain[-1]["content"] += "\n" + rewritten["content"]  # many templates want the roles to alternate
            else:
                plain.append({**rewritten, "_results": True} if is_result else rewritten)
        for message in plain:
            message.pop("_results", None)
        if not tools:
            return plain
        listed = [json.dumps(tool, ensure_ascii=False) for tool in tools]
        as_list = f"[{', '.join(listed)}]" if self.tool_format is LIST else "\n".join(listed)
        prompt = self._instructions.format(tools=as_list)
        if plain and plain[0]["role"] == "system":
            return [{**plain[0], "content": f"{plain[0]['content']}\n\n{prompt}"}, *plain[1:]]
        return [{"role": "system", "content": prompt}, *plain]

    def _rewritten(self, message: Message) -> Message:
        if message["role"] == "tool":
            return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        calls = message.get("tool_calls")
        kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
        if calls:
            written = self.tool_format.written([call["function"] for call in calls])
            kept["content"] = f"{message['content']}\n{written}" if message["content"] else written
        return kept
