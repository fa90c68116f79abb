"""Multilingual models: a BERT or an XLM-RoBERTa with SentencePiece's pieces, its pooling, and its prompt."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from cache.semantic.embedding.errors import NativeUnavailable
from cache.semantic.embedding.export import export
from cache.semantic.embedding.load import load_encoder
from cache.semantic.embedding.manifest import read_manifest
from cache.semantic.embedding.model_files import ModelFiles, find_model
from cache.semantic.embedding.native.encoder import NativeEncoder
from cache.semantic.embedding.onnx_encoder import OnnxEncoder
from cache.semantic.embedding.torch_encoder import TorchEncoder
from tests.cache.semantic.embedding import models

TEXTS = ["How do I top up?", "Wie lade ich auf?", "Как пополнить счёт?", "你好世界", "", "naïve ﬁne", "ça va " * 30]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_each_runtime_has_the_library_s_vectors(
    kind: Literal["bert", "xlm-roberta"], pooling: str, tmp_path: Path
) -> None:
    """With mean and with cls pooling; the compiled encoder knows BERTs only, and says so."""
    files = ModelFiles("m", models.write_multilingual(tmp_path, kind, pooling))
    target = tmp_path / "export"
    target.mkdir()
    export(files, target)
    expected = TorchEncoder(files, "f", threads=1).encode(TEXTS)
    np.testing.assert_allclose(
        OnnxEncoder("m", "f", target, read_manifest(target), 1).encode(TEXTS), expected, atol=1e-5
    )
    if kind == "bert":
        compiled = NativeEncoder(files, "f", target, read_manifest(target)).encode(TEXTS)
        assert float((compiled * expected).sum(axis=1).min()) > 0.9999
    else:
        with pytest.raises(NativeUnavailable, match="model_type is 'xlm-roberta'"):
            NativeEncoder(files, "f", target, read_manifest(target))


def test_the_prompt_for_queries_is_put_before_every_text(tmp_path: Path) -> None:
    """It is the model's own, though not its default; a setting replaces it, also by nothing. Each is another model."""
    folder = models.write_multilingual(tmp_path, "bert", "mean", prompt="query: ")
    bare = TorchEncoder(ModelFiles("m", folder), "f", threads=1)
    said = {None: "query: ", "": "", "Instruct: ": "Instruct: "}
    found = set()
    for prompt, expected in said.items():
        files = find_model(str(folder), prompt)
        found.add(files.fingerprint())
        np.testing.assert_allclose(
            TorchEncoder(files, "f", threads=1).encode(TEXTS[:3]),
            bare.encode([expected + text for text in TEXTS[:3]]),
            atol=1e-6,
        )
    assert len(found) == 3
    encoder = load_encoder(str(folder), tmp_path / "cache")
    np.testing.assert_allclose(encoder.encode(TEXTS[:1]), bare.encode(["query: " + TEXTS[0]]), atol=0.02)


def test_a_model_with_a_default_prompt_is_as_the_library_has_it(tmp_path: Path) -> None:
    """Then nothing is read from its file, and its fingerprint is that of its files alone."""
    folder = models.write_llama(tmp_path)
    assert find_model(str(folder)) == ModelFiles("model", folder)
