"""The grammar of a chat's answers, from its ``response_format``, ``tools`` and ``tool_choice``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from backend.chat.grammar import GrammarCompiler, GrammarError, json_schema
from backend.chat.response_format import response_rule, schema_field
from backend.chat.structured_outputs import structured_grammar
from backend.chat.tokenizer import ModelTokenizer
from backend.chat.tool_format import ToolFormat, calls_grammar, no_calls_grammar
from backend.chat.tools import Tool, ToolChoice
from backend.errors import InvalidRequest
from backend.protocol import ChatRequest, CommonFields


@dataclass(frozen=True)
class OutputConstraint:
    """A grammar for the answers, and the format of tool calls in them."""

    grammar: str
    fields: tuple[str, ...]
    """Fields of the request that the grammar comes from, for error messages."""
    tool_format: ToolFormat | None = None
    """None: no tool calls."""
    visible_tokens: frozenset[int] = frozenset()
    """Special tokens that mark calls, which the text of an answer must show."""
    from_the_start: bool = True
    """Whether the grammar leaves no room for other text before what it describes."""


class OutputConstraintReader:
    """Makes output constraints for one model.

    Args:
        has_end: whether the model has an end-of-sequence token.
    """

    def __init__(self, model_name: str, tokenizer: ModelTokenizer, grammars: GrammarCompiler, has_end: bool) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._has_end = has_end

    def read(self, request: ChatRequest, tool_choice: ToolChoice | None) -> OutputConstraint | None:
        """The constraint of a chat's answers, its grammar compiled; None: any text.

        Raises:
            InvalidRequest: a schema is wrong or not supported, or the model cannot do what is asked for.
        """
        rule = response_rule(request.response_format)
        if structured := self.read_structured(request):
            if rule is not None or (tool_choice is not None and tool_choice.required):
                other = "tool_choice" if rule is None else "response_format"
                raise InvalidRequest(f"{structured.fields[0]}: not together with {other}", structured.fields[0])
            return structured
        if rule is None and tool_choice is None:
            return self._without_calls(request)
        field = "response_format" if tool_choice is None else "tools"
        self._check_may_end(request, field)
        if rule is not None:
            self._compile(f"start: {rule}", schema_field(request.response_format))
        if tool_choice is None:
            return OutputConstraint(f"start: {rule}", (field,))
        tool_format = self.tool_format()
        specials = self._tokenizer.token_bytes.special_ids
        parallel = request.parallel_tool_calls is not False and not tool_choice.named
        make_grammar = partial(
            calls_grammar, tool_format, specials, required=tool_choice.required, parallel=parallel, answer=rule
        )
        try:
            self._grammars.constraint(grammar := make_grammar(tool_choice.tools))
        except GrammarError:
            self._compile(
                grammar := make_grammar([self._with_supported_schema(tool) for tool in tool_choice.tools]), "tools"
            )
        markers = frozenset(token_id for text, token_id in specials.items() if tool_format.marked_by(text))
        fields = (field,) if rule is None else (field, "response_format")
        return OutputConstraint(grammar, fields, tool_format, markers, tool_choice.required or rule is not None)

    def read_structured(self, request: CommonFields) -> OutputConstraint | None:
        """The constraint that vLLM's fields for structured outputs name; None: none of them is there.

        Raises:
            InvalidRequest: one is wrong or not supported.
        """
        found = structured_grammar(request)
        if found is None:
            return None
        grammar, field = found
        self._check_may_end(request, field)
        self._compile(grammar, field)
        return OutputConstraint(grammar, (field,))

    def _check_may_end(self, request: CommonFields, field: str) -> None:
        if request.ignore_eos:
            raise InvalidRequest(f"ignore_eos: not supported with {field}, whose grammar ends the answer", "ignore_eos")
        if not self._has_end:
            raise InvalidRequest(f"{field}: this model has no end-of-sequence token", field)

    def _without_calls(self, request: ChatRequest) -> OutputConstraint | None:
        """With tools that may not be called, forbids text that looks like a call, which models write out of habit."""
        template = self._tokenizer.chat_template
        if not request.tools or template is None or request.ignore_eos:
            return None
        grammar = no_calls_grammar(template.tool_format, self._tokenizer.token_bytes.special_ids)
        if grammar is None or not self._has_end:
            return None
        return OutputConstraint(grammar, ("tools",), from_the_start=False)

    def tool_format(self) -> ToolFormat:
        """The format in which the model writes tool calls.

        Raises:
            InvalidRequest: it has no chat template.
        """
        template = self._tokenizer.chat_template
        if template is None:
            raise InvalidRequest(f"tools: the model '{self._model_name}' has no chat template", "tools")
        return template.tool_format

    def _with_supported_schema(self, tool: Tool) -> Tool:
        """The tool; with any arguments if its schema is not supported and the tool is not strict."""
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
