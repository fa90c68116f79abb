"""A small model to be quantised."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backend.quantization.methods.small_model import save_small_model


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small model like SmolLM2, with inputs of 96 and 144; no test may change it."""
    directory = tmp_path_factory.mktemp("model")
    save_small_model(directory)
    return directory
