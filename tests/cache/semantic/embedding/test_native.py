"""The compiled encoder gives the vectors of sentence-transformers, or says why it does not serve."""

import asyncio
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
from cache.semantic.embedding.load import TorchEncoder, check_against_reference, reference_file
from cache.semantic.embedding.model_files import ModelFiles, find_model
from cache.semantic.embedding.native.bert import rounded
from cache.semantic.embedding.native.encoder import NativeEncoder
from tests.cache.semantic.embedding import models

TEXTS = ["How do I top up?", "why " * 100, "", "  ", "Ünïcödé 我的银行卡", *(f"{'a b ' * n}c" for n in range(9))]
MAX = 8191


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the references are, and the library, which is built once."""
    return tmp_path_factory.mktemp("cache")


def compiled(model: Path, cache: Path) -> NativeEncoder:
    """As `load_encoder` compiles and checks it."""
    files = ModelFiles("tiny", model)
    encoder = NativeEncoder(files, cache)
    check_against_reference(encoder, files, cache)
    return encoder


@pytest.fixture(scope="session")
def native(plain_model: Path, cache: Path) -> NativeEncoder:
    """The small model, compiled."""
    return compiled(plain_model, cache)


@pytest.mark.parametrize(
    ("hidden", "heads", "inner", "layers", "pooling"),
    [(36, 3, 70, 2, "cls"), (40, 5, 33, 1, "mean"), (96, 2, 32, 3, "mean"), (17, 17, 1, 1, "cls")],
)
def test_any_width_has_the_vectors_of_the_reference(
    hidden: int, heads: int, inner: int, layers: int, pooling: str, tmp_path: Path, cache: Path
) -> None:
    """A model of any width, number of heads and pooling has the vectors of the reference."""
    model = models.write_bert(
        tmp_path, pooling, Normalize(), hidden=hidden, num_attention_heads=heads, intermediate_size=inner,
        num_hidden_layers=layers, initializer_range=0.2,
    )  # fmt: skip
    encoder = compiled(model, cache)
    assert encoder.dimensions == hidden
    expected = TorchEncoder(ModelFiles("tiny", model)).encode(TEXTS)
    np.testing.assert_allclose((encoder.encode(TEXTS) * expected).sum(axis=1), 1, atol=2e-5)


def test_the_default_model_has_the_vectors_of_the_reference(minilm: Encoder) -> None:
    """The default model is compiled and has the vectors of the reference."""
    assert minilm.name == "all-MiniLM-L6-v2, compiled"
    texts = [*TEXTS, "Where is my card? " * 100, *(f"What is the fee for {n} euros?" for n in range(40))]
    expected = TorchEncoder(find_model("default")).encode(texts)
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


def test_a_token_without_a_row_is_an_error(plain_model: Path, tmp_path: Path, cache: Path) -> None:
    """A token for which the model has no row raises ValueError."""
    model = Path(shutil.copytree(plain_model, tmp_path / "model"))
    tokenizer = json.loads((model / "tokenizer.json").read_text("utf-8"))
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 40_000, "content": "<far>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    encoder = compiled(model, cache)
    with pytest.raises(ValueError, match="the tokenizer gives numbers that the model has no row for"):
        encoder.encode(["to the <far> side"])


def test_a_text_beyond_the_limit_is_read_as_far_as_the_model_reads(native: NativeEncoder, encoder: Encoder) -> None:
    """A text beyond the limit has the vector of the tokens that the model reads."""
    texts = [" " * 100_000 + "top up my card", "top up my card " * 7000, "x" * 100_000]
    np.testing.assert_allclose((native.encode(texts) * encoder.encode(texts)).sum(axis=1), 1, atol=2e-5)


async def test_threads_do_not_write_into_one_anothers_vectors(native: NativeEncoder) -> None:
    """Concurrent calls of one encoder do not change each other's vectors."""
    alone = native.encode(TEXTS)

    def compute() -> list[npt.NDArray[np.float32]]:
        return [native.encode(TEXTS[start:]) for start in range(len(TEXTS)) for _ in range(5)]

    for computed in await asyncio.gather(*(asyncio.to_thread(compute) for _ in range(4))):
        for number, vectors in enumerate(computed):
            np.testing.assert_array_equal(vectors, alone[number // 5 :])


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
        (changed("config.json", model_type="mpnet"), r"types bert and .* enum value 'mpnet' - at `\$\.model_type`"),
        (changed("config.json", hidden_act="relu"), r"with gelu .* enum value 'relu' - at `\$\.hidden_act`"),
        (
            changed("config.json", position_embedding_type="relative_key"),
            r"value 'relative_key' - at `\$\.position_",
        ),
        (changed("config.json", num_attention_heads=5), r"num_attention_heads do not share hidden_size evenly"),
        (changed("config.json", num_hidden_layers=0), r"Expected `int` >= 1 - at `\$\.num_hidden_layers`"),
        (changed("config.json", is_decoder=True), r"is_decoder is true"),
        (
            changed("config.json", model_type="xlm-roberta", pad_token_id=-(2**40)),
            r">= 0 - at `\$\.pad_token_id`",
        ),
        (changed("config.json", model_type="xlm-roberta", pad_token_id=600), r"is 600, which leaves no position"),
        (changed("config.json", intermediate_size=60), r"not those of its config\.json: .*\(64, 32\), not \(60, 32\)"),
        (changed("1_Pooling/config.json", pooling_mode="max"), r"the pooling \['max'\]"),
        (changed("1_Pooling/config.json", pooling_mode=["mean", "cls"]), r"the pooling \[\['mean', 'cls'\]\]"),
        (lambda model: (model / "modules.json").write_text("[]"), r"does not know a model of "),
        (lambda model: (model / "config.json").unlink(), r"no model with such files: .*config\.json"),
        (lambda model: (model / "model.safetensors").unlink(), r"no model with such files: .*model\.safetensors"),
        (reweighted(lambda w: w.pop("embeddings.LayerNorm.bias")), r"not those of its config\.json"),
        (
            reweighted(lambda w: w["embeddings.LayerNorm.bias"].fill(np.nan)),
            r"LayerNorm\.bias, which has numbers that are not finite",
        ),
    ],
)
def test_an_unsupported_model_is_refused_in_one_line(
    change: Callable[[Path], object], reason: str, plain_model: Path, tmp_path: Path, cache: Path
) -> None:
    """An unsupported model raises NativeUnavailable with the reason in one line."""
    model = Path(shutil.copytree(plain_model, tmp_path / "model"))
    change(model)
    with pytest.raises(NativeUnavailable, match=reason) as refusal:
        compiled(model, cache)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "no C\\+\\+ compiler"), ("false", "false ended with 1: no message")]
)
def test_a_missing_or_failing_compiler_is_reported(
    compiler: str, reason: str, plain_model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A missing or failing compiler raises NativeUnavailable and leaves no files."""
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(NativeUnavailable, match=reason):
        compiled(plain_model, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["other size", "other vectors"])
def test_another_reference_is_refused(harm: str, plain_model: Path, native: NativeEncoder, tmp_path: Path) -> None:
    """A reference of other vectors raises NativeUnavailable."""
    cache = tmp_path / "cache"
    cache.mkdir()
    path = reference_file(native.fingerprint, cache)
    vectors = native.encode(TEXTS)
    np.save(path, vectors[:, :-1] if harm == "other size" else vectors[::-1])
    with pytest.raises(NativeUnavailable, match=r"lowest cosine 0\.\d+, needed 0\.9999"):
        compiled(plain_model, cache)
