"""A small model for the tests of runners."""

from __future__ import annotations

import pytest

from backend.model_loader.weights import ModelWeights, load_weights, read_config
from backend.models.config import ModelConfig
from tests.backend.random_models import KINDS, save


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, ModelWeights]:
    """A small model like Llama 3.1 with random weights, as loaded from the files that transformers writes."""
    directory = tmp_path_factory.mktemp("llama")
    save(KINDS["llama-3.1"], directory)
    config = read_config(directory)
    return config, load_weights(directory, config)
