"""What a model's ``generation_config.json`` recommends for sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.errors import ModelError
from backend.models.generation_config import SamplingDefaults, read_sampling_defaults


def read(directory: Path, **values: Any) -> SamplingDefaults:
    """The defaults of a file with these values."""
    (directory / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return read_sampling_defaults(directory)


def test_without_a_file_nothing_changes_the_distribution(tmp_path: Path) -> None:
    """Every filter is off and the temperature is 1, as in OpenAI's API."""
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0)


def test_a_recommendation_is_read(tmp_path: Path) -> None:
    """Field by field; null, and what only transformers itself needs, is passed over."""
    found = read(tmp_path, temperature=0.6, top_k=20, top_p=None, do_sample=False, eos_token_id=[1, 2])
    assert found == SamplingDefaults(temperature=0.6, top_k=20)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 2.5}, "temperature is '2.5', expected a number from 0 to 2"),
        ({"temperature": "hot"}, "temperature is 'hot', expected a number from 0 to 2"),
        ({"top_p": True}, "top_p is 'True', expected a number from 0 to 1"),
        ({"top_k": 1.5}, "top_k is '1.5', expected an integer from 0 to"),
        ({"top_k": -1}, "top_k is '-1', expected an integer from 0 to"),
        ({"min_p": float("nan")}, "min_p is 'nan', expected a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is '0', expected a number from 0.01 to 100"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    """With its file, its field and what would be right."""
    with pytest.raises(ModelError) as refusal:
        read(tmp_path, **values)
    assert str(refusal.value).startswith(f"{tmp_path}/generation_config.json: ")
    assert message in str(refusal.value)


def test_a_file_that_is_no_object_is_named(tmp_path: Path) -> None:
    """As other JSON files of a model are."""
    (tmp_path / "generation_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError, match="expected a JSON object"):
        read_sampling_defaults(tmp_path)
