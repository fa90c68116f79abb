"""Renders a conversation into the prompt that the model was trained on, with the model's own Jinja template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from backend.errors import InvalidRequest, ModelError


class ChatTemplate:
    """A compiled template, run in Jinja's sandbox with the settings and helpers that model authors write for.

    Raises:
        ModelError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        from jinja2 import TemplateSyntaxError, ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """The template of a model directory: ``chat_template.jinja`` or a field of ``tokenizer_config.json``."""
        config_path = directory / "tokenizer_config.json"
        config: dict[str, Any] = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        file = directory / "chat_template.jinja"
        source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
        return cls(source, special) if isinstance(source, str) else None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Prompt text up to where the assistant's answer begins.

        Raises:
            InvalidRequest: the template refuses this conversation, for example for its order of roles.
        """
        from jinja2 import TemplateError

        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except (TemplateError, TypeError) as error:
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {_reason(error)}", "messages"
            ) from error


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _reason(error: Exception) -> str:
    """The template author's words; a TypeError's text could quote a message, so it is left out."""
    return "a field has a type it cannot render" if isinstance(error, TypeError) else str(error)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which models have not seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
