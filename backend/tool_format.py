"""How models write tool calls: the formats they were trained on, and the grammar that holds them to it.

Every format is one JSON object a call, ``{"name": ..., "arguments": {...}}``, in a frame of its own:

    hermes    <tool_call>\\n{...}\\n</tool_call>, again for the next call     Qwen 2.5 and 3, Hermes, SmolLM3
    list      <tool_call>[{...}, {...}]</tool_call>                          SmolLM2
    mistral   [TOOL_CALLS] [{...}, {...}]                                    Mistral
    llama3    {...} with "parameters", at the start of the answer, alone     Llama 3.1 to 3.3
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backend.grammar import json_schema
from backend.tools import Tool


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls. The strings are what the model writes, space for space."""

    begin: str
    """Marker before the calls; empty: a call begins with its brace, and only at the start of the answer."""
    opening: str
    """Between the marker and the first call."""
    between: str | None
    """Between two calls; None: one call an answer."""
    closing: str
    """After the last call."""
    arguments: str = "arguments"
    """Name of the arguments' field."""
    short_ids: bool = False
    """Ids of nine letters and digits, the only ones that Mistral's templates accept."""

    def new_id(self) -> str:
        """An id for a call."""
        if self.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def head(self) -> re.Pattern[str]:
        """Matches the start of a call up to its arguments; the group is the name as JSON."""
        return re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"' + self.arguments + r'"\s*:\s*')


_HERMES = ToolFormat("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
_LIST = ToolFormat("<tool_call>", "[", ", ", "]</tool_call>")
_MISTRAL = ToolFormat("[TOOL_CALLS]", " [", ", ", "]", short_ids=True)
_LLAMA3 = ToolFormat("", "", None, "", arguments="parameters")


def detect(template: str) -> ToolFormat | None:
    """The format that a chat template was written for; None if it is none of these."""
    if "<tool_call>" in template:
        return _LIST if "<tool_call>[" in template else _HERMES
    if "[TOOL_CALLS]" in template:
        return _MISTRAL
    if "<|python_tag|>" in template or '{"name": function name, "parameters"' in template:
        return _LLAMA3
    return None


def calls_grammar(
    form: ToolFormat,
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
        required: nothing but calls.
        parallel: whether several calls are allowed, if the format knows a way.
        answer: rule that an answer without calls follows; None: any text, which may also precede the calls.
    """
    rules = [f"call_{i}: {_quoted(_tail(form, tool))} args_{i}" for i, tool in enumerate(tools)]
    rules += [f"args_{i}: {json_schema(tool.schema)}" for i, tool in enumerate(tools)]
    names = " | ".join(f"call_{i}" for i in range(len(tools)))
    rules.append(f'call: {_quoted(_HEAD)} ({names}) "}}"')
    more = f" ({_literal(form.between, specials)} call)*" if parallel and form.between is not None else ""
    rules.append(f"calls: {_literal(form.opening, specials)} call{more} {_literal(form.closing, specials)}")
    begin = _literal(form.begin, specials)
    if required:
        start = f"{begin} calls"
    elif answer is not None:
        start = f"answer | {begin} calls"
        rules.append(f"answer: {answer}")
    elif not form.begin:
        start = "text | calls"
        # What opens with a brace is a call; else there would be no telling.
        rules += ["text: | OTHER", r"OTHER: /[^{](.|\n)*/"]
    else:
        start = "text | lead calls"
        lead = "lead" if form.begin in specials else "lead[lazy]"
        rules += ["text: TEXT", f"{lead}: TEXT {begin}", r"TEXT: /(.|\n)*/"]
    return "\n".join([f"start: {start}", *rules])


def no_calls_grammar(form: ToolFormat, specials: Mapping[str, int]) -> str | None:
    """A Lark grammar of texts that cannot be taken for calls; None: the format has no marker to keep out."""
    if not form.begin:
        return None
    # A marker that is a special token is no text, so any text is without it.
    without = "" if form.begin in specials else f" & ~/(?s:.*){re.escape(form.begin)}(?s:.*)/"
    return f"start: TEXT\nTEXT: /(?s:.*)/{without}"


_HEAD = '{"name": '


def _tail(form: ToolFormat, tool: Tool) -> str:
    return f'{json.dumps(tool.name)}, "{form.arguments}": '


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _literal(text: str, specials: Mapping[str, int]) -> str:
    """``text`` as grammar: markers that are special tokens by their ids, the rest as strings."""
    pattern = "|".join(re.escape(marker) for marker in specials if marker in text)
    pieces = re.split(f"({pattern})", text) if pattern else [text]
    return " ".join(f"<[{specials[piece]}]>" if piece in specials else _quoted(piece) for piece in pieces if piece)
