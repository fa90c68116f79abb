"""Chat templates render as in transformers, and a template's refusal is the caller's error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from backend.chat.chat_template import ChatTemplate, read_template
from backend.errors import InvalidRequest, ModelError
from backend.model import ServedModel
from backend.model_loader.source import ModelSource

MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": 'Say "hé" {{ 1 }}'},
    {"role": "assistant", "content": "hé"},
    {"role": "user", "content": "Again."},
]


def test_the_models_template_renders_as_in_transformers(model: ServedModel, source: ModelSource) -> None:
    """The model's template renders to transformers' text and token ids, with and without a system message."""
    template = model.tokenizer.chat_template
    assert template is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.directory)
    for messages in (MESSAGES, MESSAGES[1:2]):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        rendered = template.render(messages)
        assert rendered == expected
        assert model.tokenizer.fast.encode(rendered, add_special_tokens=False).ids == tokenizer(expected)["input_ids"]


def test_a_refusal_is_a_bad_request() -> None:
    """A template's `raise_exception` is a bad request with the template's message."""
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render(MESSAGES)
    assert caught.value.param == "messages"


def test_templates_run_in_a_sandbox() -> None:
    """A template runs in a sandbox, as a model directory may come from anywhere."""
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(InvalidRequest):
        template.render(MESSAGES)


def test_helpers_and_special_tokens(tmp_path: Path) -> None:
    """Templates have special tokens, plain `tojson` and loop controls, and chat_template.jinja overrides the config."""
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}, "chat_template": "old"}')
    source = "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}"
    (tmp_path / "chat_template.jinja").write_text(source + "{% endfor %}")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == '<s>{"role": "system", "content": "Be <brief> & kind."}'


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    """A model's template named `tool_use` is used for requests with tools alone."""
    plain, with_tools = "{{ messages[0].content }}", "{{ tools | length }}<tool_call>"
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": with_tools}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.generic_tools is None
    assert template.render(MESSAGES) == MESSAGES[0]["content"]
    assert template.render(MESSAGES, [{"type": "function"}]) == "1<tool_call>"
    plain_one = ChatTemplate(plain, {})
    assert plain_one.generic_tools is not None
    assert plain_one.tool_format is plain_one.generic_tools.tool_format


def test_a_base_model_has_no_template(tmp_path: Path) -> None:
    """A model without a template has none, and a template that does not compile is a model error."""
    assert ChatTemplate.load(tmp_path) is None
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_an_operators_template_replaces_the_models(tmp_path: Path) -> None:
    """The operator's template replaces all of the model's, and keeps the directory's special tokens."""
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("older")
    template = ChatTemplate.load(tmp_path, "{{ bos_token }}{{ messages[0].content }}{{ tools }}<tool_call>")
    assert template is not None
    assert template.render(MESSAGES[1:2]) == f"<s>{MESSAGES[1]['content']}None<tool_call>"
    assert template.replaces
    assert template.tool_format is not None
    plain = ChatTemplate.load(tmp_path)
    assert plain is not None
    assert not plain.replaces


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{% for m in messages %}", "the chat template does not compile"),
        (b"{{ messages | no_such_filter }}", "the chat template does not compile"),
        (b"{{ messages }}\xff", "cannot be read as UTF-8"),
        (b"", "expected a Jinja chat template"),
        (b"# Notes\nNot a template.", "expected a Jinja chat template"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """A file that is not a Jinja chat template is refused in one line that names it."""
    file = tmp_path / "chat.jinja"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_template(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b"{", "cannot be read as JSON"),
        ("tokenizer_config.json", b"[]", "expected a JSON object"),
        ("tokenizer_config.json", b'{"bos_token": "\xff"}', "cannot be read as JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "cannot be read as JSON"),
        ("tokenizer_config.json", b'{"bos_token": {"text": "<s>"}}', "bos_token"),
        ("tokenizer_config.json", b'{"bos_token": {"content": 5}}', "bos_token"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}', "chat_template"),
        ("tokenizer_config.json", b'{"chat_template": ["{{ 1 }}"]}', "chat_template"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template"),
        ("chat_template.jinja", b"\xff", "cannot be read as UTF-8"),
        ("chat_template.jinja", b"{% for %}", "does not compile"),
    ],
)
def test_broken_template_files_are_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """A broken tokenizer config or template is a model error in one line with the file and the field."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        ChatTemplate.load(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)
