"""What the answers to one request have to look like, from its ``response_format``, ``tools`` and ``tool_choice``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from backend.chat.grammar import GrammarCompiler, GrammarError, json_schema
from backend.chat.response_format import response_rule, schema_field
from backend.chat.tokenizer import ModelTokenizer
from backend.chat.tool_format import ToolFormat, calls_grammar, no_calls_grammar
from backend.chat.tools import Tool, ToolChoice
from backend.errors import InvalidRequest
from backend.protocol import ChatRequest


@dataclass(frozen=True)
class OutputConstraint:
    """A grammar for the answers, and how calls are found in them."""

    grammar: str
    fields: tuple[str, ...]
    """Those of the request that it was made of; its faults are theirs."""
    tool_format: ToolFormat | None = None
    """None: there are no calls."""
    visible: frozenset[int] = frozenset()
    """Special tokens that mark calls."""


class OutputConstraintReader:
    """Reads forms for one model.

    Args:
        has_end: whether one of its tokens ends an answer.
    """

    def __init__(self, model_name: str, tokenizer: ModelTokenizer, grammars: GrammarCompiler, has_end: bool) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._has_end = has_end

    def read(self, request: ChatRequest, choice: ToolChoice | None) -> OutputConstraint | None:
        """The form of a chat's answers, compiled; None: any text.

        Raises:
            InvalidRequest: a schema is wrong or not supported, or the model cannot do what is asked for.
        """
        rule = response_rule(request.response_format)
        if rule is None and choice is None:
            return self._without_calls(request)
        field = "response_format" if choice is None else "tools"
        if request.ignore_eos:
            raise InvalidRequest(f"ignore_eos: an answer with {field} ends where its form ends", "ignore_eos")
        if not self._has_end:
            raise InvalidRequest(f"{field}: this model has no token that ends an answer", field)
        if rule is not None:
            self._compile(f"start: {rule}", schema_field(request.response_format))
        if choice is None:
            return OutputConstraint(f"start: {rule}", (field,))
        form = self.check_template()
        specials = self._tokenizer.token_bytes.special_ids
        parallel = request.parallel_tool_calls is not False
        write = partial(calls_grammar, form, specials, required=choice.required, parallel=parallel, answer=rule)
        try:
            self._grammars.constraint(grammar := write(choice.tools))
        except GrammarError:
            self._compile(grammar := write([self._supported(tool) for tool in choice.tools]), "tools")
        marks = (token_id for text, token_id in specials.items() if form.marked_by(text))
        fields = (field,) if rule is None else (field, "response_format")
        return OutputConstraint(grammar, fields, form, frozenset(marks))

    def _without_calls(self, request: ChatRequest) -> OutputConstraint | None:
        """Where there are tools that may not be called, the habit of calling them is not to show up as text."""
        template = self._tokenizer.chat_template
        if not request.tools or template is None or template.tool_format is None or request.ignore_eos:
            return None
        grammar = no_calls_grammar(template.tool_format, self._tokenizer.token_bytes.special_ids)
        if grammar is None or not self._has_end:
            return None
        return OutputConstraint(grammar, ("tools",))

    def check_template(self) -> ToolFormat:
        """How the model writes calls.

        Raises:
            InvalidRequest: its chat template has no place for tools, or writes calls in an unknown way.
        """
        template = self._tokenizer.chat_template
        if template is None or not template.takes_tools:
            raise InvalidRequest(
                f"tools: the chat template of '{self._model_name}' has no place for tools; expected an empty list",
                "tools",
            )
        if template.tool_format is None:
            raise InvalidRequest(
                f"tools: '{self._model_name}' writes tool calls in a format that is not known here; "
                "expected an empty list",
                "tools",
            )
        return template.tool_format

    def _supported(self, tool: Tool) -> Tool:
        """The tool; with arguments of any kind, if its schema is not supported and it need not be strict."""
        try:
            self._grammars.constraint(f"start: {json_schema(tool.schema)}")
        except GrammarError as error:
            if tool.strict:
                raise InvalidRequest(f"{tool.field}: {error}", tool.field) from error
            return dataclasses.replace(tool, schema={"type": "object"})
        return tool

    def _compile(self, grammar: str, field: str) -> None:
        try:
            self._grammars.constraint(grammar)
        except GrammarError as error:
            raise InvalidRequest(f"{field}: {error}", field) from error
