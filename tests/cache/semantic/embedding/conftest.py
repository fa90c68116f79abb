"""One small model for all tests that only need some model."""

from pathlib import Path

import pytest

from cache.semantic.embedding.encoder import Encoder
from cache.semantic.embedding.load import TorchEncoder
from cache.semantic.embedding.model_files import ModelFiles
from tests.cache.semantic.embedding import models


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model that the compiled encoder supports."""
    return models.write_bert(tmp_path_factory.mktemp("plain"), "mean")


@pytest.fixture(scope="session")
def encoder(plain_model: Path) -> Encoder:
    """The small model on torch."""
    return TorchEncoder(ModelFiles("tiny", plain_model))
