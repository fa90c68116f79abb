"""Models that are quantised once under a name, and kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.model_loader.source import ModelSource
from backend.quantization.selection import prepared as module
from backend.quantization.selection.prepared import prepared
from tests.backend.conftest import quiet
from tests.backend.quantization.methods.small_model import save_small_model


def test_a_model_is_quantised_once_and_anew_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is quantised once and kept, and quantised again when its config has changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The amount of calibration data is fixed for a name; with it this test would take minutes.
    monkeypatch.setattr(module, "_WINDOWS", 2)
    monkeypatch.setattr(module, "_WINDOW_TOKENS", 64)
    directory = tmp_path / "model"
    save_small_model(directory)
    source, said = ModelSource(directory, "small"), list[str]()

    first = prepared(source, "gptq-int4", said.append)
    assert any(sentence.startswith("layer") for sentence in said)
    said.clear()
    assert prepared(source, "gptq-int4", said.append) == first
    assert said == []

    (directory / "notes.txt").write_text("of no model")
    (directory / ".#config.json").symlink_to("nobody@nowhere.1234")
    assert prepared(source, "gptq-int4", said.append) == first
    assert said == []

    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.01}))
    other = prepared(source, "gptq-int4", quiet)
    assert other.directory != first.directory
    assert json.loads((other.directory / "config.json").read_text())["rms_norm_eps"] == 0.01
