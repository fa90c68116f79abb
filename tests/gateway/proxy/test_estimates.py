"""What a request may use, by an estimate from its body."""

import base64
import os
from typing import Any

import msgspec
import pytest

from gateway.proxy.metering.estimates import output_tokens, prompt_tokens

_IMAGE = base64.b64encode(os.urandom(300_000)).decode()
_FILE_TOKENS = 1_600


def _tokens(*content: Any, **fields: Any) -> int:
    asked = {"model": "m", "messages": [{"role": "user", "content": [*content]}], **fields}
    return prompt_tokens(msgspec.json.encode(asked), asked)


def test_text_counts_by_its_length() -> None:
    """Four bytes a token, however long the text is."""
    assert 250_000 <= _tokens("a plain word " * 80_000) <= 265_000
    assert 100_000 <= _tokens("\u6f22\u5b57" * 80_000) <= 125_000  # which has no spaces


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_IMAGE}"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _IMAGE}},
        {"type": "input_audio", "input_audio": {"data": _IMAGE, "format": "wav"}},
    ],
)
def test_files_count_by_their_number(part: dict[str, Any]) -> None:
    """An image of 400,000 characters is no prompt of 100,000 tokens."""
    assert _FILE_TOKENS <= _tokens(part) <= _FILE_TOKENS + 100
    assert 2 * _FILE_TOKENS <= _tokens(part, part) <= 2 * _FILE_TOKENS + 150


def test_images_of_ollama_count_by_their_number() -> None:
    """They are strings in a list beside the text."""
    asked = {"model": "m", "messages": [{"role": "user", "content": "what is it?", "images": [_IMAGE, _IMAGE]}]}
    assert 2 * _FILE_TOKENS <= prompt_tokens(msgspec.json.encode(asked), asked) <= 2 * _FILE_TOKENS + 100


def test_a_form_counts_as_a_file() -> None:
    """A recording to transcribe is no text."""
    assert prompt_tokens(b"--boundary\r\nContent-Disposition: form-data" + os.urandom(10**6), {}) == _FILE_TOKENS
    assert prompt_tokens(b"", {}) == 0


def test_text_is_no_file_however_it_looks() -> None:
    """What a model reads counts by its length, whatever it begins with, and wherever the body begins."""
    prose = "some words of prose " * 20_000
    assert _tokens({"type": "text", "text": _IMAGE}) > 90_000
    assert _tokens({"type": "text", "text": "a" * 5_000 + " " + prose}) > 90_000
    assert _tokens({"type": "image_url", "image_url": {"url": "a" * 5_000 + " " + prose}}) > 90_000
    asked = {"model": "m", "prompt": prose}
    assert prompt_tokens(b" \r\n" * 20 + msgspec.json.encode(asked), asked) > 90_000


def test_a_conversation_that_goes_on_is_not_less_than_nothing() -> None:
    """Its files may be among the fields and not in the body."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_IMAGE}"}}
    body = msgspec.json.encode({"model": "m", "input": "x" * 5_000})
    assert prompt_tokens(body, {"model": "m", "messages": [{"role": "user", "content": [image]}]}) == _FILE_TOKENS


def test_many_values_are_not_all_looked_at() -> None:
    """An estimate of a body of a million values takes no longer than one of ten thousand."""
    asked = {"numbers": [[number] for number in range(200_000)]}
    body = msgspec.json.encode(asked)
    assert prompt_tokens(body, asked) == len(body) // 4


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, 512),
        ({"max_tokens": 10}, 20),
        ({"max_completion_tokens": 7, "max_tokens": 10}, 14),
        ({"max_tokens": -1}, 512),
    ],
)
def test_an_answer_has_its_limit_for_each_choice(fields: dict[str, Any], most: int) -> None:
    """Without a limit it is taken to be of a usual length."""
    assert output_tokens(fields, 2) == most
