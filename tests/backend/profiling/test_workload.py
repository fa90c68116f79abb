"""Files of requests: what is taken, and what is said of a line that is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from backend.errors import ModelError
from backend.model import ServedModel
from backend.profiling.workload import addressed, check, made_up, read_item, requests_of
from backend.requests.reader import RequestReader

CHAT = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


@pytest.fixture
def reader(model: ServedModel) -> RequestReader:
    return RequestReader(model, 8, True)


def test_a_file_has_chats_and_completions(tmp_path: Path, model: ServedModel, reader: RequestReader) -> None:
    """In any order, whatever model they name; also as lines of OpenAI's Batch API."""
    file = tmp_path / "some.jsonl"
    batch = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "n": 2}}
    lines = [json.dumps(CHAT), "", json.dumps({"prompt": "Once"}), json.dumps(batch)]
    file.write_text("\n".join(lines))
    items = addressed(requests_of(file), model.name)
    assert [item.name for item in items] == [f"{file}: line {number}" for number in (1, 3, 4)]
    assert [len(read_item(item, reader, model.name).sequences) for item in items] == [1, 1, 2]
    assert check(items, reader, model.name, strict=False) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: expected a JSON object, the body of a chat or of a completion"),
        (
            '{"input": "x"}',
            "line 2: expected either the field messages (a chat) or prompt (a completion), found neither",
        ),
        ('{"prompt": "x", "messages": []}', "found both"),
        ('{"prompt": 3}', "line 2: prompt: Expected"),
        ('{"prompt": "x", "temperature": 9}', "line 2: temperature: out of range, expected 0.0 to 2.0"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "line 2: messages[0].role: expected one of system"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(
    line: str, said: str, tmp_path: Path, model: ServedModel, reader: RequestReader
) -> None:
    """And with what would be right."""
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(CHAT) + "\n" + line)
    with pytest.raises(ModelError) as raised:
        check(addressed(requests_of(file), model.name), reader, model.name, strict=False)
    assert str(raised.value).startswith(str(file))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("content", "said"), [(b"\n \n", "there is no request in it"), (b"\xff", "byte 0 is not UTF-8")]
)
def test_a_file_without_requests_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    """It names the option and the file."""
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(ModelError) as raised:
        requests_of(file)
    assert str(raised.value).startswith(f"--requests {file}: ")
    assert said in str(raised.value)


@pytest.mark.parametrize("max_context", [96, 2048])
def test_made_up_prompts_fit_the_context(model: ServedModel, max_context: int) -> None:
    """Also a short one; their lengths differ, and they are the same in each run."""
    short = dataclasses.replace(model, max_context=max_context)
    reader = RequestReader(short, 8, True)
    items = made_up(short)
    requests = [read_item(item, reader, short.name) for item in items]
    assert all(r.prompt_tokens + r.sequences[0].params.max_tokens <= max_context for r in requests)
    assert made_up(short) == items
    if max_context == 2048:
        assert max(r.prompt_tokens for r in requests) > 5 * min(r.prompt_tokens for r in requests)
