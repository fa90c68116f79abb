"""An exported model gives the vectors of sentence-transformers, whatever its modules are."""

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.semantic.embedding.encoder import Encoder, unit
from cache.semantic.embedding.errors import ExportUnavailable
from cache.semantic.embedding.export import export
from cache.semantic.embedding.manifest import REFERENCE_FILE, Damaged, read_manifest
from cache.semantic.embedding.model_files import ModelFiles
from cache.semantic.embedding.onnx_encoder import OnnxEncoder
from cache.semantic.embedding.torch_encoder import TorchEncoder
from tests.cache.semantic.embedding import models

TEXTS = ["How do I top up?", "how do i TOP UP?", "why " * 100, "", "  ", "Ünïcödé 我的银行卡", "a b c d e f g h i"]


def on_onnx(folder: Path, target: Path) -> Encoder:
    """Export a model and load what was written."""
    target.mkdir()
    export(ModelFiles("tiny", folder), target)
    return OnnxEncoder("tiny", "f", target, read_manifest(target), threads=1)


def on_torch(folder: Path) -> Encoder:
    return TorchEncoder(ModelFiles("tiny", folder), "f", threads=1)


def assert_same(ours: Encoder, reference: Encoder, texts: list[str]) -> None:
    """Both give the same unit vectors, alone and in company."""
    expected = np.vstack([reference.encode([text]) for text in texts])
    assert ours.dimensions == reference.dimensions == expected.shape[1]
    for vectors in (ours.encode(texts), np.vstack([ours.encode([text]) for text in texts])):
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
        np.testing.assert_allclose((vectors * expected).sum(axis=1), 1, atol=1e-5)


def test_every_pooling_is_exported(encoder: Encoder, tiny_model: Path) -> None:
    """An exported model has the vectors of the library for each of its poolings."""
    reference = on_torch(tiny_model)
    assert_same(encoder, reference, TEXTS)
    parts = len(models.POOLINGS)
    ours = encoder.encode(TEXTS).reshape(-1, parts, models.DIMENSIONS)
    theirs = reference.encode(TEXTS).reshape(-1, parts, models.DIMENSIONS)
    lengths = np.linalg.norm(ours, axis=2) * np.linalg.norm(theirs, axis=2)
    np.testing.assert_allclose((ours * theirs).sum(axis=2) / lengths, 1, atol=1e-5)


def test_a_decoder_with_prompt_lower_case_and_dense_layer_is_exported(tmp_path: Path) -> None:
    """An exported decoder has the library's vectors, with its prompt, lower case and dense layer."""
    folder = models.write_llama(tmp_path)
    ours, reference = on_onnx(folder, tmp_path / "target"), on_torch(folder)
    assert ours.dimensions == models.DIMENSIONS // 2
    assert_same(ours, reference, TEXTS)
    upper, lower = ours.encode(["TOP UP", "top up"])
    np.testing.assert_array_equal(upper, lower)
    assert ours.length("why " * 100) == models.LONGEST


def test_a_model_without_a_transformer_is_not_exported(tmp_path: Path) -> None:
    """A model without a transformer raises ExportUnavailable with the reason that its export has kept."""
    target = tmp_path / "target"
    target.mkdir()
    export(ModelFiles("static", models.write_static(tmp_path / "model")), target)
    with pytest.raises(ExportUnavailable, match=r"its modules read more than the tokens of a text.*remove"):
        read_manifest(target)


@pytest.mark.parametrize("file", ["manifest.json", "model.onnx", "tokenizer.json", "reference.npy"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_file_is_found(file: str, harm: str, exported_folder: Path) -> None:
    """A changed, cut or missing file of an export raises Damaged with its name."""
    path = exported_folder / file
    content = bytearray(path.read_bytes())
    if harm == "remove":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(Damaged, match=file):
        read_manifest(exported_folder)


def test_other_vectors_than_the_reference_are_refused(exported_folder: Path) -> None:
    """A model whose vectors differ from the reference raises ExportUnavailable."""
    manifest = read_manifest(exported_folder)
    vectors = np.load(exported_folder / REFERENCE_FILE)
    np.save(exported_folder / REFERENCE_FILE, vectors[::-1])
    with pytest.raises(ExportUnavailable, match=r"lowest cosine 0\.\d+, needed 0\.9999"):
        OnnxEncoder("tiny", "f", exported_folder, manifest, threads=1)


def test_a_graph_that_the_runtime_cannot_read_is_refused(exported_folder: Path) -> None:
    """A graph that ONNX Runtime cannot read raises ExportUnavailable with the runtime's message."""
    manifest = read_manifest(exported_folder)
    (exported_folder / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(ExportUnavailable, match=r"ONNX Runtime cannot compute it: .*"):
        OnnxEncoder("tiny", "f", exported_folder, manifest, threads=1)


@given(texts=st.lists(st.text(st.characters(), max_size=200), max_size=6))
@settings(max_examples=50, deadline=None)
def test_any_text_has_the_same_vector_alone_and_in_a_batch(texts: list[str], encoder: Encoder) -> None:
    """Any text has the same vector alone and in a batch, but for its last bits."""
    vectors = encoder.encode(texts)
    assert vectors.shape == (len(texts), encoder.dimensions)
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_allclose(vector, encoder.encode([text])[0], atol=1e-5)
        assert 0 < encoder.length(text) <= models.LONGEST


def test_a_text_beyond_the_limit_is_read_as_far_as_the_model_reads(encoder: Encoder, tiny_model: Path) -> None:
    """A text beyond the limit has the vector and about the cost of the tokens that the model reads."""
    spaces, words, word = " " * 100_000 + "top up my card", "top up my card " * 200_000, "x" * 1_000_000
    reference = on_torch(tiny_model)
    assert_same(encoder, reference, [spaces, words[:100_000], word[:100_000]])
    began = time.process_time()
    encoder.encode([words])
    assert time.process_time() - began < 0.5
    np.testing.assert_array_equal(encoder.encode([words]), encoder.encode([words[:100_000]]))


def test_a_vector_without_direction_is_nan() -> None:
    """A vector that is zero or not finite becomes NaN, and any other one becomes a unit vector."""
    rows = np.array([[3, 4], [0, 0], [np.inf, 1], [np.nan, 1], [1e-30, 0], [-2, 0]], np.float32)
    scaled = unit(rows)
    np.testing.assert_allclose(scaled[[0, 5]], np.array([[0.6, 0.8], [-1.0, 0.0]]), rtol=1e-6)
    assert np.isnan(scaled[1:5]).any(axis=1).all()
