"""Multilingual models: a BERT or an XLM-RoBERTa with SentencePiece's pieces, its pooling, and its prompt."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from cache.semantic.embedding.load import TorchEncoder, load_encoder
from cache.semantic.embedding.model_files import ModelFiles, find_model
from cache.semantic.embedding.native.encoder import NativeEncoder
from tests.cache.semantic.embedding import models

TEXTS = ["How do I top up?", "Wie lade ich auf?", "Как пополнить счёт?", "你好世界", "", "naïve ﬁne", "ça va " * 30]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_the_compiled_encoder_has_the_library_s_vectors(
    kind: Literal["bert", "xlm-roberta"], pooling: str, tmp_path: Path
) -> None:
    """With mean and with cls pooling, and with positions that begin after that of padding."""
    files = ModelFiles("m", models.write_multilingual(tmp_path, kind, pooling))
    expected = TorchEncoder(files).encode(TEXTS)
    compiled = NativeEncoder(files, tmp_path / "cache").encode(TEXTS)
    assert float((compiled * expected).sum(axis=1).min()) > 0.9999


def test_the_prompt_for_queries_is_put_before_every_text(tmp_path: Path) -> None:
    """It is the model's own, though not its default; a setting replaces it, also by nothing. Each is another model."""
    folder = models.write_multilingual(tmp_path, "bert", "mean", prompt="query: ")
    bare = TorchEncoder(ModelFiles("m", folder))
    said = {None: "query: ", "": "", "Instruct: ": "Instruct: "}
    found = set()
    for prompt, expected in said.items():
        files = find_model(str(folder), prompt)
        found.add(files.fingerprint())
        np.testing.assert_allclose(
            TorchEncoder(files).encode(TEXTS[:3]),
            bare.encode([expected + text for text in TEXTS[:3]]),
            atol=1e-6,
        )
    assert len(found) == 3
    encoder = load_encoder(str(folder), tmp_path / "cache")
    np.testing.assert_allclose(encoder.encode(TEXTS[:1]), bare.encode(["query: " + TEXTS[0]]), atol=0.02)
