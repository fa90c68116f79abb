"""The compiled encoder gives the vectors of sentence-transformers, or says why it does not serve."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import load_file, save_file
from sentence_transformers.sentence_transformer.modules import Normalize

from cache.semantic.embedding.encoder import Encoder
from cache.semantic.embedding.errors import NativeUnavailable
from cache.semantic.embedding.export import write_description
from cache.semantic.embedding.manifest import REFERENCE_FILE, TOKENIZER_FILE, read_manifest, write_manifest
from cache.semantic.embedding.model_files import ModelFiles, find_model
from cache.semantic.embedding.native.encoder import NativeEncoder
from cache.semantic.embedding.native.layout import rounded
from cache.semantic.embedding.torch_encoder import TorchEncoder, open_model
from tests.cache.semantic.embedding import models

TEXTS = ["How do I top up?", "why " * 100, "", "  ", "Ünïcödé 我的银行卡", *(f"{'a b ' * n}c" for n in range(9))]
MAX = 8191


def described(model: Path, target: Path) -> Path:
    """What an export writes of a model, without the graph."""
    target.mkdir()
    manifest = write_description(open_model(ModelFiles("tiny", model)), ["input_ids", "attention_mask"], "", target)
    write_manifest(target, manifest)
    return target


def compiled(model: Path, export: Path) -> NativeEncoder:
    return NativeEncoder(ModelFiles("tiny", model), "f", export, read_manifest(export))


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all exports lie, and beside them the library, which is built once."""
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="session")
def plain_description(plain_model: Path, exports: Path) -> Path:
    """What an export writes of a small model, without the graph."""
    return described(plain_model, exports / "plain")


@pytest.fixture(scope="session")
def native(plain_model: Path, plain_description: Path) -> NativeEncoder:
    """That small model, compiled."""
    return compiled(plain_model, plain_description)


@pytest.mark.parametrize(
    ("hidden", "heads", "inner", "layers", "pooling"),
    [(36, 3, 70, 2, "cls"), (40, 5, 33, 1, "mean"), (96, 2, 32, 3, "mean"), (17, 17, 1, 1, "cls")],
)
def test_any_width_has_the_vectors_of_the_reference(
    hidden: int, heads: int, inner: int, layers: int, pooling: str, tmp_path: Path, exports: Path
) -> None:
    """A model of any width, number of heads and pooling has the vectors of the reference."""
    model = models.write_bert(
        tmp_path, pooling, Normalize(), hidden=hidden, num_attention_heads=heads, intermediate_size=inner,
        num_hidden_layers=layers, initializer_range=0.2,
    )  # fmt: skip
    encoder = compiled(model, described(model, exports / tmp_path.name))
    assert encoder.dimensions == hidden
    expected = TorchEncoder(ModelFiles("tiny", model), "f", threads=1).encode(TEXTS)
    np.testing.assert_allclose((encoder.encode(TEXTS) * expected).sum(axis=1), 1, atol=2e-5)


def test_the_default_model_has_the_vectors_of_the_reference(minilm: Encoder) -> None:
    """The default model is compiled and has the vectors of the reference."""
    assert minilm.name == "all-MiniLM-L6-v2, compiled"
    texts = [*TEXTS, "Where is my card? " * 100, *(f"What is the fee for {n} euros?" for n in range(40))]
    expected = TorchEncoder(find_model("default"), "f", threads=1).encode(texts)
    np.testing.assert_allclose((minilm.encode(texts) * expected).sum(axis=1), 1, atol=2e-5)


@given(texts=st.lists(st.text(st.characters(), max_size=200), max_size=40))
@settings(max_examples=50, deadline=None)
def test_a_vector_does_not_depend_on_its_batch(texts: list[str], native: NativeEncoder) -> None:
    """A text has bit for bit the same vector in every batch."""
    vectors = native.encode(texts)
    assert vectors.shape == (len(texts), native.dimensions)
    np.testing.assert_array_equal(native.encode(texts[::-1]), vectors[::-1])
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_array_equal(native.encode([text])[0], vector)


@given(
    weight=arrays(
        np.float32, array_shapes(min_dims=2, max_dims=2, max_side=40), elements=st.floats(-1e6, 1e6, width=32)
    )
)
def test_no_sum_of_products_leaves_32_bits(weight: npt.NDArray[np.float32]) -> None:
    """Sums of products with rounded weights fit 32 bits, and a rounded weight errs by half a unit at most."""
    integers, scales = rounded(weight, MAX)
    assert (np.abs(integers.astype(np.int64)).sum(axis=1) * MAX < 2**31).all()
    wrong = np.abs(integers * scales[:, None].astype(np.float64) - weight)
    assert (wrong <= scales[:, None] * 0.51).all()


def test_a_token_without_a_row_is_an_error(plain_model: Path, plain_description: Path, exports: Path) -> None:
    """A token for which the model has no row raises ValueError."""
    export = Path(shutil.copytree(plain_description, exports / "far"))
    manifest = read_manifest(export)
    tokenizer = json.loads((export / TOKENIZER_FILE).read_text("utf-8"))
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 40_000, "content": "<far>"})
    (export / TOKENIZER_FILE).write_text(json.dumps(tokenizer), "utf-8")
    encoder = NativeEncoder(ModelFiles("tiny", plain_model), "f", export, manifest)
    with pytest.raises(ValueError, match="the tokenizer gives numbers that the model has no row for"):
        encoder.encode(["to the <far> side"])


def changed(file: str, **values: object) -> Callable[[Path], None]:
    """Writes other values into a JSON file of a model."""

    def change(model: Path) -> None:
        path = model / file
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")

    return change


def reweighted(change: Callable[[dict[str, npt.NDArray[np.float32]]], object]) -> Callable[[Path], None]:
    """Writes other weights into a model."""

    def rewrite(model: Path) -> None:
        weights = {name: tensor.copy() for name, tensor in load_file(model / "model.safetensors").items()}
        change(weights)
        save_file(weights, model / "model.safetensors")

    return rewrite


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed("config.json", model_type="roberta"), r"whose model_type is 'roberta'"),
        (changed("config.json", hidden_act="relu"), r"whose hidden_act is 'relu'"),
        (changed("config.json", position_embedding_type="relative_key"), r"position_embedding_type is 'relative_key'"),
        (changed("config.json", num_attention_heads=5), r"whose heads do not share its width evenly"),
        (changed("config.json", intermediate_size=60), r"not those of its config\.json: .*\(64, 32\), not \(60, 32\)"),
        (changed("1_Pooling/config.json", pooling_mode="max"), r"the pooling \['max'\]"),
        (changed("1_Pooling/config.json", pooling_mode=["mean", "cls"]), r"the pooling \[\['mean', 'cls'\]\]"),
        (lambda model: (model / "modules.json").write_text("[]"), r"does not know a model of "),
        (lambda model: (model / "config.json").unlink(), r"a model with such files: .*config\.json"),
        (lambda model: (model / "model.safetensors").unlink(), r"it cannot read .*model\.safetensors"),
        (reweighted(lambda w: w.pop("embeddings.LayerNorm.bias")), r"not those of its config\.json"),
        (reweighted(lambda w: w["embeddings.LayerNorm.bias"].fill(np.nan)), r"LayerNorm\.bias of .* not finite"),
        (reweighted(lambda w: w["embeddings.LayerNorm.bias"].fill(9)), r"lowest cosine 0\.\d+, needed 0\.9999"),
    ],
)
def test_an_unsupported_model_is_refused_in_one_line(
    change: Callable[[Path], object], reason: str, plain_model: Path, plain_description: Path, tmp_path: Path
) -> None:
    """An unsupported model raises NativeUnavailable with the reason in one line."""
    model = Path(shutil.copytree(plain_model, tmp_path / "model"))
    change(model)
    with pytest.raises(NativeUnavailable, match=reason) as refusal:
        compiled(model, plain_description)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "no C\\+\\+ compiler"), ("false", "refuses its source: no message")]
)
def test_a_missing_or_failing_compiler_is_reported(
    compiler: str, reason: str, plain_model: Path, plain_description: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A missing or failing compiler raises NativeUnavailable and leaves no files."""
    monkeypatch.setenv("CXX", compiler)
    export = Path(shutil.copytree(plain_description, tmp_path / "export"))
    with pytest.raises(NativeUnavailable, match=reason):
        compiled(plain_model, export)
    assert list(tmp_path.iterdir()) == [export]


def test_reference_vectors_of_another_size_are_refused(
    plain_model: Path, plain_description: Path, exports: Path
) -> None:
    """Reference vectors of another size raise NativeUnavailable."""
    export = Path(shutil.copytree(plain_description, exports / "other"))
    manifest = read_manifest(export)
    vectors = np.load(export / REFERENCE_FILE)
    np.save(export / REFERENCE_FILE, vectors[:, :-1])
    with pytest.raises(NativeUnavailable, match=r"lowest cosine 0\.000000, needed 0\.9999"):
        NativeEncoder(ModelFiles("tiny", plain_model), "f", export, manifest)
