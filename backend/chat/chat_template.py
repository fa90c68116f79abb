"""Renders a conversation into a prompt with the model's Jinja chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from backend.chat.generic_tools import GenericTools
from backend.chat.reasoning import detect_reasoning_format
from backend.chat.tool_format import ToolFormat, detect_tool_format
from backend.errors import InvalidRequest, ModelError
from backend.models.json_file import read_json_object


class ChatTemplate:
    """A compiled template, run in Jinja's sandbox with the settings and helpers that model authors write for.

    Args:
        tool_source: the template for requests with tools, if the model has one apart.
        replaces: whether it replaces the model's own template.

    Raises:
        ModelError: the template does not compile.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None, replaces: bool = False
    ) -> None:
        from jinja2 import TemplateSyntaxError, ext, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(tool_source or source)
            names = meta.find_undeclared_variables(environment.parse(tool_source or source))
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.replaces = replaces
        self.source = source if tool_source is None else source + tool_source
        self.variables = frozenset(names)
        """Names that the template reads."""
        own_format = detect_tool_format(tool_source or source) if "tools" in names else None
        generic = GenericTools.of_template(self.source)
        self.generic_tools = generic if own_format is None else None
        """How tools are described if the template does not do it, or in a format that is unknown here."""
        self.tool_format: ToolFormat = own_format or generic.tool_format
        """The format of tool calls."""
        self.reasoning_format = detect_reasoning_format(self.source)
        """How the model marks its thoughts; None: it does not."""
        self.takes_system = self._takes_system()
        """Whether a conversation may begin with a system message."""

    @classmethod
    def load(cls, directory: Path, replacement: str | None = None) -> ChatTemplate | None:
        """The template of a model directory: ``chat_template.jinja`` or a field of ``tokenizer_config.json``.

        Args:
            replacement: source to use instead, with the special tokens of the directory.

        Raises:
            ModelError: a file cannot be read, or the template does not compile; names the file.
        """
        path = directory / "tokenizer_config.json"
        config = read_json_object(path) if path.is_file() else {}
        special = {
            name: _special_token(value, f"{path}: {name}")
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        file = directory / "chat_template.jinja"
        source, tool_source = _templates(config.get("chat_template"), f"{path}: chat_template")
        if replacement is not None:
            return cls(replacement, special, replaces=True)
        if file.is_file():
            path, source, tool_source = file, _read_text(file), None
        try:
            return None if source is None else cls(source, special, tool_source)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Prompt text up to where the assistant's answer begins.

        Args:
            tools: functions in OpenAI's form; only for a template without ``generic_tools``.
            add_generation_prompt: whether the assistant's turn is opened.
            variables: further ones that the template may read, such as ``enable_thinking``.

        Raises:
            InvalidRequest: the template refuses the conversation, for example its order of roles.
        """
        from jinja2 import TemplateError

        try:
            template = self._tool_template if tools else self._template
            return template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                **{**variables, **self._special_tokens},
            )
        except (TemplateError, TypeError) as error:
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {_reason(error)}", "messages"
            ) from error

    def _takes_system(self) -> bool:
        try:
            return "?" in self.render([{"role": "system", "content": "?"}, {"role": "user", "content": "!"}])
        except InvalidRequest:
            return False


def read_template(path: Path) -> str:
    """Source of a template file, checked as far as possible without a model.

    Raises:
        ModelError: no such file, no text, or no template for conversations; names the file.
    """
    source = _read_text(path)
    try:
        ChatTemplate(source, {})
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    if "messages" not in source:
        raise ModelError(f"{path}: expected a Jinja chat template, which uses the variable 'messages'")
    return source


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: cannot be read as UTF-8 ({error})") from error


def _special_token(value: Any, where: str) -> str:
    """A token's text, given as such or in an object with its properties."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ModelError(f"{where}: expected a string, or an object with a string 'content'")
    return text


def _templates(value: Any, where: str) -> tuple[str | None, str | None]:
    """The template and one for tools; of several named ones 'default' and 'tool_use'. None where there is none."""
    if value is None or isinstance(value, str):
        return value, None
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [None]:
        if not isinstance(entry, dict) or not isinstance(entry.get("template"), str):
            raise ModelError(f"{where}: expected a string, or a list of objects with 'name' and 'template'")
        named[str(entry.get("name"))] = entry["template"]
    return named.get("default"), named.get("tool_use")


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _reason(error: Exception) -> str:
    """The template author's words; a TypeError's text could quote a message, so it is left out."""
    return "a field has a type it cannot render" if isinstance(error, TypeError) else str(error)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which models did not see in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
