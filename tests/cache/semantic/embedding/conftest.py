"""One small model, exported once, for all tests that only need some model."""

import shutil
from pathlib import Path

import pytest

from cache.semantic.embedding.encoder import Encoder
from cache.semantic.embedding.export import export
from cache.semantic.embedding.manifest import read_manifest
from cache.semantic.embedding.model_files import ModelFiles
from cache.semantic.embedding.onnx_encoder import OnnxEncoder
from tests.cache.semantic.embedding import models


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model. Its vectors are those of all poolings, one after the other."""
    return models.write_bert(tmp_path_factory.mktemp("tiny"), models.POOLINGS)


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one that is quick to export."""
    return models.write_bert(tmp_path_factory.mktemp("plain"), "mean")


@pytest.fixture(scope="session")
def tiny_export(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its exported files."""
    folder = tmp_path_factory.mktemp("export")
    export(ModelFiles("tiny", tiny_model), folder)
    return folder


@pytest.fixture
def exported_folder(tiny_export: Path, tmp_path: Path) -> Path:
    """A copy of the exported files, to be harmed."""
    return Path(shutil.copytree(tiny_export, tmp_path / "export"))


@pytest.fixture(scope="session")
def encoder(tiny_export: Path) -> Encoder:
    """The small model on ONNX Runtime."""
    return OnnxEncoder("tiny", "f", tiny_export, read_manifest(tiny_export), threads=1)
