"""The formats in which models write tool calls, and a grammar for each.

In most formats a call is a JSON object, ``{"name": ..., "arguments": {...}}``, between markers; Mistral's newer formats
have the name before the arguments:

    hermes    <tool_call>\\n{...}\\n</tool_call>, again for the next call     Qwen 2.5 and 3, Hermes, SmolLM3
    list      <tool_call>[{...}, {...}]</tool_call>                          SmolLM2
    mistral   [TOOL_CALLS] [{...}, {...}], with or without the space         Mistral, up to its tokenizer v7
    named     [TOOL_CALLS]name[ARGS]{...}, again for the next call           Mistral, from v11 on
    llama3    {...} with "parameters", at the start of the answer, alone     Llama 3.1 to 3.3
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from backend.chat.grammar import json_schema
from backend.chat.tools import Tool


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls. The strings are what the model writes, space for space."""

    begin: str
    """Marker before the calls; empty: a call begins with its brace, and only at the start of the answer. Where names
    are plain text, it stands before each call."""
    opening: str
    """Between the marker and the first call."""
    between: str | None
    """Between two calls; None: one call an answer."""
    closing: str
    """After the last call."""
    arguments: str = "arguments"
    """Name of the arguments' field."""
    name_end: str = ""
    """Marker between a name in plain text and the arguments; empty: a call is one JSON object."""
    id_begin: str = ""
    """Marker of an id that the model may write after such a name. It is ignored: calls get an id from `new_id`."""
    short_ids: bool = False
    """Ids of nine letters and digits, the only ones that Mistral's templates accept."""

    def new_id(self) -> str:
        """An id for a call."""
        if self.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def written(self, calls: Sequence[Mapping[str, object]]) -> str:
        """Calls with ``name`` and ``arguments`` as the model writes them; for formats whose calls are JSON objects."""
        objects = [json.dumps({"name": c["name"], self.arguments: c["arguments"]}, ensure_ascii=False) for c in calls]
        return self.begin + self.opening + (self.between or "").join(objects) + self.closing

    def marked_by(self, text: str) -> bool:
        """Whether a special token of this text is a part of the format."""
        parts = (self.begin, self.opening, self.between or "", self.closing, self.name_end, self.id_begin)
        return any(text in part for part in parts)

    def head(self) -> re.Pattern[str]:
        """Matches the start of a call up to its arguments; the group is the name, as JSON or in plain text."""
        if self.name_end:
            return re.compile(rf"([^\[]*)(?:\[CALL_ID\][^\[]*)?{re.escape(self.name_end)}")
        return re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"' + self.arguments + r'"\s*:\s*')


HERMES = ToolFormat("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
LIST = ToolFormat("<tool_call>", "[", ", ", "]</tool_call>")
_MISTRAL = ToolFormat("[TOOL_CALLS]", " [", ", ", "]", short_ids=True)
_TIGHT = ToolFormat("[TOOL_CALLS]", "[", ", ", "]", short_ids=True)
_NAMED = ToolFormat("[TOOL_CALLS]", "", "[TOOL_CALLS]", "", name_end="[ARGS]", short_ids=True)
_NAMED_WITH_ID = replace(_NAMED, id_begin="[CALL_ID]")
_LLAMA3 = ToolFormat("", "", None, "", arguments="parameters")


def detect_tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template uses; None: unknown."""
    if "<tool_call>" in template:
        return LIST if "<tool_call>[" in template else HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" in template:
        return _NAMED_WITH_ID if "[CALL_ID]" in template else _NAMED
    if "[TOOL_CALLS]" in template:
        return _TIGHT if "[TOOL_CALLS][" in template else _MISTRAL
    if "<|python_tag|>" in template or '{"name": function name, "parameters"' in template:
        return _LLAMA3
    return None


def calls_grammar(
    tool_format: ToolFormat,
    specials: Mapping[str, int],
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool,
    answer: str | None,
) -> str:
    """A Lark grammar of answers that may, or must, call ``tools``.

    Args:
        specials: ids of the model's special tokens; a marker among them is that token, not its text.
        tools: at least one.
        required: whether the answer must be calls.
        parallel: whether several calls are allowed, if the format supports them.
        answer: rule that an answer without calls follows; None: any text, which may also precede the calls.
    """
    rules = [f"call_{i}: {_call_head(tool_format, tool, specials)} args_{i}" for i, tool in enumerate(tools)]
    rules += [f"args_{i}: {json_schema(tool.schema)}" for i, tool in enumerate(tools)]
    names = " | ".join(f"call_{i}" for i in range(len(tools)))
    rules.append(f"call: {names}" if tool_format.name_end else f'call: {_quoted(_HEAD)} ({names}) "}}"')
    if tool_format.id_begin:
        rules.append("ID: /[A-Za-z0-9]{9}/")
    more = f" ({_literal(tool_format.between, specials)} call)*" if parallel and tool_format.between is not None else ""
    rules.append(
        f"calls: {_literal(tool_format.opening, specials)} call{more} {_literal(tool_format.closing, specials)}"
    )
    begin = _literal(tool_format.begin, specials)
    if required:
        start = f"{begin} calls"
    elif answer is not None:
        start = f"answer | {begin} calls"
        rules.append(f"answer: {answer}")
    elif not tool_format.begin:
        start = "text | calls"
        # Text that starts with a brace is a call, so other text must start differently.
        rules += ["text: | OTHER", r"OTHER: /[^{](.|\n)*/"]
    else:
        start = "text | lead calls"
        lead = "lead" if tool_format.begin in specials else "lead[lazy]"
        rules += ["text: TEXT", f"{lead}: TEXT {begin}", r"TEXT: /(.|\n)*/"]
    return "\n".join([f"start: {start}", *rules])


def no_calls_grammar(tool_format: ToolFormat, specials: Mapping[str, int]) -> str | None:
    """A Lark grammar of texts without calls; None: the format has no marker to forbid."""
    if not tool_format.begin:
        return None
    # A marker that is a special token cannot occur in text.
    without = "" if tool_format.begin in specials else f" & ~/(?s:.*){re.escape(tool_format.begin)}(?s:.*)/"
    return f"start: TEXT\nTEXT: /(?s:.*)/{without}"


_HEAD = '{"name": '


def _call_head(tool_format: ToolFormat, tool: Tool, specials: Mapping[str, int]) -> str:
    """A grammar for the part of a call before its arguments, without `_HEAD`."""
    if not tool_format.name_end:
        return _quoted(f'{json.dumps(tool.name)}, "{tool_format.arguments}": ')
    call_id = f"({_literal(tool_format.id_begin, specials)} ID)?" if tool_format.id_begin else ""
    return f"{_quoted(tool.name)} {call_id} {_literal(tool_format.name_end, specials)}"


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _literal(text: str, specials: Mapping[str, int]) -> str:
    """A grammar for ``text``: special tokens by their ids, the rest as strings."""
    pattern = "|".join(re.escape(marker) for marker in specials if marker in text)
    pieces = re.split(f"({pattern})", text) if pattern else [text]
    return " ".join(f"<[{specials[piece]}]>" if piece in specials else _quoted(piece) for piece in pieces if piece)
